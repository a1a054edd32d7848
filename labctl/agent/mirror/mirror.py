"""The mirror: a pass sends the new files of a lab's runs to its store.

Only complete files count (see outputs.py), each verified by its hash. What was sent is recorded
beside the run every few seconds, so that a killed pass loses no more than that. Two passes of one
lab never overlap; a stuck pass is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from ...wire.checkpoints import find_checkpoint, list_checkpoints
from ...wire.codec import MessageError, decode, encode, from_json, to_json
from ...wire.files import CompleteFile, ManifestRequest
from ...wire.mirrors import (
    MIRROR_NOW,
    IndexRecord,
    MirrorPassReply,
    MirrorPassRequest,
    RunObjectRecord,
    SentRecord,
    StoredCode,
    StoredFile,
)
from ...wire.runs import RunRecord
from ...wire.verbs import ErrorMessage, ErrorReply, LabRequest
from ..files import outputs
from ..files.edits import edits
from ..files.records import merge_hashes, merge_records, read_hashes
from ..host.engine import inspect_containers
from ..host.engine_objects import Container
from ..host.paths import compute_age_s, hash_file, lab_dir, read_json, write_json
from ..reply import Failure, send_reply
from ..runs.records import list_attempts, read_final_record, read_last_attempt
from ..runs.run_state import inspect_run, require_run_directory
from .store import (
    ChangedError,
    MirrorStore,
    StoreError,
    can_use_store,
    open_store,
    read_config,
    rerun_with_boto3,
)
from .store_index import Files, build_key, group_by_checkpoint

LOCK = "mirror.lock"
STUCK_S = 60.0
POLL_S = 0.05
SENT = "sent.json"
SMALL_BYTES = 1024 * 1024
# seconds between two records: the work that a killed pass loses
INDEX_S = 2.0


def mirror_now(request: MirrorPassRequest) -> MirrorPassReply:
    """Make one pass over a run, or over all runs of the lab."""
    root = lab_dir(request.lab, request.lab_id)
    if not can_use_store(read_config(root).url):
        return rerun_with_boto3(MIRROR_NOW, request)
    with _hold_lock(root / ".labctl" / LOCK) as progress:
        store = open_store(root, request.lab, request.lab_id, progress)
        try:
            return _LabPass(root, request, store).execute()
        finally:
            store.close()


def serve(request: MirrorPassRequest) -> None:
    """Make a pass for this request, then for each line of standard input; reply to each.

    Python and boto3 are loaded only once, so that a small pass takes milliseconds.
    """
    lower_priority()
    while True:
        try:
            send_reply(mirror_now(request))
        except Failure as failure:
            send_reply(ErrorReply(failure.report))
        except OSError as error:
            send_reply(ErrorReply(ErrorMessage("disk", "the mirror failed", str(error))))
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = decode(MirrorPassRequest, line)


def lower_priority() -> None:
    """Give way to everything else that needs the processor."""
    with suppress(OSError):
        os.nice(19)


@contextmanager
def _hold_lock(path: Path) -> Iterator[Callable[[], None]]:
    """Allow one pass at a time; kill one that makes no progress.

    Yields a function to report progress.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _kill_stuck_holder(descriptor)
                time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        last = time.monotonic()

        def progress() -> None:
            nonlocal last
            if time.monotonic() - last > 1:
                last = time.monotonic()
                os.utime(descriptor)

        yield progress
    finally:
        os.close(descriptor)


def _kill_stuck_holder(descriptor: int) -> None:
    if compute_age_s(os.fstat(descriptor).st_mtime) > STUCK_S:
        holder = int(os.pread(descriptor, 20, 0) or b"0")
        with suppress(OSError):
            if holder > 1:
                os.kill(holder, signal.SIGKILL)


