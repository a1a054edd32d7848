"""Push: make one tree of the server equal to the local one, or change nothing there.

The server replies which files it needs. rsync (or tar) copies them to a staging directory there,
and they are renamed once labctl knows that no local file changed meanwhile. A large new file is
hashed during its transfer. Small edits since the last scan are sent with the first request, so that
one call is enough.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.errors.subject import Subject
from labctl.events import Progress, Question, Reporter
from labctl.model import GIB, FileEntry, Value
from labctl.servers.agent import KEPT, AgentClient, add_resume_hint
from labctl.sync.file_transfer import LONG_S, Destination, send_files
from labctl.sync.scan import HashIndex, rehash
from labctl.sync.source_files import SourceFiles, hash_during_transfer
from labctl.text import bytes_text
from labctl.wire.files import COMMIT, PLAN, CommitRequest, PlanReply, PlanRequest, PushedFile

TRIES = 3
NAMED_AT_MOST = 20
# Content up to this size is sent with the plan request: that costs less than a second call.
INLINE_BYTES = 256 * 1024
# The files of a tree, or a function that scans for them.
Files = Sequence[FileEntry] | Callable[[], Sequence[FileEntry]]


class PushedTree(Value, frozen=True):
    """The result of pushing one tree. `sent`, `removed` and `unchanged` count files."""

    target: str
    sent: int = 0
    sent_bytes: int = 0
    removed: int = 0
    unchanged: int = 0


def push_tree(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    target: str,
    root: Path,
    files: Files,
    reporter: Reporter,
    *,
    force: bool = False,
    index: HashIndex | None = None,
) -> PushedTree:
    """Make `target` ("code", "data/<name>", "wheelhouse") on the server equal to `files`.

    `files` (from `scan`) are below `root`; those without a `sha256` are hashed during the transfer,
    or before it if the server may already have them. A function that scans is called while the
    server's agent starts. `index`, the scan's own, stores the hashes.

    PolicyError if the server holds edits and `force` is false, or if the user declines a large
    transfer; DiskFullError before anything is sent; LinkLostError and TransferError keep what
    arrived for the next push.
    """
    request = PlanRequest(lab_name, lab_id, target, files=(), force=force)
    try:
        return _Push(remote, request, root, files, reporter, index).run()
    finally:
        if index:
            index.save()


class _Push:
    """Pushes one tree, in up to TRIES transfers."""

    def __init__(
        self,
        remote: AgentClient,
        request: PlanRequest,
        root: Path,
        files: Files,
        reporter: Reporter,
        index: HashIndex | None,
    ) -> None:
        self.remote = remote
        self.request = request
        self.root = root
        self.unlisted = files
        self.reporter = reporter
        self.index = index
        self.sent_bytes = 0
        self.complaint = ""
        self.edited = index.read if index else set()

    @functools.cached_property
    def files(self) -> tuple[FileEntry, ...]:
        """The files as they were scanned, or hashed again since."""
        return tuple(self.unlisted() if callable(self.unlisted) else self.unlisted)

    def run(self) -> PushedTree:
        sent: set[str] = set()
        agreed = False
        bad: list[str] = []
        removed: set[str] = set()
        for _ in range(TRIES):
            plan = self._plan()
            removed |= set(plan.removed)
            missing = set(plan.needed)
            needed = [f for f in self.files if f.path in missing]
            if not needed:
                return self._result(sent, removed)
            sent |= missing
            if plan.bad is not None:
                bad = self._count_inline(needed, plan.bad)
            else:
                agreed = agreed or self._require_consent(needed, plan.staged_bytes)
                bad = self._send(needed, plan)
            if not bad:
                return self._result(sent, removed)
            self._refresh(bad)
        why = f"{len(bad)} file{'' if len(bad) == 1 else 's'} changed while being sent"
        raise TransferError(
            f"{bad[0]!a} changed during each of {TRIES} transfers",
            why=f"{why}; {self.complaint}" if self.complaint else why,
            hint=lambda subject: (
                "stop the program that writes to it, or add it to .labignore, then:\n"
                f"{subject.push}"
            ),
        )

    def _plan(self) -> PlanReply:
        """Return the server's plan, after all files have the hashes that the server asked for."""
        while True:
            plan = self._request_plan()
            self._check(plan)
            if not plan.unsure:
                return plan
            self._refresh(plan.unsure)

    def _request_plan(self) -> PlanReply:
        """Request the server's plan. Its `bad` is set if the inline content was all it needs."""
        with add_resume_hint(lambda subject: subject.push):
            return self.remote.call(PLAN, self._build_request, timeout_s=LONG_S)

    def _build_request(self) -> PlanRequest:
        request = self.request._replace(files=tuple(map(_as_pushed, self.files)))
        inline = [f for f in self.files if f.path in self.edited and f.sha256]
        self.edited = set()
        if sum(f.size for f in inline) <= INLINE_BYTES:
            contents = {
                f.path: base64.b64encode(content).decode()
                for f in inline
                if (content := self._read_content(f)) is not None
            }
            request = request._replace(contents=contents)
        return request

    def _read_content(self, entry: FileEntry) -> bytes | None:
        """Read a small file; None if its size changed since the scan."""
        try:
            with (self.root / entry.path).open("rb") as file:
                content = file.read(entry.size + 1)
        except OSError:
            return None
        return content if len(content) == entry.size else None

    def _count_inline(self, needed: list[FileEntry], bad: tuple[str, ...]) -> list[str]:
        """Count content that was sent with the plan request; return the paths that differ."""
        size = sum(f.size for f in needed)
        self.sent_bytes += size
        self._progress(size, size)
        return list(bad)

    def _refresh(self, names: Sequence[str]) -> None:
        self.files = rehash(self.root, self.files, set(names), self.reporter, self.index)

    def _result(self, sent: set[str], removed: set[str]) -> PushedTree:
        return PushedTree(
            target=self.request.target,
            sent=len(sent),
            sent_bytes=self.sent_bytes,
            removed=len(removed),
            unchanged=len({f.path for f in self.files} - sent),
        )

    def _check(self, plan: PlanReply) -> None:
        if plan.conflicts:
            raise _make_conflict_error(plan.conflicts)
        if plan.short_bytes:
            raise DiskFullError(
                f"not enough disk space on the server for {self.request.target}",
                why=_shortage(plan),
                hint=lambda subject: _suggest_space(subject, "nothing was sent"),
            )

    def _require_consent(self, needed: list[FileEntry], staged_bytes: int) -> bool:
        size = sum(f.size for f in needed) - staged_bytes
        if size <= GIB:
            return True
        question = Question(
            question=f"Send {bytes_text(size)} to the server?",
            detail=f"{len(needed)} files of {self.request.target} below {self.root}",
        )
        if not self.reporter.confirm(question):
            raise PolicyError(
                "nothing was pushed",
                why=f"sending {bytes_text(size)} was not confirmed",
                hint=lambda subject: f"{subject.push}   # after you exclude files in .labignore",
            )
        return True

    def _send(self, needed: list[FileEntry], plan: PlanReply) -> list[str]:
        """Send and commit; return the paths that changed meanwhile or arrived corrupted."""
        sources = SourceFiles(self.root, needed)
        if sources.changed:
            return sources.changed
        staged = set(plan.whole)
        missing = [f for f in needed if f.path not in staged]
        unhashed = [f for f in needed if not f.sha256]
        sources.require_readable(unhashed)
        with hash_during_transfer(self.root, unhashed) as hashing:
            if missing:
                self._transfer(missing, plan)
            hashes = hashing.result()
        if changed := sources.list_changed():
            return changed
        hashed = [msgspec.structs.replace(f, sha256=f.sha256 or hashes[f.path]) for f in needed]
        request = CommitRequest(
            self.request.lab,
            self.request.lab_id,
            self.request.target,
            tuple(map(_as_pushed, hashed)),
            plan.removed,
            self.request.force,
        )
        with add_resume_hint(lambda subject: subject.push):
            reply = self.remote.call(COMMIT, request, timeout_s=LONG_S)
        if reply.conflicts:
            raise _make_conflict_error(reply.conflicts)
        if self.index:
            for path in hashes.keys() - set(reply.bad):
                self.index.store_settled(path, sources.stats[path], hashes[path])
        return list(reply.bad)

    def _transfer(self, missing: list[FileEntry], plan: PlanReply) -> None:
        total = sum(f.size for f in missing)
        destination = Destination(staging=plan.staging, basis=plan.basis, rsync_version=plan.rsync)
        with add_resume_hint(lambda subject: subject.push):
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
            raise self._make_disk_error()
        self._progress(total, total)

    def _make_disk_error(self) -> TransferError:
        """Return the error for a failed write: a full disk, if the server's plan says so."""
        plan = self._request_plan()
        if plan.short_bytes:
            return DiskFullError(
                "the server's disk is full", why=_shortage(plan), hint=_render_disk_hint
            )
        return TransferError(
            "the server could not write the received files",
            why=self.complaint,
            hint=_render_disk_hint,
        )

    def _progress(self, done: int, total: int) -> None:
        name = f"sending {self.request.target}"
        self.reporter.emit(Progress(name=name, done=done, total=total, unit="bytes"))


def _render_disk_hint(subject: Subject) -> str:
    return _suggest_space(subject, KEPT)


def _suggest_space(subject: Subject, note: str) -> str:
    return f"{subject.ssh('df -h')}\n{subject.push}   # once there is space; {note}"


def _as_pushed(entry: FileEntry) -> PushedFile:
    return PushedFile(entry.path, entry.size, entry.sha256, entry.mode, entry.mtime_ns)


def _make_conflict_error(names: Sequence[str]) -> PolicyError:
    shown = "\n".join(f"  {ascii(name)[1:-1]}" for name in names[:NAMED_AT_MOST])
    more = f"\n  and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
    return PolicyError(
        "files were changed on the server since the last push",
        why=f"a push would overwrite them:\n{shown}{more}",
        hint="labctl pull --code   # copies them here\nlabctl push --force   # discards them",
    )


def _shortage(plan: PlanReply) -> str:
    return (
        f"{bytes_text(plan.short_bytes)} more is needed, {bytes_text(plan.free_bytes)} is free, "
        "of which a small reserve is left for the server itself"
    )
