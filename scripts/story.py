"""The student's story, told by running it: each command as a person would type it.

Its last line is one JSON object with what was seen. Everything lives in a directory of its own,
HOME included, and is removed at the end, but for what a student hands in: the model, the logs and
the results presentation, which stay in ./demo-results.
"""

from __future__ import annotations

import json
import os
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
    """Run one command and show it; (exit code, standard output if captured)."""
    print(f"\n$ labctl {' '.join(words)}", flush=True)
    done = subprocess.run(
        [LABCTL, *words], cwd=cwd, text=True, stdout=subprocess.PIPE if capture else None
    )
    if check and done.returncode != 0:
        raise SystemExit(f"labctl {' '.join(words)} ended with {done.returncode}")
    return done.returncode, done.stdout or ""


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return int(answer.status)


def story(home: Path) -> dict[str, object]:
    labctl("init", "digits", "--provider", "local", cwd=home)
    lab = home / "digits"
    try:
        return _inside(lab)
    except BaseException:
        labctl("down", "--yes", "--discard", cwd=lab, check=False)
        raise


def _inside(lab: Path) -> dict[str, object]:
    labctl("doctor", cwd=lab, check=False)
    labctl("up", cwd=lab)
    run_exit, _ = labctl("run", cwd=lab)
    labctl("status", "--refresh", cwd=lab)
    _, said = labctl(
        "forward", "tensorboard", "jupyter", "--detach", "--json", cwd=lab, capture=True
    )
    urls = {one["service"]: one["url"] for one in json.loads(said)["forwards"]}
    pages = {name: status_of(url) for name, url in urls.items()}
    labctl("forward", "--stop", cwd=lab)
    labctl("logs", "--tail", "3", cwd=lab)
    labctl("pull", cwd=lab)
    _, said = labctl("eval", "--json", cwd=lab, capture=True)
    figures = json.loads(said)["evaluation"]
    _, said = labctl("eval", "--on-server", "--json", cwd=lab, capture=True)
    there = json.loads(said)["evaluation"]
    _, said = labctl("down", "--yes", "--json", cwd=lab, capture=True)
    ending = json.loads(said)
    _, said = labctl("report", "--json", cwd=lab, capture=True)
    page = _kept(Path(json.loads(said)["report"]["file"]))
    return {
        "accuracy_server": figures["accuracy_server"],
        "accuracy_local": figures["accuracy_local"],
        "accuracy_on_server_again": there["accuracy_server"],
        "run_exit": run_exit,
        "tensorboard": pages["tensorboard"],
        "jupyter": pages["jupyter"],
        "servers_left": len(ending["servers_left"]),
        "report": str(page),
    }


def _kept(page: Path) -> Path:
    """Put what is handed in where it stays; the report's new place."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    for name in KEPT:
        source = page.parent / name
        if source.is_dir():
            shutil.copytree(source, RESULTS / name)
        else:
            shutil.copy2(source, RESULTS / name)
    print(f"\nthe results presentation: {RESULTS / page.name}", flush=True)
    return RESULTS / page.name


def main() -> int:
    begun = time.monotonic()
    if RESULTS.exists() and not (RESULTS / KEPT[0]).is_file():
        raise SystemExit(f"{RESULTS} is in the way: it is not what an earlier demo left")
    home = Path(tempfile.mkdtemp(prefix="labctl-demo-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    try:
        seen = story(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    seen["seconds"] = round(time.monotonic() - begun, 1)
    good = (
        seen["accuracy_server"] == seen["accuracy_local"] == seen["accuracy_on_server_again"]
        and seen["run_exit"] == 0
        and (seen["tensorboard"], seen["jupyter"]) == (200, 200)
        and seen["servers_left"] == 0
    )
    print(json.dumps(seen), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
