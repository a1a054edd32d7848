"""What a user would pick instead: each in a virtual environment of its own, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSIONS = {"fabric": "3.2.3", "skypilot": "0.14.1"}
PROGRAMS = {"fabric": "fab", "skypilot": "sky"}


def program(cache: Path, package: str, *, install: bool) -> str | None:
    """The program's path; None where it is not installed and should not be, or cannot be."""
    folder = cache / PROGRAMS[package]
    found = folder / "bin" / PROGRAMS[package]
    if not found.exists() and install:
        wanted = f"{package}=={VERSIONS[package]}"
        print(f"installing {wanted} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        done = subprocess.run([*pip, "--disable-pip-version-check", wanted])
        if done.returncode != 0:
            print(f"{wanted} could not be installed; left out", file=sys.stderr)
            return None
    return str(found) if found.exists() else None
