"""Rules about GPUs: their utilization, power and clocks, and idle ones.

The bands of utilization (to 10, to 50, from 80%) and half of the power limit are rules of thumb.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from labctl.insight.explain.curves import compute_data_wait_share
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    Unknown,
    from_log,
    from_telemetry,
)
from labctl.insight.explain.host import find_other_load
from labctl.insight.explain.samples import (
    GpuSummary,
    cpu_share,
    drop_start,
    span_s,
    summarize_gpus,
)
from labctl.insight.explain.sources import GPU_BACKGROUND, NVML_THROTTLE, NVML_USE, TUNING
from labctl.insight.explain.wording import (
    ACCUMULATE,
    BATCH,
    WORKERS,
    build_command,
    find_numeric_option,
    make_few_samples_answer,
    percent,
)
from labctl.text import bytes_text, duration_text

IDLE_PERCENT = 10.0
HALF_PERCENT = 50.0
GOOD_PERCENT = 80.0
LOW_POWER_SHARE = 0.5
# From this share of time waiting for data, data is the bottleneck of the GPU.
WAITS = 0.2
BUSY_PROCESSOR = 0.85
# Below this share of its memory, a GPU has room for a batch twice as large.
ROOM = 0.5
OFTEN_THROTTLED = 0.1
# A program with PyTorch that has opened a GPU holds more of its memory (750 MiB of an H200, less of
# older cards). A share of the memory would not tell: 2% of an H200 are 2.8 GiB.
OPENED_BYTES = 100 * 1024**2
ASK_TORCH = (
    "labctl run -- python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'"
)
THROTTLES = {
    "thermal": (
        "gpu-throttled-by-heat",
        "its clock is reduced because of heat",
        "the GPU is too hot and slows itself down",
        "tell the server's administrator (air flow, fans), or use another server:\nlabctl offers",
    ),
    "power": (
        "gpu-throttled-by-power",
        "its clock is reduced by its power limit",
        "it draws as much power as it may; that is normal for dense computation, and costs only "
        "as much speed as the clock drops",
        "nothing is wrong with the code; a GPU with a higher limit is faster:\nlabctl offers",
    ),
    "hardware": (
        "gpu-throttled-by-hardware",
        "its clock is reduced by the board's own protection",
        "temperature, power delivery or an external brake; a training can neither cause nor fix it",
        "tell the server's administrator, or use another server:\nlabctl down && labctl up",
    ),
}


def check_use(material: RunData) -> Iterator[Answer]:
    """Judge how busy each GPU was, and find its bottleneck."""
    gpus = summarize_gpus(drop_start(material.samples))
    if not gpus:
        yield from _no_cards(material)
        return
    busy = [card for card in gpus if (card.use_percent or 0) >= IDLE_PERCENT]
    if len(gpus) > 1 and busy and len(busy) < len(gpus):
        yield _make_idle_gpus_finding(material, gpus, busy)
        gpus = tuple(busy)
    findings: dict[str, tuple[float, Finding]] = {}
    for card in gpus:
        if card.use_percent is None:
            yield _unknown_use(card)
        else:
            # GPUs with the same result become one finding, about the least used of them.
            finding = _judge(material, card)
            earlier = findings.get(finding.rule)
            if earlier is None or card.use_percent < earlier[0]:
                findings[finding.rule] = (card.use_percent, finding)
    yield from (finding for _, finding in findings.values())


def _no_cards(material: RunData) -> Iterator[Answer]:
    """Report missing telemetry. Another rule handles runs without a GPU."""
    if not material.samples:
        yield Unknown(
            rule="telemetry",
            what="what limits its speed (GPU, CPU, memory, disk)",
            why="there are no measurements: the run was too short, or nothing recorded them",
            next="train for at least a minute, then:\nlabctl explain",
        )
    elif any(sample.gpus for sample in material.samples):
        yield make_few_samples_answer("gpu-use", "how busy the GPU was", material)


def _unknown_use(card: GpuSummary) -> Unknown:
    return Unknown(
        rule="gpu-use",
        what=f"how busy the {card.name} was",
        why="it does not report its utilization (a MIG slice never does)",
        next="labctl profile   # times every kernel",
    )


def _make_idle_gpus_finding(
    material: RunData, gpus: tuple[GpuSummary, ...], busy: list[GpuSummary]
) -> Finding:
    idle = len(gpus) - len(busy)
    fewer = f"labctl up --gpu any:{len(busy)}   # uses fewer GPUs"
    command = _build_torchrun_command(material, len(gpus))
    return Finding(
        rule="gpu-some-idle",
        level="problem",
        what=f"{idle} of {len(gpus)} GPUs did nothing",
        why="the code does not use the other GPUs, which cost money all the same",
        evidence=tuple(
            from_telemetry(f"{card.name} {number}: {card.use_percent or 0:.0f}% in use (median)")
            for number, card in enumerate(gpus)
        ),
        next=f"{command}   # one process per GPU\n{fewer}" if command else fewer,
        source=TUNING,
    )


def _build_torchrun_command(material: RunData, gpus: int) -> str:
    """Build the command that starts one process per GPU; "" if the code would not use them."""
    words = list(material.run.command)
    if not material.is_distributed or len(words) < 2 or not words[1].endswith(".py"):
        return ""
    return f"labctl run -- torchrun --nproc-per-node={gpus} {shlex.join(words[1:])}"


def _judge(material: RunData, card: GpuSummary) -> Finding:
    assert card.use_percent is not None
    waited = compute_data_wait_share(material)
    evidence = _evidence(material, card, waited)
    if card.use_percent < 1 and _used_bytes(card) < OPENED_BYTES:
        return _make_unused_finding(material, card, evidence)
    if card.use_percent < IDLE_PERCENT:
        return _make_low_finding(
            material, card, waited, evidence, "gpu-idle", "problem", "hardly used"
        )
    if card.use_percent < HALF_PERCENT:
        return _make_low_finding(
            material, card, waited, evidence, "gpu-half-used", "advice", "used in part"
        )
    if card.use_percent < GOOD_PERCENT:
        return _make_low_finding(
            material,
            card,
            waited,
            evidence,
            "gpu-fair",
            "advice",
            "used well, with room to improve",
        )
    return _make_good_finding(card, evidence)


def _used_bytes(card: GpuSummary) -> float:
    return (card.memory_share or 0) * (card.memory_total_bytes or 0)


def _evidence(material: RunData, card: GpuSummary, waited: float | None) -> tuple[Evidence, ...]:
    samples = drop_start(material.samples)
    lines = [
        from_telemetry(
            f"{card.name}: {card.use_percent:.0f}% in use (median of {card.count} samples "
            f"over {duration_text(span_s(samples))})"
        )
    ]
    if card.memory_share is not None and card.memory_total_bytes:
        total = bytes_text(card.memory_total_bytes)
        lines.append(from_telemetry(f"GPU memory: {percent(card.memory_share)} of {total} in use"))
    if (share := cpu_share(samples)) is not None:
        lines.append(from_telemetry(f"CPU: {percent(share)} of its cores busy (median)"))
    if waited is not None:
        text = f"{percent(waited)} of the time was spent waiting for data (median)"
        lines.append(Evidence(text=text, source="TensorBoard"))
    return tuple(lines)


def _make_unused_finding(
    material: RunData, card: GpuSummary, evidence: tuple[Evidence, ...]
) -> Finding:
    line = next((line for line in material.log.splitlines() if ", cpu," in line), "")
    return Finding(
        rule="gpu-unused",
        level="problem",
        what=f"the {card.name} was not used at all",
        why="the code runs on the CPU, or its PyTorch was built without CUDA",
        evidence=evidence + ((from_log(line[:160]),) if line else ()),
        next=ASK_TORCH,
        source=NVML_USE,
    )


def _make_low_finding(
    material: RunData,
    card: GpuSummary,
    waited: float | None,
    evidence: tuple[Evidence, ...],
    rule: str,
    level: str,
    how: str,
) -> Finding:
    why, next_ = _cause(material, card, waited)
    return Finding(
        rule=rule,
        level="problem" if level == "problem" else "advice",
        what=f"the {card.name} was {how}: {card.use_percent:.0f}%",
        why=why,
        evidence=evidence,
        next=next_,
        source=TUNING,
    )


def _cause(material: RunData, card: GpuSummary, waited: float | None) -> tuple[str, str]:
    """Return (why, what to try).

    Other work on the server comes first, because it slows loading too. Then data: nothing else
    helps a GPU that waits for it.
    """
    if find_other_load(material.samples) is not None:
        why = "other work on the server takes CPU time that loading data and launching kernels need"
        return why, "labctl top   # shows what runs on the server now"
    processor = cpu_share(drop_start(material.samples))
    full = processor is not None and processor >= BUSY_PROCESSOR
    if waited is not None and waited >= WAITS:
        if full:
            why = "it waits for data; all CPU cores are busy, so none is left to prepare more"
            next_ = "prepare the data once instead of in every epoch (smaller images, decoded "
            return why, next_ + "arrays), or use a server with more cores:\nlabctl offers"
        why = "it waits for data, although the CPU has idle cores: loading is too slow"
        workers = find_numeric_option(material, WORKERS)
        more = str(int(workers * 2)) if workers else "8"
        otherwise = f"use {more} DataLoader workers and pin_memory=True"
        return why, build_command(material, {WORKERS: more}, otherwise)
    if full:
        why = "the CPU is at its limit: it prepares data or launches kernels more slowly than the "
        return why + "GPU works", "labctl profile   # shows what the CPU does in a step"
    reason = "data arrives in time, so " if waited is not None else ""
    has_room = card.memory_share is None or card.memory_share < ROOM
    why = f"{reason}the model or the batch is too small to fill it"
    if waited is None:
        why += "; or it waits for data, which the run does not log"
    if not has_room:
        return why, "labctl profile   # shows the gaps between kernels"
    batch = find_numeric_option(material, BATCH)
    larger = str(int(batch * 4)) if batch else "256"
    otherwise = f"use a larger batch ({larger}), with a learning rate tuned for it"
    return why, build_command(
        material, {BATCH: larger, ACCUMULATE: "1"} if batch else {BATCH: larger}, otherwise
    )


def _make_good_finding(card: GpuSummary, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        rule="gpu-good",
        level="good",
        what=f"the {card.name} was busy: {card.use_percent:.0f}%",
        why="a kernel was running nearly all the time",
        evidence=evidence,
        next="for more speed: mixed precision, torch.compile\nlabctl profile   # shows where",
        source=NVML_USE,
    )


def check_power(material: RunData) -> Iterator[Answer]:
    """Find GPUs that are busy at low power: their kernels wait for memory, or for each other."""
    for card in summarize_gpus(drop_start(material.samples)):
        if (card.use_percent or 0) < GOOD_PERCENT:
            continue
        if card.power_w is None or not card.power_limit_w:
            yield Unknown(
                rule="gpu-power",
                what=f"whether the {card.name} computes or waits for memory while it is busy",
                why="it does not report its power or its limit",
                next="labctl profile",
            )
        elif card.power_w < LOW_POWER_SHARE * card.power_limit_w:
            share = percent(card.power_w / card.power_limit_w)
            yield Finding(
                rule="gpu-low-power",
                level="advice",
                what=f"the {card.name} is busy at low power ({share} of its limit)",
                why="a kernel is always running, but its arithmetic units mostly wait for memory, "
                "for the launch of the next small kernel, or for I/O",
                evidence=(
                    from_telemetry(
                        f"{card.use_percent:.0f}% in use, {card.power_w:.0f} W of "
                        f"{card.power_limit_w:.0f} W (medians)"
                    ),
                ),
                next="use mixed precision, channels_last or torch.compile (fewer, larger kernels)\n"
                "labctl profile   # shows the kernels",
                source=GPU_BACKGROUND,
            )
            return


def check_throttling(material: RunData) -> Iterator[Answer]:
    """Find clocks that are reduced by heat, power or the board."""
    seen = set()
    for card in summarize_gpus(drop_start(material.samples)):
        for reason, share in card.throttled.items():
            if share < OFTEN_THROTTLED or reason not in THROTTLES or reason in seen:
                continue
            seen.add(reason)
            rule, what, why, next_ = THROTTLES[reason]
            evidence = [from_telemetry(f"in {percent(share)} of {card.count} samples")]
            if card.temperature_c is not None:
                evidence.append(from_telemetry(f"{card.temperature_c:.0f} °C (median)"))
            if card.clock_share is not None:
                evidence.append(
                    from_telemetry(f"clock at {percent(card.clock_share)} of its maximum")
                )
            yield Finding(
                rule=rule,
                level="advice" if reason == "power" else "problem",
                what=f"{card.name}: {what}",
                why=why,
                evidence=tuple(evidence),
                next=next_,
                source=NVML_THROTTLE,
            )


RULES = (check_use, check_power, check_throttling)