class _LabPass:
    """One pass over the runs of a lab."""

    def __init__(self, root: Path, request: MirrorPassRequest, store: MirrorStore) -> None:
        self.root = root
        self.store = store
        self.lab = LabRequest(request.lab, request.lab_id)
        self.only = request.run
        self.everything = request.all
        self.url = read_config(root).url
        self.sent = self.bytes = self.behind = 0
        self.failed: list[tuple[str, str]] = []
        self.why = ""
        self.engine = True

    def execute(self) -> MirrorPassReply:
        started_s = time.monotonic()
        runs = sorted(
            (d for d in self.root.glob("runs/[a-z0-9]*") if d.is_dir()), key=_newest_first_key
        )
        if self.only:
            runs = [require_run_directory(*self.lab, self.only)]
        inspected = self._inspect_live(runs)
        for directory in runs:
            self._try(directory.name, _RunPass(self, directory, inspected).mirror)
        if self.everything and not self.only:
            self._try("the edited code", self._send_edits)
        duration_s = max(time.monotonic() - started_s, 0.001)
        return MirrorPassReply(
            sent=self.sent,
            bytes=self.bytes,
            behind_bytes=self.behind,
            failed=tuple(self.failed[:50]),
            why=self.why,
            bytes_s=self.bytes / duration_s if self.bytes else 0.0,
        )

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except StoreError as error:
            self.record_failure(name, error)
        except Failure as failure:
            self.failed.append((name, failure.report.what))
        except OSError as error:
            self.failed.append((name, str(error)))

    def record_failure(self, name: str, error: StoreError) -> None:
        self.failed.append((name, str(error)))
        if error.whole:
            self.why = str(error)

    def _inspect_live(self, runs: list[Path]) -> dict[str, Container]:
        names = [read_last_attempt(d).container for d in runs if not read_final_record(d)]
        try:
            return inspect_containers([name for name in names if name])
        except Failure:
            self.engine = False  # send results even without the engine
            return {}

    def send(self, name: str, path: Path, size: int, sha256: str) -> bool:
        """Return whether the file is in the store now.

        Nothing is tried once the store cannot be used.
        """
        if self.why:
            self.behind += size
            return False
        try:
            self.store.send(name, path, size, sha256)
        except FileNotFoundError:
            return False  # removed meanwhile: nothing left to send
        except ChangedError:
            self.behind += size
            return False
        except StoreError as error:
            self.record_failure(name, error)
            self.behind += size
            return False
        self.sent += 1
        self.bytes += size
        return True

    def _send_edits(self) -> None:
        record_path = self.root / ".labctl" / "saved-edits.json"
        saved = read_hashes(record_path)
        for name, size, sha256, _ in edits(self.lab).files:
            if saved.get(name) != sha256 and self.send(
                f"server-edits/{name}", self.root / "code" / name, size, sha256
            ):
                merge_hashes(record_path, {name: sha256})


