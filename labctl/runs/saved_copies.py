"""A run's outputs from where they were saved: the lab's store, or the copy that its keeper has.

They come as a pull from the server does: verified, renamed into place, whole checkpoints only.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from labctl.errors import LabError, NotFoundError, TransferError
from labctl.events import Progress, Silent
from labctl.model import NAME_PATTERN, FileEntry, Run
from labctl.runs.runs import KNOWN_RUN_FIELDS
from labctl.servers.context import Ground
from labctl.stores.lab_store import lab_store
from labctl.sync.containment import contained
from labctl.sync.downloads import Due, confirm
from labctl.sync.local_results import PARTIAL, RECORD, Look, Missing, make_home, settle
from labctl.sync.pull import PulledRun
from labctl.sync.scan import hash_file, scan_data
from labctl.sync.transfer_lock import hold_transfers

# Puts a file as it was promised at a path, by rename; TransferError or NotFoundError.
Fetch = Callable[[Due, Path], None]


def from_store(ground: Ground, run_id: str) -> PulledRun:
    """What the lab's store has of a run, and how it ended; NotFoundError where it has nothing."""
    store = lab_store(ground)
    about = _object(store.read(f"runs/{run_id}/run.json"))
    index = _object(store.read(f"runs/{run_id}/index.json"))
    if not about:
        raise NotFoundError(
            f"there is nothing of run {run_id} in {ground.config.store}",
            hint="labctl status --refresh",
        )
    run = _recorded(ground, run_id, about.get("record"))
    wanted, pending = _listed(index.get("files")), _listed(index.get("pending"))

    def fetch(due: Due, path: Path) -> None:
        either = [known[due.path] for known in (wanted, pending) if due.path in known]
        for number, (size, sha256) in enumerate(either, 1):
            try:
                store.fetch(f"runs/{run_id}/files/{due.path}", path, size, sha256)
                return
            except TransferError:
                if number == len(either):
                    raise

    return _bring(ground, run_id, {**pending, **wanted}, fetch, run)


def from_copy(
    ground: Ground, run_id: str, files: dict[str, Any], archive: BinaryIO, run: Run | None
) -> PulledRun:
    """What a keeper gave (`give`): the files that it has, and a tar of those that are lacking."""
    with tempfile.TemporaryDirectory(dir=_made(ground.config.root / ".labctl")) as folder:
        came = Path(folder)
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                place = came / contained(member.name)
                source = tar.extractfile(member) if member.isreg() else None
                if source is not None:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("wb") as file:
                        shutil.copyfileobj(source, file)

        def fetch(due: Due, path: Path) -> None:
            place = came / due.path
            if not place.is_file() or hash_file(place) != due.sha256:
                raise TransferError(
                    f"{due.path} did not arrive whole", hint="labctl pull   # again"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            place.replace(path)

        return _bring(ground, run_id, _listed(files), fetch, run)


def index_of(root: Path, run_id: str) -> tuple[FileEntry, ...]:
    """The outputs of a run in a lab directory; none where there are none."""
    home = root / "runs" / run_id
    if not NAME_PATTERN.fullmatch(run_id) or not home.is_dir():
        return ()
    found = scan_data(root, f"give-{run_id}", home, Silent())
    return tuple(one for one in found if one.path != RECORD and not one.path.startswith(PARTIAL))


def give(root: Path, run_id: str, files: Sequence[FileEntry], out: BinaryIO) -> None:
    """A tar of these files of a run."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for one in files:
            member = tarfile.TarInfo(one.path)
            member.size = one.size
            content = (root / "runs" / run_id / one.path).open("rb")
            with content:
                tar.addfile(member, _exactly(content, one.size))


def _exactly(file: BinaryIO, size: int) -> BinaryIO:
    """A log may have been cut meanwhile: the other side's hash check says so, not the archive."""
    if size <= 1 << 20:
        return io.BytesIO(file.read(size).ljust(size, b"\0"))
    return file


def _bring(
    ground: Ground, run_id: str, files: dict[str, tuple[int, str]], fetch: Fetch, run: Run | None
) -> PulledRun:
    ended = run is not None and run.ended
    listed = [[path, size, sha256, False] for path, (size, sha256) in sorted(files.items())]
    found = {"ended": ended, "directory": "", "files": listed, "skipped": []}
    with hold_transfers(ground.config.root, "pull", ground.reporter):
        look = Look(ground.config.root, run_id, found)
        make_home(look.home, run)
        came, skipped = _fetched(ground, look, run_id, fetch)
        good, spoiled = confirm(look.home / PARTIAL, came)
        reason = "the disk here did not keep it; labctl pull brings it again"
        skipped += [
            Missing(run=run_id, path=one.path, size=one.size, reason=reason) for one in spoiled
        ]
        missing = {one.path for one in skipped}
        count = settle(look, good, [one for one in look.files.values() if one.path in missing])
        shutil.rmtree(look.home / PARTIAL, ignore_errors=True)
    skipped += look.skipped
    return PulledRun(
        run=run_id,
        directory=str(look.home),
        files=count,
        bytes=sum(one.size for one in came),
        skipped=tuple(skipped),
        complete=ended and not skipped,
    )


def _fetched(
    ground: Ground, look: Look, run_id: str, fetch: Fetch
) -> tuple[list[Due], list[Missing]]:
    """(what came to the partial directory, what did not and why)."""
    due, size = look.due(), 0
    came: list[Due] = []
    missing: list[Missing] = []
    total = sum(one.size for one in due)
    for one in due:
        try:
            fetch(one, look.home / PARTIAL / one.path)
            size += one.size
            came.append(one)
        except (TransferError, NotFoundError) as error:
            missing.append(Missing(run=run_id, path=one.path, size=one.size, reason=error.what))
        ground.reporter.emit(Progress(name=f"pull {run_id}", done=size, total=total, unit="bytes"))
    return came, missing


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _object(content: bytes | None) -> dict[str, Any]:
    try:
        body = json.loads(content or b"{}")
    except ValueError as error:
        raise LabError(
            "a record in the store cannot be read",
            why=str(error),
            hint="labctl pull   # from the server, while it is there",
        ) from error
    return body if isinstance(body, dict) else {}


def _listed(found: Any) -> dict[str, tuple[int, str]]:
    every = found.items() if isinstance(found, dict) else ()
    return {str(path): (max(0, int(known[0])), str(known[1])) for path, known in every}


def _recorded(ground: Ground, run_id: str, record: Any) -> Run | None:
    """The run as its store tells it, kept where it says more than what is known here: its end."""
    known = ground.state.run(ground.lab_id, run_id)
    told = record if isinstance(record, dict) else {}
    if told.get("state") not in ("exited", "cancelled") and not told.get("stopped_by"):
        return known
    fields = {key: value for key, value in told.items() if key in KNOWN_RUN_FIELDS}
    before = msgspec.to_builtins(known) if known else {"server_id": "", "lab_id": ground.lab_id}
    run = msgspec.convert({**before, **fields, "id": run_id}, Run)
    ground.state.save_run(run)
    return run
