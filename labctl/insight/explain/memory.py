"""Rules about memory that ran out or will run out, of the GPU and of the container."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from labctl.insight.explain.curves import read_setting
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    Unknown,
    from_log,
    from_record,
    from_telemetry,
)
from labctl.insight.explain.levers import list_levers
from labctl.insight.explain.samples import drop_start, fit_slope
from labctl.insight.explain.sources import CUDA_NOTES, DOCKER_LIMITS, FAQ
from labctl.insight.explain.wording import (
    ACCUMULATE,
    BATCH,
    GIB,
    WORKERS,
    build_command,
    find_numeric_option,
    percent,
)
from labctl.insight.telemetry import Sample
from labctl.model import Run, Value
from labctl.text import bytes_text, duration_text

LEAST_SAMPLES = 12
# The share of the variance that a straight line must explain in a steady rise...
STRAIGHT = 0.9
# ...and the least rise, as a share of the first value. Both are rules of thumb.
RISE_SHARE = 0.1
NEARLY_FULL = 0.95
OUT = re.compile(r"(CUDA|HIP) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
TRIED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")
CAPACITY = re.compile(r"([\d.]+) (MiB|GiB) total capacity|total capacity of ([\d.]+) (MiB|GiB)")
IN_LOG = re.compile(r"\bbatch(?:es|_size| size)?(?: of)?[ =:]+(\d+)\b")
UNITS = {"MiB": 1024**2, "GiB": GIB}


class OutOfMemory(Value, frozen=True):
    """Whose memory ran out, and the details. `batch` is the run's batch size, 0 if unknown."""

    whose: Literal["gpu", "container"]
    limit_bytes: int
    batch: int
    evidence: tuple[Evidence, ...]
    where_batch: str = ""


def find_out_of_memory(material: RunData) -> OutOfMemory | None:
    """Find out whether memory ran out in this run, and whose; None if it did not."""
    batch, where = find_batch_size(material)
    lines = [line for line in material.log.splitlines() if OUT.search(line)]
    if lines:
        return OutOfMemory(
            whose="gpu",
            limit_bytes=_parse_capacity(lines[-1]) or _find_gpu_memory(material.samples),
            batch=batch,
            evidence=(from_log(lines[-1].strip()[:300]),),
            where_batch=where,
        )
    limit = _find_exceeded_limit(material.run)
    if limit is not None:
        limits = [
            sample.memory_limit_bytes for sample in material.samples if sample.memory_limit_bytes
        ]
        return OutOfMemory(
            whose="container",
            limit_bytes=limit or (limits[-1] if limits else 0),
            batch=batch,
            evidence=(from_record(material.run.summary), *_peak_evidence(material.samples, limit)),
            where_batch=where,
        )
    return None


def _find_exceeded_limit(run: Run) -> int | None:
    """Return the memory limit in bytes at which the run was killed, 0 for the server's memory.

    None if it was not. Records of earlier versions have no field for it: only their text says it.
    """
    if isinstance(run.oom_limit_bytes, int):
        return run.oom_limit_bytes
    if not run.summary.startswith("out of memory"):
        return None
    match = re.search(r"its limit of ([\d.]+) GiB", run.summary)
    return round(float(match[1]) * GIB) if match else 0


def find_batch_size(material: RunData) -> tuple[int, str]:
    """Return (batch size, its source): the command, the curves, else the log; 0 if unknown."""
    option = find_numeric_option(material, BATCH)
    if option:
        return int(option), "the command"
    logged_size = read_setting(material.scalars, "batch_size")
    if logged_size:
        return int(logged_size), "setup/batch_size"
    match = IN_LOG.search(material.log)
    return (int(match[1]), "the log") if match else (0, "")


def _parse_capacity(line: str) -> int:
    match = CAPACITY.search(line)
    if not match:
        return 0
    size, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return round(float(size) * UNITS[unit])


def _find_gpu_memory(samples: tuple[Sample, ...]) -> int:
    totals = [gpu.memory_total_bytes for sample in samples for gpu in sample.gpus]
    return max((total for total in totals if total), default=0)


