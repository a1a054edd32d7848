"""Push: bring one tree of the server to what it is here, or change nothing good there.

Little goes as tar archives through the control connection, much through rsync, and where rsync is
not to be had, again as archives and, for large files, in chunks. All of it lands in a staging
directory, is checked by hash and renamed; a push that was cut goes on where it stopped.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labctl.actions import Decision, Progress, Reporter, rsync
from labctl.actions.remote import Remote
from labctl.actions.scan import refresh
from labctl.commands import rsync as lines
from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.model import GIB, FileEntry, Value
from labctl.remote.packing import LEVEL, worth_packing

SMALL_BYTES = 32 * 1024**2
"""Up to this much goes through the control connection: one round trip, no new login."""
FIRST_BATCH_BYTES = 16 * 1024**2
CHUNK_BYTES = 16 * 1024**2
BATCH_S = 2.0
TRIES = 3
LONG_S = 6 * 3600.0
"""For calls that hash or carry much. A dead link is noticed by the transport, much earlier."""
NAMED_AT_MOST = 20


class PushResult(Value, frozen=True):
    """`sent` and `unchanged` count files, `bytes` what travelled (without what was staged)."""

    sent: int = 0
    bytes: int = 0
    removed: int = 0
    unchanged: int = 0


def push(
    remote: Remote,
    lab_name: str,
    lab_id: str,
    target: str,
    root: Path,
    files: Sequence[FileEntry],
    reporter: Reporter,
    *,
    force: bool = False,
    ssh: lines.Way | None = None,
) -> PushResult:
    """Make `target` ("code", "data/<name>", "wheelhouse") on the server what `files` are here.

    `files` (from `scan`) lie below `root`. PolicyError where the server holds edits that `force`
    does not give up, or where much is to be sent and the person says no; DiskFullError before
    anything is sent; LinkLostError and TransferError leave what arrived for the next push.
    """
    one = _Push(remote, {"lab": lab_name, "lab_id": lab_id, "target": target}, root, reporter, ssh)
    return one.run(tuple(files), force)


class _Push:
    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        root: Path,
        reporter: Reporter,
        way: lines.Way | None,
    ) -> None:
        self.remote = remote
        self.request = request
        self.said = f"sending {request['target']}"
        self.root = root
        self.reporter = reporter
        self.way = way
        self.sent_bytes = 0
        self.total = 0
        self.before = 0

    def run(self, files: tuple[FileEntry, ...], force: bool) -> PushResult:
        self.request["force"] = force
        sent: set[str] = set()
        agreed = False
        bad: list[str] = []
        removed: set[str] = set()
        for _ in range(TRIES):
            plan = self._call("plan", {"files": [_wire(f) for f in files]})
            self._refuse(plan)
            removed |= set(plan["removed"])
            missing = set(plan["needed"])
            needed = [f for f in files if f.path in missing]
            if not needed:
                return self._result(files, sent, removed)
            staged: dict[str, int] = plan["staged"]
            agreed = agreed or self._agree(needed, staged)
            sent |= {f.path for f in needed}
            bad = self._send(needed, plan)
            if not bad:
                return self._result(files, sent, removed)
            files = refresh(self.root, files, set(bad))
        raise TransferError(
            f"{bad[0]!a} changed each time while it was sent",
            why=f"{len(bad)} files differ from what was read a moment before",
            hint="stop what writes them, or name them in .labignore, then labctl push",
        )

    def _result(
        self, files: tuple[FileEntry, ...], sent: set[str], removed: set[str]
    ) -> PushResult:
        return PushResult(
            sent=len(sent),
            bytes=self.sent_bytes,
            removed=len(removed),
            unchanged=len({f.path for f in files} - sent),
        )

    def _call(self, verb: str, more: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        return self.remote.call(verb, {**self.request, **more}, body=body, timeout_s=LONG_S)

    def _refuse(self, plan: dict[str, Any]) -> None:
        if plan["conflicts"]:
            raise _edited(plan["conflicts"])
        if plan["short_bytes"]:
            free = plan["free_bytes"]
            raise DiskFullError(
                f"the server's disk has no room for {self.request['target']}",
                why=f"{_mib(plan['short_bytes'])} MiB are missing, {_mib(free)} MiB are free, and "
                "a little is kept free for the server itself",
                hint="labctl ssh -- df -h  (nothing was sent)",
            )

    def _agree(self, needed: list[FileEntry], staged: dict[str, int]) -> bool:
        size = sum(f.size - min(f.size, staged.get(f.path, 0)) for f in needed)
        if size <= GIB:
            return True
        question = Decision(
            question=f"Send {size / GIB:.1f} GiB to the server?",
            detail=f"{len(needed)} files of {self.request['target']} below {self.root}",
        )
        if not self.reporter.ask(question):
            raise PolicyError(
                "nothing was pushed",
                why=f"{size / GIB:.1f} GiB would be sent, and nobody agreed",
                hint="labctl push --yes, or leave something out in .labignore",
            )
        return True

    def _send(self, needed: list[FileEntry], plan: dict[str, Any]) -> list[str]:
        """Send and commit; returns the paths that arrived different."""
        staged: dict[str, int] = plan["staged"]
        left = sum(f.size - min(f.size, staged.get(f.path, 0)) for f in needed)
        self.before, self.total = self.sent_bytes, self.sent_bytes + left
        finish = {"files": [_wire(f) for f in needed], "removed": plan["removed"]}
        if left > SMALL_BYTES and self.way and plan["rsync"] and self._rsync(needed, plan):
            reply = self._call("commit", finish)
        else:
            reply = self._by_hand(needed, staged, finish)
        if reply["conflicts"]:
            raise _edited(reply["conflicts"])
        self._progress(self.total - self.before)
        bad: list[str] = reply["bad"]
        return bad

    def _rsync(self, needed: list[FileEntry], plan: dict[str, Any]) -> bool:
        way, staging = self.way, plan["staging"]
        assert way is not None
        pack = self._worth_packing(needed)
        return rsync.run(
            lambda names: lines.push_argv(way, str(self.root), staging, names, pack=pack),
            [f.path for f in needed],
            self.remote.transport.endpoint,
            receiver="the server",
            hint="labctl push",
            on_bytes=self._progress,
        )

    def _worth_packing(self, files: list[FileEntry]) -> bool:
        return worth_packing((self.root / one.path, one.size) for one in files)

    def _progress(self, done: int) -> None:
        """`done` bytes of this round have gone."""
        self.sent_bytes = min(self.total, self.before + done)
        self.reporter.emit(
            Progress(name=self.said, done=self.sent_bytes, total=self.total, unit="bytes")
        )

    def _by_hand(
        self, needed: list[FileEntry], staged: dict[str, int], finish: dict[str, Any]
    ) -> dict[str, Any]:
        """Large files in chunks, the others as archives; the last one also commits."""
        large = [f for f in needed if f.size > CHUNK_BYTES]
        done = 0
        for entry in large:
            done = self._append(entry, staged.get(entry.path, 0), done)
        rest = [
            f
            for f in needed
            if f.size <= CHUNK_BYTES and (staged.get(f.path) != f.size or not f.size)
        ]
        limit = FIRST_BATCH_BYTES
        pack = self._worth_packing(rest)
        while rest:
            batch, rest = _split(rest, limit)
            began = time.monotonic()
            body = _archive(self.root, batch, pack)
            reply = self._call("receive", {**finish, "stage_only": bool(rest)}, body)
            done += sum(f.size for f in batch)
            self._progress(done)
            took_s = max(0.01, time.monotonic() - began)
            sent = sum(f.size + tarfile.BLOCKSIZE for f in batch)
            limit = max(256 * 1024, min(SMALL_BYTES, int(sent * BATCH_S / took_s)))
            if not rest:
                return reply
        return self._call("commit", finish)

    def _append(self, entry: FileEntry, offset: int, done: int) -> int:
        try:
            with (self.root / entry.path).open("rb") as file:
                file.seek(offset)
                while offset < entry.size and (block := file.read(CHUNK_BYTES)):
                    at = {"path": entry.path, "offset": offset}
                    offset = int(self._call("append", at, block)["size"])
                    done += len(block)
                    self._progress(done)
        except FileNotFoundError:
            pass  # the commit will name it as missing
        return done


def _wire(entry: FileEntry) -> list[Any]:
    return [entry.path, entry.size, entry.sha256, entry.mode]


def _split(files: list[FileEntry], limit: int) -> tuple[list[FileEntry], list[FileEntry]]:
    """As many files as make up `limit` bytes, at least one, and the rest."""
    size = 0
    for count, entry in enumerate(files):
        size += entry.size + tarfile.BLOCKSIZE
        if count and size > limit:
            return files[:count], files[count:]
    return files, []


def _archive(root: Path, files: list[FileEntry], pack: bool) -> bytes:
    """A tar of the files as they are now; one that is gone is left out, and the server says so."""
    buffer = io.BytesIO()
    with _opened(buffer, pack) as archive:
        for entry in files:
            try:
                content = (root / entry.path).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            info = tarfile.TarInfo(entry.path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _opened(buffer: io.BytesIO, pack: bool) -> tarfile.TarFile:
    form = tarfile.PAX_FORMAT
    if pack:
        return tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=LEVEL, format=form)
    return tarfile.open(fileobj=buffer, mode="w", format=form)


def _edited(names: list[str]) -> PolicyError:
    shown = "\n".join(f"  {ascii(name)[1:-1]}" for name in names[:NAMED_AT_MOST])
    more = f"\n  and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
    return PolicyError(
        "files were changed on the server since the last push",
        why=f"a push would overwrite them:\n{shown}{more}",
        hint="labctl pull --code  brings them here; labctl push --force  gives them up",
    )


def _mib(size: int) -> int:
    return -(-size // 1024**2)
