"""Is the GPU at work? Its use, its power, its clocks, and whether there are idle ones.

The bands of use (0 to 10, up to 50, from 80 %) and half of the power limit are rules of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator

from labctl.insight.explain.curves import data_wait_share
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    Material,
    Unknown,
    measured,
    printed,
)
from labctl.insight.explain.samples import LEAST, Card, cards, processor_share, settled, span_s
from labctl.insight.explain.sources import GPU_BACKGROUND, NVML_THROTTLE, NVML_USE, TUNING
from labctl.insight.explain.wording import (
    ACCUMULATE,
    BATCH,
    WORKERS,
    again,
    gib,
    given_number,
    minutes,
    percent,
    taken_samples,
)

IDLE_PERCENT = 10.0
HALF_PERCENT = 50.0
GOOD_PERCENT = 80.0
LOW_POWER_SHARE = 0.5
# From this share of time waiting for data on, data is what holds the GPU up.
WAITS = 0.2
BUSY_PROCESSOR = 0.85
# Below this share of its memory a card has room for a batch twice as large.
ROOM = 0.5
OFTEN_THROTTLED = 0.1
ASK_TORCH = (
    "labctl run -- python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'"
)
THROTTLES = {
    "thermal": (
        "gpu-throttled-by-heat",
        "its clock is held down by heat",
        "the card is too warm and slows itself",
        "tell whoever runs the server (air flow, fans); or another server: labctl offers",
    ),
    "power": (
        "gpu-throttled-by-power",
        "its clock is held down by its power limit",
        "it draws all the power that it may; that is usual in dense arithmetic, and costs speed "
        "only as far as the clock falls",
        "nothing is wrong with the code; a card with a higher limit is faster: labctl offers",
    ),
    "hardware": (
        "gpu-throttled-by-hardware",
        "its clock is held down by the board's own protection",
        "temperature, power delivery or an external brake; a training cannot cause or mend that",
        "tell whoever runs the server; or another server: labctl down && labctl up",
    ),
}


def use(material: Material) -> Iterator[Answer]:
    """How busy each GPU was, and what held it up."""
    found = cards(settled(material.samples))
    if not found:
        yield from _no_cards(material)
        return
    busy = [card for card in found if (card.use_percent or 0) >= IDLE_PERCENT]
    if len(found) > 1 and busy and len(busy) < len(found):
        yield _some_idle(found, busy)
        found = tuple(busy)
    told: dict[str, tuple[float, Finding]] = {}
    for card in found:
        if card.use_percent is None:
            yield _silent(card)
        else:
            # Cards that do the same are one finding, about the least used of them.
            finding = _of_card(material, card)
            known = told.get(finding.rule)
            if known is None or card.use_percent < known[0]:
                told[finding.rule] = (card.use_percent, finding)
    yield from (finding for _, finding in told.values())


def _no_cards(material: Material) -> Iterator[Answer]:
    """No telemetry at all, or too little of a GPU. A run without a GPU is another rule's."""
    if not material.samples:
        yield Unknown(
            rule="telemetry",
            what="what limits its speed (GPU, processor, memory, disk)",
            why="nothing was measured while it ran: it was too short, or the watchdog does not run",
            next="run it for a minute at least, then: labctl explain",
        )
    elif any(sample.gpus for sample in material.samples):
        yield Unknown(
            rule="gpu-use",
            what="how busy the GPU was",
            why=taken_samples(len(material.samples), LEAST),
            next="let it run for a minute, then: labctl explain",
        )


def _silent(card: Card) -> Unknown:
    return Unknown(
        rule="gpu-use",
        what=f"how busy the {card.name} was",
        why="it does not report its use (a MIG part never does)",
        next="labctl profile   # times every kernel",
    )


def _some_idle(found: tuple[Card, ...], busy: list[Card]) -> Finding:
    idle = len(found) - len(busy)
    return Finding(
        rule="gpu-some-idle",
        level="problem",
        what=f"{idle} of {len(found)} GPUs did nothing",
        why="the code uses as many as it was written for; the others are paid for all the same",
        evidence=tuple(
            measured(f"{card.name} {number}: {card.use_percent or 0:.0f} % in use (median)")
            for number, card in enumerate(found)
        ),
        next="start one process per GPU (labctl run -- torchrun --nproc-per-node="
        f"{len(found)} train.py), or ask for fewer: labctl up --gpu A100:{len(busy)}",
        source=TUNING,
    )


def _of_card(material: Material, card: Card) -> Finding:
    assert card.use_percent is not None
    waited = data_wait_share(material)
    evidence = _evidence(material, card, waited)
    if card.use_percent < 1 and (card.memory_share or 0) < 0.02:
        return _unused(material, card, evidence)
    if card.use_percent < IDLE_PERCENT:
        return _low(material, card, waited, evidence, "gpu-idle", "problem", "hardly used")
    if card.use_percent < HALF_PERCENT:
        return _low(material, card, waited, evidence, "gpu-half-used", "advice", "used in part")
    if card.use_percent < GOOD_PERCENT:
        return _low(material, card, waited, evidence, "gpu-fair", "advice", "used well, with room")
    return _good(card, evidence)