def _peak_evidence(samples: tuple[Sample, ...], limit: int) -> tuple[Evidence, ...]:
    """Return the peak of the samples, unless the memory filled up between two of them."""
    peak = max((sample.memory_bytes or 0 for sample in samples), default=0)
    if not peak or peak < limit / 2:
        return ()
    return (from_telemetry(f"container memory: peak use {bytes_text(peak)}"),)


def check_out_of_memory(material: RunData) -> Iterator[Answer]:
    """Report memory that ran out, with the estimate's numbers and the batch to use."""
    failure = find_out_of_memory(material)
    if failure is None:
        return
    gpu = failure.whose == "gpu"
    why, evidence = _explain_size(material, failure)
    yield Finding(
        rule="gpu-out-of-memory" if gpu else "out-of-memory",
        level="problem",
        what="the GPU's memory ran out" if gpu else "the container's memory ran out",
        why=why,
        evidence=(*failure.evidence, *evidence),
        next=_suggest_smaller(material, failure),
        source=CUDA_NOTES if gpu else DOCKER_LIMITS,
        levers=list_levers(material, failure.batch, _choose_batch(material, failure)),
    )
    if material.fit is None and failure.batch:
        yield Unknown(
            rule="memory-of-levers",
            what="how much memory each of the levers would need",
            why="the run's script has no function build_model that PyTorch here can call",
            next="write build_model():\nlabctl docs estimate\nThen:\nlabctl explain",
        )


def _explain_size(material: RunData, failure: OutOfMemory) -> tuple[str, tuple[Evidence, ...]]:
    """Return (why memory ran out, evidence from the estimate)."""
    fit = material.fit
    used = f"a batch of {failure.batch} ({failure.where_batch})" if failure.batch else "its batch"
    if fit is None and failure.whose == "gpu":
        return f"activations grow with the batch size; {used} was too large", ()
    if fit is None:
        what = "data kept in memory, DataLoader workers and activations add up"
        return f"{what}; {used} was too large" if failure.batch else what, ()
    evidence = [
        Evidence(
            text=f"estimate: {bytes_text(fit.fixed_bytes)} for weights, gradients, optimizer and "
            f"overhead, and {bytes_text(fit.item_bytes)} for each item of {fit.item}",
            source=f"labctl estimate {fit.target}",
        )
    ]
    if not failure.batch:
        return "weights, gradients, optimizer and activations do not fit", tuple(evidence)
    total = fit.fixed_bytes + failure.batch * fit.item_bytes
    text = f"with {used} that is {bytes_text(total)}, of {bytes_text(fit.limit_bytes)} available"
    evidence.append(Evidence(text=text, source=f"labctl estimate {fit.target}"))
    if total <= fit.limit_bytes:
        why = (
            f"the estimate fits, so something else took the memory: items larger than {fit.item}, "
            "stored data or results (a list of losses with their graphs), DataLoader workers, or "
            "another process"
        )
    else:
        why = f"{used} does not fit"
    return why, tuple(evidence)


