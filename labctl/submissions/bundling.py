"""Building a bundle: the model, logs, report and code of one run, and their manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from labctl.errors import NotFoundError, PolicyError
from labctl.model import Run, Value
from labctl.runs import provenance, runs
from labctl.servers.context import LabContext
from labctl.submissions import ASSIGNMENT_FILE, freshness, manifest
from labctl.submissions.assignment import Assignment
from labctl.submissions.bundle import BundleSource, packed_bytes
from labctl.submissions.lost_results import describe_loss, explain_missing_results
from labctl.submissions.manifest import BundleFile, BundleManifest, CodeCommit
from labctl.submissions.run_files import (
    find_best_checkpoint,
    hash_files,
    list_run_files,
    require_complete_checkpoint,
)
from labctl.sync.local_results import RECORD, read_pulled_run
from labctl.sync.scan import scan_code
from labctl.sync.starter_update import has_conflict_marks
from labctl.text import names_text

LARGEST_NAMED = 5
# Larger files are no code that a student merges.
MOST_CONFLICT_BYTES = 1024**2
SUBMIT = "labctl submit"
# the parts that a pull brings
PULLED_PARTS = ("model", "logs")
SUBMIT_THE_END = "labctl pull --follow && labctl submit --fresh"
SUBMIT_ELSEWHERE = "labctl -C DIR submit   # in the lab's directory"
# The evaluation by the run itself; `labctl eval` writes its own file next to it.
SERVERS_EVALUATION = "logs/evaluation.json"
# A file's path in the bundle, and its size.
Sized = tuple[str, int]


class BundleContents(Value, frozen=True):
    """Everything that would be submitted. `notes` are for the student, one sentence each.

    `stale` says which of the results are older than others, one sentence each.
    """

    manifest: BundleManifest
    sources: tuple[BundleSource, ...]
    bundle_bytes: int
    notes: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    def list_part(self, part: str) -> tuple[BundleFile, ...]:
        """Return the files of one part: model, logs, code, report, evaluation."""
        return tuple(file for file in self.manifest.files if get_bundle_part(file.path) == part)

    def has_file(self, path: str) -> bool:
        """Tell whether the bundle has this file."""
        return any(file.path == path for file in self.manifest.files)


class BundleOrigin(NamedTuple):
    """The run as its server reported it, with the code it started from, and the commit."""

    record: dict[str, Any]
    code: CodeCommit


def get_bundle_part(path: str) -> str:
    """Return the part that a file in a bundle belongs to."""
    return path.split("/")[0].removesuffix(".html").removesuffix(".json")


def collect_contents(
    context: LabContext,
    rules: Assignment,
    student: str,
    most_bytes: int,
    run_id: str = "",
    checkpoint: str = "",
    beside: Iterable[str] = (),
    *,
    code_only: bool = False,
) -> BundleContents:
    """Collect the contents of a bundle from a run and its lab, except the files `beside`.

    With `code_only`, and for an assignment about code in a lab without runs, it is the code alone.
    NotFoundError if something that the assignment requires is missing, TransferError if a
    checkpoint is incomplete, PolicyError if the bundle exceeds `most_bytes`: that is decided by the
    files' sizes, before any file is read.
    """
    if code_only or (not run_id and is_code_enough(rules) and not _has_runs(context)):
        return _collect_code(context, rules, student, most_bytes, beside)
    needs_model = "model" in rules.require
    on_server = freshness.inspect_run(context, find_run(context, run_id), needs_model=needs_model)
    run = on_server.run
    home = context.config.root / "runs" / run.id
    if not home.is_dir():
        other = _find_other(context, run.id, needs_model=needs_model)
        raise explain_missing_results(context, run, other)
    chosen = checkpoint or find_best_checkpoint(home)
    code = _read_commit(context)
    result = assemble_contents(context, rules, student, most_bytes, run, chosen, code, beside)
    stale = freshness.find_stale_results(on_server, home, chosen)
    has_all_files = freshness.has_final_files(run, home) and not on_server.new_checkpoints
    other = _find_other(context, run.id)
    loss = describe_loss(context, run)
    if loss is not None and not has_all_files and find_missing_part(rules, result) in PULLED_PARTS:
        raise explain_missing_results(context, run, other)
    _check_required(rules, result, run, has_all_files, other)
    notes = result.notes
    if not run.has_ended:
        notes += (f"to submit the end of {run.id}: {SUBMIT_THE_END}",)
    return msgspec.structs.replace(result, notes=notes, stale=stale)


def is_code_enough(rules: Assignment) -> bool:
    """Tell whether the assignment is about code: it requires nothing that only a run has."""
    return set(rules.require) == {"code"}


def _has_runs(context: LabContext) -> bool:
    try:
        find_run(context, "")
    except NotFoundError:
        return False
    return True


def _collect_code(
    context: LabContext,
    rules: Assignment,
    student: str,
    most_bytes: int,
    beside: Iterable[str],
) -> BundleContents:
    code = _read_commit(context)
    result = assemble_contents(context, rules, student, most_bytes, None, "", code, beside)
    if part := find_missing_part(rules, result):
        if part == "code":
            raise NotFoundError("this lab has no files to submit", hint=SUBMIT_ELSEWHERE)
        raise NotFoundError(f"{rules.name} requires the {part}, which only a run has", hint=SUBMIT)
    return result


def _read_commit(context: LabContext) -> CodeCommit:
    with provenance.GitQuery(context.config.root) as query:
        current = query.read_code()
    return CodeCommit(commit=current.commit, dirty=current.dirty)


def assemble_contents(
    context: LabContext,
    rules: Assignment,
    student: str,
    most_bytes: int,
    run: Run | None,
    checkpoint: str,
    code: CodeCommit,
    beside: Iterable[str] = (),
) -> BundleContents:
    """Assemble a run's files and the code in the lab's directory; without a run the code alone.

    TransferError if the checkpoint is incomplete, PolicyError as in `collect_contents`.
    """
    notes, sources, origin = list[str](), list[BundleSource](), BundleOrigin({}, code)
    if run is not None:
        sources += _list_run_sources(context, rules, most_bytes, run, checkpoint, notes)
        origin = _read_origin(context, run, code)
        sources.append(_generate_file(RECORD, origin.record))
    sources += _list_code_files(context, {*beside, ASSIGNMENT_FILE})
    _note_conflicts(sources, notes)
    if run is not None:
        _note_doubts(run, sources, notes)
    built = BundleManifest(
        kind=manifest.KIND,
        version=1,
        assignment=rules.name,
        course=rules.course,
        student=student,
        lab=context.config.name,
        run=run.id if run else "",
        checkpoint=checkpoint,
        record=origin.record,
        code=origin.code,
        files=tuple(source.file for source in sources),
    )
    manifest.decode(manifest.encode(built))  # raises for names that are not allowed in a bundle
    size = packed_bytes(built, sources)
    _check_size(rules, [(file.path, file.size) for file in built.files], most_bytes, size)
    return BundleContents(
        manifest=built, sources=tuple(sources), bundle_bytes=size, notes=tuple(notes)
    )


def _list_run_sources(
    context: LabContext,
    rules: Assignment,
    most_bytes: int,
    run: Run,
    checkpoint: str,
    notes: list[str],
) -> list[BundleSource]:
    """Hash what a bundle has of a run, once the sizes are known to be allowed."""
    root = context.config.root
    home = root / "runs" / run.id
    run_files = list_run_files(home, checkpoint, notes)
    _check_size(rules, [(file.name, file.size) for file in run_files], most_bytes)
    sources = list(hash_files(run_files, root, run.id, context.reporter))
    require_complete_checkpoint(home, checkpoint, sources)
    return sources


def _check_size(
    rules: Assignment, sizes: list[Sized], most_bytes: int, bundle_bytes: int = 0
) -> None:
    total = bundle_bytes or sum(size for _, size in sizes)
    if total <= most_bytes:
        return
    largest = sorted(sizes, key=lambda item: -item[1])[:LARGEST_NAMED]
    raise PolicyError(
        f"the bundle is too large: {total:,} bytes; {rules.name} accepts at most {most_bytes:,}",
        why="\n".join(f"{size:>15,} bytes  {name}" for name, size in largest),
        hint=_suggest_smaller([name for name, _ in largest]),
    )


def _suggest_smaller(largest: list[str]) -> str:
    """Suggest what makes a bundle smaller whose largest files are these, the largest first."""
    parts = {get_bundle_part(name) for name in largest}
    lines: list[str] = []
    if "code" in parts:
        lines.append("list files that you need not submit in .labignore, then:\nlabctl submit")
    if "model" in parts:
        lines.append("labctl submit --checkpoint NAME   # a smaller one")
    if not lines:
        lines.append("labctl submit --code-only   # without the run, if the assignment allows it")
    return "\n".join(lines)


def find_run(context: LabContext, run_id: str) -> Run:
    """Return the recorded run; if the record is lost, from its downloaded results."""
    try:
        return runs.find_run(context, run_id)
    except NotFoundError:
        homes = context.config.root / "runs"
        files = [homes / run_id / RECORD] if run_id else list(homes.glob(f"*/{RECORD}"))
        pulled = [run for file in files if (run := read_pulled_run(file)) is not None]
        if not pulled:
            raise
        return max(pulled, key=lambda run: run.created_at)


def _read_origin(context: LabContext, run: Run, current: CodeCommit) -> BundleOrigin:
    """Return where the model comes from: the run's record without the time of its last refresh.

    So the same run makes the same bundle. `current` is the commit of the code as it is now.
    """
    record = msgspec.to_builtins(run)
    del record["seen_at"]
    entries = context.state.list_events(lab_id=context.lab_id, run_id=run.id, kind=provenance.CODE)
    started_from = entries[0].detail if entries else {}
    if entries:
        record["started_from"] = started_from
    code = msgspec.structs.replace(
        current,
        run_commit=str(started_from.get("commit", "")),
        run_dirty=started_from.get("dirty"),
    )
    return BundleOrigin(record, code)


def _list_code_files(context: LabContext, left_out: set[str]) -> Iterator[BundleSource]:
    root = context.config.root
    data = [
        source.path for source in context.config.data.values() if source.path and source.inside_lab
    ]
    for entry in scan_code(root, context.reporter, data=data):
        if entry.path not in left_out:
            file = BundleFile(path=f"code/{entry.path}", size=entry.size, sha256=entry.sha256)
            yield BundleSource(file=file, path=root / entry.path)


def _note_conflicts(sources: list[BundleSource], notes: list[str]) -> None:
    """Name the code in which an update of the course's files left both versions."""
    unresolved = [
        source.file.path.removeprefix("code/")
        for source in sources
        if source.path is not None
        and get_bundle_part(source.file.path) == "code"
        and source.file.size <= MOST_CONFLICT_BYTES
        and has_conflict_marks(source.path.read_bytes())
    ]
    if unresolved:
        notes.append(f"with conflict marks of labctl join: {names_text(unresolved, 3)}")