class _RunPass:
    """One run's part of a pass. `sent` is what the store has, as recorded in SENT."""

    def __init__(self, parent: _LabPass, directory: Path, inspected: dict[str, Container]) -> None:
        self.parent = parent
        self.directory = directory
        self.name = directory.name
        self.meta = directory / ".labctl"
        self.inspected = inspected
        self.spec = read_json(self.meta / "spec.json")
        self.sent = read_sent(self.meta / SENT, parent.url)
        self.files: Files = dict(self.sent.files or {})
        self.index: Files = dict(self.sent.index or {})
        self.next = dict(self.index)
        self.indexed_s = time.monotonic()

    def mirror(self) -> None:
        if not self.spec or not (self.directory / "code").is_dir():
            return  # just claimed
        ended = read_final_record(self.directory)
        if ended and self.sent.final == to_json(ended) and not self.parent.everything:
            return
        record = self._determine_record()
        code = self._send_code()
        is_described = code is not None and self._send_run_json(code, record)
        is_complete = self._send_outputs(self._list_outputs()) and is_described
        if is_complete and read_final_record(self.directory) and not self.parent.why:
            # A resumed run ends again.
            self._save_sent(self.sent._replace(final=to_json(read_final_record(self.directory))))

    def _determine_record(self) -> object:
        """Return the run's record, as JSON."""
        record = read_final_record(self.directory)
        if not record and self.parent.engine:
            with suppress(Failure):
                return to_json(inspect_run(self.directory, self.inspected))
        return to_json(record or RunRecord(self.name, "unknown"))

    def _list_outputs(self) -> tuple[CompleteFile, ...]:
        lab, lab_id = self.parent.lab
        request = ManifestRequest(lab, lab_id, (self.name,), all=self.parent.everything)
        return outputs.manifest(request).runs[self.name].files

    def _send_code(self) -> StoredCode | None:
        """Send the run's own code, once; None if that failed."""
        if self.sent.code:
            return self.sent.code
        packed = self.meta / "code.tar"
        try:
            pack_code(self.directory, packed)
            size, sha256 = packed.stat().st_size, hash_file(packed)
            if not self.parent.send(build_key(self.name, "code.tar"), packed, size, sha256):
                return None
        finally:
            if packed.exists():
                packed.unlink()
        code = StoredCode(size, sha256)
        self._save_sent(self.sent._replace(code=code))
        return code

    def _send_run_json(self, code: StoredCode, record: object) -> bool:
        """Write run.json if its content has changed."""
        attempts = tuple(read_json(path) for path in list_attempts(self.directory))
        about = RunObjectRecord(self.spec, code, record, attempts)
        if self.sent.about == about:
            return True
        if not self._put_json("run.json", about._replace(at=time.time())):
            return False
        self._save_sent(self.sent._replace(about=about))
        return True

    def _send_outputs(self, files: Sequence[CompleteFile]) -> bool:
        """Send new files, newest checkpoints first, and index them; return whether all arrived."""
        current = {file.path: StoredFile(file.size, file.sha256) for file in files}
        growing = {file.path for file in files if file.growing}
        self._forget_removed(current)
        groups = group_by_checkpoint(current)
        is_complete = True
        for top in sorted(groups, key=self._sort_key):
            due = [name for name in groups[top] if self.files.get(name) != current[name]]
            if due and not self._announce_replacements(due, current, growing):
                return False
            sent = [name for name in due if self._send(name, current, name in growing)]
            self.files.update({name: current[name] for name in sent})
            failed = {*due} - {*sent}
            is_complete = is_complete and not failed
            indexed = [] if top and failed else [name for name in groups[top] if name not in failed]
            # With what this checkpoint had before: it would count as deleted because of that.
            for name in [*self.next]:
                if name in groups[top] or (top and name.startswith(top)):
                    del self.next[name]
            self.next.update({name: current[name] for name in indexed})
            if time.monotonic() - self.indexed_s > INDEX_S:
                self._forget_superseded()
                self._put_index({})
        self._forget_superseded()
        return self._put_index({}) and is_complete

    def _sort_key(self, top: str) -> float:
        """Order other files, which are small, first, then checkpoints, the newest first."""
        if not top:
            return float("-inf")
        with suppress(OSError):
            return -(self.directory / top / "manifest.json").stat().st_mtime
        return 0.0

    def _forget_removed(self, current: Files) -> None:
        """Remove deleted files from the index; files that are merely changing stay.

        Checkpoints stay too: see `_forget_superseded`.
        """
        checkpoints = list_checkpoints(self.next)
        for name in [*self.next]:
            is_gone = name not in current and not (self.directory / name).exists()
            if is_gone and not find_checkpoint(name, checkpoints):
                del self.next[name]

    def _forget_superseded(self) -> None:
        """Remove deleted checkpoints from the index if it has one that still exists here.

        A run may delete checkpoints faster than they can be sent. The store still has the files of
        those that were sent, and one of them is the best copy until a newer one has arrived.
        """
        checkpoints = {top: names for top, names in group_by_checkpoint(self.next).items() if top}
        deleted = [
            top
            for top, names in checkpoints.items()
            if not all((self.directory / name).exists() for name in names)
        ]
        if len(deleted) < len(checkpoints):
            for top in deleted:
                for name in checkpoints[top]:
                    del self.next[name]

    def _announce_replacements(self, due: list[str], current: Files, growing: set[str]) -> bool:
        """Index files before they are replaced: see "pending" in store_index.py."""
        pending = {n: current[n] for n in due if n in self.files and n not in growing}
        return not pending or self._put_index(pending)

    def _send(self, name: str, current: Files, growing: bool) -> bool:
        path = self.directory / name
        if growing and current[name].size < SMALL_BYTES:
            # Read it again: such a file may have been replaced since it was listed.
            with suppress(OSError):
                content = path.read_bytes()
                current[name] = StoredFile(len(content), hashlib.sha256(content).hexdigest())
        return self.parent.send(build_key(self.name, f"files/{name}"), path, *current[name])

    def _put_index(self, pending: Files) -> bool:
        """Write the index of the store's files, unless it is up to date."""
        if self.next == self.index and not pending:
            return True
        if not self._put_json("index.json", IndexRecord(self.next, pending, time.time())):
            return False
        changed = {
            name: entry for name, entry in self.next.items() if self.index.get(name) != entry
        }
        self.index, self.indexed_s = dict(self.next), time.monotonic()
        merge_records(StoredFile, self.meta / "mirrored.json", changed)
        self._save_sent(self.sent)
        return True

    def _put_json(self, name: str, body: NamedTuple) -> bool:
        if self.parent.why:
            return False
        try:
            self.parent.store.write(build_key(self.name, name), encode(body).encode())
        except StoreError as error:
            self.parent.record_failure(build_key(self.name, name), error)
            return False
        return True

    def _save_sent(self, sent: SentRecord) -> None:
        self.sent = sent._replace(files=self.files, index=self.index)
        write_json(self.meta / SENT, to_json(self.sent, drop_defaults=True))


def read_sent(path: Path, url: str) -> SentRecord:
    """Return what is recorded of the store at `url`; an empty record for another store."""
    try:
        sent = from_json(SentRecord, read_json(path))
    except MessageError:
        return SentRecord(url)
    return sent if sent.url == url else SentRecord(url)


def pack_code(directory: Path, target: Path) -> None:
    """Write a tar of the code that the run got: the files that existed when it started."""
    import tarfile

    names = json.loads((directory / ".labctl" / "code.json").read_text())
    with target.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name in sorted(names):
            path = directory / "code" / name
            if path.is_file() and not path.is_symlink():
                info = archive.gettarinfo(str(path), name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                with path.open("rb") as content:
                    archive.addfile(info, content)


def _newest_first_key(directory: Path) -> float:
    """Return a sort key that puts the newest run first: it is the live one."""
    with suppress(OSError):
        return -(directory / ".labctl" / "claim.json").stat().st_mtime
    return 0.0


def build_priority_words() -> list[str]:
    """Return the words that start a low-priority pass, if the server has `ionice`."""
    return ["ionice", "-c", "3"] if shutil.which("ionice") else []
