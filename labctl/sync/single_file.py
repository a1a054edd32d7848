"""One file to or from any path on the server, over SFTP. Trees go by push and pull."""

from __future__ import annotations

import posixpath
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.errors import NotFoundError, TransferError, UsageError
from labctl.events import Progress, Reporter
from labctl.transports import Transport
from labctl.transports.failures import endpoint_text

if TYPE_CHECKING:
    from paramiko import SFTPClient


def upload_file(
    transport: Transport, source: Path, target: str, reporter: Reporter, server_name: str = ""
) -> int:
    """Copy a file to `target` on the server, and return its size in bytes.

    A relative target is below the account's home; a directory receives the file under its name.
    `target` changes only when the whole file is there, and gets the mode of `source`. Errors call
    the server `server_name`; "" for its address.
    """
    if not source.is_file():
        raise NotFoundError(
            f"there is no file {source}",
            why="it is a directory; labctl cp copies one file" if source.is_dir() else "",
            hint=_list_command(source),
        )
    name = server_name or endpoint_text(transport.endpoint)
    with _open_sftp(transport, target) as sftp:
        if target.endswith("/") or stat.S_ISDIR(_read_mode(sftp, target)):
            target = posixpath.join(target, source.name)
        directory = posixpath.dirname(target)
        if directory and not stat.S_ISDIR(_read_mode(sftp, directory)):
            raise NotFoundError(
                f"there is no directory {directory} on {name}",
                hint=f"labctl ssh -- mkdir -p {shlex.quote(directory)}",
            )
        staged = f"{target}.labctl-part"
        sent = sftp.put(str(source), staged, callback=_TransferProgress(reporter, source.name))
        sftp.chmod(staged, stat.S_IMODE(source.stat().st_mode))
        sftp.posix_rename(staged, target)
    return sent.st_size or 0


def _list_command(source: Path) -> str:
    """Return the command that shows what could be copied instead of `source`."""
    if source.is_dir():
        return "labctl push   # sends the code and data of the lab"
    near = next(path for path in (source.parent, *source.parents) if path.is_dir())
    return f"ls {shlex.quote(str(near))}   # shows the files that exist"


def download_file(
    transport: Transport, source: str, target: Path, reporter: Reporter, server_name: str = ""
) -> int:
    """Copy a file of the server here, and return its size in bytes.

    A relative source is below the account's home; a directory receives the file under its name.
    `target` changes only when the whole file is here. Errors call the server `server_name`; "" for
    its address.
    """
    name = posixpath.basename(source)
    if not name:
        raise UsageError(f"{source} names no file", why="it ends in a slash", hint="labctl pull")
    if target.is_dir():
        target = target / name
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}", hint=f"mkdir -p {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".labctl-") as directory:
        staged = Path(directory) / "file"
        with _open_sftp(transport, source) as sftp:
            mode = _read_mode(sftp, source)
            if not mode:
                raise NotFoundError(
                    f"there is no {source} on {server_name or endpoint_text(transport.endpoint)}",
                    hint=_list_there_command(posixpath.dirname(source)),
                )
            if stat.S_ISDIR(mode):
                raise UsageError(
                    f"{source} is a directory on the server",
                    why="`labctl cp` copies one file",
                    hint="labctl pull   # for the outputs of runs",
                )
            sftp.get(source, str(staged), callback=_TransferProgress(reporter, name))
        staged.replace(target)
    return target.stat().st_size


@contextmanager
def _open_sftp(transport: Transport, path: str) -> Iterator[SFTPClient]:
    try:
        with transport.open_sftp() as sftp:
            yield sftp
    except OSError as error:
        # Errors of the server come without the name of a file; those of this machine have it.
        if isinstance(error, PermissionError) and error.filename is None:
            why = "your account on the server may not use this path"
            directory = shlex.quote(posixpath.dirname(path) or ".")
            hint = f"labctl ssh -- ls -la {directory}   # shows owners and permissions"
        else:
            why, hint = str(error), "labctl ssh -- df -h ."
        raise TransferError(f"{path} could not be copied", why=why, hint=hint) from error


def _list_there_command(directory: str) -> str:
    if not directory:
        return "labctl ssh -- ls   # lists your home there"
    return f"labctl ssh -- ls {shlex.quote(directory)}   # lists the directory there"


def _read_mode(sftp: SFTPClient, path: str) -> int:
    """Return the mode of a file or directory; 0 if it does not exist."""
    try:
        return sftp.stat(path).st_mode or 0
    except FileNotFoundError:
        return 0


class _TransferProgress:
    """Reports the bytes that are done, as SFTP's callback."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter = reporter
        self._name = f"copying {name}"

    def __call__(self, done: int, total: int) -> None:
        self._reporter.emit(Progress(name=self._name, done=done, total=total, unit="bytes"))
