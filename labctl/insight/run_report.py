"""Write the report of a run: one HTML file of everything that this machine knows about it.

Uses only pulled files, evaluations and the ledger, without asking a server or a provider. Missing
values are shown as not measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from labctl.decoding import convert_value, decode_json
from labctl.errors import LabError, NotFoundError
from labctl.events import Note, Step
from labctl.insight.quantization.measurements import FILE as QUANTIZATION
from labctl.insight.quantization.measurements import QuantizedModel, read_quantization
from labctl.insight.report import pictures
from labctl.insight.report.document import DocumentForm, Report, write_document
from labctl.insight.report.facts import (
    Bill,
    Checkpoint,
    LostServer,
    ReportFacts,
)
from labctl.insight.report.notes import FILE as NOTES
from labctl.insight.report.notes import read_notes
from labctl.insight.report.page import build_page
from labctl.insight.report.render import render
from labctl.insight.scalars import Scalars, read_scalars
from labctl.insight.speedup import FILE as SPEEDUP
from labctl.insight.speedup import Speedup, read_speedup
from labctl.insight.telemetry import TELEMETRY_FILE, Sample, read_samples
from labctl.model import NAME_PATTERN, Run, Value
from labctl.runs import provenance, runs
from labctl.runs.checkpointed_runs import NONE_HAS_ANY, has_saved_none, suggest_other_run
from labctl.runs.evaluate import ON_SERVER, read_server_accuracy
from labctl.runs.evaluation import FILE, Evaluation, read_evaluation
from labctl.runs.evaluation_script import SCRIPT
from labctl.runs.provenance import RunOrigin, ServerHardware
from labctl.servers import cost
from labctl.servers.context import LabContext
from labctl.sync.local_results import RECORD
from labctl.wire.checkpoints import fingerprint_files

REPORT_NAME = "report"
REPORT = f"{REPORT_NAME}.html"
# The last line of a report.
INPUTS_COMMENT = "<!-- labctl: written from {} -->"
MOST_CHECKPOINTS = 1000
LARGEST_MANIFEST = 1024**2
T = TypeVar("T", bound=Value)


class _ManifestMetrics(Value, frozen=True):
    """The fields of a checkpoint's manifest.json that a report uses."""

    step: Annotated[int, msgspec.Meta(ge=0, le=10**15)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)


def write_report(
    context: LabContext,
    run_id: str = "",
    out: Path | None = None,
    *,
    form: DocumentForm | None = None,
    version: str = "",
) -> Report:
    """Write the report of a run (by default the latest) to `out`, else into the run's directory.

    NotFoundError if the run was not pulled. `version` is labctl's, shown on the page.
    """
    form = form or DocumentForm()
    context.reporter.emit(Step(name=form.step))
    facts = collect_facts(context, run_id, version)
    directory = context.config.root / "runs" / facts.run.id
    inputs = fingerprint_inputs(directory)
    page = render(build_page(facts), context.paths.data_dir / "templates" / "report", form.template)
    text = f"{page}\n{INPUTS_COMMENT.format(inputs)}\n"
    file = out or directory / form.name_file(REPORT_NAME)
    size = write_document(text, file, form)
    context.reporter.emit(Step(name=form.step, done=True))
    for note in facts.notes:
        context.reporter.emit(Note(text=note, level="warning"))
    # A pull ends with the record; `labctl eval --on-server` downloads only its own result.
    is_pulled = (directory / RECORD).is_file()
    can_evaluate = (context.config.root / SCRIPT).is_file()
    lacks = _list_missing(facts, run_id, is_pulled=is_pulled, can_evaluate=can_evaluate)
    return Report(run=facts.run.id, file=str(file), bytes=size, lacks=lacks)


def fingerprint_inputs(home: Path) -> str:
    """Return a fingerprint of the files that a report shows: the report says which it was."""
    evaluation = home / FILE
    text = evaluation.read_bytes() if evaluation.is_file() else b""
    parts = [fingerprint_files(home / name) for name in ("checkpoints", "logs")]
    for own in (home / NOTES, home.parent.parent / NOTES):
        text += own.read_bytes() if own.is_file() else b""
    return hashlib.sha256(" ".join(parts).encode() + text).hexdigest()[:16]


