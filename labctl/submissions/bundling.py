"""What goes into a bundle: the model, logs, report and code of one run, and their manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import NotFoundError, PolicyError
from labctl.model import Run, Value
from labctl.runs import provenance, runs
from labctl.servers.context import Ground
from labctl.submissions import ASSIGNMENT_FILE, manifest
from labctl.submissions.assignment import Assignment
from labctl.submissions.bundle import Source, packed_bytes
from labctl.submissions.manifest import BundleFile, Code, Manifest
from labctl.submissions.run_files import best_checkpoint, check_whole, files_of_run, hashed
from labctl.sync.local_results import RECORD
from labctl.sync.scan import scan_code

LARGEST_NAMED = 5
# What the run itself found out; `labctl eval` writes its own beside it.
SERVERS_EVALUATION = "logs/evaluation.json"
# A file's path in the bundle, and its size.
Sized = tuple[str, int]


class Contents(Value, frozen=True):
    """Everything that would be handed in. `notes` are for the person, one sentence each."""

    manifest: Manifest
    sources: tuple[Source, ...]
    bundle_bytes: int
    notes: tuple[str, ...] = ()

    def of(self, part: str) -> tuple[BundleFile, ...]:
        """The files of one part: model, logs, code, report, evaluation."""
        return tuple(one for one in self.manifest.files if part_of(one.path) == part)

    def holds(self, path: str) -> bool:
        return any(one.path == path for one in self.manifest.files)


def part_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".html").removesuffix(".json")


def contents(
    ground: Ground,
    rules: Assignment,
    student: str,
    most_bytes: int,
    run_id: str = "",
    checkpoint: str = "",
    beside: Iterable[str] = (),
) -> Contents:
    """What a run and the lab hold, as a bundle for `rules`. `beside` are files that stay here.

    NotFoundError where something that the assignment requires is not here, TransferError where a
    checkpoint is not whole, PolicyError where it is larger than `most_bytes`: by the files' sizes,
    before one of them is read.
    """
    run = _run(ground, run_id)
    home = ground.config.root / "runs" / run.id
    if not home.is_dir():
        raise NotFoundError(f"run {run.id} is not here", hint=f"labctl pull {run.id}")
    notes: list[str] = []
    chosen = checkpoint or best_checkpoint(home)
    seen = files_of_run(home, chosen, notes)
    _check_size(rules, [(one.name, one.size) for one in seen], most_bytes)
    found = list(hashed(seen, ground.config.root, run.id, ground.reporter))
    check_whole(home, chosen, found)
    record = _record(ground, run)
    found += [_made(RECORD, record), *_code(ground, {*beside, ASSIGNMENT_FILE})]
    _tell(run, found, notes)
    made = _manifest(ground, rules, (student, run.id, chosen), record, found)
    manifest.decode(manifest.encode(made))  # names that no bundle may hold are told here
    size = packed_bytes(made, found)
    _check_size(rules, [(one.path, one.size) for one in made.files], most_bytes, size)
    whole = Contents(manifest=made, sources=tuple(found), bundle_bytes=size, notes=tuple(notes))
    _check_required(rules, whole, run.id)
    return whole


def _manifest(
    ground: Ground,
    rules: Assignment,
    whose: tuple[str, str, str],
    record: dict[str, Any],
    found: list[Source],
) -> Manifest:
    """`whose` is the student, the run and the checkpoint."""
    student, run, checkpoint = whose
    return Manifest(
        kind=manifest.KIND,
        version=1,
        assignment=rules.name,
        course=rules.course,
        student=student,
        lab=ground.config.name,
        run=run,
        checkpoint=checkpoint,
        record=record,
        code=_git(ground, record),
        files=tuple(source.file for source in found),
    )


def _check_size(
    rules: Assignment, sizes: list[Sized], most_bytes: int, bundle_bytes: int = 0
) -> None:
    total = bundle_bytes or sum(size for _, size in sizes)
    if total <= most_bytes:
        return
    largest = sorted(sizes, key=lambda one: -one[1])[:LARGEST_NAMED]
    raise PolicyError(
        f"the bundle is too large: {total:,} bytes; {rules.name} takes at most {most_bytes:,}",
        why="\n".join(f"{size:>15,} bytes  {name}" for name, size in largest),
        hint="labctl submit --checkpoint NAME   # a smaller one; or name files in .labignore",
    )


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
    body: dict[str, Any] = msgspec.to_builtins(run)
    del body["seen_at"]
    entries = ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind=provenance.CODE)
    return {**body, "started_from": entries[0].detail} if entries else body


def _git(ground: Ground, record: dict[str, Any]) -> Code:
    with provenance.Looking(ground.config.root) as looking:
        now = looking.code()
    then = record.get("started_from", {})
    return Code(
        commit=now.commit,
        dirty=now.dirty,
        run_commit=str(then.get("commit", "")),
        run_dirty=then.get("dirty"),
    )


def _code(ground: Ground, left: set[str]) -> Iterator[Source]:
    root = ground.config.root
    inside = [one.path for one in ground.config.data.values() if one.path and one.inside_lab]
    for entry in scan_code(root, ground.reporter, data=inside):
        if entry.path not in left:
            file = BundleFile(path=f"code/{entry.path}", size=entry.size, sha256=entry.sha256)
            yield Source(file=file, path=root / entry.path)


def _tell(run: Run, found: list[Source], notes: list[str]) -> None:
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
        if not whole.of(part) and not (part == "evaluation" and whole.holds(SERVERS_EVALUATION)):
            raise NotFoundError(
                f"{rules.name} requires the {part}, and run {run_id} has none here",
                hint=ways[part],
            )


def _made(name: str, body: dict[str, Any]) -> Source:
    """A file that is written into the bundle alone."""
    text = msgspec.json.format(msgspec.json.encode(body, order="deterministic"), indent=1) + b"\n"
    sha256 = hashlib.sha256(text).hexdigest()
    return Source(file=BundleFile(path=name, size=len(text), sha256=sha256), content=text)