def _suggest_smaller(material: RunData, failure: OutOfMemory) -> str:
    """Suggest the command with a batch that fits."""
    fit = material.fit
    if fit is not None and fit.batch == 0:
        larger = "use checkpointing, a smaller model, or a GPU with more memory:\nlabctl offers"
        raise_limit = "raise `memory` under `limits` in lab.yaml, then:\nlabctl run"
        return larger if failure.whose == "gpu" else raise_limit
    batch = _choose_batch(material, failure)
    if batch < 1:
        if failure.whose == "gpu":
            return "halve the batch size and accumulate gradients over two batches"
        return (
            "use fewer DataLoader workers, a smaller batch, or more memory (`limits` in lab.yaml)"
        )
    parts = -(-failure.batch // batch) if failure.batch else 1
    changes: dict[tuple[str, ...], str] = {BATCH: str(batch)}
    if parts > 1:
        changes[ACCUMULATE] = str(parts)
    otherwise = f"use a batch size of {batch}, and accumulate gradients over {parts} batches"
    return build_command(material, changes, otherwise)


def _choose_batch(material: RunData, failure: OutOfMemory) -> int:
    """Return the batch to try: half of the failed one, or less if the estimate says so."""
    batch, fit = failure.batch // 2, material.fit
    if fit is None:
        return batch
    return min(batch, fit.batch) if batch else fit.batch


def check_rising_memory(material: RunData) -> Iterator[Answer]:
    """Find memory that rises steadily, of the container and of each GPU."""
    samples = drop_start(material.samples)
    if len({sample.attempt for sample in samples}) > 1:
        last = samples[-1].attempt
        samples = tuple(sample for sample in samples if sample.attempt == last)
    points = [(sample.at, sample.memory_bytes) for sample in samples if sample.memory_bytes]
    limits = [sample.memory_limit_bytes for sample in samples if sample.memory_limit_bytes]
    yield from _find_rise(material, points, limits[-1] if limits else 0, "the container's memory")
    for number in range(max((len(sample.gpus) for sample in samples), default=0)):
        rows = [sample.gpus[number] for sample in samples if len(sample.gpus) > number]
        ats = [sample.at for sample in samples if len(sample.gpus) > number]
        points = [(at, g.memory_bytes) for at, g in zip(ats, rows, strict=True) if g.memory_bytes]
        totals = [gpu.memory_total_bytes for gpu in rows if gpu.memory_total_bytes]
        name = f"the memory of GPU {number}"
        yield from _find_rise(material, points, totals[-1] if totals else 0, name)


def _find_rise(
    material: RunData, points: list[tuple[float, int]], limit: int, whose: str
) -> Iterator[Answer]:
    if len(points) < LEAST_SAMPLES:
        return
    begin = points[0][0]
    per_s, straight = fit_slope([(at - begin, float(size)) for at, size in points])
    took_s = points[-1][0] - begin
    risen = per_s * took_s
    if straight < STRAIGHT or risen < RISE_SHARE * points[0][1]:
        return
    evidence = [
        from_telemetry(
            f"from {bytes_text(points[0][1])} to {bytes_text(points[-1][1])} "
            f"in {duration_text(took_s)}: {bytes_text(per_s * 3600)} an hour; "
            f"a straight line explains {percent(straight)} of it"
        )
    ]
    full_in = ""
    if limit > points[-1][1]:
        left_s = (limit - points[-1][1]) / per_s
        full_in = f"; at this rate it will be full in {duration_text(left_s)}"
        evidence.append(from_telemetry(f"its limit is {bytes_text(limit)}"))
    gpu = "GPU" in whose
    yield Finding(
        rule="gpu-memory-creeps" if gpu else "memory-creeps",
        level="problem",
        what=f"{whose} rises steadily{full_in}",
        why="something accumulates from step to step: `total += loss` keeps every graph; or a list "
        "of outputs, an unbounded cache, or DataLoader workers that copy Python objects",
        evidence=tuple(evidence),
        next="store loss.item() or .detach() instead; use arrays instead of lists in the "
        "dataset" + ("" if gpu else _suggest_fewer_workers(material)),
        source=FAQ,
    )


def _suggest_fewer_workers(material: RunData) -> str:
    command = build_command(material, {WORKERS: "0"}, "")
    return f"\nto check whether the workers are the cause:\n{command}" if command else ""


def check_nearly_full(material: RunData) -> Iterator[Answer]:
    """Warn about a container whose memory is nearly full."""
    samples = drop_start(material.samples)
    if find_out_of_memory(material) is not None or not samples:
        return
    shares = [
        sample.memory_bytes / sample.memory_limit_bytes
        for sample in samples
        if sample.memory_bytes and sample.memory_limit_bytes
    ]
    if shares and max(shares) >= NEARLY_FULL:
        limit = next(s.memory_limit_bytes for s in reversed(samples) if s.memory_limit_bytes)
        yield Finding(
            rule="memory-nearly-full",
            level="advice",
            what="the container's memory is nearly full",
            why="the kernel kills the run when it reaches its limit",
            evidence=(from_telemetry(f"peak use {percent(max(shares))} of {bytes_text(limit)}"),),
            next="use fewer workers or a smaller batch, or raise `memory` below `limits`",
            source=DOCKER_LIMITS,
        )


RULES = (check_out_of_memory, check_rising_memory, check_nearly_full)
