"""Pull the outputs of runs, so that every file is complete or absent.

The server lists complete files. They are downloaded to `<run>/.labctl-partial`, verified on the
disk against the server's hashes, and renamed. A directory with a manifest.json (a checkpoint)
appears in one rename, or gets its manifest last. Every name that a server sends is checked before
it becomes a local path. Only the holder of the lab's transfer lock writes there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from labctl import shell
from labctl.errors import PolicyError, TransferError
from labctl.events import Reporter, report_wait
from labctl.model import NAME_PATTERN, Run, Value
from labctl.servers.agent import AgentClient
from labctl.sync.containment import escape_controls
from labctl.sync.downloads import AnnouncedFile, Download
from labctl.sync.durability import sync_files
from labctl.sync.file_transfer import RemoteFolder
from labctl.sync.local_results import (
    PARTIAL,
    RECORD,
    MissingFile,
    RunComparison,
    create_run_directory,
    place_files,
    write_record,
)
from labctl.sync.transfer_lock import WAIT_S, hold_transfers
from labctl.wire.files import (
    MANIFEST,
    PULLED,
    ManifestRequest,
    PartsRequest,
    PulledFile,
    PulledRequest,
    RunManifest,
)

CHECKPOINTS = "checkpoints"
TRIES = 3
LONG_S = 6 * 3600.0


class PulledRun(Value, frozen=True):
    """The result of pulling one run. `files` and `bytes` count what this pull downloaded.

    `complete` means that the run has ended and all of its outputs are on this machine. `left` are
    files that the run wrote outside its outputs, and that are only on the server.
    """

    run: str
    directory: str
    files: int = 0
    bytes: int = 0
    skipped: tuple[MissingFile, ...] = ()
    complete: bool = False
    left: tuple[MissingFile, ...] = ()


class PullResult(Value, frozen=True):
    runs: tuple[PulledRun, ...] = ()

    @property
    def complete(self) -> bool:
        return all(run.complete for run in self.runs)


def pull(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    run_ids: Sequence[str],
    lab_root: Path,
    outputs: Sequence[str] = (),
    *,
    reporter: Reporter,
    everything: bool = False,
    only: Sequence[str] = (),
    records: Iterable[Run] = (),
    wait_s: float = WAIT_S,
    hint: str = "",
) -> PullResult:
    """Pull the outputs of `run_ids` (all runs if empty) to `<lab_root>/runs/<run>/`.

    `outputs` adds to what each run was started with; `everything` pulls all new files, `only`
    nothing but these outputs, after which no run counts as complete. `records` are written to
    `run.json`. DiskFullError, LinkLostError and TransferError keep what arrived for the next pull;
    PolicyError if the server sends a name that leaves its directory; BusyError if another transfer
    of the lab lasts longer than `wait_s` seconds. `hint` is the command that continues the pull, by
    default `labctl pull` with what this call pulls.
    """
    request = ManifestRequest(
        lab_name, lab_id, all=everything, outputs=tuple(outputs), only=tuple(only)
    )
    record_by_id = {record.id: record for record in records}
    with hold_transfers(lab_root, "pull", reporter, wait_s=wait_s):
        with report_wait(reporter, "listing the results on the server"):
            runs = _fetch_manifest(remote, request._replace(quick=True), run_ids)
        return PullResult(
            runs=tuple(
                _Pull(
                    remote,
                    request,
                    name,
                    lab_root,
                    reporter,
                    hint or _format_command(name if run_ids else "--runs", everything=everything),
                ).run(manifest, record_by_id.get(name))
                for name, manifest in sorted(runs.items())
            )
        )


def _format_command(chosen: str, *, everything: bool) -> str:
    return shell.command("labctl", "pull", *["--all"] * everything, chosen).render()


def verify(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    run_ids: Sequence[str],
    lab_root: Path,
    outputs: Sequence[str] = (),
    *,
    everything: bool = False,
) -> tuple[MissingFile, ...]:
    """List the runs' outputs (with `everything`, other new files too) that are not on this disk.

    Compares hashes, and writes only the index. Files that the server cannot deliver count as
    missing. TransferError if the local disk fails.
    """
    request = ManifestRequest(lab_name, lab_id, all=everything, outputs=tuple(outputs))
    runs = sorted(_fetch_manifest(remote, request, run_ids).items())
    comparisons = [(name, RunComparison(lab_root, name, manifest)) for name, manifest in runs]
    local_files = [path for _, comparison in comparisons for path in comparison.list_local_files()]
    if local_files:
        sync_files(local_files[0].parent, local_files)
    missing: list[MissingFile] = []
    for name, comparison in comparisons:
        missing += [
            MissingFile(run=name, path=escape_controls(file.path), size=file.size)
            for file in comparison.list_missing()
        ]
        missing += comparison.skipped
    return tuple(missing)


def list_new_checkpoints(
    remote: AgentClient, lab_name: str, lab_id: str, run_id: str, lab_root: Path
) -> tuple[str, ...]:
    """List the run's whole checkpoints on the server that this machine lacks, or has differently.

    Large files are compared by size alone, so that the server need not read them.
    """
    request = ManifestRequest(lab_name, lab_id, only=(CHECKPOINTS,), quick=True)
    files = _list_different(remote, request, run_id, lab_root)
    return tuple(sorted({file.path.split("/")[1] for file in files}))


def list_left_files(
    remote: AgentClient, lab_name: str, lab_id: str, run_id: str, lab_root: Path
) -> tuple[MissingFile, ...]:
    """List what `pull --all` would download and a pull of the outputs did not.

    Large files are compared by size alone, so that the server need not read them.
    """
    request = ManifestRequest(lab_name, lab_id, all=True, quick=True)
    files = _list_different(remote, request, run_id, lab_root)
    return tuple(
        MissingFile(run=run_id, path=escape_controls(file.path), size=file.size) for file in files
    )


def _list_different(
    remote: AgentClient, request: ManifestRequest, run_id: str, lab_root: Path
) -> list[AnnouncedFile]:
    manifest = _fetch_manifest(remote, request, [run_id])[run_id]
    comparison = RunComparison(lab_root, run_id, manifest)
    return [
        due
        for due in comparison.list_missing()
        if due.sha256 or not _has_size(comparison.locate(due.path), due.size)
    ]


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fetch_manifest(
    remote: AgentClient, request: ManifestRequest, run_ids: Sequence[str]
) -> Mapping[str, RunManifest]:
    named = request._replace(runs=tuple(run_ids))
    runs = remote.call(MANIFEST, named, timeout_s=LONG_S).runs
    for name in runs:
        if not NAME_PATTERN.match(name) or (run_ids and name not in run_ids):
            raise PolicyError(
                f"the server sent run {name!a}, which labctl did not request",
                hint="labctl doctor",
            )
    return runs


class _Pull:
    """Pulls one run, in up to TRIES transfers."""

    def __init__(
        self,
        remote: AgentClient,
        request: ManifestRequest,
        run: str,
        lab_root: Path,
        reporter: Reporter,
        hint: str,
    ) -> None:
        self.remote = remote
        self.request = request
        self.name = run
        self.lab_root = lab_root
        self.reporter = reporter
        self.hint = hint

    def run(self, manifest: RunManifest, record: Run | None) -> PulledRun:
        comparison = RunComparison(self.lab_root, self.name, manifest)
        create_run_directory(comparison.home)
        files = size = 0
        for tries_left in reversed(range(TRIES)):
            due = comparison.list_missing()
            if not due:
                break
            download = Download(
                RemoteFolder(
                    remote=self.remote,
                    request=PartsRequest(self.request.lab, self.request.lab_id, self.name),
                    directory=manifest.directory,
                    rsync_version=manifest.rsync,
                ),
                comparison.home / PARTIAL,
                basis=comparison.home,
                reporter=self.reporter,
                name=f"pull {self.name}",
                hint=self.hint,
            )
            good, bad = download.fetch(due)
            comparison.files |= {file.path: file for file in good}
            size += download.sent_bytes
            files += place_files(comparison, good, bad)
            if bad and tries_left:
                manifest = _fetch_manifest(self.remote, self.request, [self.name])[self.name]
                comparison = RunComparison(self.lab_root, self.name, manifest)
        remaining = comparison.list_missing()
        self._report_local_files(comparison, remaining)
        skipped = [*comparison.skipped, *self._list_remaining(remaining, comparison.ended)]
        shutil.rmtree(comparison.home / PARTIAL, ignore_errors=True)
        if not self.request.only or not (comparison.home / RECORD).exists():
            write_record(comparison.home, record)
        return PulledRun(
            run=self.name,
            directory=str(comparison.home),
            files=files,
            bytes=size,
            skipped=tuple(skipped),
            complete=comparison.ended and not skipped and not self.request.only,
        )

    def _report_local_files(
        self, comparison: RunComparison, remaining: list[AnnouncedFile]
    ) -> None:
        """Tell the server which files are safe here, so that its watchdog saves only the rest."""
        missing = {file.path for file in remaining}
        local = [file for file in comparison.files.values() if file.path not in missing]
        if comparison.unpulled and local:
            files = tuple(PulledFile(file.path, file.size, file.sha256) for file in local)
            lab, lab_id = self.request.lab, self.request.lab_id
            with report_wait(self.reporter, f"finishing the download of {self.name}"):
                self.remote.call(PULLED, PulledRequest(lab, lab_id, {self.name: files}))

    def _list_remaining(self, remaining: list[AnnouncedFile], ended: bool) -> list[MissingFile]:
        """List files that changed during every transfer; TransferError if the run has ended."""
        if remaining and ended:
            name = escape_controls(remaining[0].path)
            raise TransferError(
                f"{name} of run {self.name} arrived corrupted {TRIES} times",
                why="its hash differs from the server's",
                hint=self.hint,
            )
        reason = "changed during every download"
        return [
            MissingFile(
                run=self.name, path=escape_controls(file.path), size=file.size, reason=reason
            )
            for file in remaining
        ]
