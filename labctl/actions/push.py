"""Push: bring one tree of the server to what it is here, or change nothing good there.

What is missing there travels as one stream over the control connection. It lands in a staging
directory, is hashed on its way, and renamed; a push that was cut goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labctl.actions import Decision, Progress, Reporter
from labctl.actions.remote import Remote, resumable
from labctl.actions.scan import refresh
from labctl.errors import DiskFullError, PolicyError, TransferError
from labctl.model import GIB, FileEntry, Value
from labctl.remote.outgoing import Outgoing

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
) -> PushResult:
    """Make `target` ("code", "data/<name>", "wheelhouse") on the server what `files` are here.

    `files` (from `scan`) lie below `root`. PolicyError where the server holds edits that `force`
    does not give up, or where much is to be sent and the person says no; DiskFullError before
    anything is sent; LinkLostError and TransferError leave what arrived for the next push.
    """
    one = _Push(remote, {"lab": lab_name, "lab_id": lab_id, "target": target}, root, reporter)
    return one.run(tuple(files), force)


class _Push:
    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        root: Path,
        reporter: Reporter,
    ) -> None:
        self.remote = remote
        self.request = request
        self.said = f"sending {request['target']}"
        self.root = root
        self.reporter = reporter
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
        staged: dict[str, int] = plan["staged"]
        parts = [
            (entry.path, min(entry.size, staged.get(entry.path, 0)), entry.size)
            for entry in needed
            if not entry.size or staged.get(entry.path) != entry.size
        ]
        self.before = self.sent_bytes
        self.total = self.before + sum(size - offset for _, offset, size in parts)
        finish = {"files": [_wire(f) for f in needed], "removed": plan["removed"]}
        if parts:
            body = Outgoing(self.root, parts, self._progress)
            finish["parts"] = [[path, offset] for path, offset, _ in parts]
            reply = self._call("receive", finish, body)
        else:
            reply = self._call("commit", finish)
        if reply["conflicts"]:
            raise _edited(reply["conflicts"])
        self._progress(self.total - self.before)
        bad: list[str] = reply["bad"]
        return bad

    def _progress(self, done: int) -> None:
        """`done` bytes of this round have gone."""
        self.sent_bytes = min(self.total, self.before + done)
        self.reporter.emit(
            Progress(name=self.said, done=self.sent_bytes, total=self.total, unit="bytes")
        )


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
