"""What of a lab goes into a bundle: the model, logs, report and code of one run, looked through."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from labctl.actions import provenance, runs
from labctl.actions.ground import Ground
from labctl.actions.pull import MANIFEST, PARTIAL, RECORD
from labctl.actions.scan import Index, scan_code
from labctl.errors import LabError, NotFoundError, TransferError
from labctl.evaluation import read_evaluation
from labctl.model import Run, Value
from labctl.submissions import ASSIGNMENT_FILE, manifest
from labctl.submissions.assignment import Assignment
from labctl.submissions.bundle import Source, packed_bytes
from labctl.submissions.manifest import BundleFile, Code, Manifest

CHECKPOINTS, LOGS = "checkpoints", "logs"
REPORT, EVALUATION = "report.html", "evaluation.json"
MOST_MANIFEST_BYTES = 4 * 1024 * 1024
LEFT_OUT = frozenset((PARTIAL, ".labctl"))


class Contents(Value, frozen=True):
    """Everything that would be handed in. `notes` are for the person, one sentence each."""

    manifest: Manifest
    sources: tuple[Source, ...]
    bundle_bytes: int
    notes: tuple[str, ...] = ()

    def of(self, part: str) -> tuple[BundleFile, ...]:
        """The files of one part: model, logs, code, report, evaluation."""
        return tuple(one for one in self.manifest.files if part_of(one.path) == part)


def part_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".html").removesuffix(".json")


def contents(
    ground: Ground,
    rules: Assignment,
    student: str,
    run_id: str = "",
    checkpoint: str = "",
    beside: Iterable[str] = (),
) -> Contents:
    """What a run and the lab hold, as a bundle for `rules`. `beside` are files that stay here.

    NotFoundError where something that the assignment requires is not here, TransferError where a
    checkpoint is not whole.
    """
    run = _run(ground, run_id)
    home = ground.config.root / "runs" / run.id
    if not home.is_dir():
        raise NotFoundError(f"run {run.id} is not here", hint=f"labctl pull {run.id}")
    notes: list[str] = []
    known = _Hashes(ground, run.id, notes)
    chosen = checkpoint or _best(home)
    found = [*_model(known, home, chosen), *_tree(known, home / LOGS, LOGS, f"{LOGS}/")]
    for name in (REPORT, EVALUATION):
        if (home / name).is_file() and not (home / name).is_symlink():
            found.append(known.source(name, home / name, name))
    record = _record(ground, run)
    text = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1)
    found.append(_bytes(RECORD, text + b"\n"))
    found += _code(ground, {*beside, ASSIGNMENT_FILE})
    _notes(ground, run, found, notes)
    known.index.save(keep=True)
    made = Manifest(
        kind=manifest.KIND,
        version=1,
        assignment=rules.name,
        course=rules.course,
        student=student,
        lab=ground.config.name,
        run=run.id,
        checkpoint=chosen,
        record=record,
        code=_git(ground, run),
        files=tuple(source.file for source in found),
    )
    manifest.decode(manifest.encode(made))  # names that no bundle may hold are told here
    whole = Contents(
        manifest=made,
        sources=tuple(found),
        bundle_bytes=packed_bytes(made, found),
        notes=tuple(notes),
    )
    _check_required(rules, whole, run.id)
    return whole


def _run(ground: Ground, run_id: str) -> Run:
    """The run as recorded; where the record is lost, as its pull left it."""
    try:
        return runs.latest(ground, run_id)
    except NotFoundError:
        homes = ground.config.root / "runs"
        files = [homes / run_id / RECORD] if run_id else list(homes.glob(f"*/{RECORD}"))
        known = [run for file in files if (run := _pulled(file)) is not None]
        if not known:
            raise
        return max(known, key=lambda run: run.created_at)


def _pulled(file: Path) -> Run | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError):
        return None


def _record(ground: Ground, run: Run) -> dict[str, Any]:
    """The run as its server told it, and what the ledger keeps of how it was started.

    Without the moment when it was last looked at, so that the same run makes the same bundle.
    """
    body: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(run, seen_at=0.0))
    del body["seen_at"]
    entries = ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind=provenance.CODE)
    return {**body, "started_from": entries[0].detail} if entries else body


def _git(ground: Ground, run: Run) -> Code:
    with provenance.Looking(ground.config.root) as looking:
        now = looking.code()
    entries = ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind=provenance.CODE)
    then = entries[0].detail if entries else {}
    return Code(
        commit=now.commit,
        dirty=now.dirty,
        run_commit=str(then.get("commit", "")),
        run_dirty=then.get("dirty"),
    )


def _best(home: Path) -> str:
    """The checkpoint that was evaluated; else the one with the best metrics; else the last."""
    try:
        named = read_evaluation(home / EVALUATION).checkpoint
    except LabError:
        named = ""
    if named and "/" not in named and (home / CHECKPOINTS / named).exists():
        return named
    whole = sorted(home.glob(f"{CHECKPOINTS}/*/{MANIFEST}"))
    ranked = sorted(whole, key=lambda path: (_accuracy(path), path.parent.name))
    return ranked[-1].parent.name if ranked else ""


def _accuracy(file: Path) -> float:
    metrics = _object(file).get("metrics")
    value = metrics.get("val_accuracy") if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else -1.0


def _model(known: _Hashes, home: Path, chosen: str) -> list[Source]:
    """The chosen checkpoint, each file as its own manifest says; all of them where none is."""
    if chosen and ("/" in chosen or chosen in (".", "..")):
        raise NotFoundError(f"{chosen!a} is no checkpoint's name", hint=_names(home))
    place = home / CHECKPOINTS / chosen
    if place.is_file() and not place.is_symlink():
        return [known.source(f"model/{chosen}", place, f"{CHECKPOINTS}/{chosen}")]
    if chosen and not place.is_dir():
        raise NotFoundError(f"there is no checkpoint {chosen} in {home}", hint=_names(home))
    inside = f"{CHECKPOINTS}/{chosen}/" if chosen else f"{CHECKPOINTS}/"
    found = list(
        _tree(known, place, inside.rstrip("/"), f"model/{chosen}/" if chosen else "model/")
    )
    listed = _object(place / MANIFEST).get("files")
    here = {source.file.path.removeprefix(f"model/{chosen}/"): source.file for source in found}
    for name, promised in listed.items() if isinstance(listed, dict) else ():
        one = here.get(name)
        if one is None or {"size": one.size, "sha256": one.sha256} != promised:
            raise TransferError(
                f"the checkpoint {chosen} is not whole: {name}",
                why="it is not the file that its manifest names",
                hint="labctl pull",
            )
    return found


def _names(home: Path) -> str:
    known = sorted(path.name for path in (home / CHECKPOINTS).glob("*"))
    return f"labctl submit --checkpoint {known[-1]}" if known else "labctl pull"


class _Hashes:
    """Hashes of the run's files, kept from its pull; links are told and left out."""

    def __init__(self, ground: Ground, run_id: str, notes: list[str]) -> None:
        self.index = Index(ground.config.root.resolve(), f"runs/{run_id}")
        self.notes = notes

    def source(self, name: str, path: Path, key: str) -> Source:
        sha256, found = self.index.hash(key, path)
        return Source(file=BundleFile(path=name, size=found.st_size, sha256=sha256), path=path)


