"""Finding a Python on this server that has boto3.

It is the playbook's, the distribution's, or one in a venv that labctl creates in the account's
home if it cannot become root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from ...wire.mirrors import INSTALL_BOTO3
from ...wire.verbs import Empty
from ..host.sudo import call_as_root, can_sudo
from ..program import PROGRAM

PYTHONS = ("/opt/labctl/venv/bin/python3", sys.executable, "python3")
# Versions before 1.24 do not support S3's checksums, and lack this module.
CHECK = "import boto3, botocore.httpchecksum"
REQUIREMENT = "boto3>=1.24"
INSTALL_S = 300
LACKING = "no Python on the server has boto3, and labctl could not install it"


def has_boto3() -> bool:
    """Return whether this process can use S3."""
    try:
        import boto3  # noqa: F401 (only to see whether it is installed)
        import botocore.httpchecksum  # noqa: F401
    except ImportError:
        return False
    return True


def find_python(uid: int | None = None, words: Sequence[str] = ()) -> str:
    """Return a Python on this server that can import boto3; "" if none can.

    `words` run a command as the account `uid`; without them, it is this process's own account.
    """
    venv, owner = find_venv(), os.geteuid() if uid is None else uid
    for python in (*PYTHONS, *([str(venv / "bin/python3")] if is_owned(venv, owner) else [])):
        if shutil.which(python) and run_quietly([*words, python, "-c", CHECK], 60):
            return python
    return ""


def provide_python() -> str:
    """Return a Python with boto3, which is installed if necessary; "" if that fails."""
    python = find_python()
    if not python and can_sudo():
        call_as_root(INSTALL_BOTO3, Empty())
        python = find_python()
    if not python and make_venv():
        python = find_python()
    return python


def install_boto3(request: Empty) -> Empty:
    """Install the distribution's boto3 as root. The caller checks whether that worked."""
    ways = {
        "apt-get": [["update", "-q"], ["install", "-q", "-y", "python3-boto3"]],
        "dnf": [["install", "-q", "-y", "python3-boto3"]],
    }
    for program, calls in ways.items():
        if shutil.which(program):
            for words in calls:
                run_quietly(["env", "DEBIAN_FRONTEND=noninteractive", program, *words], INSTALL_S)
            break
    return Empty()


def become_boto3_python(verb: str, request: bytes) -> None:
    """Continue this process in a Python that has boto3, with `request` on standard input.

    Returns only if there is no such Python.
    """
    python = provide_python()
    if not python:
        return
    with tempfile.TemporaryFile() as file:
        file.write(request)
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.execv(python, [python, str(PROGRAM), verb])


def find_venv() -> Path:
    return Path.home() / ".local/share/labctl/boto3"


def is_owned(directory: Path, uid: int) -> bool:
    """Return whether it belongs to `uid`: no account, least of all root, runs others' code."""
    return directory.is_dir() and directory.stat().st_uid == uid


def make_venv() -> bool:
    """Create the venv; return whether it exists now. Of concurrent calls, one puts it in place."""
    venv = find_venv()
    draft = venv.with_name(f"{venv.name}.{os.getpid()}")
    pip = [str(draft / "bin/python3"), "-m", "pip", "install", "-q", REQUIREMENT]
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        is_created = run_quietly([sys.executable, "-m", "venv", str(draft)], INSTALL_S)
        if is_created and run_quietly(pip, INSTALL_S):
            shutil.rmtree(venv, ignore_errors=True)
            draft.rename(venv)
    except OSError:
        return is_owned(venv, os.geteuid())
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return is_owned(venv, os.geteuid())


def run_quietly(words: list[str], limit_s: float) -> bool:
    """Return whether the command succeeded in time."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
