"""Explain why a run is slow or wrong: load its logs, and apply the rules of `explain/`."""

from __future__ import annotations

import re
import time
from itertools import islice
from pathlib import Path, PurePosixPath

import msgspec

from labctl.config.schema import ImageConfig
from labctl.errors import LabError
from labctl.events import Step
from labctl.insight.explain.diagnosis import diagnose
from labctl.insight.explain.evidence import Finding, LeftOutPath, RunData, Unknown
from labctl.insight.explain.installs import find_installs
from labctl.insight.explain.memory import find_out_of_memory
from labctl.insight.explain.missing_path import find_missing_path
from labctl.insight.explain.server_commands import ServerCommands
from labctl.insight.memory_fit import estimate_fit, read_scripts
from labctl.insight.model_measurement import suggest_target
from labctl.insight.scalars import Flaw, Scalars, read_scalars
from labctl.insight.telemetry import TELEMETRY_FILE, read_samples
from labctl.lazy import lazy_imports
from labctl.model import Run, Value
from labctl.runs.missing_script import list_scripts
from labctl.servers.context import LabContext
from labctl.sync.ignore import (
    NEVER_AT_TOP,
    IgnoredName,
    IgnoreRule,
    find_ignored_name,
    inclusion_text,
    rule_text,
)
from labctl.wire.containment import is_contained
from labctl.wire.run_ids import PROFILE_PREFIX

with lazy_imports(__name__):
    from labctl.insight import profile

LOG_TAIL_BYTES = 256 * 1024
# Runs install packages before they do anything else.
LOG_HEAD_BYTES = 8 * 1024**2
# Reading more bytes of event files than this takes about a second, so progress is shown.
SLOW_BYTES = 4 * 1024**2
# Entries of a directory that are compared with the ignore rules.
MOST_ENTRIES = 100
OPTION = re.compile(r"""["'](--[a-z][a-z0-9_-]{0,40})["']""")
# A training script that can use several GPUs reads its rank, or leaves that to a library.
DISTRIBUTED = re.compile(r"LOCAL_RANK|init_process_group|accelerate|lightning|deepspeed")
CODE_DIRECTORY = "/lab/code"


class InputSummary(Value, frozen=True):
    """The data behind an explanation. `flaws` are parts of event files that could not be read."""

    samples: int
    curves: int
    points: int
    log_bytes: int
    has_log: bool
    flaws: tuple[Flaw, ...]


class Explanation(Value, frozen=True):
    """`findings` by importance, and `unknown`: questions that the data cannot answer."""

    run: Run
    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]
    read: InputSummary


def explain(context: LabContext, run: Run) -> Explanation:
    """Apply the rules to a run, from its files on this machine."""
    if run.id.startswith(PROFILE_PREFIX):
        run = profile.unwrap_command(run)
    material = load_material(context, run)
    failure = find_out_of_memory(material)
    if failure is not None:
        material = msgspec.structs.replace(material, fit=estimate_fit(context, material, failure))
    diagnosis = diagnose(material)
    commands = ServerCommands(
        server=context.state.get_server(run.server_id),
        lab_server=context.state.get_lab_server(context.lab_id),
    )
    scalars = material.scalars
    return Explanation(
        run=run,
        findings=tuple(map(commands.adapt, diagnosis.findings)),
        unknown=tuple(map(commands.adapt, diagnosis.unknown)),
        read=InputSummary(
            samples=len(material.samples),
            curves=len(scalars.series),
            points=sum(len(series.steps) for series in scalars.series),
            log_bytes=len(material.log.encode()),
            has_log=material.has_log,
            flaws=scalars.flaws,
        ),
    )


def _find_directory(context: LabContext, run: Run) -> Path:
    return context.config.root / "runs" / run.id