def _note_doubts(run: Run, sources: list[BundleSource], notes: list[str]) -> None:
    if not run.has_ended:
        notes.append(f"run {run.id} has not ended (last known)")
    elif run.exit_code:
        notes.append(f"run {run.id} ended with {run.exit_code}: {run.summary}")
    changed = [
        source.file.path.removeprefix("code/")
        for source in sources
        if get_bundle_part(source.file.path) == "code"
        and source.path is not None
        and run.created_at
        and source.path.stat().st_mtime > run.created_at
    ]
    if changed:
        notes.append(f"changed since the run began: {names_text(changed, 3)}")


def find_missing_part(rules: Assignment, result: BundleContents) -> str:
    """Return a part that the assignment requires and the bundle has not; "" without one."""
    for part in rules.require:
        has_part = bool(result.list_part(part))
        if not has_part and not (part == "evaluation" and result.has_file(SERVERS_EVALUATION)):
            return part
    return ""


def _find_other(context: LabContext, run_id: str, *, needs_model: bool = True) -> str:
    """Return the latest other run whose model, or log, is on this machine; "" without one."""
    others = [run.id for run in context.state.list_runs(context.lab_id) if run.id != run_id]
    homes = context.config.root / "runs"

    def has_results(home: Path) -> bool:
        return bool(find_best_checkpoint(home)) if needs_model else (home / "logs").is_dir()

    return next((one for one in reversed(others) if has_results(homes / one)), "")


