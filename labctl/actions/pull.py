"""Pull: bring the outputs of runs home, whole or not at all.

The server names whole files, bytes land in `<run>/.labctl-partial`, are checked against its hashes
and renamed. A directory with a manifest.json (a checkpoint) appears in one rename, or gets its
manifest last. Every name that a server sends is checked before it becomes a path here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from labctl.actions import Reporter
from labctl.actions.arrivals import Arrivals, Due, contained, unwelcome
from labctl.actions.remote import Remote
from labctl.actions.scan import Index
from labctl.errors import PolicyError, TransferError
from labctl.model import NAME_PATTERN, Run, Value

PARTIAL = ".labctl-partial"
RECORD = "run.json"
MANIFEST = "manifest.json"
TRIES = 3
LONG_S = 6 * 3600.0


class Missing(Value, frozen=True):
    """A file of a run that is not here. `reason` is "" where a pull would bring it."""

    run: str
    path: str
    size: int = 0
    reason: str = ""


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
) -> PullResult:
    """Bring the outputs of `run_ids` (all runs if empty) to `<lab_root>/runs/<run>/`.

    `outputs` adds to what each run was started with; `everything` brings all new files, `only`
    nothing but these outputs, after which no run counts as complete. `records` are written to
    `run.json`. DiskFullError, LinkLostError and TransferError leave what arrived for the next
    pull; PolicyError where the server sends a name that leaves its directory.
    """
    request = {"lab": lab_name, "lab_id": lab_id, "outputs": list(outputs), "all": everything}
    if only:
        request["only"] = list(only)
    runs = _manifest(remote, {**request, "quick": True}, run_ids)
    known = {record.id: record for record in records}
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
) -> tuple[Missing, ...]:
    """Everything among the runs' outputs that is not here, hashes compared; nothing is written
    but the index."""
    request = {"lab": lab_name, "lab_id": lab_id, "outputs": list(outputs), "all": False}
    missing: list[Missing] = []
    for name, found in sorted(_manifest(remote, request, run_ids).items()):
        one = Look(lab_root, name, found)
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


class Look:
    """What the server has of one run, compared with what is here."""

    def __init__(self, lab_root: Path, run: str, found: dict[str, Any]) -> None:
        # The user may have put runs/ itself elsewhere; below it nothing is followed.
        self.home = (lab_root / "runs").resolve() / run
        self.index = Index(lab_root.resolve(), f"runs/{run}")
        self.ended = bool(found["ended"])
        self.unpulled = int(found.get("unpulled", 0))
        self.files: dict[str, Due] = {}
        self.skipped = [
            Missing(run=run, path=ascii(path)[1:-1], reason=reason)
            for path, reason in found["skipped"]
        ]
        for path, size, sha256, growing in found["files"]:
            if reason := unwelcome(path, reserved=(PARTIAL, RECORD)):
                self.skipped.append(
                    Missing(run=run, path=ascii(path)[1:-1], size=size, reason=reason)
                )
            else:
                due = Due(path=path, size=size, sha256=sha256, growing=growing)
                self.files[contained(path)] = due

    def due(self) -> list[Due]:
        """The files that are not here as they are there."""
        missing = [due for due in self.files.values() if not self._here(due)]
        self.index.save(keep=True)
        return missing

    def older(self, due: Due) -> Path | None:
        """A file that may begin, or be, like one whose content is not known here."""
        path = inside(self.home, due.path)
        if (due.sha256 and not due.growing) or not path.is_file() or path.is_symlink():
            return None
        size = path.stat().st_size
        return path if size == due.size or (due.growing and size < due.size) else None

    def _here(self, due: Due) -> bool:
        path = inside(self.home, due.path)
        if (
            not due.sha256
            or not path.is_file()
            or path.is_symlink()
            or path.stat().st_size != due.size
        ):
            return False
        return self.index.hash(due.path, path)[0] == due.sha256


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
        bad: list[Due] = []
        for _ in range(TRIES):
            due = look.due()
            if not due:
                bad = []
                break
            arrivals = Arrivals(
                self.remote,
                {**self.request, "run": self.name},
                look.home / PARTIAL,
                reporter=self.reporter,
                name=f"pull {self.name}",
                hint="labctl pull",
            )
            good, bad = arrivals.fetch(due, look.older)
            look.files |= {one.path: one for one in good}
            size += arrivals.total
            files += settle(look, good, bad)
            if not bad:
                break
            look = Look(
                self.lab_root,
                self.name,
                _manifest(self.remote, self.request, [self.name])[self.name],
            )
        self._tell(look, bad)
        skipped = [*look.skipped, *self._late(bad, look.ended)]
        shutil.rmtree(look.home / PARTIAL, ignore_errors=True)
        return PulledRun(
            run=self.name,
            directory=str(look.home),
            files=files,
            bytes=size,
            skipped=tuple(skipped),
            complete=look.ended and not skipped and "only" not in self.request,
        )

    def _tell(self, look: Look, bad: list[Due]) -> None:
        """Have the server know what is safe here: its watchdog saves only the rest."""
        held = [d for d in look.files.values() if d not in bad]
        if look.unpulled and held:
            files = [[d.path, d.size, d.sha256] for d in held]
            about = {key: self.request[key] for key in ("lab", "lab_id")}
            self.remote.call("pulled", {**about, "runs": {self.name: files}})

    def _late(self, bad: list[Due], ended: bool) -> list[Missing]:
        if bad and ended:
            raise TransferError(
                f"{bad[0].path} of run {self.name} arrived different {TRIES} times",
                why="its hash is not the one that the server told",
                hint="labctl pull",
            )
        reason = "changed each time while it was pulled"
        return [Missing(run=self.name, path=d.path, size=d.size, reason=reason) for d in bad]


def make_home(home: Path, record: Run | None) -> None:
    if home.is_symlink():
        raise PolicyError(
            f"{home} is a link",
            why="results are not written through links",
            hint=f"mv {home} somewhere else, then labctl pull",
        )
    home.mkdir(parents=True, exist_ok=True)
    if record is not None:
        staging = home / f".{RECORD}.new"
        staging.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        staging.replace(home / RECORD)


def inside(home: Path, name: str) -> Path:
    """`home/name`, refused where the way there passes through a link."""
    path = home
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink():
            raise PolicyError(
                f"{path} is a link",
                why="results are not written through links",
                hint=f"mv {path} somewhere else, then labctl pull",
            )
    return home / name


def settle(look: Look, due: list[Due], bad: list[Due]) -> int:
    """Rename what arrived well into place; a checkpoint with a file missing waits."""
    partial = look.home / PARTIAL
    tops = _tops(look.files)
    waiting = {top for one in bad if (top := _top_of(one.path, tops))}
    good = [d for d in due if d not in bad and _top_of(d.path, tops) not in waiting]
    count = 0
    for top, members in _grouped(good, tops).items():
        place = inside(look.home, top.rstrip("/")) if top else look.home
        if top and not place.exists() and len(members) == _members(look.files, top):
            _keep_only(partial / top, {partial / one.path for one in members})
            place.parent.mkdir(parents=True, exist_ok=True)
            (partial / top).rename(place)
        else:
            for one in sorted(members, key=lambda d: d.path == top + MANIFEST):
                _place(partial / one.path, inside(look.home, one.path))
        for one in members:
            look.index.put(one.path, (look.home / one.path).lstat(), one.sha256)
        count += len(members)
    look.index.save(keep=True)
    return count


def _tops(files: Iterable[str]) -> list[str]:
    """Directories (with "/") that hold a manifest, outermost ones only."""
    tops: list[str] = []
    for name in sorted(files, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in tops):
                tops.append(top)
    return tops


def _top_of(name: str, tops: list[str]) -> str:
    return next((top for top in tops if name.startswith(top)), "")


def _grouped(due: list[Due], tops: list[str]) -> dict[str, list[Due]]:
    groups: dict[str, list[Due]] = {}
    for one in due:
        groups.setdefault(_top_of(one.path, tops), []).append(one)
    return groups


def _members(files: Iterable[str], top: str) -> int:
    return sum(name.startswith(top) for name in files)


def _keep_only(directory: Path, wanted: set[Path]) -> None:
    """Drop what an earlier, cut pull left here and is no part of it any more."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if path not in wanted:
                path.unlink()


def _place(arrived: Path, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(place)
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise PolicyError(
            f"{place} cannot be written: a file and a directory of one name",
            hint=f"mv {place} somewhere else, then labctl pull",
        ) from None
