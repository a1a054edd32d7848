"""The alternatives to labctl, each in its own virtual environment, which is created once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# The versions that the targets were measured against.
WANTED = {
    "fabric": "3.2.3",
    "parallel-ssh": "2.16.*",
    "asyncssh": "2.24.*",
    "pyinfra": "3.10.*",
    "ansible-core": "2.19.*",
    "skypilot": "0.14.1",
    "dstack": "0.22.5",
}
FOLDERS = {"fabric": "fab", "skypilot": "sky"}
# hundreds of megabytes each: installed only on request
ON_DEMAND = ("skypilot", "dstack")


@dataclass(frozen=True)
class Peer:
    """A package in its environment. `version` is the installed one."""

    package: str
    version: str
    folder: Path

    def program(self, name: str) -> str:
        """Return the path of one of its programs, for example python."""
        return str(self.folder / "bin" / name)


def peers(cache: Path, packages: Iterable[str], *, install: bool) -> dict[str, Peer]:
    """Return the installed or installable peers by package; report those that are skipped."""
    found = {}
    for package in packages:
        folder = cache / FOLDERS.get(package, package)
        version = _version(folder, package)
        if not version and install and _install(folder, package):
            version = _version(folder, package)
        if version:
            found[package] = Peer(package, version, folder)
        else:
            print(f"{package} is not installed; skipping it", file=sys.stderr)
    return found


def _version(folder: Path, package: str) -> str:
    python = folder / "bin" / "python"
    if not python.exists():
        return ""
    line = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", line], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _install(folder: Path, package: str) -> bool:
    wanted = f"{package}=={WANTED[package]}"
    print(f"installing {wanted} in {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    return subprocess.run([*pip, "--disable-pip-version-check", wanted]).returncode == 0