def _tree(known: _Hashes, folder: Path, inside: str, prefix: str) -> Iterator[Source]:
    """The plain files below a folder of the run, in order of name."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            path = Path(place) / name
            below = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                known.notes.append(f"{inside}/{below} is a link or no file, and stays here")
                continue
            yield known.source(prefix + below, path, f"{inside}/{below}")


def _code(ground: Ground, left: set[str]) -> Iterator[Source]:
    root = ground.config.root
    inside = [one.path for one in ground.config.data.values() if one.path and one.inside_lab]
    for entry in scan_code(root, ground.reporter, data=inside):
        if entry.path not in left:
            file = BundleFile(path=f"code/{entry.path}", size=entry.size, sha256=entry.sha256)
            yield Source(file=file, path=root / entry.path)


def _notes(ground: Ground, run: Run, found: list[Source], notes: list[str]) -> None:
    if not run.ended:
        notes.append(f"run {run.id} has not ended, as far as is known here: labctl pull --follow")
    elif run.exit_code:
        notes.append(f"run {run.id} ended with {run.exit_code}: {run.told}")
    changed = [
        source.file.path.removeprefix("code/")
        for source in found
        if part_of(source.file.path) == "code"
        and source.path is not None
        and run.created_at
        and source.path.stat().st_mtime > run.created_at
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        notes.append(f"changed since the run began: {', '.join(changed[:3])}{more}")


def _check_required(rules: Assignment, whole: Contents, run_id: str) -> None:
    ways = {
        "model": f"labctl pull {run_id}",
        "logs": f"labctl pull {run_id}",
        "report": f"labctl report {run_id}",
        "evaluation": f"labctl eval {run_id}",
        "code": "labctl -C DIR submit   # in the lab's directory",
    }
    for part in rules.require:
        if not whole.of(part):
            raise NotFoundError(
                f"{rules.name} requires the {part}, and run {run_id} has none here",
                hint=ways[part],
            )


def _bytes(name: str, content: bytes) -> Source:
    sha256 = hashlib.sha256(content).hexdigest()
    return Source(file=BundleFile(path=name, size=len(content), sha256=sha256), content=content)


def _object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_MANIFEST_BYTES:
            return {}
        body = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
