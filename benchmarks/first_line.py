"""From nothing to the first line of training, compared with the longest part of it.

Each round makes a new server of the provider `local` for the sample project, and removes it at the
end. The first round builds the image. Later ones find it in the image cache that the provider
keeps: they show labctl's own share. The figures are those of `--timings`, which begin after the
start of Python.

    python -m benchmarks.first_line [--rounds N] [--directory DIR]

DIR keeps the lab, and so its image cache, for the next call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import NotDoneError, environment

ROOT = Path(__file__).parents[1]
TARGET = 1.25
FIRST_LINE = "first line"
# One epoch: the rest of the training is not timed.
COMMAND = ("python", "train.py", "--epochs", "1")


def labctl(home: Path, root: Path, *words: str) -> str:
    """Run the labctl of this repository; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "labctl", *words],
        cwd=root,
        env={**environment(home), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise NotDoneError(f"labctl {' '.join(words)} ended with {done.returncode}")
    return done.stdout


def read_timings(output: str) -> dict[str, Any]:
    timings: dict[str, Any] = json.loads(output)["timings"]
    return timings


def measure_round(home: Path, root: Path, number: int) -> dict[str, float]:
    """Return the seconds of each part and of the whole, for a server that did not exist before."""
    try:
        up = read_timings(labctl(home, root, "up", "--yes", "--timings", "--json"))
        words = ("--timings", "--json", "--id", f"first-{number}", "--", *COMMAND)
        run = read_timings(labctl(home, root, "run", *words))
    finally:
        labctl(home, root, "down", "--yes", "--discard")
    seconds: dict[str, float] = {}
    for part in (*up["parts"], *run["parts"]):
        seconds[part["name"]] = seconds.get(part["name"], 0.0) + part["duration_s"]
    if FIRST_LINE not in seconds:
        raise NotDoneError("the run has no first line")
    seconds["total"] = up["total_s"] + run["total_s"]
    return seconds


def describe_round(seconds: dict[str, float]) -> str:
    parts = {name: took for name, took in seconds.items() if name != "total"}
    longest = max(parts, key=lambda name: parts[name])
    ratio = seconds["total"] / parts[longest]
    verdict = "" if ratio <= TARGET else ", **missed**"
    figures = ", ".join(f"{name} {took:.1f}" for name, took in parts.items())
    return (
        f"{seconds['total']:.1f} s = {ratio:.2f} x {longest} (target: {TARGET}{verdict}); {figures}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        place = (chosen.directory or Path(folder)).absolute()
        home, root = place / "home", place / "digits"
        if not root.exists():
            home.mkdir(parents=True, exist_ok=True)
            labctl(home, place, "init", root.name, "--provider", "local")
        for number in range(chosen.rounds):
            print(describe_round(measure_round(home, root, number)), flush=True)


if __name__ == "__main__":
    main()
