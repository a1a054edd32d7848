"""Did memory run out, or will it? The GPU's, and the container's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from labctl.insight.explain.curves import setting
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    Material,
    measured,
    printed,
    recorded,
)
from labctl.insight.explain.samples import settled, slope
from labctl.insight.explain.sources import CUDA_NOTES, DOCKER_LIMITS, FAQ
from labctl.insight.explain.wording import (
    ACCUMULATE,
    BATCH,
    GIB,
    WORKERS,
    again,
    gib,
    given_number,
    minutes,
    percent,
)
from labctl.insight.telemetry import Sample
from labctl.model import Value

LEAST_SAMPLES = 12
# Share of the variance that a steady rise explains...
STRAIGHT = 0.9
# ...and how much it must have risen, as a share of where it began. Both are rules of thumb.
RISE_SHARE = 0.1
NEARLY_FULL = 0.95
OUT = re.compile(r"(CUDA|HIP) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
TRIED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")
CAPACITY = re.compile(r"([\d.]+) (MiB|GiB) total capacity|total capacity of ([\d.]+) (MiB|GiB)")
IN_LOG = re.compile(r"\bbatch(?:es|_size| size)?(?: of)?[ =:]+(\d+)\b")
UNITS = {"MiB": 1024**2, "GiB": GIB}


class OutOfMemory(Value, frozen=True):
    """Whose memory ran out, with what is known of it. `batch` is what the run used, 0 unknown."""

    whose: Literal["gpu", "container"]
    limit_bytes: int
    batch: int
    evidence: tuple[Evidence, ...]
    where_batch: str = ""


def ran_out(material: Material) -> OutOfMemory | None:
    """Whether memory ran out in this run, and where."""
    batch, where = used_batch(material)
    lines = [line for line in material.log.splitlines() if OUT.search(line)]
    if lines:
        return OutOfMemory(
            whose="gpu",
            limit_bytes=_capacity(lines[-1]) or _card_bytes(material.samples),
            batch=batch,
            evidence=(printed(lines[-1].strip()[:300]),),
            where_batch=where,
        )
    if material.run.told.startswith("out of memory"):
        limits = [one.memory_limit_bytes for one in material.samples if one.memory_limit_bytes]
        told = re.search(r"its limit of ([\d.]+) GiB", material.run.told)
        limit = round(float(told[1]) * GIB) if told else (limits[-1] if limits else 0)
        return OutOfMemory(
            whose="container",
            limit_bytes=limit,
            batch=batch,
            evidence=(recorded(material.run.told), *_most(material.samples)),
            where_batch=where,
        )
    return None


def used_batch(material: Material) -> tuple[int, str]:
    """(items of a batch, where that is said): the command, the curves, else the log; 0 unknown."""
    typed = given_number(material, BATCH)
    if typed:
        return int(typed), "the command"
    told = setting(material.scalars, "batch_size")
    if told:
        return int(told), "setup/batch_size"
    found = IN_LOG.search(material.log)
    return (int(found[1]), "the log") if found else (0, "")


def _capacity(line: str) -> int:
    found = CAPACITY.search(line)
    if not found:
        return 0
    size, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return round(float(size) * UNITS[unit])


def _card_bytes(samples: tuple[Sample, ...]) -> int:
    totals = [gpu.memory_total_bytes for one in samples for gpu in one.gpus]
    return max((total for total in totals if total), default=0)


def _most(samples: tuple[Sample, ...]) -> tuple[Evidence, ...]:
    used = [one.memory_bytes for one in samples if one.memory_bytes]
    return (measured(f"its memory: at most {gib(max(used))} was seen in use"),) if used else ()


def exhausted(material: Material) -> Iterator[Answer]:
    """Out of memory, with the plan's numbers and the batch to use."""
    found = ran_out(material)
    if found is None:
        return
    gpu = found.whose == "gpu"
    why, evidence = _plan(material, found)
    yield Finding(
        rule="gpu-out-of-memory" if gpu else "out-of-memory",
        level="problem",
        what="the GPU's memory ran out" if gpu else "the container's memory ran out",
        why=why,
        evidence=(*found.evidence, *evidence),
        next=_smaller(material, found),
        source=CUDA_NOTES if gpu else DOCKER_LIMITS,
    )


def _plan(material: Material, found: OutOfMemory) -> tuple[str, tuple[Evidence, ...]]:
    fit = material.fit
    used = f"a batch of {found.batch} ({found.where_batch})" if found.batch else "its batch"
    if fit is None:
        what = (
            "activations grow with the batch"
            if found.whose == "gpu"
            else ("data kept in memory, DataLoader workers and activations add up")
        )
        return f"{what}; {used} was too much", ()
    evidence = [
        Evidence(
            said=f"plan: {gib(fit.fixed_bytes)} for weights, gradients, optimizer and overhead, "
            f"and {gib(fit.item_bytes)} for each item of {fit.item}",
            of=f"labctl estimate {fit.target}",
        )
    ]
    if not found.batch:
        return "weights, gradients, optimizer and activations did not fit", tuple(evidence)
    total = fit.fixed_bytes + found.batch * fit.item_bytes
    said = f"at {used} that is {gib(total)}, of {gib(fit.limit_bytes)} that can be used"
    evidence.append(Evidence(said=said, of=f"labctl estimate {fit.target}"))
    if total <= fit.limit_bytes:
        why = (
            f"by the plan it should have fitted, so something else took the memory: larger items "
            f"than {fit.item}, data or results that are kept (a list of losses with their graphs), "
            "DataLoader workers, another process"
        )
    else:
        why = f"{used} does not fit"
    return why, tuple(evidence)


