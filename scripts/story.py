"""Runs a student's workflow: each command as a person would type it.

The last line of output is a JSON object with the results. Everything, including HOME, is in a
temporary directory that is removed at the end, except what a student submits: the model, the logs
and the results presentation, which stay in ./demo-results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

LABCTL = str(Path(sys.executable).with_name("labctl"))
RESULTS = Path("demo-results").absolute()
KEPT = ("report.html", "evaluation.json", "checkpoints", "logs")


def labctl(*words: str, cwd: Path, capture: bool = False, check: bool = True) -> tuple[int, str]:
    """Run a command and show its output; return (exit code, standard output if captured)."""
    print(f"\n$ labctl {' '.join(words)}", flush=True)
    done = subprocess.run(
        [LABCTL, *words], cwd=cwd, text=True, stdout=subprocess.PIPE if capture else None
    )
    print(done.stdout or "", end="", flush=True)
    if check and done.returncode != 0:
        raise SystemExit(f"labctl {' '.join(words)} exited with code {done.returncode}")
    return done.returncode, done.stdout or ""


def fetch_status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as response:
        return int(response.status)


def run_story(home: Path) -> dict[str, object]:
    labctl("init", "digits", "--provider", "local", cwd=home)
    lab = home / "digits"
    try:
        return run_lab_commands(lab)
    except BaseException:
        labctl("down", "--yes", "--discard", cwd=lab, check=False)
        raise


def run_lab_commands(lab: Path) -> dict[str, object]:
    labctl("doctor", cwd=lab, check=False)
    labctl("up", cwd=lab)
    run_exit, _ = labctl("run", cwd=lab)
    labctl("status", "--refresh", cwd=lab)
    _, output = labctl("forward", "tensorboard", "jupyter", "--detach", cwd=lab, capture=True)
    urls = dict(re.findall(r"^(\w+): (http\S+)$", output, re.MULTILINE))
    pages = {name: fetch_status(url) for name, url in urls.items()}
    labctl("forward", "--stop", cwd=lab)
    labctl("logs", "--tail", "3", cwd=lab)
    labctl("pull", cwd=lab)
    _, output = labctl("eval", cwd=lab, capture=True)
    evaluation = parse_accuracies(output)
    _, output = labctl("eval", "--on-server", cwd=lab, capture=True)
    server_evaluation = parse_accuracies(output)
    down_exit, _ = labctl("down", "--yes", cwd=lab, check=False)
    labctl("report", cwd=lab)
    page = keep_results(next((lab / "runs").glob("*/report.html")))
    return {
        "accuracy_server": evaluation["on the server"],
        "accuracy_local": evaluation["here"],
        "accuracy_on_server_again": server_evaluation["on the server"],
        "run_exit": run_exit,
        "tensorboard": pages["tensorboard"],
        "jupyter": pages["jupyter"],
        "down_exit": down_exit,
        "report": str(page),
    }


def parse_accuracies(output: str) -> dict[str, float]:
    """Return the accuracies that `labctl eval` shows: "here" and "on the server"."""
    figures = re.findall(r"^(here|on the server): +([\d.]+)", output, re.MULTILINE)
    return {where: float(figure) for where, figure in figures}


def keep_results(page: Path) -> Path:
    """Copy what a student submits to RESULTS; return the report's new path."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    for name in KEPT:
        source = page.parent / name
        if source.is_dir():
            shutil.copytree(source, RESULTS / name)
        else:
            shutil.copy2(source, RESULTS / name)
    print(f"\nResults presentation: {RESULTS / page.name}", flush=True)
    return RESULTS / page.name


def main() -> int:
    started_s = time.monotonic()
    if RESULTS.exists() and not (RESULTS / KEPT[0]).is_file():
        raise SystemExit(f"{RESULTS} already exists and is not from an earlier demo")
    home = Path(tempfile.mkdtemp(prefix="labctl-demo-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    try:
        results = run_story(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    results["seconds"] = round(time.monotonic() - started_s, 1)
    is_passed = (
        results["accuracy_server"]
        == results["accuracy_local"]
        == results["accuracy_on_server_again"]
        and results["run_exit"] == 0
        and (results["tensorboard"], results["jupyter"]) == (200, 200)
        and results["down_exit"] == 0
    )
    print(json.dumps(results), flush=True)
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
