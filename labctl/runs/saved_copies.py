"""Pull a run's outputs from a saved copy: the lab's store, or the keeper's mirror.

As in a pull from the server, files are verified, then renamed into place; incomplete checkpoints
are left out.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.errors import LabError, NotFoundError, TransferError
from labctl.events import Progress, SilentReporter
from labctl.model import NAME_PATTERN, FileEntry, Run, Server
from labctl.runs.runs import to_run
from labctl.servers.context import LabContext
from labctl.stores.lab_store import open_lab_store
from labctl.sync.containment import require_contained
from labctl.sync.downloads import AnnouncedFile, verify_files
from labctl.sync.local_results import (
    PARTIAL,
    RECORD,
    MissingFile,
    RunComparison,
    create_run_directory,
    place_files,
    read_pulled_run,
    write_record,
)
from labctl.sync.pull import PulledRun
from labctl.sync.scan import hash_file, scan_data
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.codec import Message, MessageError, decode
from labctl.wire.files import CompleteFile, RunManifest
from labctl.wire.mirrors import IndexRecord, StoredRunRecord
from labctl.wire.runs import RunRecord
from labctl.wire.tar import TarError, TarStream

# The ledger's line for a server of which `down` has downloaded and verified every run.
DOWNLOADED = "downloaded"

# Writes one verified file to a path, by rename; raises TransferError or NotFoundError.
Fetch = Callable[[AnnouncedFile, Path], None]


def note_downloaded(context: LabContext, server: Server) -> None:
    """Record that every file of the server's runs is on this machine, verified."""
    context.state.record(DOWNLOADED, lab_id=context.lab_id, server_id=server.id)


def find_downloaded_runs(context: LabContext, run_ids: Sequence[str]) -> list[PulledRun]:
    """Return these runs if `down` downloaded all of them and they are still here, otherwise []."""
    folder = context.config.root / "runs"
    runs = [context.state.get_run(context.lab_id, run_id) for run_id in run_ids]
    if not all(run is not None and _is_downloaded(context, folder, run) for run in runs):
        return []
    return [
        PulledRun(run=run_id, directory=str(folder / run_id), complete=True) for run_id in run_ids
    ]


def _is_downloaded(context: LabContext, folder: Path, run: Run) -> bool:
    notes = context.state.list_events(server_id=run.server_id, kind=DOWNLOADED, limit=1)
    is_here = read_pulled_run(folder / run.id / RECORD) is not None
    return is_here and any(note.at >= run.created_at for note in notes)


def pull_from_store(context: LabContext, run_id: str) -> PulledRun:
    """Pull a run's files and final state from the lab's store; NotFoundError if it has none."""
    store = open_lab_store(context)
    stored = _parse_object(StoredRunRecord, store.read(f"runs/{run_id}/run.json"))
    index = _parse_object(IndexRecord, store.read(f"runs/{run_id}/index.json"))
    if stored is None:
        raise NotFoundError(
            f"{context.config.store} has nothing of run {run_id}",
            hint="labctl status --all   # lists the runs",
        )
    run = _record_end(context, run_id, stored.record)
    wanted = index.files if index else {}
    pending = index.pending if index else {}

    def fetch(due: AnnouncedFile, path: Path) -> None:
        versions = [files[due.path] for files in (wanted, pending) if due.path in files]
        for number, (size, sha256) in enumerate(versions, 1):
            try:
                store.fetch(f"runs/{run_id}/files/{due.path}", path, size, sha256)
                return
            except TransferError:
                if number == len(versions):
                    raise

    return _pull_files(context, run_id, {**pending, **wanted}, fetch, run)


