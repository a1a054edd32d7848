"""Pull: bring the outputs of runs home, whole or not at all.

The server names whole files, bytes land in `<run>/.labctl-partial`, are checked against its hashes
on the disk and renamed. A directory with a manifest.json (a checkpoint) appears in one rename, or
gets its manifest last. Every name that a server sends is checked before it becomes a path here.
Nobody but the holder of the lab's transfers writes there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labctl.errors import PolicyError, TransferError
from labctl.events import Reporter
from labctl.model import NAME_PATTERN, Run, Value
from labctl.servers.agent import Remote
from labctl.sync.downloads import Download, Due
from labctl.sync.durability import sync_files
from labctl.sync.local_results import PARTIAL, Look, Missing, make_home, settle
from labctl.sync.transfer_lock import WAIT_S, hold_transfers

TRIES = 3
LONG_S = 6 * 3600.0


class PulledRun(Value, frozen=True):
    """What a pull did for one run. `files` and `bytes` count what came now.

    `complete` says that the run has ended and all of its outputs are here.
    """

    run: str
    directory: str
    files: int = 0
    bytes: int = 0
    skipped: tuple[Missing, ...] = ()
    complete: bool = False


class PullResult(Value, frozen=True):
    runs: tuple[PulledRun, ...] = ()

    @property
    def complete(self) -> bool:
        return all(run.complete for run in self.runs)


def pull(
    remote: Remote,
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
) -> PullResult:
    """Bring the outputs of `run_ids` (all runs if empty) to `<lab_root>/runs/<run>/`.

    `outputs` adds to what each run was started with; `everything` brings all new files, `only`
    nothing but these outputs, after which no run counts as complete. `records` are written to
    `run.json`. DiskFullError, LinkLostError and TransferError leave what arrived for the next
    pull; PolicyError where the server sends a name that leaves its directory; BusyError where
    another transfer of the lab goes on for longer than `wait_s`.
    """
    request = {"lab": lab_name, "lab_id": lab_id, "outputs": list(outputs), "all": everything}
    if only:
        request["only"] = list(only)
    known = {record.id: record for record in records}
    with hold_transfers(lab_root, "pull", reporter, wait_s=wait_s):
        runs = _manifest(remote, {**request, "quick": True}, run_ids)
        return PullResult(
            runs=tuple(
                _Pull(remote, request, name, lab_root, reporter).run(found, known.get(name))
                for name, found in sorted(runs.items())
            )
        )


def verify(
    remote: Remote,
    lab_name: str,
    lab_id: str,
    run_ids: Sequence[str],
    lab_root: Path,
    outputs: Sequence[str] = (),
    *,
    everything: bool = False,
) -> tuple[Missing, ...]:
    """Everything among the runs' outputs (with `everything`, their new files elsewhere too) that
    is not on the disk here, hashes compared; nothing is written but the index.

    What the server cannot hand out counts as missing. TransferError where the disk here fails.
    """
    request = {"lab": lab_name, "lab_id": lab_id, "outputs": list(outputs), "all": everything}
    runs = sorted(_manifest(remote, request, run_ids).items())
    looks = [(name, Look(lab_root, name, found)) for name, found in runs]
    here = [path for _, one in looks for path in one.here()]
    if here:
        sync_files(here[0].parent, here)
    missing: list[Missing] = []
    for name, one in looks:
        missing += [Missing(run=name, path=d.path, size=d.size) for d in one.due()]
        missing += one.skipped
    return tuple(missing)


def _manifest(
    remote: Remote, request: dict[str, Any], run_ids: Sequence[str]
) -> Mapping[str, dict[str, Any]]:
    reply = remote.call("manifest", {**request, "runs": list(run_ids)}, timeout_s=LONG_S)
    runs: dict[str, dict[str, Any]] = reply["runs"]
    for name in runs:
        if not NAME_PATTERN.match(name) or (run_ids and name not in run_ids):
            raise PolicyError(
                f"the server sent a run called {name!a}, which was not asked for",
                hint="labctl doctor",
            )
    return runs


class _Pull:
    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        run: str,
        lab_root: Path,
        reporter: Reporter,
    ) -> None:
        self.remote = remote
        self.request = request
        self.name = run
        self.lab_root = lab_root
        self.reporter = reporter

    def run(self, found: dict[str, Any], record: Run | None) -> PulledRun:
        look = Look(self.lab_root, self.name, found)
        make_home(look.home, record)
        files = size = 0
        for tries_left in reversed(range(TRIES)):
            due = look.due()
            if not due:
                break
            download = Download(
                self.remote,
                {**self.request, "run": self.name},
                look.folder,
                look.home / PARTIAL,
                basis=look.home,
                reporter=self.reporter,
                name=f"pull {self.name}",
                hint="labctl pull",
            )
            good, bad = download.fetch(due)
            look.files |= {one.path: one for one in good}
            size += download.sent_bytes
            files += settle(look, good, bad)
            if bad and tries_left:
                found = _manifest(self.remote, self.request, [self.name])[self.name]
                look = Look(self.lab_root, self.name, found)
        late = look.due()
        self._tell(look, late)
        skipped = [*look.skipped, *self._late(late, look.ended)]
        shutil.rmtree(look.home / PARTIAL, ignore_errors=True)
        return PulledRun(
            run=self.name,
            directory=str(look.home),
            files=files,
            bytes=size,
            skipped=tuple(skipped),
            complete=look.ended and not skipped and "only" not in self.request,
        )

    def _tell(self, look: Look, late: list[Due]) -> None:
        """Have the server know what is safe here: its watchdog saves only the rest."""
        lacking = {d.path for d in late}
        held = [d for d in look.files.values() if d.path not in lacking]
        if look.unpulled and held:
            files = [[d.path, d.size, d.sha256] for d in held]
            about = {key: self.request[key] for key in ("lab", "lab_id")}
            self.remote.call("pulled", {**about, "runs": {self.name: files}})

    def _late(self, late: list[Due], ended: bool) -> list[Missing]:
        if late and ended:
            raise TransferError(
                f"{late[0].path} of run {self.name} arrived different {TRIES} times",
                why="its hash is not the one that the server told",
                hint="labctl pull",
            )
        reason = "changed each time while it was pulled"
        return [Missing(run=self.name, path=d.path, size=d.size, reason=reason) for d in late]