def load_material(context: LabContext, run: Run) -> RunData:
    """Read everything that is known about a run from its files on this machine."""
    directory = _find_directory(context, run)
    root = context.config.root
    scripts = read_scripts(root).values()
    try:
        log = _read_log_end(directory / "logs" / "run.log")
        return RunData(
            run=run,
            samples=read_samples(directory / "logs" / TELEMETRY_FILE),
            scalars=_load_scalars(context, directory),
            log=log,
            has_log=(directory / "logs" / "run.log").is_file(),
            options=frozenset(option for text in scripts for option in OPTION.findall(text)),
            is_distributed=any(DISTRIBUTED.search(text) for text in scripts),
            now=time.time(),
            left_out=_find_left_out(context, find_missing_path(log)),
            installs=find_installs(_read_log_start(directory / "logs" / "run.log")),
            model_function=suggest_target(root),
            package_file=_name_package_file(context.config.image),
            scripts=list_scripts(root),
        )
    except OSError as error:
        raise LabError(
            f"{error.filename} cannot be read",
            why=str(error.strerror),
            hint=f"labctl pull {run.id}",
        ) from error


def _load_scalars(context: LabContext, directory: Path) -> Scalars:
    """Read the scalars from the logs; if those have none, from all pulled files of the run."""
    sizes = [path.stat().st_size for path in directory.rglob("*tfevents*") if path.is_file()]
    step = Step(name="reading TensorBoard's curves")
    slow = sum(sizes) > SLOW_BYTES
    if slow:
        context.reporter.emit(step)
    scalars = read_scalars(directory / "logs")
    scalars = scalars if scalars.files else read_scalars(directory)
    if slow:
        context.reporter.emit(msgspec.structs.replace(step, done=True))
    return scalars


def _read_log_end(path: Path) -> str:
    """Read the last LOG_TAIL_BYTES of a log, as text."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace")


def _read_log_start(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(LOG_HEAD_BYTES)


def _name_package_file(image: ImageConfig) -> str:
    """Return what lists the packages of the lab's image; "" if lab.yaml names only an image."""
    return image.environment_file or ("the Dockerfile" if image.build else "")


def _find_left_out(context: LabContext, missing: str) -> LeftOutPath | None:
    """Return the path that the run did not find, if it exists here and is not pushed as code."""
    root, path = context.config.root, PurePosixPath(CODE_DIRECTORY, missing)
    if not missing or not path.is_relative_to(CODE_DIRECTORY):
        return None
    name = str(path.relative_to(CODE_DIRECTORY))
    if not is_contained(name) or not (root / name).exists():
        return None
    for key, source in context.config.data.items():
        if source.path and source.inside_lab and (root / name).is_relative_to(source.path):
            inner = PurePosixPath(key, (root / name).relative_to(source.path))
            return LeftOutPath(path=name, in_data=f"$LABCTL_DATA_DIR/{inner}")
    if name.split("/")[0] in NEVER_AT_TOP:
        return None  # no ignore rule changes that
    if ignored := find_ignored_name(root, name):
        if ignored.is_folder:
            return _describe_left_out(name, ignored.rule, ignored.name, f"{ignored.name}/")
        # The run would not find the other ignored files beside this one, either.
        parent = str(PurePosixPath(name).parent)
        is_alone = parent == "." or sum(map(bool, _check_entries(root, parent))) < 2
        return _describe_left_out(name, ignored.rule, "", name if is_alone else f"{parent}/**")
    entries = _check_entries(root, name)
    if entries and all(entries) and entries[0]:
        return _describe_left_out(name, entries[0].rule, name, f"{name}/**")
    return None


def _describe_left_out(name: str, rule: IgnoreRule, directory: str, excluded: str) -> LeftOutPath:
    return LeftOutPath(
        path=name,
        rule=rule_text(rule),
        directory=directory,
        inclusion=inclusion_text(rule, excluded),
    )


def _check_entries(root: Path, directory: str) -> list[IgnoredName | None]:
    """Return what leaves out each of a directory's first entries, None for one that is pushed."""
    if not (root / directory).is_dir():
        return []
    names = islice(sorted(path.name for path in (root / directory).iterdir()), MOST_ENTRIES)
    return [find_ignored_name(root, f"{directory}/{name}") for name in names]