def _check_required(
    rules: Assignment, result: BundleContents, run: Run, has_all_files: bool, other: str
) -> None:
    """NotFoundError for a missing part; `has_all_files` if another pull would bring nothing.

    `other` is another run that has a model.
    """
    pull, why = f"labctl pull {run.id}", ""
    if not run.has_ended:
        pull = f"labctl pull --follow {run.id}"
        why = "the run has not ended, and a pull leaves out files that it is still writing"
    elif not has_all_files:
        why = "the files on this machine are not the final ones of the run"
    save = "save the model in $LABCTL_CHECKPOINT_DIR in your code, then:\nlabctl run"
    if other:
        save = f"labctl submit {other}   # the latest run with a model\nor {save}"
    hints = {
        "model": (why, save if has_all_files else pull),
        "logs": (why, pull),
        "report": ("", f"labctl report {run.id}"),
        "evaluation": ("", f"labctl eval {run.id}"),
        "code": ("", SUBMIT_ELSEWHERE),
    }
    if part := find_missing_part(rules, result):
        why, hint = hints[part]
        what = f"{rules.name} requires the {part}, but run {run.id} has none on this machine"
        raise NotFoundError(what, why=why, hint=hint)


def _generate_file(name: str, body: object) -> BundleSource:
    """Return a generated file that exists in the bundle only."""
    text = msgspec.json.format(msgspec.json.encode(body, order="deterministic"), indent=1) + b"\n"
    sha256 = hashlib.sha256(text).hexdigest()
    return BundleSource(file=BundleFile(path=name, size=len(text), sha256=sha256), content=text)
