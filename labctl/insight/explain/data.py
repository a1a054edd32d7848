"""Does data come in time? Waiting, workers, /dev/shm, and the processor where there is no GPU.

Shares of waiting (20 and 50 %), of busy cores (85 %) and of /dev/shm (90 %) are rules of thumb.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from labctl.insight.explain.curves import data_wait, data_wait_share, setting
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    Material,
    Unknown,
    logged,
    measured,
    printed,
    recorded,
)
from labctl.insight.explain.samples import (
    LEAST,
    cores,
    middle,
    processor_share,
    rate,
    settled,
    span_s,
)
from labctl.insight.explain.sources import DATA_LOADER, SHARED_MEMORY, TUNING
from labctl.insight.explain.wording import (
    WORKERS,
    again,
    gib,
    given_number,
    minutes,
    number,
    percent,
    taken_samples,
)

MUCH_WAITING = 0.5
SOME_WAITING = 0.2
BUSY = 0.85
# Bytes a second read from disk.
WORTH_TELLING = 1024**2
FULL_SHM = 0.9
# What Docker gives where nobody asks for more.
SMALL_SHM_BYTES = 64 * 1024**2
TOO_MANY_WORKERS = re.compile(
    r"This DataLoader will create (\d+) worker processes in total\. Our suggested max number of "
    r"worker in current system is (\d+)"
)
SHM_WORDS = ("insufficient shared memory", "out of shared memory", "killed by signal: Bus error")


def waiting(material: Material) -> Iterator[Answer]:
    """The share of time in which the training waited for its next batch."""
    share = data_wait_share(material)
    curve = data_wait(material.scalars)
    if share is None or curve is None:
        yield Unknown(
            rule="data-wait",
            what="how long the training waits for data",
            why="it logs no share of time spent waiting for data",
            next="log it as speed/data_wait_share, as the sample project does; or: labctl profile",
        )
        return
    evidence = [logged(f"{curve.tag}: {percent(share)} (median of {len(curve.values)} points)")]
    samples = settled(material.samples)
    processor = processor_share(samples)
    if processor is not None:
        evidence.append(measured(f"processor: {percent(processor)} of its cores busy (median)"))
    speed = rate(samples, lambda one: one.disk_read_bytes) or 0.0
    if speed >= WORTH_TELLING:
        evidence.append(measured(f"read from disk: {gib(speed)} a second"))
    without_gpu = material.samples and not any(one.gpus for one in material.samples)
    if share < (MUCH_WAITING if without_gpu else SOME_WAITING):
        yield Finding(
            rule="data-in-time",
            level="good",
            what=f"data comes in time ({percent(share)} of the time is spent waiting for it)",
            why="without a GPU the same cores prepare data and compute: workers gain little"
            if without_gpu and share >= SOME_WAITING
            else "faster loading would gain no more than that",
            evidence=tuple(evidence),
            next="nothing to do",
            source=TUNING,
        )
        return
    why, next_ = _way_out(material, processor)
    yield Finding(
        rule="data-wait",
        level="problem" if share >= MUCH_WAITING else "advice",
        what=f"the training waits for data {percent(share)} of the time",
        why=why,
        evidence=tuple(evidence),
        next=next_,
        source=TUNING,
    )


def _way_out(material: Material, processor: float | None) -> tuple[str, str]:
    workers = _workers(material)
    if processor is not None and processor >= BUSY:
        why = "the processor has no core left to prepare more of it"
        return why, (
            "prepare it once instead of in every epoch (smaller pictures, decoded arrays); "
            "or a server with more cores: labctl offers"
        )
    if workers == 0:
        why = "batches are prepared by the training process itself, between two steps"
        otherwise = "DataLoader(num_workers=4, pin_memory=True, persistent_workers=True)"
        return why, again(material, {WORKERS: "4"}, otherwise)
    known = f"{workers:.0f} workers" if workers else "its workers"
    why = f"{known} prepare it too slowly, though the processor has cores to spare"
    if processor is None:
        why = f"{known} prepare it too slowly"
    more = str(int(workers * 2)) if workers else "8"
    otherwise = "more DataLoader workers, or files that are read faster (few large ones)"
    return why, again(material, {WORKERS: more}, otherwise)


def _workers(material: Material) -> float | None:
    """Of the DataLoader, as the run logged it, or as its command says."""
    told = setting(material.scalars, "workers")
    return told if told is not None else given_number(material, WORKERS)


def workers(material: Material) -> Iterator[Answer]:
    """DataLoader workers against the cores that the run may use."""
    found = TOO_MANY_WORKERS.search(material.log)
    count = _workers(material)
    have = cores(material.samples)
    evidence: list[Evidence] = []
    if found:
        count, suggested = float(found[1]), float(found[2])
        evidence.append(printed(found[0]))
        have = suggested if have is None else min(have, suggested)
    if count is None or have is None or count <= max(have, 1):
        return
    if not found:
        evidence.append(logged(f"setup/workers: {count:.0f}"))
    evidence.append(measured(f"the run may use {number(have)} cores"))
    fewer = str(max(1, int(have)))
    yield Finding(
        rule="workers-above-cores",
        level="advice",
        what=f"{count:.0f} DataLoader workers share {number(have)} cores",
        why="they take turns, also with the training itself, and each holds its own memory",
        evidence=tuple(evidence),
        next=again(material, {WORKERS: fewer}, f"at most {fewer} workers"),
        source=DATA_LOADER,
    )


def shared_memory(material: Material) -> Iterator[Answer]:
    """/dev/shm, through which DataLoader workers hand over batches."""
    said = next((w for w in SHM_WORDS if w in material.log), "")
    limits = [one.shm_limit_bytes for one in material.samples if one.shm_limit_bytes]
    used = [one.shm_bytes for one in material.samples if one.shm_bytes is not None]
    limit = limits[-1] if limits else None
    evidence: list[Evidence] = []
    if said:
        line = next(line for line in material.log.splitlines() if said in line)
        evidence.append(printed(line.strip()[:200]))
    if limit is not None:
        most = f", at most {gib(max(used))} used" if used else ""
        evidence.append(measured(f"/dev/shm has {gib(limit)}{most}"))
    larger = f"{max(2, -(-4 * (limit or 0) // 1024**3))}GB"
    next_ = f"in lab.yaml, limits: {{shm: {larger}}}, then: labctl run"
    if said or (limit and used and max(used) >= FULL_SHM * limit):
        yield Finding(
            rule="shm-full",
            level="problem",
            what="/dev/shm is too small",
            why="DataLoader workers hand over batches through it; where it is full they are killed",
            evidence=tuple(evidence),
            next=next_,
            source=SHARED_MEMORY,
        )
    elif limit is not None and limit <= SMALL_SHM_BYTES and (_workers(material) or 0) > 0:
        yield Finding(
            rule="shm-small",
            level="advice",
            what=f"/dev/shm has only {gib(limit)}",
            why="that is what Docker gives unasked; larger batches or more workers will fill it",
            evidence=tuple(evidence),
            next=next_,
            source=SHARED_MEMORY,
        )


def processor(material: Material) -> Iterator[Answer]:
    """Where no GPU is: does the run use the cores it has?"""
    samples = settled(material.samples)
    if not material.samples or any(one.gpus for one in material.samples):
        return
    if len(samples) < LEAST:
        yield Unknown(
            rule="processor-use",
            what="what limits its speed (processor, memory, disk)",
            why=taken_samples(len(material.samples), LEAST),
            next="let it run for a minute (more epochs), then: labctl explain",
        )
        return
    share, have = processor_share(samples), cores(samples)
    if share is None or have is None:
        yield Unknown(
            rule="processor-use",
            what="whether the processor was busy",
            why="the server could not measure it",
            next="labctl ssh -- top",
        )
        return
    busy = middle(one.cpu_cores for one in samples) or 0.0
    evidence = (
        measured(
            f"{busy:.1f} of {number(have)} cores busy (median over {minutes(span_s(samples))})"
        ),
        recorded("no GPU was given to the run"),
    )
    if share >= BUSY:
        yield _at_its_limit(share, evidence)
    elif have >= 2 and 0.9 <= busy <= 1.2:
        yield Finding(
            rule="processor-one-core",
            level="advice",
            what=f"one core of {number(have)} does the work",
            why="the code runs in one thread: OMP_NUM_THREADS=1, Python loops, or batches too "
            "small to be shared",
            evidence=evidence,
            next="unset OMP_NUM_THREADS (env: in lab.yaml), larger batches, or DataLoader workers",
            source=TUNING,
        )
    elif share < 0.5:
        yield Finding(
            rule="processor-idle",
            level="advice",
            what=f"the processor was busy for {percent(share)} only",
            why="the run waits: for files, for the network, or for single-threaded parts",
            evidence=evidence,
            next="labctl profile   # shows what a step waits for",
            source=TUNING,
        )


def _at_its_limit(share: float, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        rule="processor-busy",
        level="good",
        what=f"the processor was busy: {percent(share)} of its cores",
        why="the run is limited by arithmetic, as it should be without a GPU",
        evidence=evidence,
        next="labctl estimate train.py:build_model --batch 64 --items 60k   # would a GPU pay?",
        source=TUNING,
    )


RULES = (waiting, workers, shared_memory, processor)
