"""Rules about data loading: waiting, workers, /dev/shm, and the CPU of runs without a GPU.

The thresholds for waiting (20 and 50%), busy cores (85%) and /dev/shm (90%) are rules of thumb.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from labctl.insight.explain.curves import (
    compute_data_wait_share,
    find_data_wait_series,
    read_setting,
)
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    Unknown,
    from_events,
    from_log,
    from_record,
    from_telemetry,
)
from labctl.insight.explain.samples import (
    LEAST,
    byte_rate,
    cores,
    cpu_share,
    drop_start,
    median_of,
    span_s,
)
from labctl.insight.explain.sources import DATA_LOADER, SHARED_MEMORY, TUNING
from labctl.insight.explain.wording import (
    WORKERS,
    build_command,
    find_numeric_option,
    make_few_samples_answer,
    number,
    percent,
)
from labctl.text import bytes_text, duration_text

MUCH_WAITING = 0.5
SOME_WAITING = 0.2
BUSY = 0.85
# bytes per second of disk reads that are worth a line of evidence
WORTH_TELLING = 1024**2
FULL_SHM = 0.9
# Docker's default size of /dev/shm
SMALL_SHM_BYTES = 64 * 1024**2
TOO_MANY_WORKERS = re.compile(
    r"This DataLoader will create (\d+) worker processes in total\. Our suggested max number of "
    r"worker in current system is (\d+)"
)
SHM_WORDS = ("insufficient shared memory", "out of shared memory", "killed by signal: Bus error")


def check_waiting(material: RunData) -> Iterator[Answer]:
    """Judge the share of time in which the training waited for its next batch."""
    share = compute_data_wait_share(material)
    curve = find_data_wait_series(material.scalars)
    if share is None or curve is None:
        yield Unknown(
            rule="data-wait",
            what="how long the training waits for data",
            why="it does not log the share of time spent waiting for data",
            next="log it as speed/data_wait_share, as the sample project does, or:\nlabctl profile",
        )
        return
    evidence = [
        from_events(f"{curve.tag}: {percent(share)} (median of {len(curve.values)} points)")
    ]
    samples = drop_start(material.samples)
    processor = cpu_share(samples)
    if processor is not None:
        evidence.append(from_telemetry(f"CPU: {percent(processor)} of its cores busy (median)"))
    speed = byte_rate(samples, lambda sample: sample.disk_read_bytes) or 0.0
    if speed >= WORTH_TELLING:
        evidence.append(from_telemetry(f"read from disk: {bytes_text(speed)} per second"))
    without_gpu = material.samples and not any(sample.gpus for sample in material.samples)
    if share < (MUCH_WAITING if without_gpu else SOME_WAITING):
        yield Finding(
            rule="data-in-time",
            level="good",
            what=f"data arrives in time ({percent(share)} of the time is spent waiting for it)",
            why="without a GPU, the same cores prepare data and compute, so workers gain little"
            if without_gpu and share >= SOME_WAITING
            else "faster loading could save at most that share of the time",
            evidence=tuple(evidence),
            next="nothing to do",
            source=TUNING,
        )
        return
    why, next_ = _suggest_loading(material, processor)
    yield Finding(
        rule="data-wait",
        level="problem" if share >= MUCH_WAITING else "advice",
        what=f"the training waits for data {percent(share)} of the time",
        why=why,
        evidence=tuple(evidence),
        next=next_,
        source=TUNING,
    )


def _suggest_loading(material: RunData, processor: float | None) -> tuple[str, str]:
    """Return (why the training waits for data, what to try)."""
    workers = _count_workers(material)
    if processor is not None and processor >= BUSY:
        why = "all CPU cores are busy, so none is left to prepare more data"
        return why, (
            "prepare the data once instead of in every epoch (smaller images, decoded arrays), "
            "or use a server with more cores:\nlabctl offers"
        )
    if workers == 0:
        why = "the training process itself prepares the batches, between two steps"
        otherwise = "DataLoader(num_workers=4, pin_memory=True, persistent_workers=True)"
        return why, build_command(material, {WORKERS: "4"}, otherwise)
    who = f"{workers:.0f} workers" if workers else "its workers"
    why = f"{who} prepare data too slowly, although the CPU has idle cores"
    if processor is None:
        why = f"{who} prepare data too slowly"
    more = str(int(workers * 2)) if workers else "8"
    otherwise = "use more DataLoader workers, or a few large files, which are faster to read"
    return why, build_command(material, {WORKERS: more}, otherwise)


def _count_workers(material: RunData) -> float | None:
    """Return the number of DataLoader workers that the run logged, or that its command sets."""
    logged_workers = read_setting(material.scalars, "workers")
    return logged_workers if logged_workers is not None else find_numeric_option(material, WORKERS)


def check_workers(material: RunData) -> Iterator[Answer]:
    """Compare the DataLoader workers with the cores that the run may use."""
    warning = TOO_MANY_WORKERS.search(material.log)
    count = _count_workers(material)
    available = cores(material.samples)
    evidence: list[Evidence] = []
    if warning:
        count, suggested = float(warning[1]), float(warning[2])
        evidence.append(from_log(warning[0]))
        available = suggested if available is None else min(available, suggested)
    if count is None or available is None or count <= max(available, 1):
        return
    if not warning:
        evidence.append(from_events(f"setup/workers: {count:.0f}"))
    evidence.append(from_telemetry(f"the run may use {number(available)} cores"))
    fewer = str(max(1, int(available)))
    yield Finding(
        rule="workers-above-cores",
        level="advice",
        what=f"{count:.0f} DataLoader workers share {number(available)} cores",
        why="they compete with each other and with the training, and each uses its own memory",
        evidence=tuple(evidence),
        next=build_command(material, {WORKERS: fewer}, f"use at most {fewer} workers"),
        source=DATA_LOADER,
    )


def check_shared_memory(material: RunData) -> Iterator[Answer]:
    """Check the size of /dev/shm, through which DataLoader workers pass batches."""
    message = next((w for w in SHM_WORDS if w in material.log), "")
    limits = [sample.shm_limit_bytes for sample in material.samples if sample.shm_limit_bytes]
    used = [sample.shm_bytes for sample in material.samples if sample.shm_bytes is not None]
    limit = limits[-1] if limits else None
    evidence: list[Evidence] = []
    if message:
        line = next(line for line in material.log.splitlines() if message in line)
        evidence.append(from_log(line.strip()[:200]))
    if limit is not None:
        most = f", at most {bytes_text(max(used))} used" if used else ""
        evidence.append(from_telemetry(f"/dev/shm has {bytes_text(limit)}{most}"))
    larger = f"{max(2, -(-4 * (limit or 0) // 1024**3))}GB"
    next_ = f"in lab.yaml, limits: {{shm: {larger}}}, then:\nlabctl run"
    if message or (limit and used and max(used) >= FULL_SHM * limit):
        yield Finding(
            rule="shm-full",
            level="problem",
            what="/dev/shm is too small",
            why="DataLoader workers pass batches through it, and are killed when it is full",
            evidence=tuple(evidence),
            next=next_,
            source=SHARED_MEMORY,
        )
    elif limit is not None and limit <= SMALL_SHM_BYTES and (_count_workers(material) or 0) > 0:
        yield Finding(
            rule="shm-small",
            level="advice",
            what=f"/dev/shm has only {bytes_text(limit)}",
            why="that is Docker's default; larger batches or more workers will fill it",
            evidence=tuple(evidence),
            next=next_,
            source=SHARED_MEMORY,
        )


def check_cpu(material: RunData) -> Iterator[Answer]:
    """For a run without a GPU, check whether it uses its cores."""
    samples = drop_start(material.samples)
    if not material.samples or any(sample.gpus for sample in material.samples):
        return
    if len(samples) < LEAST:
        what = "what limits its speed (CPU, memory, disk)"
        yield make_few_samples_answer("processor-use", what, material)
        return
    share, have = cpu_share(samples), cores(samples)
    if share is None or have is None:
        yield Unknown(
            rule="processor-use",
            what="whether the CPU was busy",
            why="the server could not measure it",
            next="labctl ssh -- top",
        )
        return
    busy = median_of(sample.cpu_cores for sample in samples) or 0.0
    period = duration_text(span_s(samples))
    evidence = (
        from_telemetry(f"{busy:.1f} of {number(have)} cores busy (median over {period})"),
        from_record("the run had no GPU"),
    )
    if share >= BUSY:
        yield _make_busy_finding(share, evidence, material.model_function)
    elif have >= 2 and 0.9 <= busy <= 1.2:
        yield _make_one_core_finding(have, evidence)
    elif share < 0.5:
        yield _make_idle_finding(share, evidence)


def _make_one_core_finding(have: float, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        rule="processor-one-core",
        level="advice",
        what=f"one core of {number(have)} does the work",
        why="the code runs in one thread: OMP_NUM_THREADS=1, Python loops, or batches too small to "
        "split",
        evidence=evidence,
        next="unset OMP_NUM_THREADS (env: in lab.yaml), or use larger batches or DataLoader "
        "workers",
        source=TUNING,
    )


def _make_idle_finding(share: float, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        rule="processor-idle",
        level="advice",
        what=f"only {percent(share)} of the CPU was used",
        why="the run waits for files, for the network, or for single-threaded code",
        evidence=evidence,
        next="labctl profile   # shows what a step waits for",
        source=TUNING,
    )


def _make_busy_finding(
    share: float, evidence: tuple[Evidence, ...], model_function: str
) -> Finding:
    return Finding(
        rule="processor-busy",
        level="good",
        what=f"the CPU was busy: {percent(share)} of its cores",
        why="the run is limited by computation, as it should be without a GPU",
        evidence=evidence,
        next=f"labctl estimate {model_function} --batch 64 --items 60k   # is a GPU worth it?",
        source=TUNING,
    )


RULES = (check_waiting, check_workers, check_shared_memory, check_cpu)
