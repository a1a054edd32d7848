"""Restoring a run from the lab's store: its code, outputs and spec, as a run that was lost.

Files arrive in a staging directory, are checked by their hash and renamed; an interrupted restore
resumes. Damaged files are left out and reported, a checkpoint only as a whole.
"""

from __future__ import annotations

import fcntl
import re
import time
from pathlib import Path

from ...wire.checkpoints import MANIFEST
from ...wire.codec import Message, MessageError, decode, to_json
from ...wire.mirrors import (
    RESTORE_RUN,
    IndexRecord,
    RestoreRunReply,
    RestoreRunRequest,
    SentRecord,
    StoredFile,
    StoredRunRecord,
)
from ...wire.runs import AttemptRecord
from ...wire.verbs import SHOW_DISK, UP_COMMAND, HintPart
from ..files.checkpoints import read_checkpoint_manifest
from ..files.files import RESERVE_BYTES
from ..files.records import merge_records
from ..files.unpacking import unpack
from ..host.paths import (
    count_free_bytes,
    drop_tree,
    hash_file,
    lab_dir,
    resolve_inside,
    run_dir,
    write_json,
)
from ..reply import Failure
from ..runs.records import write_attempt, write_final_record, write_spec_and_claim
from ..runs.run_state import inspect_run
from .run_pass import SENT
from .store import MirrorStore, StoreError, can_use_store, open_store, read_config, rerun_with_boto3
from .store_index import Files, build_key, find_damage, group_by_checkpoint

STAGING = ".from-store-"
CONTAINER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,200}")


