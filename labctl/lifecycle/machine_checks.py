"""Checks of this machine: its programs and its disk. None of them needs a lab."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from labctl import __version__
from labctl.config import Paths
from labctl.config.installation import find_commit
from labctl.model import GIB, Check
from labctl.text import bytes_text
from labctl.transports.rsync import find_program

# Results and images are kept in the home directory.
LOW_DISK_BYTES = 5 * GIB
FULL_DISK_BYTES = GIB // 2


def list_machine_checks(paths: Paths) -> list[Check]:
    """Check what labctl needs on this machine, whatever the provider is."""
    return [
        _check_version(),
        _check_ssh(),
        _check_rsync(),
        _check_disk(paths.home),
    ]


def _check_version() -> Check:
    commit = find_commit()
    version = f"{__version__}{f' (commit {commit})' if commit else ''}"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return Check(
        name="labctl", ok=True, detail=f"{version}, Python {platform.python_version()}, {system}"
    )


def _check_ssh() -> Check:
    if not shutil.which("ssh"):
        detail = "not found; forwards, attach and quick commands need it"
        fix = "sudo apt-get install openssh-client  # macOS: brew install openssh"
        return Check(name="ssh", ok=False, detail=detail, next=fix)
    return Check(name="ssh", ok=True, detail=_read_first_line("ssh", "-V"))


def _check_rsync() -> Check:
    fix = "sudo apt-get install rsync  # macOS: brew install rsync"
    if not shutil.which("rsync"):
        detail = "not found; without it, files are sent as one stream, which cannot be resumed"
        return Check(name="rsync", ok=True, warning=True, detail=detail, next=fix)
    version = _read_first_line("rsync", "--version").removeprefix("rsync ")
    if not find_program().is_usable:
        detail = f"{version}: lacks options that labctl needs, so files are sent as one stream"
        return Check(name="rsync", ok=True, warning=True, detail=detail, next=fix)
    return Check(name="rsync", ok=True, detail=version)


def _read_first_line(*argv: str) -> str:
    """Return the first line that a program prints, on either stream."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return " ".join(lines[0].split())[:60] if lines else "no version"


def _check_disk(home: Path) -> Check:
    free = shutil.disk_usage(home).free
    low = free < LOW_DISK_BYTES
    return Check(
        name="disk",
        ok=free >= FULL_DISK_BYTES,
        warning=low,
        detail=f"{bytes_text(free)} free in your home directory",
        next="labctl images --remove all  # or find what is large: du -xh ~ | sort -h | tail"
        if low
        else "",
    )
