"""What a sweep does: its parameters, metric, limits and command, from lab.yaml and options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from labctl.config import LabConfig
from labctl.config.reader import find_nearest
from labctl.config.sweep import (
    MOST_PARAMETERS,
    Direction,
    Parameter,
    Pruner,
    Sampler,
    parse_metric,
    parse_parameter,
    parse_parameter_name,
)
from labctl.errors import UsageError
from labctl.model import NAME_PATTERN, Value

DEFAULT_STUDY = "sweep"
# A run's name is the study's with the number of the trial and of its attempt.
LONGEST_STUDY = 24
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
# what an error adds to the typed options
_EXAMPLE_COMMAND = ("python", "train.py")
_EXAMPLE_PARAMETERS = ("lr=1e-4..1e-1:log",)
_EXAMPLE_METRIC = "val/loss"
EXAMPLE = (
    f"labctl sweep --param {_EXAMPLE_PARAMETERS[0]} --metric {_EXAMPLE_METRIC} --direction minimize"
)


class SweepPlan(Value, frozen=True):
    """One sweep. `trials` counts those of the whole study; `parallel` is 0 for one on each server.

    `space`, `metric`, `direction` and `command` make the trials of a study comparable; the other
    fields may change when a sweep continues.
    """

    study: str
    space: dict[str, Parameter]
    metric: str
    direction: Direction
    command: tuple[str, ...]
    trials: int
    parallel: int
    budget_usd: float | None
    sampler: Sampler
    seed: int
    pruner: Pruner
    startup: int
    warmup: int


class SweepOptions(Value, frozen=True):
    """The options of the command line; None, "" and () where lab.yaml decides."""

    study: str = DEFAULT_STUDY
    parameters: tuple[str, ...] = ()
    metric: str = ""
    direction: Direction | None = None
    trials: int | None = None
    parallel: int | None = None
    budget_usd: float | None = None
    seed: int | None = None
    command: tuple[str, ...] = ()

    def format_call(self, study: str, *more: str) -> str:
        """Return the command that sweeps with these options in `study`; `more` are others of it."""
        words = ["labctl", "sweep", "--study", study, *more]
        for text in self.parameters:
            words += ["--param", text]
        budget = None if self.budget_usd is None else f"{self.budget_usd:g}"
        options: dict[str, object] = {
            "--metric": self.metric or None,
            "--direction": self.direction,
            "--trials": self.trials,
            "--parallel": self.parallel,
            "--budget": budget,
            "--seed": self.seed,
        }
        for name, value in options.items():
            words += [] if value is None else [name, str(value)]
        words += ["--", *self.command] if self.command else []
        return shlex.join(words)


NO_OPTIONS = SweepOptions()


def build_plan(config: LabConfig, options: SweepOptions) -> SweepPlan:
    """Return the plan; UsageError if parameters, metric or command are missing or wrong."""
    sweep = config.sweep
    require_study_name(options.study)
    space = {**sweep.parameters, **_parse_parameters(options.parameters)}
    metric = _parse_metric(options.metric) or sweep.metric
    direction = options.direction or sweep.direction
    command = options.command or config.run
    _require_complete(space, metric, direction, command, options)
    assert direction is not None
    return SweepPlan(
        study=options.study,
        space=space,
        metric=metric,
        direction=direction,
        command=command,
        trials=sweep.trials if options.trials is None else options.trials,
        parallel=sweep.parallel if options.parallel is None else options.parallel,
        budget_usd=sweep.budget_usd if options.budget_usd is None else options.budget_usd,
        sampler=sweep.sampler,
        seed=sweep.seed if options.seed is None else options.seed,
        pruner=sweep.pruner,
        startup=sweep.startup,
        warmup=sweep.warmup,
    )


def require_study_name(name: str) -> None:
    """UsageError for a name that cannot begin the names of runs."""
    if not NAME_PATTERN.fullmatch(name) or len(name) > LONGEST_STUDY:
        raise UsageError(
            f"{name!r} is not the name of a study",
            why=f"use at most {LONGEST_STUDY} lower-case letters, digits and `-`",
            hint="labctl sweep --study first",
        )


def _parse_parameters(texts: Sequence[str]) -> dict[str, Parameter]:
    parameters = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            if not equals:
                raise ValueError("write NAME=VALUES, such as lr=1e-4..1e-1:log or batch=32,64")
            parameters[parse_parameter_name(name)] = parse_parameter(values)
        except ValueError as error:
            raise UsageError(
                f"--param {text!r} is not a parameter", why=str(error), hint=EXAMPLE
            ) from None
    return parameters


def _parse_metric(text: str) -> str:
    try:
        return text and parse_metric(text)
    except ValueError as error:
        raise UsageError(f"--metric: {error}", hint=EXAMPLE) from None


def _require_complete(
    space: Mapping[str, Parameter],
    metric: str,
    direction: Direction | None,
    command: Sequence[str],
    options: SweepOptions,
) -> None:
    def complete(**added: Any) -> str:
        return msgspec.structs.replace(options, **added).format_call(options.study)

    if not command:
        raise UsageError(
            "nothing to run",
            why="lab.yaml has no `run:` and nothing follows `--`",
            hint=complete(command=_EXAMPLE_COMMAND),
        )
    if not space:
        raise UsageError(
            "the sweep has no parameters",
            why="lab.yaml has no `parameters:` under `sweep:`, and --param was not given",
            hint=complete(parameters=_EXAMPLE_PARAMETERS),
        )
    if len(space) > MOST_PARAMETERS:
        raise UsageError(
            f"the sweep has {len(space)} parameters",
            why=f"at most {MOST_PARAMETERS} are possible; fewer are found in fewer trials",
            hint="remove some under `sweep: parameters:` in lab.yaml",
        )
    if not metric:
        raise UsageError(
            "the sweep has no metric",
            why="lab.yaml has no `metric:` under `sweep:`, and --metric was not given. It names a "
            "number in logs/progress.json or a curve of TensorBoard",
            hint=complete(metric=_EXAMPLE_METRIC),
        )
    if direction is None:
        raise UsageError(
            f"should {metric} become small or large?",
            why="lab.yaml has no `direction:` under `sweep:`, and --direction was not given",
            hint="\n".join(complete(direction=one) for one in _DIRECTIONS),
        )


def build_command(command: Sequence[str], params: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of a trial: the plan's with its parameters as options at the end."""
    return (*command, *list_options(params))


