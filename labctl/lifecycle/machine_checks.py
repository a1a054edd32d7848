"""Checks of this machine: programs, disk and clock. None of them needs a lab."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

from labctl import __version__
from labctl.config import Paths
from labctl.config.installation import find_commit
from labctl.http_client import open_session
from labctl.model import GIB, Check
from labctl.text import bytes_text, duration_text
from labctl.transports.rsync import find_program

# Results and images are kept in the home directory.
LOW_DISK_BYTES = 5 * GIB
FULL_DISK_BYTES = GIB // 2
# The header `Date` of a reply has the time. Not https: with a wrong clock no certificate is valid.
CLOCK_URL = "http://checkip.amazonaws.com/"
CLOCK_TIMEOUT_S = 5.0
# `Date` has whole seconds, and a slow reply makes it less exact.
CLOCK_WARNING_S = 30.0
# AWS refuses requests whose time is 5 minutes off.
CLOCK_ERROR_S = 240.0


def list_machine_checks(paths: Paths) -> list[Check]:
    """Check what labctl needs on this machine, whatever the provider is."""
    return [
        _check_version(),
        _check_ssh(),
        _check_rsync(),
        _check_disk(paths.home),
        check_clock(),
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


def check_clock(url: str = CLOCK_URL) -> Check:
    """Compare the clock with that of a server on the internet; skipped if it does not answer."""
    before = time.time()
    try:
        at = parsedate_to_datetime(_fetch_date(url)).timestamp()
    except (OSError, TypeError, ValueError):
        detail = f"not checked, because {url} did not answer with the time"
        return Check(name="clock", ok=True, skipped=True, detail=detail)
    # The server rounds down, on average by half a second.
    ahead = (before + time.time()) / 2 - (at + 0.5)
    if abs(ahead) < CLOCK_WARNING_S:
        return Check(name="clock", ok=True, detail="right")
    side = "ahead" if ahead > 0 else "behind"
    return Check(
        name="clock",
        ok=abs(ahead) < CLOCK_ERROR_S,
        warning=True,
        detail=f"{duration_text(abs(ahead))} {side}; clouds refuse requests with a wrong time",
        next="sudo timedatectl set-ntp true\nsudo sntp -sS time.apple.com   # on macOS",
    )


def _fetch_date(url: str) -> str:
    """Fetch the header `Date` of a reply; a refusal has one, too."""
    with open_session() as session:
        response = session.head(url, timeout=CLOCK_TIMEOUT_S, allow_redirects=True)
        return str(response.headers.get("Date", ""))