def collect_facts(
    context: LabContext,
    run_id: str = "",
    version: str = "",
    *,
    with_text: bool = True,
    besides: Collection[str] = (),
) -> ReportFacts:
    """Gather everything that this machine knows about a run, by default with notes.md.

    `besides` are other runs that the user named.
    """
    runs_dir = (context.config.root / "runs").resolve()
    run = _find_run(context, runs_dir, run_id, besides)
    directory = runs_dir / run.id
    if not directory.is_dir():
        raise _make_not_pulled_error(context, run, is_latest=not run_id)
    notes: list[str] = []
    newest = _read_evaluation(directory / FILE, notes)
    on_server = _read_evaluation(directory / ON_SERVER, notes)
    by_run = _read_evaluation(directory / "logs" / FILE, notes)
    evaluation = newest or on_server or by_run
    name = evaluation.checkpoint if evaluation else ""
    servers = [one for one in (on_server, by_run) if one and one.checkpoint == name]
    checkpoints = _read_checkpoints(directory / "checkpoints")
    text = read_notes(context.config.root, directory, notes) if with_text else ()
    return ReportFacts(
        lab=context.config.name,
        run=run,
        evaluation=evaluation,
        here=newest if newest and newest.where == "here" else None,
        server=servers[0] if servers else None,
        server_accuracy=read_server_accuracy(directory, name) if name else None,
        scalars=_read_logged(directory / "logs", notes),
        samples=_read_telemetry(directory / "logs" / TELEMETRY_FILE, notes),
        speedup=_read_speedup(directory / "logs" / SPEEDUP, notes),
        quantization=_read_quantization(directory / "logs" / QUANTIZATION, notes),
        checkpoints=checkpoints,
        chosen_step=_find_step(name, checkpoints),
        code=_read_code(context, run),
        machine=_read_machine(context, run),
        bill=_compute_bill(context, run),
        reclaims=_read_reclaims(context, run),
        pictures=_read_pictures(directory, evaluation),
        text=text,
        notes=tuple(notes),
        made_at=time.time(),
        labctl=version,
    )


def _make_not_pulled_error(context: LabContext, run: Run, *, is_latest: bool) -> LabError:
    """Make the error for a run without files here.

    The latest run, if it has no checkpoints, is rarely the one that is meant.
    """
    what, pull = f"run {run.id} was not pulled to this machine", f"labctl pull {run.id}"
    if not (is_latest and has_saved_none(run)):
        return NotFoundError(what, hint=pull)
    other = suggest_other_run(context, run.id, "labctl", "report", on_server=False)
    why = "it saved no checkpoints" if other else f"it saved no checkpoints; {NONE_HAS_ANY}"
    hint = f"{other}\n{pull}   # its logs and curves" if other else pull
    return NotFoundError(what, why=why, hint=hint)


def _find_run(
    context: LabContext, runs_dir: Path, run_id: str, besides: Collection[str] = ()
) -> Run:
    """Return the recorded run, else its record from the last pull; else NotFoundError."""
    if run_id and not NAME_PATTERN.fullmatch(run_id):
        raise NotFoundError(f"there is no run {run_id}", hint="labctl status")
    try:
        return runs.find_run(context, run_id, besides=besides)
    except NotFoundError:
        # This machine's records may have been deleted since the pull.
        directories = (
            [runs_dir / run_id]
            if run_id
            else sorted(runs_dir.glob("*"), key=_modified, reverse=True)
        )
        for directory in directories:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                return decode_json((directory / RECORD).read_bytes(), Run)
        raise


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _read_evaluation(path: Path, notes: list[str]) -> Evaluation | None:
    try:
        return read_evaluation(path)
    except NotFoundError:
        return None
    except LabError as error:
        notes.append(f"skipped {path.name}: {error.why}")
        return None


def _read_logged(logs: Path, notes: list[str]) -> Scalars:
    try:
        scalars = read_scalars(logs)
    except OSError as error:
        notes.append(f"the logs cannot be read: {error.strerror}")
        return Scalars()
    notes += [f"{flaw.file or 'the logs'}: {flaw.what}" for flaw in scalars.flaws if not flaw.cut]
    notes += [f"{flaw.file} ends in the middle of a record" for flaw in scalars.flaws if flaw.cut]
    return scalars


def _read_telemetry(path: Path, notes: list[str]) -> tuple[Sample, ...]:
    try:
        return read_samples(path)
    except OSError as error:
        notes.append(f"the telemetry cannot be read: {error.strerror}")
        return ()


def _read_speedup(path: Path, notes: list[str]) -> Speedup | None:
    try:
        return read_speedup(path)
    except (OSError, ValueError) as error:
        notes.append(f"skipped {path.name}: {error}")
        return None


def _read_quantization(path: Path, notes: list[str]) -> QuantizedModel | None:
    try:
        return read_quantization(path)
    except (OSError, ValueError) as error:
        notes.append(f"skipped {path.name}: {error}")
        return None


