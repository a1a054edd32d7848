"""Running rsync, and saying what its exit codes mean."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from labctl.commands import rsync, ssh
from labctl.errors import DiskFullError, LinkLostError, TransferError
from labctl.model import Endpoint
from labctl.transports import failures
from labctl.transports.client import quick_login

_NOT_USABLE = (1, 2, 5, 126, 127)
"""Options it does not know, a noisy shell, no start, not executable, not there."""
_LINK = (10, 12, 30, 255)
_PARTLY = (0, 23, 24)
"""Some files vanished or could not be read: the receiver's hash check names them."""
_KEPT = "what has arrived is kept and used"
_FULL = ("No space left on device", "Disk quota exceeded")


def way(config_path: Path, server_id: str) -> rsync.Way | None:
    """rsync to a server described in `config_path`, on a connection of its own.

    None where this machine has no OpenSSH or no rsync of 3.0 or newer.
    """
    if not shutil.which("ssh") or not shutil.which("rsync"):
        return None
    done = subprocess.run(
        ["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    version = rsync.parse_version(done.stdout.decode(errors="replace"))
    if version < rsync.OLDEST:
        return None
    line = ssh.rsync_shell(str(config_path), login=quick_login())
    return rsync.Way(ssh_line=line, host=ssh.check_id(server_id), version=version)


def run(
    argv_for: Callable[[str], list[str]],
    names: Iterable[str],
    endpoint: Endpoint,
    *,
    hint: str,
    on_bytes: Callable[[int], None],
) -> bool:
    """Bring `names` home; False where rsync cannot be used with this server.

    `argv_for` takes the path of the file of names. `on_bytes` hears how many have come so far.
    LinkLostError within 10 s of a dead link, DiskFullError, TransferError; what arrived stays.
    """
    with tempfile.NamedTemporaryFile() as listed, tempfile.TemporaryFile() as said:
        listed.write(b"".join(os.fsencode(name) + b"\0" for name in names))
        listed.flush()
        process = subprocess.Popen(
            argv_for(listed.name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "LC_ALL": "C"},  # its words are recognised in English
        )
        with process:
            try:
                assert process.stdout is not None
                begun = _follow(process.stdout, on_bytes)
                code = process.wait()
            finally:
                process.terminate()
        said.seek(0)
        words = said.read().decode(errors="replace").strip()
    return _judge(code, words, endpoint, hint, begun=begun)


def _follow(stdout: IO[bytes], on_bytes: Callable[[int], None]) -> bool:
    """Hand on how far it is until it ends; whether anything was transferred."""
    rest = b""
    begun = False
    while block := os.read(stdout.fileno(), 65536):
        *segments, rest = (rest + block).replace(b"\n", b"\r").split(b"\r")
        counts = [count for s in segments if (count := rsync.parse_progress(s)) is not None]
        if counts:
            begun = True
            on_bytes(counts[-1])
    return begun


def _judge(code: int, words: str, endpoint: Endpoint, hint: str, *, begun: bool = False) -> bool:
    if any(text in words for text in _FULL):
        raise disk_full(words[-300:], hint)
    if code in _PARTLY:
        return True
    if code in _NOT_USABLE or "is your shell clean" in words:
        return False
    if code == 255 and not begun:
        raise failures.of_ssh(endpoint, words)
    if code in _LINK:
        lost = failures.lost(endpoint, words[-300:])
        raise LinkLostError(lost.what, why=lost.why, hint=f"{hint}  ({_KEPT})")
    raise TransferError(
        f"rsync ended before everything was there ({_ending(code)})",
        why=words[-600:],
        hint=f"{hint}  ({_KEPT})",
    )


def disk_full(why: str, hint: str) -> DiskFullError:
    return DiskFullError(
        "the disk of this machine is full", why=why, hint=f"make room, then {hint}"
    )


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit {code}"