def _smaller(material: Material, found: OutOfMemory) -> str:
    """The command with the batch that fits."""
    fit = material.fit
    if fit is not None and fit.batch == 0:
        larger = "a GPU with more memory: labctl offers; or checkpointing, a smaller model"
        return (
            larger if found.whose == "gpu" else "limits: {memory: ...} in lab.yaml, then labctl run"
        )
    batch = found.batch // 2
    if fit is not None:
        batch = min(batch, fit.batch) if batch else fit.batch
    if batch < 1:
        halve = "half the batch, and the gradients of two added up"
        return halve if found.whose == "gpu" else f"{halve}; or limits: {{memory: ...}} in lab.yaml"
    parts = -(-found.batch // batch) if found.batch else 1
    changes: dict[tuple[str, ...], str] = {BATCH: str(batch)}
    if parts > 1:
        changes[ACCUMULATE] = str(parts)
    return again(material, changes, f"a batch of {batch}, and gradients of {parts} added up")


def creeping(material: Material) -> Iterator[Answer]:
    """Memory that rises steadily: the container's, and each GPU's."""
    samples = settled(material.samples)
    if len({one.attempt for one in samples}) > 1:
        last = samples[-1].attempt
        samples = tuple(one for one in samples if one.attempt == last)
    own = [(one.at, one.memory_bytes) for one in samples if one.memory_bytes]
    limits = [one.memory_limit_bytes for one in samples if one.memory_limit_bytes]
    yield from _creeping(material, own, limits[-1] if limits else 0, "the container's memory")
    for number in range(max((len(one.gpus) for one in samples), default=0)):
        rows = [one.gpus[number] for one in samples if len(one.gpus) > number]
        ats = [one.at for one in samples if len(one.gpus) > number]
        points = [(at, g.memory_bytes) for at, g in zip(ats, rows, strict=True) if g.memory_bytes]
        totals = [gpu.memory_total_bytes for gpu in rows if gpu.memory_total_bytes]
        name = f"the memory of GPU {number}"
        yield from _creeping(material, points, totals[-1] if totals else 0, name)


def _creeping(
    material: Material, points: list[tuple[float, int]], limit: int, whose: str
) -> Iterator[Answer]:
    if len(points) < LEAST_SAMPLES:
        return
    begin = points[0][0]
    per_s, straight = slope([(at - begin, float(size)) for at, size in points])
    took_s = points[-1][0] - begin
    risen = per_s * took_s
    if straight < STRAIGHT or risen < RISE_SHARE * points[0][1]:
        return
    evidence = [
        measured(
            f"from {gib(points[0][1])} to {gib(points[-1][1])} in {minutes(took_s)}: "
            f"{gib(per_s * 3600)} an hour, {percent(straight)} of it a straight line"
        )
    ]
    left = ""
    if limit > points[-1][1]:
        left_s = (limit - points[-1][1]) / per_s
        left = f"; at this rate it is full in {minutes(left_s)}"
        evidence.append(measured(f"its limit is {gib(limit)}"))
    gpu = "GPU" in whose
    yield Finding(
        rule="gpu-memory-creeps" if gpu else "memory-creeps",
        level="problem",
        what=f"{whose} rises steadily{left}",
        why="something is kept from step to step: `total += loss` keeps every graph, a list of "
        "outputs, a cache without a bound, or DataLoader workers that copy Python objects",
        evidence=tuple(evidence),
        next="use loss.item() or .detach() for what is kept; arrays instead of lists in the "
        "dataset" + ("" if gpu else _fewer_workers(material)),
        source=FAQ,
    )


def _fewer_workers(material: Material) -> str:
    typed = again(material, {WORKERS: "0"}, "")
    return f"; to see whether it is the workers: {typed}" if typed else ""


def nearly_full(material: Material) -> Iterator[Answer]:
    """No room left, though it went well so far."""
    samples = settled(material.samples)
    if ran_out(material) is not None or not samples:
        return
    shares = [
        one.memory_bytes / one.memory_limit_bytes
        for one in samples
        if one.memory_bytes and one.memory_limit_bytes
    ]
    if shares and max(shares) >= NEARLY_FULL:
        limit = next(s.memory_limit_bytes for s in reversed(samples) if s.memory_limit_bytes)
        yield Finding(
            rule="memory-nearly-full",
            level="advice",
            what="the container's memory is nearly full",
            why="at its limit the kernel kills the run",
            evidence=(measured(f"at most {percent(max(shares))} of {gib(limit)} in use"),),
            next="fewer workers or a smaller batch; or limits: {memory: ...} in lab.yaml",
            source=DOCKER_LIMITS,
        )


RULES = (exhausted, creeping, nearly_full)
