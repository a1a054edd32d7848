"""The student's story, told by running it: each command as a person would type it.

Its last line is one JSON object with what was seen. Everything lives in a directory of its own,
HOME included, and is removed at the end.
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
    _, said = labctl("down", "--yes", "--json", cwd=lab, capture=True)
    ending = json.loads(said)
    return {
        "accuracy_server": figures["accuracy_server"],
        "accuracy_local": figures["accuracy_local"],
        "run_exit": run_exit,
        "tensorboard": pages["tensorboard"],
        "jupyter": pages["jupyter"],
        "servers_left": len(ending["servers_left"]),
    }


def main() -> int:
    begun = time.monotonic()
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
        seen["accuracy_server"] == seen["accuracy_local"]
        and seen["run_exit"] == 0
        and (seen["tensorboard"], seen["jupyter"]) == (200, 200)
        and seen["servers_left"] == 0
    )
    print(json.dumps(seen), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
