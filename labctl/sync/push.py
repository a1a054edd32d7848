"""Push: bring one tree of the server to what it is here, or change nothing good there.

The server says what it needs. rsync (or tar) brings that to a staging directory there, and it is
renamed once this side knows that no file changed meanwhile. A large file that is new is hashed
while it travels. What little was edited since the last scan goes along with the question, so that
one call does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.events import Decision, Progress, Reporter
from labctl.model import GIB, FileEntry, Value
from labctl.servers.agent import KEPT, Remote, resumable
from labctl.sync.file_transfer import LONG_S, Destination, send_files
from labctl.sync.scan import Index, identity, refresh

TRIES = 3
NAMED_AT_MOST = 20
ALONG_BYTES = 256 * 1024  # so much travels with the question: it costs less than a second call
BLOCK_BYTES = 1024**2


class PushPlan(Value, frozen=True):
    """What the server says that it needs (`plan` in agent/files/files.py).

    `bad` is None where nothing went along that was committed at once.
    """

    needed: tuple[str, ...]
    whole: tuple[str, ...]
    staged_bytes: int
    unsure: tuple[str, ...]
    conflicts: tuple[str, ...]
    removed: tuple[str, ...]
    short_bytes: int
    free_bytes: int
    staging: str
    basis: str = ""
    rsync: str = ""
    bad: tuple[str, ...] | None = None


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
    index: Index | None = None,
) -> PushResult:
    """Make `target` ("code", "data/<name>", "wheelhouse") on the server what `files` are here.

    `files` (from `scan`) lie below `root`; those without a `sha256` are hashed on their way, or
    before where the server may have them already. `index`, which the scan was given, learns that.

    PolicyError where the server holds edits that `force` does not give up, or where much is to be
    sent and the person says no; DiskFullError before anything is sent; LinkLostError and
    TransferError leave what arrived for the next push.
    """
    request = {"lab": lab_name, "lab_id": lab_id, "target": target, "force": force}
    try:
        return _Push(remote, request, root, reporter, index).run(tuple(files))
    finally:
        if index:
            index.save()


class _Push:
    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        root: Path,
        reporter: Reporter,
        index: Index | None,
    ) -> None:
        self.remote = remote
        self.request = request
        self.root = root
        self.reporter = reporter
        self.index = index
        self.sent_bytes = 0
        self.complaint = ""
        self.files: tuple[FileEntry, ...] = ()
        self.edited = index.read if index else set()

    def run(self, files: tuple[FileEntry, ...]) -> PushResult:
        sent: set[str] = set()
        agreed = False
        bad: list[str] = []
        removed: set[str] = set()
        for _ in range(TRIES):
            files, plan = self._plan(files)
            self.files = files
            removed |= set(plan.removed)
            missing = set(plan.needed)
            needed = [f for f in files if f.path in missing]
            if not needed:
                return self._result(files, sent, removed)
            sent |= missing
            if plan.bad is not None:
                bad = self._went_along(needed, plan.bad)
            else:
                agreed = agreed or self._agree(needed, plan.staged_bytes)
                bad = self._send(needed, plan)
            if not bad:
                return self._result(files, sent, removed)
            files = self._refresh(files, bad)
        why = f"{len(bad)} files differ from what was read a moment before"
        raise TransferError(
            f"{bad[0]!a} changed each time while it was sent",
            why=f"{why}; {self.complaint}" if self.complaint else why,
            hint="stop what writes them, or name them in .labignore, then labctl push",
        )

    def _plan(self, files: tuple[FileEntry, ...]) -> tuple[tuple[FileEntry, ...], PushPlan]:
        """What the server needs, and the files, with those hashes that it had to know."""
        while True:
            plan = self._ask(files)
            self._refuse(plan)
            if not plan.unsure:
                return files, plan
            files = self._refresh(files, plan.unsure)

    def _ask(self, files: tuple[FileEntry, ...]) -> PushPlan:
        """The server's plan; `bad` in it tells that what went along was all that it needs."""
        request: dict[str, Any] = {"files": [_wire(f) for f in files]}
        along = [f for f in files if f.path in self.edited and f.sha256]
        self.edited = set()
        if sum(f.size for f in along) <= ALONG_BYTES:
            request["contents"] = {
                f.path: base64.b64encode(content).decode()
                for f in along
                if (content := self._content(f)) is not None
            }
        return msgspec.convert(self._call("plan", request), PushPlan)

    def _content(self, entry: FileEntry) -> bytes | None:
        """The whole of a small file; None where it is no longer what was scanned."""
        try:
            with (self.root / entry.path).open("rb") as file:
                content = file.read(entry.size + 1)
        except OSError:
            return None
        return content if len(content) == entry.size else None

    def _went_along(self, needed: list[FileEntry], bad: tuple[str, ...]) -> list[str]:
        """The paths that arrived different."""
        size = sum(f.size for f in needed)
        self.sent_bytes += size
        self._progress(size, size)
        return list(bad)

    def _refresh(self, files: tuple[FileEntry, ...], names: Sequence[str]) -> tuple[FileEntry, ...]:
        return refresh(self.root, files, set(names), self.reporter, self.index)

    def _result(
        self, files: tuple[FileEntry, ...], sent: set[str], removed: set[str]
    ) -> PushResult:
        return PushResult(
            sent=len(sent),
            bytes=self.sent_bytes,
            removed=len(removed),
            unchanged=len({f.path for f in files} - sent),
        )

    def _call(self, verb: str, more: dict[str, Any]) -> dict[str, Any]:
        with resumable("labctl push"):
            return self.remote.call(verb, {**self.request, **more}, timeout_s=LONG_S)

    def _refuse(self, plan: PushPlan) -> None:
        if plan.conflicts:
            raise _edited(plan.conflicts)
        if plan.short_bytes:
            raise DiskFullError(
                f"the server's disk has no room for {self.request['target']}",
                why=_shortage(plan),
                hint="labctl ssh -- df -h  (nothing was sent)",
            )

    def _agree(self, needed: list[FileEntry], staged_bytes: int) -> bool:
        size = sum(f.size for f in needed) - staged_bytes
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

    def _send(self, needed: list[FileEntry], plan: PushPlan) -> list[str]:
        """Send and commit; returns the paths that changed meanwhile, or arrived different."""
        sources = _Sources(self.root, needed)
        if changed := sources.list_changed():
            return changed
        staged = set(plan.whole)
        missing = [f for f in needed if f.path not in staged]
        with _Hashing(self.root, [f for f in needed if not f.sha256]) as hashing:
            if missing:
                self._transfer(missing, plan)
            hashes = hashing.wait()
        if changed := sources.list_changed():
            return changed
        whole = [msgspec.structs.replace(f, sha256=f.sha256 or hashes[f.path]) for f in needed]
        request = {"files": [_wire(f) for f in whole], "removed": plan.removed}
        reply = self._call("commit", request)
        if reply["conflicts"]:
            raise _edited(reply["conflicts"])
        bad: list[str] = reply["bad"]
        if self.index:
            for path in hashes.keys() - set(bad):
                self.index.learn(path, sources.stats[path], hashes[path])
        return bad

    def _transfer(self, missing: list[FileEntry], plan: PushPlan) -> None:
        total = sum(f.size for f in missing)
        destination = Destination(staging=plan.staging, basis=plan.basis, rsync_version=plan.rsync)
        with resumable("labctl push"):
            copied = send_files(
                self.remote.transport,
                self.root,
                missing,
                destination,
                lambda done: self._progress(done, total) if done < total else None,
            )
        self.sent_bytes += copied.sent_bytes
        self.complaint = copied.complaint.strip()[-300:]
        if copied.is_disk_error:
            raise self._disk_error()
        self._progress(total, total)

    def _disk_error(self) -> TransferError:
        """Why the server could not write: full by now, as its plan says, or broken."""
        plan = self._ask(self.files)
        hint = f"labctl ssh -- df -h, then labctl push  ({KEPT})"
        if plan.short_bytes:
            return DiskFullError("the server's disk is full", why=_shortage(plan), hint=hint)
        return TransferError(
            "the server could not write what arrived", why=self.complaint, hint=hint
        )

    def _progress(self, done: int, total: int) -> None:
        name = f"sending {self.request['target']}"
        self.reporter.emit(Progress(name=name, done=done, total=total, unit="bytes"))