def _read_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """List the pulled checkpoints by their manifests; those with an invalid one are left out."""
    checkpoints = []
    for path in sorted(folder.glob("*/manifest.json"))[:MOST_CHECKPOINTS]:
        with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
            with path.open("rb") as file:
                body = decode_json(file.read(LARGEST_MANIFEST), _ManifestMetrics)
            metrics = {k: float(v) for k, v in body.metrics.items() if isinstance(v, int | float)}
            checkpoints.append(
                Checkpoint(name=path.parent.name, step=body.step, epoch=body.epoch, metrics=metrics)
            )
    return tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.step))


def _find_step(name: str, checkpoints: tuple[Checkpoint, ...]) -> int | None:
    """Return the step of a checkpoint, from its manifest or its name."""
    step = next((one.step for one in checkpoints if one.name == name), None)
    match = re.fullmatch(r"step-(\d{1,15})", name)
    return step if step is not None else int(match[1]) if match else None


def _read_pictures(directory: Path, evaluation: Evaluation | None) -> dict[str, str]:
    """Read the pictures that an evaluation names by path, without following links."""
    uris: dict[str, str] = {}
    for mistake in evaluation.worst if evaluation else ():
        if not mistake.picture or mistake.picture.startswith("data:"):
            continue
        path = directory / mistake.picture
        with contextlib.suppress(OSError, ValueError):
            if path.resolve() == path and path.stat().st_size <= pictures.MOST_BYTES:
                picture, _ = pictures.check_bytes(path.read_bytes())
                uris[mistake.picture] = picture
    return uris


def _read_code(context: LabContext, run: Run) -> RunOrigin | None:
    lines = context.state.list_events(
        lab_id=context.lab_id, run_id=run.id, kind=provenance.CODE, limit=1
    )
    return _convert(lines[0].detail, RunOrigin) if lines else None


def _read_machine(context: LabContext, run: Run) -> ServerHardware | None:
    """Read the server's hardware as recorded when it was last prepared."""
    lines = context.state.list_events(server_id=run.server_id, kind="ready", limit=1)
    detail = lines[0].detail if lines else {}
    return _convert(detail, ServerHardware) if detail.get("cpus") else None


def _convert(detail: object, kind: type[T]) -> T | None:
    """Convert a ledger entry, which another version may have written; None if it does not fit."""
    try:
        return convert_value(detail, kind)
    except msgspec.ValidationError:
        return None


def _compute_bill(context: LabContext, run: Run) -> Bill:
    costs = cost.compute_costs(context)
    own = next((server for server in costs.servers if server.server_id == run.server_id), None)
    share = next((one for one in costs.runs if one.run_id == run.id), None)
    return Bill(
        provider=own.provider if own else "",
        type=own.type if own else "",
        spot=bool(own and own.spot),
        price_usd_per_hour=own.price_usd_per_hour if own else None,
        run_hours=share.hours if share else None,
        run_usd=share.cost_usd if share else None,
        lab_usd=costs.total_usd if costs.servers else None,
        lab_complete=costs.complete,
        idle_share=own.idle_share if own else None,
    )


def _read_reclaims(context: LabContext, run: Run) -> tuple[LostServer, ...] | None:
    if not context.state.list_events(lab_id=context.lab_id, limit=1):
        return None
    lines = context.state.list_events(lab_id=context.lab_id, run_id=run.id, kind="recovered")
    return tuple(
        LostServer(
            at=float(line.detail.get("at") or line.at),
            reason=str(line.detail.get("told") or ""),
            last_step=line.detail.get("last_step"),
            from_step=line.detail.get("step"),
            took_s=line.detail.get("took_s"),
        )
        for line in lines
    )


def _list_missing(
    facts: ReportFacts, run_id: str, *, is_pulled: bool, can_evaluate: bool
) -> tuple[str, ...]:
    """List the missing data, each with the command that provides it.

    `run_id` is the run as the user named it, "" for the latest.
    """
    evaluate, pull = (f"labctl {verb} {run_id}".rstrip() for verb in ("eval", "pull"))
    missing = []
    if facts.evaluation is None:
        missing.append(f"no evaluation: {evaluate if can_evaluate else f'no {SCRIPT} in this lab'}")
    elif facts.here is None:
        call = evaluate if facts.checkpoints else f"{pull} && {evaluate}"
        missing.append(f"evaluated on the server only; to check it on this machine: {call}")
    elif facts.server is None and facts.server_accuracy is None:
        missing.append(f"no evaluation on the server: {evaluate} --on-server")
    if not is_pulled and not (facts.scalars.series and facts.samples):
        return (*missing, f"no curves or telemetry: the run was not downloaded completely: {pull}")
    if not facts.scalars.series:
        missing.append("no curves: the run logged no TensorBoard scalars to logs/")
    if not facts.samples:
        missing.append("no telemetry: the run was too short, or nothing recorded it")
    return tuple(missing)
