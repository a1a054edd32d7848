"""Files on their way home: one stream into a partial directory, checked against their hashes.

The bytes that lie there already, or in an older copy, are told to the server by their hash: where
it has the same ones, only what follows them travels. What has come is synced to the disk and read
back from there before anything counts as arrived.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from labctl.actions import Progress, Reporter
from labctl.actions.durability import hash_on_disk, sync_files
from labctl.actions.remote import KEPT, Remote, resumable
from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.model import Value
from labctl.remote.landing import Landing, Part, take_in
from labctl.remote.parcel import CutError

RESERVE_BYTES = 64 * 1024**2
LONGEST_NAME_BYTES = 255
TOLD_BYTES = 1024**2
"""How often progress is told of."""


class Due(Value, frozen=True):
    """A file that the server promises; without a `sha256`, that comes when the file has come.

    A `growing` one counts up to `size` bytes only. `identity` is that of the file here whose
    content was found right on the disk.
    """

    path: str
    size: int
    sha256: str
    growing: bool = False
    identity: tuple[int, int, int] | None = None


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


def renamed_identity(found: os.stat_result) -> tuple[int, int, int]:
    """What a rename leaves as it is, and a change of the contents does not."""
    return found.st_size, found.st_mtime_ns, found.st_ino


def confirm(partial: Path, came: Iterable[Due]) -> tuple[list[Due], list[Due]]:
    """Sync the files that came to `partial`, and hash what the disk has of them.

    (those that are as promised, with their identity; those that are not, and are gone).
    TransferError where the disk fails.
    """
    due = list(came)
    if due:
        sync_files(partial, [partial / one.path for one in due])
    good, bad = [], []
    for one in due:
        path = partial / one.path
        with contextlib.suppress(OSError):  # a disk that cannot read it does not have it
            sha256, found = hash_on_disk(path)
            if (sha256, found.st_size) == (one.sha256, one.size):
                good.append(msgspec.structs.replace(one, identity=renamed_identity(found)))
                continue
        path.unlink(missing_ok=True)
        bad.append(one)
    return good, bad


class Held(Value, frozen=True):
    """What is here of a file: its first `size` bytes at `path`, and the hash that took them in."""

    path: Path
    size: int = 0
    digest: Any = None

    @property
    def sha256(self) -> str:
        return str(self.digest.hexdigest()) if self.size else ""


class Arrivals:
    """Brings files from the server to `partial` here, and goes on where an earlier try was cut.

    `request` is what the verb "send" needs to find the directory. `total` are the bytes that the
    last `fetch` brought.
    """

    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        partial: Path,
        *,
        reporter: Reporter,
        name: str,
        hint: str,
    ) -> None:
        self.remote = remote
        self.request = request
        self.partial = partial
        self.reporter = reporter
        self.name = name
        self.hint = hint
        self.total = 0

    def fetch(
        self, due: Sequence[Due], older: Callable[[Due], Path | None] = lambda due: None
    ) -> tuple[list[Due], list[Due]]:
        """Bring `due`: (those that are on the disk here, with their hashes; those that did not
        come, or different).

        `older` may name a file that begins like a due one: what is the same need not travel.
        DiskFullError before anything has come where the room is short, else in the middle;
        LinkLostError and TransferError leave what has arrived for the next time.
        """
        if not due:
            self.total = 0
            return [], []
        try:
            with self._room(), resumable(self.hint):
                coming = _Coming(self, due, [self._held(one, older(one)) for one in due])
                told = coming.receive()
        except CutError as error:
            raise TransferError(
                "the transfer was cut short", why=str(error), hint=f"{self.hint}  ({KEPT})"
            ) from error
        came, bad = [], []
        for one, arrived, there in zip(due, coming.sha256(), told, strict=True):
            if arrived and arrived == (one.sha256 or there):
                came.append(msgspec.structs.replace(one, sha256=arrived))
            else:
                self.place(one.path).unlink(missing_ok=True)
                bad.append(one)
        good, spoiled = confirm(self.partial, came)
        return good, [*bad, *spoiled]

    def place(self, name: str) -> Path:
        """Where `name` arrives; whatever is no directory on the way there, and ours, goes."""
        here = self.partial
        for part in contained(name).split("/")[:-1]:
            here = here / part
            if here.is_symlink() or here.is_file():
                here.unlink()
        return self.partial / name

    def require(self, total: int) -> None:
        """DiskFullError where so many bytes have no room."""
        self.total = total
        free = shutil.disk_usage(_existing(self.partial)).free
        if total + RESERVE_BYTES > free:
            raise DiskFullError(
                "there is no room here for the results",
                why=f"{_mib(total)} MiB are to come, {_mib(free)} MiB are free at "
                f"{_existing(self.partial)}, and {_mib(RESERVE_BYTES)} are kept free",
                hint=f"make room, then {self.hint}  (nothing was brought)",
            )

    def progress(self, done: int) -> None:
        self.reporter.emit(Progress(name=self.name, done=done, total=self.total, unit="bytes"))

    def _held(self, due: Due, older: Path | None) -> Held:
        place = self.place(due.path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        elif place.is_symlink() or (place.exists() and place.stat().st_nlink > 1):
            place.unlink()  # a second name of a good file, which a cut pull has left
        for path in (place, older):
            if path is not None and path.is_file() and (size := path.stat().st_size):
                digest = hashlib.sha256()
                with path.open("rb", buffering=0) as file:
                    take_in(file.fileno(), digest, min(size, due.size))
                return Held(path=path, size=min(size, due.size), digest=digest)
        return Held(path=place)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = f"make room, then {self.hint}  ({KEPT})"
            raise DiskFullError(
                "the disk of this machine is full", why=str(error), hint=hint
            ) from error


class _Coming:
    """One stream of `due` files, of which `held` is here."""

    def __init__(self, arrivals: Arrivals, due: Sequence[Due], held: Sequence[Held]) -> None:
        self.arrivals = arrivals
        self.due = due
        self.held = held
        self.begun: list[int] = []
        self.landing: Landing | None = None
        self.told = 0

    def receive(self) -> list[str]:
        """Have them sent; the hashes that the server tells at the end."""
        parts = [
            [one.path, one.size, one.sha256, held.size, held.sha256]
            for one, held in zip(self.due, self.held, strict=True)
        ]
        request = {**self.arrivals.request, "parts": parts}
        try:
            reply = self.arrivals.remote.stream(
                "send", request, on_reply=self._begin, on_bytes=self._feed
            )
        finally:
            if self.landing is not None:
                self.landing.close()
        told: list[str] = reply["sha256"]
        if self.landing is None or len(told) != len(self.due):
            raise CutError("the server did not say what it sent")
        self.landing.end()
        return told

    def sha256(self) -> list[str]:
        """The hash of each file that arrived, "" where it was not there."""
        assert self.landing is not None
        arrived = iter(self.landing.sha256)
        return [next(arrived) if start >= 0 else "" for start in self.begun]

    def _begin(self, reply: dict[str, Any]) -> None:
        self.begun = reply["from"]
        rows = list(zip(self.due, self.held, self.begun, strict=False))
        if len(self.begun) != len(self.due) or any(
            start not in (-1, 0, held.size) for _, held, start in rows
        ):
            raise CutError("the server began where it was not asked to")
        self.arrivals.require(sum(one.size - start for one, _, start in rows if start >= 0))
        self.landing = Landing(
            self._part(one, held, start) for one, held, start in rows if start >= 0
        )

    def _part(self, due: Due, held: Held, start: int) -> Part:
        place = self.arrivals.place(due.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not start:
            place.unlink(missing_ok=True)
            return Part(str(place), 0, due.size)
        if held.path != place:
            _stand_in(held.path, place, whole=start == due.size)
        return Part(str(place), start, due.size, held.digest)

    def _feed(self, chunk: bytes) -> None:
        assert self.landing is not None
        self.landing.feed(chunk)
        done = self.landing.done
        if done - self.told >= TOLD_BYTES or done == self.arrivals.total:
            self.told = done
            self.arrivals.progress(done)


def _stand_in(older: Path, place: Path, *, whole: bool) -> None:
    """Have at `place` what is in `older`: as a second name, where nothing will be written to it."""
    if whole:
        with contextlib.suppress(OSError):
            place.hardlink_to(older)
            return
    shutil.copyfile(older, place)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _mib(size: int) -> int:
    return -(-size // 1024**2)