class _Sources:
    """The files of one transfer, as they were when it began: who changed meanwhile is sent anew."""

    def __init__(self, root: Path, files: Sequence[FileEntry]) -> None:
        self.root = root
        self.files = files
        self.stats: dict[str, os.stat_result] = {}
        for entry in files:
            found = self._stat(entry.path)
            if found and (found.st_size, found.st_mtime_ns) == (entry.size, entry.mtime_ns):
                self.stats[entry.path] = found

    def list_changed(self) -> list[str]:
        """Paths that are no more what was scanned."""
        return [entry.path for entry in self.files if not self._is_same(entry.path)]

    def _is_same(self, path: str) -> bool:
        before, now = self.stats.get(path), self._stat(path)
        return bool(before and now and identity(before) == identity(now))

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.lstat(f"{self.root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            return None


class _Hashing:
    """Takes the hashes of files beside their transfer. OSError for one that may not be read."""

    def __init__(self, root: Path, files: Sequence[FileEntry]) -> None:
        self.root = root
        self.paths = [entry.path for entry in files]
        self.hashes: dict[str, str] = {}
        self.error: OSError | None = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        for path in self.paths:
            if not os.access(root / path, os.R_OK):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    (root / path).open("rb").close()

    def __enter__(self) -> _Hashing:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.ending.set()
        self.thread.join()

    def wait(self) -> dict[str, str]:
        """All hashes by path, "" for a file that is gone."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.hashes

    def _run(self) -> None:
        try:
            for path in self.paths:
                self.hashes[path] = self._hash(self.root / path)
        except OSError as error:
            self.error = error

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while not self.ending.is_set() and (block := file.read(BLOCK_BYTES)):
                    digest.update(block)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return digest.hexdigest()


def _wire(entry: FileEntry) -> list[Any]:
    return [entry.path, entry.size, entry.sha256, entry.mode, entry.mtime_ns]


def _edited(names: Sequence[str]) -> PolicyError:
    shown = "\n".join(f"  {ascii(name)[1:-1]}" for name in names[:NAMED_AT_MOST])
    more = f"\n  and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
    return PolicyError(
        "files were changed on the server since the last push",
        why=f"a push would overwrite them:\n{shown}{more}",
        hint="labctl pull --code  brings them here; labctl push --force  gives them up",
    )


def _shortage(plan: PushPlan) -> str:
    return (
        f"{_mib(plan.short_bytes)} MiB are missing, {_mib(plan.free_bytes)} MiB are free, "
        "and a little is kept free for the server itself"
    )


def _mib(size: int) -> int:
    return -(-size // 1024**2)
