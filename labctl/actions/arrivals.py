"""Files on their way home: bytes into a partial directory, then checked against their hashes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from labctl.actions import Progress, Reporter, rsync
from labctl.actions.remote import Remote
from labctl.actions.scan import hash_file
from labctl.commands import rsync as lines
from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.model import Value

SMALL_BYTES = 32 * 1024**2
"""Up to this much goes through the control connection: one round trip, no new login."""
RESERVE_BYTES = 64 * 1024**2
LONGEST_NAME_BYTES = 255


class Due(Value, frozen=True):
    """A file that the server promises. A `growing` one counts up to `size` bytes only."""

    path: str
    size: int
    sha256: str
    growing: bool = False


def contained(name: str) -> str:
    """`name`, a relative path from a server; PolicyError where it could lead anywhere else."""
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise PolicyError(
            f"the server sent the name {name!a}, which leaves its directory",
            why="no honest server does that; nothing was written under it",
            hint="labctl ssh",
        )
    return name


def unwelcome(name: str, *, reserved: Sequence[str] = ()) -> str:
    """Why a contained name is left out here, "" if it is not. PolicyError as `contained`."""
    parts = contained(name).split("/")
    if parts[0] in reserved or parts[0].startswith(".labctl"):
        return "its name is labctl's own"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "a control character in its name"
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if max(map(len, encoded)) > LONGEST_NAME_BYTES:
        return "its name is too long"
    return ""


class Arrivals:
    """Brings files from `directory` on the server to `partial` here, resuming what lies there.

    `request` is what the verb "read" needs to find the directory.
    """

    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        directory: str,
        partial: Path,
        *,
        reporter: Reporter,
        way: lines.Way | None,
        name: str,
        hint: str,
    ) -> None:
        self.remote = remote
        self.request = request
        self.directory = directory
        self.partial = partial
        self.reporter = reporter
        self.way = way
        self.name = name
        self.hint = hint
        self.total = 0

    def seed(self, due: Due, older: Path) -> None:
        """Begin a growing file with what came the last time."""
        place = self._place(due.path)
        if place.exists() or not older.is_file() or older.is_symlink():
            return
        if older.stat().st_size <= due.size:
            place.parent.mkdir(parents=True, exist_ok=True)
            with self._room():
                shutil.copyfile(older, place)

    def fetch(self, due: Sequence[Due]) -> int:
        """Bring all that is missing of `due`; returns the bytes that travelled."""
        left = [(one, have) for one in due if (have := self._have(one)) < one.size or not one.size]
        self.total = sum(one.size - have for one, have in left)
        free = shutil.disk_usage(_existing(self.partial)).free
        if self.total + RESERVE_BYTES > free:
            raise DiskFullError(
                "there is no room here for the results",
                why=f"{_mib(self.total)} MiB are to come, {_mib(free)} MiB are free at "
                f"{_existing(self.partial)}, and {_mib(RESERVE_BYTES)} are kept free",
                hint=f"make room, then {self.hint}  (nothing was brought)",
            )
        if not left:
            return 0
        with self._room():
            self.partial.mkdir(parents=True, exist_ok=True)
            if self.total <= SMALL_BYTES or self.way is None or not self._rsync(left):
                self._read(left)
        return self.total

    def check(self, due: Sequence[Due]) -> list[Due]:
        """Those of `due` that did not arrive as promised; what lies here of them is dropped."""
        bad = []
        for one in due:
            place = self._place(one.path)
            if not place.is_file() or place.is_symlink():
                bad.append(one)
                continue
            if place.stat().st_size > one.size and one.growing:
                os.truncate(place, one.size)
            if place.stat().st_size != one.size or hash_file(place) != one.sha256:
                place.unlink()
                bad.append(one)
        return bad

    def _place(self, name: str) -> Path:
        """Where `name` arrives; whatever is no directory on the way there, and ours, goes."""
        here = self.partial
        for part in contained(name).split("/")[:-1]:
            here = here / part
            if here.is_symlink() or here.is_file():
                here.unlink()
        return self.partial / name

    def _have(self, due: Due) -> int:
        place = self._place(due.path)
        if place.is_symlink():
            place.unlink()
        elif place.is_dir():
            shutil.rmtree(place)
        elif place.is_file():
            if place.stat().st_size > due.size:
                os.truncate(place, due.size)
            return place.stat().st_size
        return 0

    def _rsync(self, left: Sequence[tuple[Due, int]]) -> bool:
        way = self.way
        assert way is not None
        parts = [[one.path, have, one.size - have] for one, have in left]
        pack = bool(self.remote.call("packs", {**self.request, "parts": parts})["packs"])
        return rsync.run(
            lambda names: lines.pull_argv(way, self.directory, str(self.partial), names, pack=pack),
            [one.path for one, _ in left],
            self.remote.transport.endpoint,
            hint=self.hint,
            on_bytes=self._progress,
        )

    def _read(self, left: Sequence[tuple[Due, int]]) -> None:
        # What a rsync that gave up has brought counts too.
        parts = [(one, self._have(one)) for one, _ in left]
        request = {
            **self.request,
            "parts": [[one.path, have, one.size - have] for one, have in parts],
        }
        sink = _Sink([self._place(one.path) for one, _ in parts], self._progress)
        try:
            self.remote.stream("read", request, on_reply=sink.begin, on_bytes=sink.feed)
        finally:
            sink.close()
        if sink.left:
            raise TransferError("the transfer was cut short", hint=self.hint)

    def _progress(self, done: int) -> None:
        event = Progress(name=self.name, done=min(done, self.total), total=self.total, unit="bytes")
        self.reporter.emit(event)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = f"{self.hint}  (what has arrived is kept and used)"
            raise rsync.disk_full(str(error), hint) from error


class _Sink:
    """Distributes one stream of bytes over files, appending to each what is its own."""

    def __init__(self, places: Sequence[Path], on_bytes: Any) -> None:
        self.places = iter(places)
        self.sizes: Iterator[int] = iter(())
        self.left = 0
        self.done = 0
        self.file: IO[bytes] | None = None
        self.on_bytes = on_bytes

    def begin(self, reply: dict[str, Any]) -> None:
        self.sizes = iter(reply["sizes"])
        self._next()

    def _next(self) -> None:
        """Open the next file that gets bytes; empty ones are made on the way."""
        self.close()
        for size, place in zip(self.sizes, self.places, strict=False):
            if size < 0:
                continue  # it is gone on the server; the check will say so
            place.parent.mkdir(parents=True, exist_ok=True)
            self.file = place.open("ab")
            self.left = size
            if size:
                return
            self.close()

    def feed(self, block: bytes) -> None:
        while block and self.file is not None:
            self.file.write(block[: self.left])
            taken = min(len(block), self.left)
            block = block[taken:]
            self.left -= taken
            self.done += taken
            if not self.left:
                self._next()
        self.on_bytes(self.done)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _mib(size: int) -> int:
    return -(-size // 1024**2)
