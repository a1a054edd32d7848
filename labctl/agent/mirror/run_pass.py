"""One run's part of a pass of the mirror.

Only complete files count (see outputs.py), each verified by its hash. What was sent is recorded
beside the run every few seconds, so that a killed pass loses no more than that.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Sequence

from ...wire.checkpoints import find_checkpoint, list_checkpoints
from ...wire.codec import MessageError, encode, from_json, to_json
from ...wire.files import CompleteFile, ManifestRequest
from ...wire.mirrors import IndexRecord, RunObjectRecord, SentRecord, StoredCode, StoredFile
from ...wire.runs import RunRecord
from ..files import outputs
from ..files.records import merge_records
from ..host.paths import hash_file, read_json, write_json
from ..reply import Failure
from ..runs.executor import ProgramState
from ..runs.records import list_attempts, read_final_record
from ..runs.run_state import inspect_run
from .store import StoreError
from .store_index import Files, build_key, group_by_checkpoint

if TYPE_CHECKING:
    from .mirror import LabPass

SENT = "sent.json"
SMALL_BYTES = 1024 * 1024
# seconds between two records: the work that a killed pass loses
INDEX_S = 2.0


class RunPass:
    """One run's part of a pass. `sent` is what the store has, as recorded in SENT."""

    def __init__(self, parent: LabPass, directory: Path, programs: dict[str, ProgramState]) -> None:
        self.parent = parent
        self.directory = directory
        self.name = directory.name
        self.meta = directory / ".labctl"
        self.programs = programs
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
                return to_json(inspect_run(self.directory, self.programs))
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