def list_options(params: Mapping[str, str]) -> tuple[str, ...]:
    """Return parameters as the words of a command line. A value like an option needs a `=`."""
    words: list[str] = []
    for name, value in params.items():
        words += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
    return tuple(words)


def describe_params(params: Mapping[str, str]) -> str:
    """Write parameters as options, with numbers of at most four digits."""
    return shlex.join(list_options({name: shorten_number(v) for name, v in params.items()}))


def shorten_number(text: str) -> str:
    """Write a long number with four digits; other texts are unchanged."""
    try:
        return text if len(text) <= 6 else f"{float(text):.4g}"
    except ValueError:
        return text


def make_run_id(study: str, number: int, attempt: int) -> str:
    """Return the name of the run of a trial. Repeated for the same trial, it is the same."""
    return f"{study}-{number}" + (f"-try{attempt}" if attempt > 1 else "")


def describe_changes(before: SweepPlan, after: SweepPlan) -> list[str]:
    """List what makes trials of two plans not comparable; empty if they are."""
    changes = []
    for name in dict.fromkeys([*before.space, *after.space]):
        old, new = before.space.get(name), after.space.get(name)
        if old != new:
            near = "" if new else find_nearest(name, set(after.space) - set(before.space))
            texts = [one.text if one else "not there" for one in (old, new)]
            changes.append(f"{name}: {texts[0]} -> {texts[1]}" + (f" ({near}?)" if near else ""))
    for key in ("metric", "direction"):
        if getattr(before, key) != getattr(after, key):
            changes.append(f"{key}: {getattr(before, key)} -> {getattr(after, key)}")
    if before.command != after.command:
        changes.append(f"command: {shlex.join(before.command)} -> {shlex.join(after.command)}")
    return changes


def is_same_without_metric(before: SweepPlan, after: SweepPlan) -> bool:
    """Whether only metric and direction differ."""
    changed = msgspec.structs.replace(before, metric=after.metric, direction=after.direction)
    return not describe_changes(changed, after)
