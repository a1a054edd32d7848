"""This machine's OpenSSH client: its private directory, and what its version is asked for."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from labctl.commands import ssh
from labctl.errors import PolicyError


def runtime_dir(parent: Path = Path("/tmp")) -> Path:
    """A short private directory for control sockets, made if absent.

    Short, since a socket's path may have only about 100 bytes; so neither TMPDIR nor the state
    directory will do. PolicyError where somebody else made it first.
    """
    path = parent / f"labctl-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PolicyError(
            f"{path} belongs to somebody else",
            why="whoever owns it could listen in on connections to your servers",
            hint=f"have an administrator remove it: sudo rm -r {path}",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def quick_login() -> tuple[str, ...]:
    """Options for quick logins with this machine's ssh; none where there is no ssh.

    Asking it for its version takes 5 ms: what it said is kept beside the control sockets, under
    the time and size of the program.
    """
    program = shutil.which("ssh")
    if program is None:
        return ()
    found = Path(program).stat()
    kept = runtime_dir() / f"ssh-{found.st_mtime_ns}-{found.st_size}"
    try:
        version = kept.read_text()
    except FileNotFoundError:
        version = _version(program)
        staging = kept.with_name(f"{kept.name}.{os.getpid()}")
        staging.write_text(version)
        staging.replace(kept)
    return ssh.quick_login(version)


def _version(program: str) -> str:
    import subprocess  # not for what is known

    done = subprocess.run([program, "-V"], stdin=subprocess.DEVNULL, capture_output=True)
    return done.stderr.decode(errors="replace")