def pull_from_keeper(
    context: LabContext,
    run_id: str,
    files: Mapping[str, tuple[int, str]],
    archive: BinaryIO,
    run: Run | None,
) -> PulledRun:
    """Pull a keeper's copy: `files` is its index, `archive` a tar of the files missing here."""
    with tempfile.TemporaryDirectory(
        dir=_make_directory(context.config.root / ".labctl")
    ) as folder:
        received = Path(folder)
        try:
            _extract_files(archive, received)
        except TarError as error:
            raise TransferError(
                "the keeper's copy was not fully received",
                why=str(error),
                hint=f"labctl pull {run_id}   # again",
            ) from error

        def fetch(due: AnnouncedFile, path: Path) -> None:
            target = received / due.path
            if not target.is_file() or hash_file(target) != due.sha256:
                raise TransferError(
                    f"{due.path} was not fully received", hint=f"labctl pull {run_id}   # again"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            target.replace(path)

        return _pull_files(context, run_id, files, fetch, run)


def _extract_files(archive: BinaryIO, directory: Path) -> None:
    stream = TarStream(archive)
    for member in stream:
        target = directory / require_contained(member.name)
        if member.kind == tarfile.REGTYPE:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(stream, file)


def list_outputs(root: Path, run_id: str) -> tuple[FileEntry, ...]:
    """List the outputs of a run in a lab directory, with their hashes."""
    directory = root / "runs" / run_id
    if not NAME_PATTERN.fullmatch(run_id) or not directory.is_dir():
        return ()
    files = scan_data(root, f"give-{run_id}", directory, SilentReporter())
    return tuple(
        file for file in files if file.path != RECORD and not file.path.startswith(PARTIAL)
    )


def write_tar(root: Path, run_id: str, files: Sequence[FileEntry], out: BinaryIO) -> None:
    """Write a tar of these files of a run to `out`."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.size = file.size
            content = (root / "runs" / run_id / file.path).open("rb")
            with content:
                tar.addfile(member, _read_exactly(content, file.size))


def _read_exactly(file: BinaryIO, size: int) -> BinaryIO:
    """Pad a file that was truncated meanwhile; the hash check of the receiver rejects it."""
    if size <= 1 << 20:
        return io.BytesIO(file.read(size).ljust(size, b"\0"))
    return file


def _pull_files(
    context: LabContext,
    run_id: str,
    files: Mapping[str, tuple[int, str]],
    fetch: Fetch,
    run: Run | None,
) -> PulledRun:
    ended = run is not None and run.has_ended
    entries = tuple(
        CompleteFile(path, size, sha256, growing=False)
        for path, (size, sha256) in sorted(files.items())
    )
    manifest = RunManifest(files=entries, skipped=(), directory="", ended=ended)
    with hold_transfers(context.config.root, "pull", context.reporter):
        comparison = RunComparison(context.config.root, run_id, manifest)
        create_run_directory(comparison.home)
        received, skipped = _fetch_files(context, comparison, run_id, fetch)
        good, corrupt = verify_files(comparison.home / PARTIAL, received)
        reason = "corrupted on this machine's disk; labctl pull downloads it again"
        skipped += [
            MissingFile(run=run_id, path=file.path, size=file.size, reason=reason)
            for file in corrupt
        ]
        missing = {file.path for file in skipped}
        count = place_files(
            comparison, good, [file for file in comparison.files.values() if file.path in missing]
        )
        shutil.rmtree(comparison.home / PARTIAL, ignore_errors=True)
        if not skipped or not (comparison.home / RECORD).exists():
            write_record(comparison.home, run)
    skipped += comparison.skipped
    return PulledRun(
        run=run_id,
        directory=str(comparison.home),
        files=count,
        bytes=sum(file.size for file in received),
        skipped=tuple(skipped),
        complete=ended and not skipped,
    )


def _fetch_files(
    context: LabContext, comparison: RunComparison, run_id: str, fetch: Fetch
) -> tuple[list[AnnouncedFile], list[MissingFile]]:
    """Fetch files to the partial directory; return (received files, missing files and why)."""
    due, size = comparison.list_missing(), 0
    received: list[AnnouncedFile] = []
    missing: list[MissingFile] = []
    total = sum(file.size for file in due)
    for file in due:
        try:
            fetch(file, comparison.home / PARTIAL / file.path)
            size += file.size
            received.append(file)
        except (TransferError, NotFoundError) as error:
            missing.append(
                MissingFile(run=run_id, path=file.path, size=file.size, reason=error.what)
            )
        context.reporter.emit(Progress(name=f"pull {run_id}", done=size, total=total, unit="bytes"))
    return received, missing


def _make_directory(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _parse_object(kind: type[Message], content: bytes | None) -> Message | None:
    try:
        return decode(kind, content) if content else None
    except MessageError as error:
        raise LabError(
            "a record in the store cannot be read",
            why=str(error),
            hint="labctl pull   # from the server, while it exists",
        ) from error


def _record_end(context: LabContext, run_id: str, record: RunRecord | None) -> Run | None:
    """Record the run's end from the store's record, if that has it; return the run."""
    recorded = context.state.get_run(context.lab_id, run_id)
    if record is None or (record.state not in ("exited", "cancelled") and not record.stopped_by):
        return recorded
    record = record._replace(id=run_id, lab_id=record.lab_id or context.lab_id)
    run = to_run(record, recorded.server_id if recorded else "")
    run = msgspec.structs.replace(run, seen_at=recorded.seen_at if recorded else 0.0)
    context.state.save_run(run)
    return run
