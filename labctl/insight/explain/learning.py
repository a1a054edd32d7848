"""Gradients, the learning rate, and whether what is learned holds on data that was held out.

Thresholds are rules of thumb: a gradient norm ten times its median is a spike, a held-out loss that
has risen by a tenth of its fall is overfitting, and so is an accuracy that lags by ten points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from labctl.insight.explain.curves import (
    LEAST_POINTS,
    PARTS,
    accuracies,
    course,
    finite,
    gradient_norm,
    held_out_loss,
    learning_rate,
    spikes,
    train_loss,
)
from labctl.insight.explain.evidence import Answer, Finding, Material, Unknown, logged
from labctl.insight.explain.rates import smaller_rate
from labctl.insight.explain.sources import (
    CLIPPING,
    EARLY_STOPPING,
    LEARNING_RATES,
    MIXED_PRECISION,
    PLAYBOOK,
)
from labctl.insight.explain.wording import CLIP, again, given, number, percent, taken
from labctl.insight.scalars import Series

SPIKE_TIMES = 10.0
VANISHED = 1e-6
LEAST_EPOCHS = 4
RISEN = 0.1
GAP = 0.1
# A rise above the lowest held-out loss that is worth a word, but is no fault.
LITTLE = 0.2
IDLE_END = 0.2


def gradients(material: Material) -> Iterator[Answer]:
    """Gradient norms that jump, vanish, or are no numbers."""
    series = gradient_norm(material.scalars)
    if series is None:
        if material.scalars.series:
            yield Unknown(
                rule="gradient-norm",
                what="whether gradients explode or vanish",
                why="no curve is called gradient norm",
                next="log what torch.nn.utils.clip_grad_norm_ returns as train/gradient_norm",
            )
        return
    points = finite(series)
    lost = [s for s, v in zip(series.steps, series.values, strict=True) if not math.isfinite(v)]
    if lost:
        yield _no_number(material, series, lost)
    if len(points) < LEAST_POINTS:
        return
    usual = median(value for _, value in points)
    if usual < VANISHED:
        yield Finding(
            rule="gradients-vanish",
            level="problem",
            what="the gradients vanish",
            why="nothing reaches the weights: activations that saturate, many layers without "
            "normalisation, fp16 without loss scaling, or a graph that was detached",
            evidence=(logged(f"{series.tag}: {number(usual)} (median)"),),
            next="normalisation and residual connections; loss scaling where fp16 is used",
            source=MIXED_PRECISION,
        )
    # Norms fall as training goes on: what is lower than in the beginning does no harm.
    begin = median(value for _, value in points[: len(points) // PARTS])
    seen = [one for one in spikes(series, SPIKE_TIMES) if one.value > begin]
    if seen:
        top = max(seen, key=lambda spike: spike.value)
        yield Finding(
            rule="gradient-spikes",
            level="advice",
            what=f"the gradient norm jumps ({len(seen)} of {len(series.values)} points)",
            why="a single batch pulls hard; without clipping such a step can undo much",
            evidence=(
                logged(
                    f"{series.tag}: {number(top.value)} at step {top.step}, {number(top.around)} "
                    "around it"
                ),
            ),
            next=_clip(material, usual),
            source=CLIPPING,
        )


def _no_number(material: Material, series: Series, lost: list[int]) -> Finding:
    share = len(lost) / len(series.steps)
    evidence = (
        logged(
            f"{series.tag}: no number at {len(lost)} of {len(series.steps)} points, first at "
            f"step {lost[0]}"
        ),
    )
    few = share < 0.05 and ("float16" in material.log or "fp16" in material.log)
    return Finding(
        rule="gradients-not-finite",
        level="good" if few else "problem",
        what="some gradients were infinite, as fp16's loss scaling expects"
        if few
        else "gradients were NaN or infinite",
        why="the scaler skips such a step and scales less"
        if few
        else "a step with them makes every weight NaN",
        evidence=evidence,
        next="nothing to do" if few else smaller_rate(material),
        source=MIXED_PRECISION,
    )


def _clip(material: Material, usual: float) -> str:
    if given(material, CLIP):
        return "look at the batch of that step; the norm is clipped already"
    # The name of the option tells that the script clips; its value shows as the default does.
    if taken(material, CLIP):
        return "look at the batch of that step; " + again(
            material, {CLIP: f"{usual * 2:.2g}"}, "a smaller largest norm"
        )
    return f"torch.nn.utils.clip_grad_norm_(model.parameters(), {usual * 2:.2g})"


def rate(material: Material) -> Iterator[Answer]:
    """The learning rate itself."""
    series = learning_rate(material.scalars)
    if series is None:
        if material.scalars.series:
            yield Unknown(
                rule="learning-rate",
                what="whether the learning rate is right",
                why="no curve is called learning rate or lr",
                next="log optimizer.param_groups[0]['lr'] as train/learning_rate",
            )
        return
    points = finite(series)
    if len(points) < 2:
        return
    values = [value for _, value in points]
    if max(values) <= 0:
        yield _zero(series, "the learning rate is 0", f"{series.tag}: 0 at every point")
        return
    idle = next((i for i, v in enumerate(reversed(values)) if v > 0), 0) / len(values)
    if idle >= IDLE_END and len(values) >= LEAST_POINTS:
        step = next(s for s, v in reversed(points) if v > 0)
        what = f"the learning rate is 0 for the last {percent(idle)} of the run"
        yield _zero(series, what, f"{series.tag}: 0 after step {step}")
        return
    loss = train_loss(material.scalars)
    found = course(loss) if loss is not None else None
    steady = max(values) - min(values) <= 1e-3 * max(values)
    if loss is None or found is None or not steady or len(values) < LEAST_POINTS:
        return
    fell = found.first - found.last > 3 * found.noise
    if fell and found.medians[6] - found.last < 3 * found.noise:
        yield Finding(
            rule="learning-rate-constant",
            level="advice",
            what="the learning rate never changes, and the loss has stopped falling",
            why="a rate that decays lets it settle lower",
            evidence=(
                logged(f"{series.tag}: {number(values[-1])} throughout"),
                logged(
                    f"{loss.tag}: {number(found.medians[6])} at two thirds, "
                    f"{number(found.last)} at the end"
                ),
            ),
            next="torch.optim.lr_scheduler.CosineAnnealingLR, or smaller from here on: "
            + smaller_rate(material, 3.0),
            source=LEARNING_RATES,
        )


def _zero(series: Series, what: str, said: str) -> Finding:
    return Finding(
        rule="learning-rate-zero",
        level="problem",
        what=what,
        why="steps of length 0 change nothing and cost the same",
        evidence=(logged(said),),
        next="the schedule's number of steps must be that of the run: total steps = epochs x "
        "batches of an epoch",
        source=PLAYBOOK,
    )


def held_out(material: Material) -> Iterator[Answer]:
    """Overfitting: the loss on held-out data turns, or its accuracy lags."""
    loss = held_out_loss(material.scalars)
    trained, other = accuracies(material.scalars)
    if loss is None and other is None:
        if material.scalars.series:
            yield Unknown(
                rule="overfitting",
                what="whether it overfits",
                why="nothing was logged on held-out data (a curve with val and loss in its name)",
                next="evaluate on a validation set after every epoch, and log val/loss",
            )
        return
    turned = _turned(material, loss) if loss is not None else None
    lags = _lags(trained, other) if trained is not None and other is not None else None
    if turned or lags:
        yield from (one for one in (turned or lags,) if one)
        return
    points = finite(loss) if loss is not None else []
    if loss is not None and len(points) >= LEAST_EPOCHS:
        best = min(points, key=lambda point: point[1])
        little = points[-1][1] - best[1] > LITTLE * abs(best[1])
        yield Finding(
            rule="no-overfitting",
            level="good",
            what=f"hardly any overfitting, since step {best[0]}"
            if little
            else "no overfitting is seen",
            why="what it learns holds on data that it has not seen"
            + (", if a little less than it did" if little else ""),
            evidence=(
                logged(
                    f"{loss.tag}: lowest at step {best[0]} ({number(best[1])}), "
                    f"{number(points[-1][1])} at the end"
                ),
            ),
            next="nothing to do",
            source=EARLY_STOPPING,
        )
    elif loss is not None and len(points) == len(loss.values):
        yield Unknown(
            rule="overfitting",
            what="whether it overfits",
            why=f"{loss.tag} has {len(points)} points; it takes {LEAST_EPOCHS}",
            next="train longer, or evaluate more often",
        )


def _turned(material: Material, loss: Series) -> Finding | None:
    points = finite(loss)
    if len(points) < LEAST_EPOCHS:
        return None
    best = min(points, key=lambda point: point[1])
    first, last = points[0], points[-1]
    fallen, risen = first[1] - best[1], last[1] - best[1]
    ended = [value for step, value in points if step > best[0]]
    # The last point alone may be chance: the later half of what followed must be above as well.
    later = median(ended[len(ended) // 2 :]) - best[1] if ended else 0.0
    if len(ended) < 2 or min(risen, later) <= RISEN * max(fallen, 0.05 * abs(best[1])):
        return None
    train = train_loss(material.scalars)
    own = finite(train) if train is not None else []
    before = [value for step, value in own if step <= best[0]]
    after = [value for step, value in own if step > best[0]]
    evidence = [
        logged(
            f"{loss.tag}: lowest at step {best[0]} ({number(best[1])}), "
            f"{number(last[1])} at the end"
        )
    ]
    if train is not None and before and after:
        evidence.append(
            logged(f"{train.tag}: {number(before[-1])} then, {number(after[-1])} at the end")
        )
    return Finding(
        rule="overfitting",
        level="problem" if risen > 0.5 * max(fallen, 0.0) else "advice",
        what=f"it overfits after step {best[0]}",
        why="from there on it learns the training data by heart, which helps nobody else",
        evidence=tuple(evidence),
        next=f"use the checkpoint of step {best[0]} (labctl eval); then more data or augmentation, "
        "weight decay, dropout, a smaller model, or stop earlier",
        source=EARLY_STOPPING,
    )


def _lags(trained: Series, other: Series) -> Finding | None:
    own, held = finite(trained), finite(other)
    if not own or not held:
        return None
    recent = median(value for _, value in own[-5:])
    gap = recent - held[-1][1]
    scale = 100.0 if recent > 1.5 else 1.0
    if gap < GAP * scale:
        return None
    return Finding(
        rule="overfitting-gap",
        level="advice",
        what=f"it does worse on held-out data ({gap / scale * 100:.0f} points of accuracy)",
        why="it has learned some of its training data by heart, or the two sets differ",
        evidence=(
            logged(f"{trained.tag}: {number(recent)} (median of the last points)"),
            logged(f"{other.tag}: {number(held[-1][1])}"),
        ),
        next="more data or augmentation, weight decay, dropout, or a smaller model; and check that "
        "both sets are prepared alike",
        source=EARLY_STOPPING,
    )


RULES = (gradients, rate, held_out)
