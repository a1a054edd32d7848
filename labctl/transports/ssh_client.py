"""This machine's OpenSSH client: how it is started, its private directory, its fast options."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from labctl.commands import ssh
from labctl.config import copy_environment
from labctl.errors import LabError, PolicyError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import subprocess


def spawn_ssh(
    argv: Sequence[str], pipe: int, stderr: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start ssh with `pipe` for each of its streams, or with errors to the file `stderr`."""
    try:
        return subprocess.Popen(
            argv,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr or pipe,
            # Passed on unread. LC_ALL: `failures` recognizes ssh's messages in English.
            env={**copy_environment(), "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise LabError(
            "ssh is not installed on this machine",
            why="labctl reaches other machines through the system's OpenSSH",
            hint="sudo apt install openssh-client",
        ) from None


def runtime_dir(parent: Path = Path("/tmp")) -> Path:
    """Return a short private directory for control sockets; create it if missing.

    Short, since a socket's path may have only about 100 bytes; so neither TMPDIR nor the state
    directory can be used. PolicyError if the directory belongs to another user.
    """
    path = parent / f"labctl-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PolicyError(
            f"{path} belongs to another user",
            why="its owner could intercept connections to your servers",
            hint=f"have an administrator remove it:\nsudo rm -r {path}",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def find_quick_login_options() -> tuple[str, ...]:
    """Return options for fast logins with this machine's ssh; none if it is not installed.

    `ssh -V` takes 5 ms, so its output is cached next to the control sockets, under the
    modification time and size of the program.
    """
    program = shutil.which("ssh")
    if program is None:
        return ()
    status = Path(program).stat()
    cache = runtime_dir() / f"ssh-{status.st_mtime_ns}-{status.st_size}"
    try:
        version = cache.read_text()
    except FileNotFoundError:
        version = _read_version(program)
        staging = cache.with_name(f"{cache.name}.{os.getpid()}")
        staging.write_text(version)
        staging.replace(cache)
    return ssh.choose_fast_kex_options(version)


def _read_version(program: str) -> str:
    result = subprocess.run([program, "-V"], stdin=subprocess.DEVNULL, capture_output=True)
    return result.stderr.decode(errors="replace")
