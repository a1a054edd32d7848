"""What the loss says: no number any more, diverging, flat, spiking, still falling.

Where a threshold stands without a source it is a rule of thumb; the steps are those of TensorBoard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from labctl.insight.explain.curves import (
    LEAST_POINTS,
    Course,
    at,
    course,
    finite,
    gradient_norm,
    spikes,
    train_loss,
    train_losses,
)
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    Material,
    Unknown,
    logged,
    printed,
)
from labctl.insight.explain.no_learning import flat, guessed, guesses
from labctl.insight.explain.rates import beside, smaller_rate
from labctl.insight.explain.sources import LEARNING_RATES, MIXED_PRECISION, PLAYBOOK, RECIPE
from labctl.insight.explain.wording import (
    CLIP,
    EPOCHS,
    again,
    also,
    given_number,
    number,
    percent,
    taken,
)
from labctl.insight.scalars import Series

IN_LOG = re.compile(r"\b(loss)\b[^\n]{0,40}?\b(nan|inf|-inf)\b", re.IGNORECASE)
FLAT_SHARE = 0.02
RISE_OF_FALL = 0.5
SPIKE_TIMES = 3.0
# How high a spike is at least, as a share of all that the loss has fallen.
SPIKE_OF_FALL = 0.2
MANY_SPIKES = 0.02
# Share of the whole fall that came in the last fifth.
STILL_FALLING = 0.1


def no_number(material: Material) -> Iterator[Answer]:
    """NaN or infinity in a loss, or said in the log."""
    for series in train_losses(material.scalars):
        bad = next((i for i, v in enumerate(series.values) if not math.isfinite(v)), None)
        if bad is not None:
            yield _no_number(material, series, bad)
            return
    found = IN_LOG.search(material.log)
    if found:
        line = next(line for line in material.log.splitlines() if found[0] in line)
        evidence = [printed(line.strip()[:200])]
        curve = train_loss(material.scalars)
        points = finite(curve) if curve is not None else []
        if curve is not None and points:
            step, value = points[-1]
            evidence.append(logged(f"{curve.tag}: {number(value)} at step {step}, the last"))
            evidence += beside(material, step)
        yield _diverged_to_nan(material, found[2].lower(), "", tuple(evidence))


def _no_number(material: Material, series: Series, bad: int) -> Finding:
    step, value = series.steps[bad], series.values[bad]
    name = "NaN" if math.isnan(value) else "infinite"
    if bad == 0:
        return Finding(
            rule="loss-nan-from-the-start",
            level="problem",
            what=f"the loss is {name} from its first point on",
            why="that is hardly the learning rate: look for NaN in the data, log(0) or a division "
            "by zero in the loss, or numbers too large for fp16",
            evidence=(logged(f"{series.tag}: {name} at step {step}, the first that was logged"),),
            next="torch.autograd.set_detect_anomaly(True) names the operation; and check one "
            "batch: assert torch.isfinite(inputs).all()",
            source=RECIPE,
        )
    evidence = [
        logged(
            f"{series.tag}: {number(series.values[bad - 1])} at step {series.steps[bad - 1]}, "
            f"{name} at step {step}"
        )
    ]
    evidence += beside(material, series.steps[bad - 1])
    return _diverged_to_nan(material, name, f" at step {step}", tuple(evidence))


def _diverged_to_nan(
    material: Material, name: str, where: str, evidence: tuple[Evidence, ...]
) -> Finding:
    half = "float16" in material.log or "fp16" in material.log
    why = "steps too large for the loss's shape: it grew until numbers ended"
    if half:
        why += "; fp16 ends at 65504, bf16 or loss scaling reach further"
    return Finding(
        rule="loss-nan",
        level="problem",
        what=f"the loss became {name}{where}",
        why=why,
        evidence=evidence,
        next=also(smaller_rate(material), _clipping(material)),
        source=MIXED_PRECISION if half else PLAYBOOK,
    )


def _clipping(material: Material) -> str:
    if given_number(material, CLIP):
        return ""
    return "" if taken(material, CLIP) else "and clip gradients to a norm of 1"


def shape(material: Material) -> Iterator[Answer]:
    """Where the loss goes: up, nowhere, down and up again, still down, or down."""
    series = train_loss(material.scalars)
    if series is None:
        yield _without(material)
        return
    found = course(series)
    if found is None:
        if len(finite(series)) == len(series.values):
            yield Unknown(
                rule="loss",
                what="where the loss goes",
                why=f"{series.tag} has {len(series.values)} points; it takes {LEAST_POINTS}",
                next="log it more often, or train longer",
            )
        return
    yield from _shape(material, series, found)


def _without(material: Material) -> Unknown:
    tags = [one.tag for one in material.scalars.series if not one.tag.startswith("setup/")]
    if tags:
        why = f"no curve has a name with `loss` in it; there are: {', '.join(tags[:6])}"
    elif material.scalars.files:
        why = (
            "it logged no curve yet"
            if not material.run.ended
            else "it ended before it logged a curve"
        )
    else:
        why = "the run wrote no TensorBoard event files below $LABCTL_LOG_DIR"
    return Unknown(
        rule="loss",
        what="whether it learns",
        why=why,
        next="SummaryWriter(os.environ['LABCTL_LOG_DIR']).add_scalar('train/loss', loss, step)",
    )


def _shape(material: Material, series: Series, found: Course) -> Iterator[Finding]:
    low = found.medians[found.lowest]
    fallen, risen = found.first - low, found.last - low
    # A fall or rise counts where it stands out of the scatter of single points.
    tremble = 2 * found.noise
    if risen > max(RISE_OF_FALL * fallen, tremble):
        yield _rising(material, series, found)
    elif fallen <= max(FLAT_SHARE * abs(found.first), tremble / 2):
        yield flat(material, series, found)
    elif (classes := guessed(material.scalars, found)) > 0:
        yield guesses(material, series, found, classes)
    else:
        late = found.medians[-3] - found.last
        if found.lowest == len(found.medians) - 1 and late > STILL_FALLING * fallen:
            yield _still_falling(material, series, found, late / fallen)
        else:
            yield _fell(series, found)


def _rising(material: Material, series: Series, found: Course) -> Finding:
    low, beyond = found.lowest, found.last > found.first
    step = found.ends[low]
    said = (
        f"{series.tag}: {number(found.first)} in the beginning, {number(found.medians[low])} "
        f"around step {step}, {number(found.last)} at the end (medians of tenths)"
    )
    return Finding(
        rule="loss-diverging",
        level="problem",
        what="the loss diverges" if beyond else f"the loss rises again after step {step}",
        why="the steps are too large"
        + ("" if beyond else " for where it has come, or the data changed on the way"),
        evidence=(logged(said), *beside(material, found.ends[-1])),
        next=also(
            smaller_rate(material, 10.0 if beyond else 3.0),
            "" if beyond else "or a rate that decays, with warm-up before it",
        ),
        source=PLAYBOOK,
    )


def _still_falling(material: Material, series: Series, found: Course, late: float) -> Finding:
    epochs = given_number(material, EPOCHS)
    more = str(int(epochs * 2)) if epochs else "20"
    said = (
        f"{series.tag}: {number(found.first)} to {number(found.last)}; {percent(late)} of that in "
    )
    return Finding(
        rule="loss-still-falling",
        level="advice",
        what="the loss was still falling at the end",
        why="more steps, or larger ones, would bring it lower",
        evidence=(logged(said + "the last fifth"), *beside(material, found.ends[-1])),
        next=again(material, {EPOCHS: more}, "train longer, or with a larger learning rate"),
        source=LEARNING_RATES,
    )


def _fell(series: Series, found: Course) -> Finding:
    return Finding(
        rule="loss-falls",
        level="good",
        what=f"the loss fell from {number(found.first)} to {number(found.last)}",
        why="it has learned what it could at this learning rate",
        evidence=(logged(f"{series.tag}: medians of the first and last tenth of its points"),),
        next="nothing to do",
        source=PLAYBOOK,
    )


def jumps(material: Material) -> Iterator[Answer]:
    """Single points far above their neighbours."""
    series = train_loss(material.scalars)
    found = course(series) if series is not None else None
    if series is None or found is None:
        return
    fallen = found.first - found.medians[found.lowest]
    seen = spikes(series, SPIKE_TIMES, SPIKE_OF_FALL * max(fallen, 0.0))
    if not seen:
        return
    norm = gradient_norm(material.scalars)
    evidence = []
    for one in sorted(seen, key=lambda spike: -spike.value)[:3]:
        size = at(norm, one.step)
        beside = f", gradient norm {number(size)}" if size is not None else ""
        evidence.append(
            logged(
                f"{series.tag}: {number(one.value)} at step {one.step}, {number(one.around)} "
                f"around it{beside}"
            )
        )
    many = len(seen) > MANY_SPIKES * len(series.values)
    yield Finding(
        rule="loss-spikes",
        level="problem" if many else "advice",
        what=f"the loss jumps ({len(seen)} of {len(series.values)} points)",
        why="some batches throw it off: odd or wrongly labelled examples, or steps at the edge of "
        "what is stable",
        evidence=tuple(evidence),
        next=also(
            also(smaller_rate(material, 3.0), _clipping(material)),
            "and look at the batches of those steps",
        ),
        source=PLAYBOOK,
    )


RULES = (no_number, shape, jumps)