def restore(request: RestoreRunRequest) -> RestoreRunReply:
    """Restore a run from the store; a run that exists already stays as it is."""
    root = lab_dir(request.lab, request.lab_id)
    directory = run_dir(root, request.run)
    url = read_config(root).url
    if request.store not in ("", url):
        what = f"this server's store is {url or 'none'}, not {request.store}"
        raise Failure("policy", what, "", UP_COMMAND)
    if not can_use_store(url):
        return rerun_with_boto3(RESTORE_RUN, request)
    with (root / ".labctl" / "restore.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return RestoreRunReply(inspect_run(directory, {}), 0, 0, ())
        store = open_store(root, request.lab, request.lab_id)
        try:
            return _Restore(root, request, store, url).execute()
        except StoreError as error:
            raise Failure("store", f"{url} cannot be used", str(error), UP_COMMAND) from None
        finally:
            store.close()


class _Restore:
    """The restore of one run."""

    def __init__(
        self, root: Path, request: RestoreRunRequest, store: MirrorStore, url: str
    ) -> None:
        self.run = request.run
        self.lab_id = request.lab_id
        self.url = url
        self.store = store
        self.directory = run_dir(root, self.run)
        self.staging = self.directory.with_name(STAGING + self.run)
        self.left_out: list[tuple[str, str]] = []
        self.arrived: Files = {}

    def execute(self) -> RestoreRunReply:
        stored = self._read_object("run.json", StoredRunRecord)
        if stored is None:
            what = f"{self.url} has no files of run {self.run}"
            raise Failure("missing", what, "", HintPart("status", "--refresh"))
        if (stored.spec.id, stored.spec.lab_id) != (self.run, self.lab_id):
            raise Failure("policy", f"the store has another run under the name {self.run}")
        index = self._read_object("index.json", IndexRecord) or IndexRecord()
        indexed, pending = _list_outputs(index.files), _list_outputs(index.pending)
        code = StoredFile(stored.code.size, stored.code.sha256)
        self._require_room([*indexed.values(), code, code])
        (self.staging / ".labctl").mkdir(parents=True, exist_ok=True)
        self._restore_code(code)
        for name in sorted({*indexed, *pending}):
            versions = [entry[name] for entry in (indexed, pending) if name in entry]
            self._fetch_file(build_key(self.run, f"files/{name}"), name, versions)
        self._drop_broken_checkpoints(sorted({*indexed, *pending}))
        self._write_records(stored)
        self.staging.rename(self.directory)
        size = stored.code.size + sum(file.size for file in self.arrived.values())
        run = inspect_run(self.directory, {})
        return RestoreRunReply(run, len(self.arrived) + 1, size, tuple(self.left_out))

    def _read_object(self, name: str, kind: type[Message]) -> Message | None:
        """Read an object of the run; None if the store lacks it."""
        content = self.store.read(build_key(self.run, name))
        if content is None:
            return None
        try:
            return decode(kind, content)
        except MessageError as error:
            what = f"{name} of run {self.run} in {self.url} is damaged"
            raise Failure("store", what, str(error)) from None

    def _require_room(self, files: list[StoredFile]) -> None:
        size, free = sum(file.size for file in files), count_free_bytes(self.staging)
        if size + RESERVE_BYTES > free:
            why = f"it needs {size} bytes, and {free} bytes are free"
            what = f"the server's disk has no room for run {self.run}"
            raise Failure("disk", what, why, SHOW_DISK)

    def _fetch_file(self, store_key: str, name: str, versions: list[StoredFile]) -> bool:
        """Fetch a file to the staging directory; it must match one of `versions`.

        Returns False if it was left out.
        """
        path = resolve_inside(self.staging, name)
        match = _find_match(path, versions)
        try:
            if match is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.store.fetch(store_key, path, max(size for size, _ in versions))
                match = _find_match(path, versions)
        except StoreError as error:
            if error.whole:
                raise
            self.left_out.append((name, str(error)))
        else:
            if match is None:
                self.left_out.append((name, "it does not match the store's index"))
        if match is None:
            if path.exists():
                path.unlink()
            return False
        self.arrived[name] = match
        return True

    def _restore_code(self, entry: StoredFile) -> None:
        packed = self.staging / ".labctl" / "code.tar"
        if not self._fetch_file(build_key(self.run, "code.tar"), ".labctl/code.tar", [entry]):
            what = f"the code of run {self.run} in {self.url} is incomplete"
            raise Failure("store", what, self.left_out[-1][1])
        del self.arrived[".labctl/code.tar"]
        code = self.staging / "code"
        drop_tree(code)
        code.mkdir()
        unpack(packed, "code.tar", code)
        names = _restore_modes(packed, code)
        write_json(self.staging / ".labctl" / "code.json", names)
        packed.unlink()

    def _drop_broken_checkpoints(self, names: list[str]) -> None:
        """Drop every checkpoint of which anything is missing."""
        for top, members in group_by_checkpoint(names).items():
            if not top:
                continue
            why = find_damage(
                top, read_checkpoint_manifest(self.staging / top / MANIFEST), self.arrived
            )
            missing = [name for name in members if name not in self.arrived]
            if missing or why:
                self.left_out.append((top, why or f"{missing[0][len(top) :]} is missing"))
                drop_tree(resolve_inside(self.staging, top.rstrip("/")))
                for name in members:
                    self.arrived.pop(name, None)

    def _write_records(self, stored: StoredRunRecord) -> None:
        """Write the records of a run whose machine is gone."""
        meta = self.staging / ".labctl"
        record = stored.record
        write_spec_and_claim(
            self.staging, stored.spec, (record and record.created_at) or time.time()
        )
        for number, attempt in enumerate(stored.attempts or (AttemptRecord(),), 1):
            name = attempt.container if CONTAINER.fullmatch(attempt.container) else ""
            started_at = attempt.started_at or 0.0
            # It ran on another machine: a foreign boot token marks the attempt as lost.
            lost = AttemptRecord(container=name, boot="elsewhere", started_at=started_at)
            write_attempt(self.staging, number, lost)
        if record and record.state in ("exited", "cancelled"):
            write_final_record(self.staging, record)
        sent = SentRecord(self.url, self.arrived, self.arrived, stored.code)
        write_json(meta / SENT, to_json(sent, drop_defaults=True))
        merge_records(StoredFile, meta / "mirrored.json", self.arrived)


def _list_outputs(indexed: dict[str, StoredFile]) -> Files:
    """Return the files of an index, without those in a run's own .labctl directory."""
    return {
        name: file._replace(size=max(0, file.size))
        for name, file in indexed.items()
        if name.split("/")[0] != ".labctl"
    }


def _find_match(path: Path, versions: list[StoredFile]) -> StoredFile | None:
    """Return the version that the file's first bytes match, and truncate the file to it.

    None without a match. A log may have grown since it was indexed.
    """
    if not path.is_file() or path.is_symlink():
        return None
    for version in versions:
        is_long = path.stat().st_size >= version.size
        if is_long and hash_file(path, version.size) == version.sha256:
            with path.open("r+b") as file:
                file.truncate(version.size)
            return version
    return None


def _restore_modes(packed: Path, code: Path) -> list[str]:
    """Make programs executable, and return the names of all files in the archive."""
    import tarfile

    names = []
    with tarfile.open(str(packed)) as archive:
        for member in archive:
            if member.isreg():
                names.append(member.name)
                if member.mode & 0o100:
                    resolve_inside(code, member.name).chmod(0o755)
    return names
