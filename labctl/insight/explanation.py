"""Why a run is slow or wrong: gathers what the run left and applies the rules of `explain/`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.errors import LabError
from labctl.events import Note, Step
from labctl.insight.explain.diagnosis import verdict
from labctl.insight.explain.evidence import Finding, Fit, Material, Unknown
from labctl.insight.explain.memory import OutOfMemory, ran_out
from labctl.insight.scalars import Flaw, Scalars, read_scalars
from labctl.insight.telemetry import TELEMETRY_FILE, read_samples
from labctl.model import Run, Value
from labctl.runs import runs
from labctl.servers.context import Ground

if TYPE_CHECKING:
    from labctl.estimate.constants import Precision
    from labctl.estimate.plan import Plan

LOG_TAIL_BYTES = 256 * 1024
# Of event files: reading as much of scalars takes about a second, which is shown.
SLOW_BYTES = 4 * 1024**2
# What Python with PyTorch takes of a container's memory before there is a model: an assumption.
PROCESS_BYTES = 256 * 1024**2
MOST_SCRIPTS = 50
LARGEST_SCRIPT_BYTES = 256 * 1024
OPTION = re.compile(r"""["'](--[a-z][a-z0-9_-]{0,40})["']""")
BUILDS = re.compile(r"^def build_model\b", re.MULTILINE)


class Read(Value, frozen=True):
    """What an explanation rests on. `flaws` are parts of event files that could not be read."""

    samples: int
    curves: int
    points: int
    log_bytes: int
    flaws: tuple[Flaw, ...]


class Explanation(Value, frozen=True):
    """`findings` in the order in which they matter; `unknown` is what could not be told."""

    run: Run
    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]
    read: Read


def explain(ground: Ground, run: Run) -> Explanation:
    """Everything that the rules say of a run, from what is here of it."""
    if run.id.startswith(runs.PROFILES):
        from labctl.insight.profile import own_command

        run = own_command(run)
    material = _gathered(ground, run)
    found = ran_out(material)
    if found is not None:
        material = msgspec.structs.replace(material, fit=_fit(ground, material, found))
    said = verdict(material)
    scalars = material.scalars
    return Explanation(
        run=run,
        findings=said.findings,
        unknown=said.unknown,
        read=Read(
            samples=len(material.samples),
            curves=len(scalars.series),
            points=sum(len(one.steps) for one in scalars.series),
            log_bytes=len(material.log.encode()),
            flaws=scalars.flaws,
        ),
    )


def _directory(ground: Ground, run: Run) -> Path:
    return ground.config.root / "runs" / run.id


def _gathered(ground: Ground, run: Run) -> Material:
    directory = _directory(ground, run)
    try:
        return Material(
            run=run,
            samples=read_samples(directory / "logs" / TELEMETRY_FILE),
            scalars=_scalars(ground, directory),
            log=_tail(directory / "logs" / "run.log"),
            options=_options(ground.config.root),
            now=time.time(),
        )
    except OSError as error:
        raise LabError(
            f"{error.filename} cannot be read",
            why=str(error.strerror),
            hint=f"labctl pull {run.id}",
        ) from error


def _scalars(ground: Ground, directory: Path) -> Scalars:
    """From the logs; where those hold none, from all that the run brought home."""
    sizes = [path.stat().st_size for path in directory.rglob("*tfevents*") if path.is_file()]
    step = Step(name="reading TensorBoard's curves")
    slow = sum(sizes) > SLOW_BYTES
    if slow:
        ground.reporter.emit(step)
    found = read_scalars(directory / "logs")
    found = found if found.files else read_scalars(directory)
    if slow:
        ground.reporter.emit(msgspec.structs.replace(step, done=True))
    return found


def _tail(path: Path) -> str:
    """The end of a log, as text."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace")


def _scripts(root: Path) -> dict[str, str]:
    """The lab's own Python files, by name."""
    found = {}
    for path in sorted(root.glob("*.py"))[:MOST_SCRIPTS]:
        if path.is_file() and path.stat().st_size <= LARGEST_SCRIPT_BYTES:
            found[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _options(root: Path) -> frozenset[str]:
    """What looks like an option in the lab's scripts: commands that change one can be told."""
    every = _scripts(root).values()
    return frozenset(option for text in every for option in OPTION.findall(text))


def _fit(ground: Ground, material: Material, found: OutOfMemory) -> Fit | None:
    """The plan of the model that the run's script builds; None where it builds none for us."""
    from labctl.estimate.plan import Plan
    from labctl.insight.model_measurement import Source, measured

    scripts = _scripts(ground.config.root)
    named = [Path(word).name for word in material.run.command if word.endswith(".py")]
    name = next((one for one in named if BUILDS.search(scripts.get(one, ""))), "")
    if not name or not found.limit_bytes:
        return None
    root = ground.config.root
    source = Source(file=root / name, function="build_model", root=root)
    plan = Plan(precision=_precision(material.log), optimizer="adamw")
    try:
        model = measured(source, plan, ground.reporter)
    except LabError as error:
        text = f"no plan of its memory: {error.what}"
        ground.reporter.emit(Note(text=text, level="warning"))
        return None
    return _fitting(msgspec.structs.replace(plan, measured=model), found, f"{name}:build_model")


def _precision(log: str) -> Precision:
    if "bfloat16" in log:
        return "bf16"
    return "fp16" if "float16" in log else "fp32"


def _fitting(plan: Plan, found: OutOfMemory, target: str) -> Fit:
    """The largest power of two that fits, by the sum that `labctl estimate` shows."""
    from labctl.estimate.memory import memory

    assert plan.measured is not None
    item = plan.measured.item_bytes
    of_one = memory(plan)
    fixed = of_one.total_bytes - item
    if found.whose == "container":
        fixed += PROCESS_BYTES - of_one.overhead_bytes  # no CUDA takes it there
    room = found.limit_bytes - fixed
    most = room // item if item > 0 and room > 0 else 0
    return Fit(
        target=target,
        item="x".join(map(str, plan.measured.input_shape)) or "its example's shape",
        fixed_bytes=fixed,
        item_bytes=item,
        limit_bytes=found.limit_bytes,
        batch=1 << (most.bit_length() - 1) if most else 0,
    )