def _evidence(material: Material, card: Card, waited: float | None) -> tuple[Evidence, ...]:
    samples = settled(material.samples)
    lines = [
        measured(
            f"{card.name}: {card.use_percent:.0f} % in use (median of {card.count} samples "
            f"over {minutes(span_s(samples))})"
        )
    ]
    if card.memory_share is not None and card.memory_total_bytes:
        total = gib(card.memory_total_bytes)
        lines.append(measured(f"its memory: {percent(card.memory_share)} of {total} in use"))
    if (share := processor_share(samples)) is not None:
        lines.append(measured(f"processor: {percent(share)} of its cores busy (median)"))
    if waited is not None:
        said = f"{percent(waited)} of the time was spent waiting for data (median)"
        lines.append(Evidence(said=said, of="TensorBoard"))
    return tuple(lines)


def _unused(material: Material, card: Card, evidence: tuple[Evidence, ...]) -> Finding:
    said = next((line for line in material.log.splitlines() if ", cpu," in line), "")
    return Finding(
        rule="gpu-unused",
        level="problem",
        what=f"the {card.name} was not used at all",
        why="the code stays on the processor, or its PyTorch is one without CUDA",
        evidence=evidence + ((printed(said[:160]),) if said else ()),
        next=ASK_TORCH,
        source=NVML_USE,
    )


def _low(
    material: Material,
    card: Card,
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
        what=f"the {card.name} was {how}: {card.use_percent:.0f} %",
        why=why,
        evidence=evidence,
        next=next_,
        source=TUNING,
    )


def _cause(material: Material, card: Card, waited: float | None) -> tuple[str, str]:
    """(why, what to try): data first, since nothing else helps a GPU that waits for it."""
    processor = processor_share(settled(material.samples))
    full = processor is not None and processor >= BUSY_PROCESSOR
    if waited is not None and waited >= WAITS:
        if full:
            why = "it waits for data, and the processor has no core left to prepare more"
            next_ = "prepare the data once instead of in every epoch (smaller pictures, decoded "
            return why, next_ + "arrays), or a server with more cores: labctl offers"
        why = "it waits for data, while the processor has cores to spare: loading is too slow"
        workers = given_number(material, WORKERS)
        more = str(int(workers * 2)) if workers else "8"
        return why, again(material, {WORKERS: more}, f"{more} DataLoader workers, pin_memory=True")
    if full:
        why = "the processor is at its limit: it prepares data or feeds kernels slower than the "
        return why + "GPU works", "labctl profile   # shows what the processor does in a step"
    known = "data is there in time, so " if waited is not None else ""
    room = card.memory_share is None or card.memory_share < ROOM
    why = f"{known}the model or the batch is too small to fill it"
    if waited is None:
        why += "; or it waits for data, which the run does not log"
    if not room:
        return why, "labctl profile   # shows the gaps between kernels"
    batch = given_number(material, BATCH)
    larger = str(int(batch * 4)) if batch else "256"
    otherwise = f"a larger batch ({larger}), with a learning rate tuned for it"
    return why, again(
        material, {BATCH: larger, ACCUMULATE: "1"} if batch else {BATCH: larger}, otherwise
    )


def _good(card: Card, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        rule="gpu-good",
        level="good",
        what=f"the {card.name} was busy: {card.use_percent:.0f} %",
        why="some kernel ran nearly all the time",
        evidence=evidence,
        next="to go faster still: mixed precision, torch.compile; labctl profile shows where",
        source=NVML_USE,
    )


def power(material: Material) -> Iterator[Answer]:
    """Busy, and yet cool: kernels that wait on memory, or on each other."""
    for card in cards(settled(material.samples)):
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
                why="a kernel runs all the time, but its arithmetic units mostly wait: for memory, "
                "for small kernels one after another, or for I/O",
                evidence=(
                    measured(
                        f"{card.use_percent:.0f} % in use, {card.power_w:.0f} W of "
                        f"{card.power_limit_w:.0f} W (medians)"
                    ),
                ),
                next="mixed precision, channels_last or torch.compile (fewer, larger kernels); "
                "labctl profile names the kernels",
                source=GPU_BACKGROUND,
            )
            return


def throttled(material: Material) -> Iterator[Answer]:
    """Clocks held down by heat, power or the board."""
    seen = set()
    for card in cards(settled(material.samples)):
        for reason, share in card.throttled.items():
            if share < OFTEN_THROTTLED or reason not in THROTTLES or reason in seen:
                continue
            seen.add(reason)
            rule, what, why, next_ = THROTTLES[reason]
            evidence = [measured(f"{percent(share)} of {card.count} samples say so")]
            if card.temperature_c is not None:
                evidence.append(measured(f"{card.temperature_c:.0f} °C (median)"))
            if card.clock_share is not None:
                evidence.append(measured(f"clock at {percent(card.clock_share)} of its highest"))
            yield Finding(
                rule=rule,
                level="advice" if reason == "power" else "problem",
                what=f"{card.name}: {what}",
                why=why,
                evidence=tuple(evidence),
                next=next_,
                source=NVML_THROTTLE,
            )


RULES = (use, power, throttled)
