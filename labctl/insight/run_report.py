"""The results presentation of a run: what is known here of it, gathered into one HTML file.

Nothing is asked of a server or a provider: what was pulled, evaluated and written into the ledger
is all there is, and what is missing is said to be.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from labctl.errors import LabError, NotFoundError
from labctl.events import Note, Step
from labctl.insight.report import pictures
from labctl.insight.report.facts import Bill, Checkpoint, Code, Facts, Machine, Reclaim
from labctl.insight.report.page import page
from labctl.insight.report.render import render
from labctl.insight.scalars import Scalars, read_scalars
from labctl.insight.telemetry import TELEMETRY_FILE, Sample, read_samples
from labctl.model import NAME_PATTERN, Run, Value
from labctl.runs import provenance, runs
from labctl.runs.evaluate import ON_SERVER, accuracy_on_server
from labctl.runs.evaluation import FILE, Evaluation, read_evaluation
from labctl.servers import cost
from labctl.servers.context import Ground
from labctl.sync.local_results import RECORD

REPORT = "report.html"
MOST_CHECKPOINTS = 1000
LARGEST_MANIFEST = 1024**2
T = TypeVar("T", bound=Value)


class _Manifest(Value, frozen=True):
    """What is read of a checkpoint's manifest.json."""

    step: Annotated[int, msgspec.Meta(ge=0, le=10**15)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)


class Report(Value, frozen=True):
    """What was written. `lacks` names what the report says "not measured" of, for want of it."""

    run: str
    file: str
    bytes: int
    lacks: tuple[str, ...] = ()


def report(
    ground: Ground, run_id: str = "", out: Path | None = None, *, version: str = ""
) -> Report:
    """Write the report of a run (the latest) to `out`, by default `runs/<run>/report.html`.

    NotFoundError where the run was not pulled. `version` is labctl's, to be named on the page.
    """
    ground.reporter.emit(Step(name="writing the report"))
    facts = gather(ground, run_id, version)
    text = render(page(facts), ground.paths.data_dir / "templates" / "report").encode()
    file = out or ground.config.root / "runs" / facts.run.id / REPORT
    _write(file, text)
    ground.reporter.emit(Step(name="writing the report", done=True))
    for note in facts.notes:
        ground.reporter.emit(Note(text=note, level="warning"))
    return Report(run=facts.run.id, file=str(file), bytes=len(text), lacks=_lacks(facts))


def _write(file: Path, text: bytes) -> None:
    staging = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staging.write_bytes(text)
        staging.replace(file)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise LabError(
            f"{file} cannot be written", why=str(error), hint="labctl report --out FILE"
        ) from error


def gather(ground: Ground, run_id: str = "", version: str = "") -> Facts:
    """All that this machine knows of a run."""
    home = (ground.config.root / "runs").resolve()
    run = _run(ground, home, run_id)
    directory = home / run.id
    if not directory.is_dir():
        raise NotFoundError(f"run {run.id} is not here", hint=f"labctl pull {run.id}")
    notes: list[str] = []
    newest = _evaluation(directory / FILE, notes)
    on_server = _evaluation(directory / ON_SERVER, notes)
    told = _evaluation(directory / "logs" / FILE, notes)
    found = newest or on_server or told
    name = found.checkpoint if found else ""
    there = [one for one in (on_server, told) if one and one.checkpoint == name]
    checkpoints = _checkpoints(directory / "checkpoints")
    return Facts(
        lab=ground.config.name,
        run=run,
        evaluation=found,
        here=newest if newest and newest.where == "here" else None,
        server=there[0] if there else None,
        server_accuracy=accuracy_on_server(directory, name) if name else None,
        scalars=_scalars(directory / "logs", notes),
        samples=_samples(directory / "logs" / TELEMETRY_FILE, notes),
        checkpoints=checkpoints,
        chosen_step=_step(name, checkpoints),
        code=_code(ground, run),
        machine=_machine(ground, run),
        bill=_bill(ground, run),
        reclaims=_reclaims(ground, run),
        pictures=_pictures(directory, found),
        notes=tuple(notes),
        made_at=time.time(),
        labctl=version,
    )


def _run(ground: Ground, home: Path, run_id: str) -> Run:
    """The run as recorded, else as it was when it was pulled; NotFoundError where there is none."""
    if run_id and not NAME_PATTERN.fullmatch(run_id):
        raise NotFoundError(f"there is no run {run_id}", hint="labctl status")
    try:
        return runs.latest(ground, run_id)
    except NotFoundError:
        # The record on this machine may have been begun anew since.
        places = [home / run_id] if run_id else sorted(home.glob("*"), key=_modified, reverse=True)
        for place in places:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                return msgspec.json.decode((place / RECORD).read_bytes(), type=Run)
        raise


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _evaluation(path: Path, notes: list[str]) -> Evaluation | None:
    try:
        return read_evaluation(path)
    except NotFoundError:
        return None
    except LabError as error:
        notes.append(f"{path.name} was left out: {error.why}")
        return None


