"""The input of the rules (`RunData`) and their output (`Finding`, `Unknown`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from labctl.insight.explain.sources import Reference
from labctl.insight.scalars import Scalars
from labctl.insight.telemetry import Sample
from labctl.model import Run, Value

Level = Literal["problem", "advice", "good"]
TELEMETRY = "logs/telemetry.jsonl"
LOG = "logs/run.log"
RECORD = "the run's record"
EVENTS = "TensorBoard"


class Evidence(Value, frozen=True):
    """A measured value or a line of text, and the file that it comes from."""

    text: str = msgspec.field(name="said")
    source: str = msgspec.field(name="of")


class Lever(Value, frozen=True):
    """A way to need less memory: `total_bytes` with it (0: unknown), and its price in time.

    `fits` is None if that is unknown.
    """

    name: str
    total_bytes: int
    fits: bool | None
    price: str
    next: str


class Finding(Value, frozen=True):
    """One result of a rule. `rule` identifies it for programs and never changes.

    `why` explains it, `next` is what to try: a command if there is one. `levers` are several ways
    to choose from.
    """

    rule: str
    level: Level
    what: str
    why: str
    evidence: tuple[Evidence, ...]
    next: str
    source: Reference
    levers: tuple[Lever, ...] = ()


class Unknown(Value, frozen=True):
    """A question that the data cannot answer: why not, and what would answer it."""

    rule: str
    what: str
    why: str
    next: str


Answer = Finding | Unknown


class MemoryFit(Value, frozen=True):
    """An estimate of the model's memory, for the batch that ran out and for the one that fits.

    Bytes as `labctl estimate` counts them: `fixed_bytes` without activations, `item_bytes` for
    each item of the batch, whose shape is `item` ("1x16x16"). `batch` is the largest power of two
    that fits, 0 if not even one item does. `item_flops` are the operations of one item,
    `checkpointed_bytes` the activations of the batch that ran out, with activation checkpointing.
    `precision` is what the run computed in. 0 and "": unknown.
    """

    target: str
    item: str
    fixed_bytes: int
    item_bytes: int
    limit_bytes: int
    batch: int
    item_flops: int = 0
    checkpointed_bytes: int = 0
    precision: str = ""


class LeftOutPath(Value, frozen=True):
    """A file or directory that the run did not find, and what left it out of the push of code.

    `path` is relative to the lab, `rule` is "*.bin in .gitignore". `directory` is set if the rule
    leaves out a whole directory. `inclusion` is the line that would push it ("!/data/ to
    .labignore"). `in_data` is the path in the run if lab.yaml lists it under data:.
    """

    path: str
    rule: str = ""
    directory: str = ""
    inclusion: str = ""
    in_data: str = ""


class PackageInstall(Value, frozen=True):
    """An installation of packages in a run's log: its place there, and its last line."""

    first_byte: int
    last_byte: int
    packages: int
    line: str


class RunData(Value, frozen=True):
    """Everything known about a run. Missing parts are empty.

    `log` is the end of its output; `has_log` says whether the file is on this machine, even if it
    is empty. `options` are those that the lab's scripts accept ("--lr").
    `is_distributed` says whether these scripts can use several GPUs. `now` is Unix time, for an
    active run. `installs` are from the start of the log. `fit` is set if memory ran out and the
    model could be built. `model_function` is what `labctl estimate` would call. `package_file`
    lists the packages of the image that the lab builds. `scripts` are the names of those beside
    lab.yaml.
    """

    run: Run
    samples: tuple[Sample, ...] = ()
    scalars: Scalars = Scalars()
    log: str = ""
    has_log: bool = False
    options: frozenset[str] = frozenset()
    is_distributed: bool = False
    now: float = 0.0
    fit: MemoryFit | None = None
    left_out: LeftOutPath | None = None
    installs: tuple[PackageInstall, ...] = ()
    model_function: str = "FILE.py:FUNCTION"
    package_file: str = ""
    scripts: frozenset[str] = frozenset()

    @property
    def image_name(self) -> str:
        """What the programs and packages of the run come from, for a sentence."""
        return "the image" if self.run.is_container else "the run's environment"

    @property
    def package_list(self) -> str:
        """What a package must be added to."""
        if self.package_file or self.run.is_container:
            return self.package_file or "the image"
        return "the requirements.txt that image: in lab.yaml names"


Rule = Callable[[RunData], Iterator[Answer]]


def from_telemetry(text: str) -> Evidence:
    return Evidence(text=text, source=TELEMETRY)


def from_log(text: str) -> Evidence:
    return Evidence(text=text, source=LOG)


def from_record(text: str) -> Evidence:
    return Evidence(text=text, source=RECORD)


def from_events(text: str) -> Evidence:
    return Evidence(text=text, source=EVENTS)
