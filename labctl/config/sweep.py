"""`sweep:` in lab.yaml: the parameters that a sweep tries, and what it optimizes.

A parameter is written as a text (`1e-4..1e-1:log`, `1..8`, `32,64`), as a list of choices, or as a
mapping with `type`. The command line takes the text.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, TypeAlias

import msgspec

from labctl.config.document import Node, escape, quote
from labctl.config.reader import Parsed, make_problem
from labctl.config.scalars import parse_price
from labctl.errors import Problem
from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import decimal  # few sweeps have a step

Kind: TypeAlias = Literal["float", "int", "choice"]
Direction: TypeAlias = Literal["minimize", "maximize"]
Sampler: TypeAlias = Literal["tpe", "random"]
Pruner: TypeAlias = Literal["none", "median", "halving"]

DEFAULT_TRIALS = 20
MOST_TRIALS = 10_000
MOST_PARALLEL = 64
MOST_PARAMETERS = 50
MOST_CHOICES = 100
LONGEST_CHOICE = 200
LONGEST_METRIC = 300
# Larger whole numbers are not exact as floats, which the study's file stores.
LARGEST_INT = 2**53
_EXAMPLE = "write 1e-4..1e-1:log, 1..8 or 32,64"
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})((?::[a-z]+(?:=[^:]*)?)*)")
_WHOLE = re.compile(r"[+-]?[0-9]+")


class Parameter(Value, frozen=True):
    """The values that a parameter may have: a range with both ends, or choices as typed.

    `log` draws from the range's logarithm. `step` is the distance between values, 0 for any value
    (of whole numbers, for 1).
    """

    kind: Kind = msgspec.field(name="type")
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float = 0.0
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "choice":
            _check_choices(self)
        else:
            _check_range(self)

    @property
    def text(self) -> str:
        """The parameter as it is typed."""
        if self.kind == "choice":
            return ",".join(self.values)
        low, high = (format_number(end, self.kind) for end in (self.low, self.high))
        step = f":step={format_number(self.step, self.kind)}" if self.step else ""
        return f"{low}..{high}{':log' if self.log else ''}{step}"


def format_number(value: float, kind: Kind) -> str:
    """Write a number so that it is read back as the same one: with a dot or exponent for floats."""
    return str(int(value)) if kind == "int" else repr(float(value))


def _check_choices(parameter: Parameter) -> None:
    values = parameter.values
    if parameter.low or parameter.high or parameter.log or parameter.step:
        raise ValueError("a choice has `values`, and no low, high, log or step")
    if not 2 <= len(values) <= MOST_CHOICES:
        raise ValueError(f"needs 2 to {MOST_CHOICES} values; {_EXAMPLE}")
    for value in values:
        if not value or len(value) > LONGEST_CHOICE or not value.isprintable():
            raise ValueError(f"{quote(value)} is not a value: write 1 to {LONGEST_CHOICE} letters")
        if values.count(value) > 1:
            raise ValueError(f"{quote(value)} is listed twice")


def _check_range(parameter: Parameter) -> None:
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.values:
        raise ValueError("`values` belong to `type: choice`")
    if not low < high:
        raise ValueError("low must be less than high")
    if not math.isfinite(high - low):
        raise ValueError("the range is too large for a number of 64 bits")
    if parameter.log and low <= 0:
        raise ValueError("log needs a range above 0")
    if parameter.log and step:
        raise ValueError("log and step exclude each other")
    if step < 0 or step > high - low:
        raise ValueError("step must be positive, and no larger than the range")
    if step and (high - low) / step > LARGEST_INT:
        raise ValueError(f"step is too small: the range has more than {LARGEST_INT} steps")
    if step and _find_remainder(low, high, step):
        raise ValueError("the difference of low and high must be a multiple of step")
    if parameter.kind == "int":
        if not all(float(number).is_integer() for number in (low, high, step)):
            raise ValueError("low, high and step of `type: int` are whole numbers")
        if max(abs(low), abs(high)) > LARGEST_INT:
            raise ValueError(f"whole numbers are at most {LARGEST_INT}")


def _find_remainder(low: float, high: float, step: float) -> decimal.Decimal:
    """Return what is left of the range after its last step, without the errors of floats."""
    exact_low, exact_high, exact_step = (decimal.Decimal(repr(one)) for one in (low, high, step))
    return (exact_high - exact_low) % exact_step


def parse_parameter(text: str) -> Parameter:
    """Parse `1e-4..1e-1:log`, `1..8`, `0.1..0.5:step=0.1` or `32,64`."""
    match = _RANGE.fullmatch(text)
    if match is None:
        if ".." in text:
            raise ValueError(f"{quote(text)} is not a range; {_EXAMPLE}")
        return Parameter(kind="choice", values=tuple(part.strip() for part in text.split(",")))
    low, high, options = match.groups()
    log, step = False, 0.0
    for option in options.split(":")[1:]:
        name, _, value = option.partition("=")
        if name == "log" and not value:
            log = True
        elif name == "step" and re.fullmatch(_NUMBER, value):
            step = float(value)
        else:
            raise ValueError(f"{quote(option)} is not an option of a range: write log or step=2")
    kind: Kind = "int" if _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high) else "float"
    return Parameter(kind=kind, low=float(low), high=float(high), log=log, step=step)


def parse_parameter_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError(
            f"{quote(text)} is not the name of an option: write lr for --lr, with letters, digits, "
            "`.`, `_` and `-`"
        )
    return text


def parse_metric(text: str) -> str:
    if not text or len(text) > LONGEST_METRIC or not text.isprintable():
        raise ValueError(f"{quote(text[:LONGEST_METRIC])} is not the name of a metric")
    return text


def _parse_count(text: str, most: int, what: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise ValueError(f"{quote(text)} is not {what} from {least} to {most}")
    return int(text)


def parse_trials(text: str) -> int:
    return _parse_count(text, MOST_TRIALS, "a number of trials")


def parse_parallel(text: str) -> int:
    return _parse_count(text, MOST_PARALLEL, "a number of trials at a time")


def parse_seed(text: str) -> int:
    return _parse_count(text, 2**32 - 1, "a seed", least=0)


def parse_start(text: str) -> int:
    return _parse_count(text, MOST_TRIALS, "a number", least=0)


Choices: TypeAlias = tuple[str, ...]
WrittenParameter: TypeAlias = Annotated[Parameter, Parsed(parse_parameter)] | Choices | Parameter


class SweepFile(Value, frozen=True):
    """`sweep:` in lab.yaml. The command line overrides `trials`, `parallel`, `budget` and more."""

    parameters: dict[Annotated[str, Parsed(parse_parameter_name)], WrittenParameter] = (
        msgspec.field(default_factory=dict)
    )
    metric: Annotated[str, Parsed(parse_metric)] = ""
    direction: Direction | None = None
    trials: Annotated[int, Parsed(parse_trials)] = DEFAULT_TRIALS
    parallel: Annotated[int, Parsed(parse_parallel)] = 0
    budget: Annotated[float | None, Parsed(parse_price)] = None
    sampler: Sampler = "tpe"
    seed: Annotated[int, Parsed(parse_seed)] = 0
    pruner: Pruner = "median"
    startup: Annotated[int, Parsed(parse_start)] = 5
    warmup: Annotated[int, Parsed(parse_start)] = 0


class SweepConfig(Value, frozen=True):
    """What lab.yaml says of a sweep; no parameters, "" or None where it says nothing.

    `parallel` is 0 for one trial on each server. `budget_usd` limits the cost of all trials.
    `startup` trials run before the pruner ends one, and none ends before its step `warmup`.
    """

    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    metric: str = ""
    direction: Direction | None = None
    trials: int = DEFAULT_TRIALS
    parallel: int = 0
    budget_usd: float | None = None
    sampler: Sampler = "tpe"
    seed: int = 0
    pruner: Pruner = "median"
    startup: int = 5
    warmup: int = 0


def build_sweep(node: Node | None, file: SweepFile, problems: list[Problem]) -> SweepConfig:
    """Return the sweep of a file; add to `problems` the lists that are no choices.

    `node` is that of `sweep`, None without one.
    """
    entries = node.value.get("parameters") if node and isinstance(node.value, dict) else None
    nodes = entries.value if entries and isinstance(entries.value, dict) else {}
    if entries and len(nodes) > MOST_PARAMETERS:
        message = f"has {len(nodes)} parameters; at most {MOST_PARAMETERS} are possible"
        problems.append(make_problem(entries, "sweep.parameters", message))
    parameters = {
        name: written for name, written in file.parameters.items() if isinstance(written, Parameter)
    }
    for name, item in nodes.items():
        if isinstance(item.value, list):
            path = f"sweep.parameters.{escape(name)}"
            values = tuple(one.value for one in item.value if isinstance(one.value, str))
            try:
                parameters[name] = Parameter(kind="choice", values=values)
            except ValueError as error:
                problems.append(make_problem(item, path, str(error)))
    parameters = {name: parameters[name] for name in nodes if name in parameters}
    return SweepConfig(
        parameters=parameters,
        metric=file.metric,
        direction=file.direction,
        trials=file.trials,
        parallel=file.parallel,
        budget_usd=file.budget,
        sampler=file.sampler,
        seed=file.seed,
        pruner=file.pruner,
        startup=file.startup,
        warmup=file.warmup,
    )


def list_sweep_settings(sweep: SweepConfig) -> list[tuple[str, str]]:
    """List (dotted key, value as text) of a sweep; nothing without parameters."""
    if not sweep.parameters:
        return []
    rows = [(f"sweep.parameters.{name}", one.text) for name, one in sweep.parameters.items()]
    return [
        *rows,
        ("sweep.metric", sweep.metric),
        ("sweep.direction", sweep.direction or ""),
        ("sweep.trials", str(sweep.trials)),
        ("sweep.parallel", str(sweep.parallel or "auto")),
        ("sweep.budget", "" if sweep.budget_usd is None else f"{sweep.budget_usd:g}"),
        ("sweep.sampler", sweep.sampler),
        ("sweep.seed", str(sweep.seed)),
        ("sweep.pruner", sweep.pruner),
        ("sweep.startup", str(sweep.startup)),
        ("sweep.warmup", str(sweep.warmup)),
    ]