def _scalars(logs: Path, notes: list[str]) -> Scalars:
    try:
        found = read_scalars(logs)
    except OSError as error:
        notes.append(f"the logs cannot be read: {error.strerror}")
        return Scalars()
    notes += [f"{one.file or 'the logs'}: {one.what}" for one in found.flaws if not one.cut]
    notes += [f"{one.file} ends in the middle of a record" for one in found.flaws if one.cut]
    return found


def _samples(path: Path, notes: list[str]) -> tuple[Sample, ...]:
    try:
        return read_samples(path)
    except OSError as error:
        notes.append(f"the telemetry cannot be read: {error.strerror}")
        return ()


def _checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Those that are here, by their manifests; one that cannot be read is no checkpoint."""
    found = []
    for path in sorted(folder.glob("*/manifest.json"))[:MOST_CHECKPOINTS]:
        with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
            with path.open("rb") as file:
                body = msgspec.json.decode(file.read(LARGEST_MANIFEST), type=_Manifest)
            known = {k: float(v) for k, v in body.metrics.items() if isinstance(v, int | float)}
            found.append(
                Checkpoint(name=path.parent.name, step=body.step, epoch=body.epoch, metrics=known)
            )
    return tuple(sorted(found, key=lambda one: one.step))


def _step(name: str, checkpoints: tuple[Checkpoint, ...]) -> int | None:
    """The step of a checkpoint, from its manifest or from its name."""
    known = next((one.step for one in checkpoints if one.name == name), None)
    match = re.fullmatch(r"step-(\d{1,15})", name)
    return known if known is not None else int(match[1]) if match else None


def _pictures(directory: Path, found: Evaluation | None) -> dict[str, str]:
    """The pictures that an evaluation names by a path, none through a link."""
    shown: dict[str, str] = {}
    for one in found.worst if found else ():
        if not one.picture or one.picture.startswith("data:"):
            continue
        path = directory / one.picture
        with contextlib.suppress(OSError, ValueError):
            if path.resolve() == path and path.stat().st_size <= pictures.MOST_BYTES:
                picture, _ = pictures.from_bytes(path.read_bytes())
                shown[one.picture] = picture
    return shown


def _code(ground: Ground, run: Run) -> Code | None:
    lines = ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind=provenance.CODE, limit=1)
    return _converted(lines[0].detail, Code) if lines else None


def _machine(ground: Ground, run: Run) -> Machine | None:
    """The server's hardware as it was found when it was last made ready."""
    lines = ground.state.events(server_id=run.server_id, kind="ready", limit=1)
    detail = lines[0].detail if lines else {}
    return _converted(detail, Machine) if detail.get("cpus") else None


def _converted(detail: dict[str, Any], kind: type[T]) -> T | None:
    """A line of the ledger, which another version may have written."""
    try:
        return msgspec.convert(detail, kind)
    except msgspec.ValidationError:
        return None


def _bill(ground: Ground, run: Run) -> Bill:
    known = cost.costs(ground)
    own = next((one for one in known.servers if one.server_id == run.server_id), None)
    share = next((one for one in known.runs if one.run_id == run.id), None)
    return Bill(
        provider=own.provider if own else "",
        type=own.type if own else "",
        spot=bool(own and own.spot),
        price_usd_per_hour=own.price_usd_per_hour if own else None,
        run_hours=share.hours if share else None,
        run_usd=share.cost_usd if share else None,
        lab_usd=known.total_usd if known.servers else None,
        lab_complete=known.complete,
        idle_share=own.idle_share if own else None,
    )


def _reclaims(ground: Ground, run: Run) -> tuple[Reclaim, ...] | None:
    if not ground.state.events(lab_id=ground.lab_id, limit=1):
        return None
    lines = ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind="recovered")
    return tuple(
        Reclaim(
            at=float(line.detail.get("at") or line.at),
            told=str(line.detail.get("told") or ""),
            last_step=line.detail.get("last_step"),
            from_step=line.detail.get("step"),
            took_s=line.detail.get("took_s"),
        )
        for line in lines
    )


def _lacks(facts: Facts) -> tuple[str, ...]:
    """What to do for what is missing, each with its command."""
    lacks = []
    if facts.evaluation is None:
        lacks.append("no evaluation: labctl eval")
    elif facts.here is None:
        lacks.append("no evaluation on this machine: labctl eval")
    elif facts.server is None and facts.server_accuracy is None:
        lacks.append("no evaluation on the server: labctl eval --on-server")
    if not facts.scalars.series:
        lacks.append("no curves: the run logged no TensorBoard scalars to logs/")
    if not facts.samples:
        lacks.append("no telemetry: the run was too short, or its server's watchdog did not run")
    return tuple(lacks)
