"""Runs as they would be, in figures: telemetry, curves and a record made to measure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from labctl.cli.groups import COMMANDS
from labctl.insight.explain.diagnosis import diagnose
from labctl.insight.explain.evidence import Finding, RunData, Unknown
from labctl.insight.scalars import Scalars, Series
from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Run

GIB = 1024**3
COMMAND = ("python", "train.py", "--lr", "0.01", "--batch-size", "64")


def run(**fields: Any) -> Run:
    known: dict[str, Any] = {
        "id": "night",
        "lab_id": "lab",
        "server_id": "server",
        "state": "exited",
        "exit_code": 0,
        "summary": "done",
        "command": COMMAND,
        "started_at": 1000.0,
        "ended_at": 2000.0,
    }
    return Run(**{**known, **fields})


def series(tag: str, values: Sequence[float], every: int = 10) -> Series:
    steps = tuple(every * (number + 1) for number in range(len(values)))
    times = tuple(1000.0 + number for number in range(len(values)))
    return Series(tag=tag, steps=steps, values=tuple(values), times=times)


def gpu(**fields: Any) -> GpuSample:
    known: dict[str, Any] = {
        "uuid": "GPU-1",
        "name": "NVIDIA T4",
        "use_percent": 90.0,
        "memory_bytes": 8 * GIB,
        "memory_total_bytes": 16 * GIB,
        "power_w": 60.0,
        "power_limit_w": 70.0,
        "temperature_c": 70.0,
        "sm_clock_mhz": 1500.0,
        "sm_clock_max_mhz": 1590.0,
    }
    return GpuSample(**{**known, **fields})


def samples(
    *gpus: GpuSample,
    count: int = 30,
    change: Callable[[int], dict[str, Any]] = lambda number: {},
    **fields: Any,
) -> tuple[Sample, ...]:
    """One every 10 s; `change` says what differs from one to the next."""
    known: dict[str, Any] = {
        "cpu_cores": 3.0,
        "cores": 8.0,
        "memory_bytes": 2 * GIB,
        "memory_limit_bytes": 8 * GIB,
        "shm_bytes": 0,
        "shm_limit_bytes": 2 * GIB,
        "gpus": gpus,
    }
    return tuple(
        Sample(at=1000.0 + 10 * number, **{**known, **fields, **change(number)})
        for number in range(count)
    )


def material(*curves: Series, **fields: Any) -> RunData:
    """A run that ended well, with a log and options, unless said otherwise."""
    known: dict[str, Any] = {
        "run": run(),
        "scalars": Scalars(series=curves, files=1 if curves else 0),
        "log": "epoch 1\n",
        "options": frozenset({"--lr", "--batch-size", "--workers", "--accumulate", "--epochs"}),
        "now": 3000.0,
    }
    return RunData(**{**known, **fields})


def findings(made: RunData) -> dict[str, Finding]:
    """By rule. A next step that begins with `labctl` is one whole command."""
    found = diagnose(made).findings
    for one in found:
        if one.next.startswith("labctl "):
            words = shlex.split(one.next, comments=True)
            assert words[1] in COMMANDS
            assert not any(word.endswith((",", ";")) for word in words), one.next
    return {one.rule: one for one in found}


def unknown(made: RunData) -> dict[str, Unknown]:
    return {one.rule: one for one in diagnose(made).unknown}
