"""Push: bring one tree of the server to what it is here, or change nothing good there.

What is missing there travels as one stream over the control connection. It lands in a staging
directory, is hashed on its way, and renamed; a push that was cut goes on where it stopped. A large
file that is new is not read before: its hash is taken while it is sent, and told at the end. What
little was edited since the last scan goes along with the question, so that one call does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labctl.actions import Decision, Progress, Reporter
from labctl.actions.remote import Remote, resumable
from labctl.actions.scan import Index, identity, refresh
from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.model import GIB, FileEntry, Value
from labctl.remote.landing import take_in
from labctl.remote.outgoing import Outgoing, Part
from labctl.remote.parcel import CutError

TRIES = 3
LONG_S = 6 * 3600.0
"""For calls that hash or carry much. A dead link is noticed by the transport, much earlier."""
NAMED_AT_MOST = 20
ALONG_BYTES = 256 * 1024
"""So much travels with the question what is needed: it costs less than a second call."""


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
        self.said = f"sending {request['target']}"
        self.root = root
        self.reporter = reporter
        self.index = index
        self.sent_bytes = 0
        self.total = 0
        self.before = 0
        self.edited = index.read if index else set()

    def run(self, files: tuple[FileEntry, ...]) -> PushResult:
        sent: set[str] = set()
        agreed = False
        bad: list[str] = []
        removed: set[str] = set()
        for _ in range(TRIES):
            files, plan = self._plan(files)
            removed |= set(plan["removed"])
            missing = set(plan["needed"])
            needed = [f for f in files if f.path in missing]
            if not needed:
                return self._result(files, sent, removed)
            sent |= missing
            if "bad" in plan:
                bad = self._went_along(needed, plan)
            else:
                agreed = agreed or self._agree(needed, plan["staged"])
                bad = self._send(needed, plan)
            if not bad:
                return self._result(files, sent, removed)
            files = self._refresh(files, bad)
        raise TransferError(
            f"{bad[0]!a} changed each time while it was sent",
            why=f"{len(bad)} files differ from what was read a moment before",
            hint="stop what writes them, or name them in .labignore, then labctl push",
        )

    def _plan(self, files: tuple[FileEntry, ...]) -> tuple[tuple[FileEntry, ...], dict[str, Any]]:
        """What the server needs, and the files, with those hashes that it had to know."""
        while True:
            plan = self._ask(files)
            self._refuse(plan)
            if not plan["unsure"]:
                return files, plan
            files = self._refresh(files, plan["unsure"])

    def _ask(self, files: tuple[FileEntry, ...]) -> dict[str, Any]:
        """The server's plan; a "bad" in it tells that what went along was all that it needs."""
        request: dict[str, Any] = {"files": [_wire(f) for f in files]}
        along = [(f.path, 0, f.size) for f in files if f.path in self.edited and f.sha256]
        self.edited = set()
        if not along or sum(size for _, _, size in along) > ALONG_BYTES:
            return self._call("plan", request)
        request["parts"] = [[path, 0] for path, _, _ in along]
        return self._call("plan", request, Outgoing(self.root, along, lambda done: None))

    def _went_along(self, needed: list[FileEntry], plan: dict[str, Any]) -> list[str]:
        """The paths that arrived different."""
        self.before, self.total = self.sent_bytes, self.sent_bytes + sum(f.size for f in needed)
        self._progress(self.total - self.before)
        bad: list[str] = plan["bad"]
        return bad

    def _refresh(self, files: tuple[FileEntry, ...], names: list[str]) -> tuple[FileEntry, ...]:
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

    def _call(
        self,
        verb: str,
        more: dict[str, Any],
        body: Callable[[], Iterator[bytes]] | None = None,
    ) -> dict[str, Any]:
        request = {**self.request, **more}
        with resumable("labctl push"):
            return self.remote.call(verb, request, body=body, timeout_s=LONG_S)

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
        parts, unread = self._parts(needed, plan)
        self.before = self.sent_bytes
        self.total = self.before + sum(size - offset for _, offset, size in parts)
        finish = {"files": [_wire(f) for f in needed], "removed": plan["removed"]}
        if parts:
            body = unread.outgoing(parts, self._progress)
            finish["parts"] = [[path, offset] for path, offset, _ in parts]
            reply = self._call("receive", finish, body)
        else:
            reply = self._call("commit", finish)
        if reply["conflicts"]:
            raise _edited(reply["conflicts"])
        self._progress(self.total - self.before)
        bad: list[str] = reply["bad"]
        if self.index:
            unread.teach(self.index, but=bad)
        return bad

    def _parts(self, needed: list[FileEntry], plan: dict[str, Any]) -> tuple[list[Part], _Unread]:
        """What is to be sent of each file, and those among them that are hashed meanwhile."""
        parts: list[Part] = []
        unread = _Unread(self.root)
        for entry in needed:
            there = plan["staged"].get(entry.path, 0)
            offset = min(entry.size, there)
            if not entry.sha256:
                offset = unread.begin(entry, offset, plan["begun"].get(entry.path, ""))
            elif entry.size and there == entry.size:
                continue
            parts.append((entry.path, offset, entry.size))
        return parts, unread

    def _progress(self, done: int) -> None:
        """`done` bytes of this round have gone."""
        self.sent_bytes = min(self.total, self.before + done)
        self.reporter.emit(
            Progress(name=self.said, done=self.sent_bytes, total=self.total, unit="bytes")
        )


class _Unread:
    """Files that are read for the first time while they are sent.

    Both sides would hash the same mixture of a file that changes meanwhile: only of one that stood
    still from `begin` to the stream's end is a hash told.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: dict[str, os.stat_result] = {}
        self.digests: dict[str, Any] = {}
        self.sha256: dict[str, str] = {}

    def begin(self, entry: FileEntry, offset: int, begun: str) -> int:
        """Where to go on: at `offset` where what is before it hashes to `begun`, else at 0.

        OSError for a file that may not be read; one that is gone is found out later.
        """
        digest = hashlib.sha256()
        path = f"{self.root}/{entry.path}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, CutError):
            self.found[entry.path] = os.lstat(path)
            if offset or not os.access(path, os.R_OK):
                with Path(path).open("rb", buffering=0) as file:
                    take_in(file.fileno(), digest, offset)
        good = digest.hexdigest() == begun
        self.digests[entry.path] = digest if good else hashlib.sha256()
        return offset if good else 0

    def outgoing(self, parts: list[Part], on_bytes: Callable[[int], None]) -> Outgoing:
        if not self.digests:
            return Outgoing(self.root, parts, on_bytes)
        digests = [self.digests.get(path) for path, _, _ in parts]
        body = Outgoing(self.root, parts, on_bytes, digests, lambda: self._told(body))
        return body

    def _told(self, body: Outgoing) -> bytes:
        self.sha256 = {
            path: digest.hexdigest()
            for (path, _, size), digest in zip(body.parts, body.digests, strict=True)
            if digest is not None and self._stood_still(path, size)
        }
        return json.dumps(self.sha256, separators=(",", ":")).encode()

    def _stood_still(self, path: str, size: int) -> bool:
        try:
            now = os.lstat(f"{self.root}/{path}")
        except OSError:
            return False
        before = self.found.get(path)
        return before is not None and identity(now) == identity(before) and now.st_size == size

    def teach(self, index: Index, but: list[str]) -> None:
        for path, sha256 in self.sha256.items():
            if path not in but:
                index.learn(path, self.found[path], sha256)


def _wire(entry: FileEntry) -> list[Any]:
    return [entry.path, entry.size, entry.sha256, entry.mode]


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
