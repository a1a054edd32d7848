"""Rules about gradients, the learning rate, and overfitting.

Thresholds are rules of thumb: a gradient norm ten times its median is a spike, a held-out loss that
has risen by a tenth of its fall is overfitting, and so is an accuracy that lags by ten points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from labctl.insight.explain.curves import (
    LEAST_POINTS,
    PARTS,
    find_accuracies,
    find_gradient_norm_series,
    find_held_out_loss,
    find_learning_rate,
    find_spikes,
    find_train_loss,
    finite_points,
    summarize_trend,
)
from labctl.insight.explain.evidence import Answer, Finding, RunData, Unknown, from_events
from labctl.insight.explain.rates import suggest_clip_norm, suggest_smaller_rate
from labctl.insight.explain.sources import (
    CLIPPING,
    EARLY_STOPPING,
    LEARNING_RATES,
    MIXED_PRECISION,
    PLAYBOOK,
)
from labctl.insight.explain.wording import (
    CLIP,
    build_command,
    find_accepted_option,
    find_option,
    join_suggestions,
    make_few_points_answer,
    number,
    percent,
)
from labctl.insight.scalars import Series

SPIKE_TIMES = 10.0
VANISHED = 1e-6
LEAST_EPOCHS = 4
RISEN = 0.1
GAP = 0.1
# A rise above the lowest held-out loss that is worth mentioning, but not a problem.
LITTLE = 0.2
IDLE_END = 0.2


def check_gradients(material: RunData) -> Iterator[Answer]:
    """Find gradient norms that jump, vanish, or are NaN or infinite."""
    series = find_gradient_norm_series(material.scalars)
    if series is None:
        if material.scalars.series:
            yield Unknown(
                rule="gradient-norm",
                what="whether gradients explode or vanish",
                why="no curve is named gradient norm",
                next="log the result of torch.nn.utils.clip_grad_norm_ as train/gradient_norm",
            )
        return
    points = finite_points(series)
    lost = [s for s, v in zip(series.steps, series.values, strict=True) if not math.isfinite(v)]
    if lost:
        yield _not_finite(material, series, lost)
    if len(points) < LEAST_POINTS:
        return
    usual = median(value for _, value in points)
    if usual < VANISHED:
        yield Finding(
            rule="gradients-vanish",
            level="problem",
            what="the gradients vanish",
            why="almost no gradient reaches the weights: saturated activations, many layers "
            "without normalization, fp16 without loss scaling, or a detached graph",
            evidence=(from_events(f"{series.tag}: {number(usual)} (median)"),),
            next="use normalization and residual connections, and loss scaling with fp16",
            source=MIXED_PRECISION,
        )
    # Norms fall during training: a spike below the first values does no harm.
    begin = median(value for _, value in points[: len(points) // PARTS])
    found = [spike for spike in find_spikes(series, SPIKE_TIMES) if spike.value > begin]
    if found:
        top = max(found, key=lambda spike: spike.value)
        yield Finding(
            rule="gradient-spikes",
            level="advice",
            what=f"the gradient norm has spikes ({len(found)} of {len(series.values)} points)",
            why="a single batch has a large gradient; without clipping, such a step can undo much",
            evidence=(
                from_events(
                    f"{series.tag}: {number(top.value)} at step {top.step}, {number(top.baseline)} "
                    "around it"
                ),
            ),
            next=_suggest_clipping(material),
            source=CLIPPING,
        )


def _not_finite(material: RunData, series: Series, lost: list[int]) -> Finding:
    share = len(lost) / len(series.steps)
    evidence = (
        from_events(
            f"{series.tag}: not finite at {len(lost)} of {len(series.steps)} points, first at "
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
        why="the scaler skips such a step and reduces its scale"
        if few
        else "a step with such gradients makes every weight NaN",
        evidence=evidence,
        next="nothing to do" if few else suggest_smaller_rate(material),
        source=MIXED_PRECISION,
    )


def _suggest_clipping(material: RunData) -> str:
    if find_option(material, CLIP):
        return "look at the batch of that step; the norm is already clipped"
    norm = suggest_clip_norm(material)
    if not norm:
        return "look at the batch of that step; clipping does not help, since no norm is above 1"
    # The option's name shows that the script clips.
    if find_accepted_option(material, CLIP):
        clipped = build_command(material, {CLIP: norm}, f"a maximum norm of {norm}")
        return join_suggestions("look at the batch of that step", clipped)
    return f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm})"


def check_learning_rate(material: RunData) -> Iterator[Answer]:
    """Find learning rates that are 0, or constant while the loss does not fall."""
    series = find_learning_rate(material.scalars)
    if series is None:
        if material.scalars.series:
            yield Unknown(
                rule="learning-rate",
                what="whether the learning rate is right",
                why="no curve is named learning rate or lr",
                next="log optimizer.param_groups[0]['lr'] as train/learning_rate",
            )
        return
    points = finite_points(series)
    if len(points) < 2:
        return
    values = [value for _, value in points]
    if max(values) <= 0:
        yield _make_zero_rate_finding(
            series, "the learning rate is 0", f"{series.tag}: 0 at every point"
        )
        return
    idle = next((i for i, v in enumerate(reversed(values)) if v > 0), 0) / len(values)
    if idle >= IDLE_END and len(values) >= LEAST_POINTS:
        step = next(s for s, v in reversed(points) if v > 0)
        what = f"the learning rate is 0 for the last {percent(idle)} of the run"
        yield _make_zero_rate_finding(series, what, f"{series.tag}: 0 after step {step}")
        return
    steady = max(values) - min(values) <= 1e-3 * max(values)
    if steady and len(values) >= LEAST_POINTS:
        yield from _check_constant_rate(material, f"{series.tag}: {number(values[-1])} throughout")


def _check_constant_rate(material: RunData, rate: str) -> Iterator[Finding]:
    """Find a loss that fell at first, and stopped falling at a constant learning rate."""
    loss = find_train_loss(material.scalars)
    trend = summarize_trend(loss) if loss is not None else None
    if loss is None or trend is None:
        return
    fell = trend.first - trend.last > 3 * trend.noise
    if fell and trend.medians[6] - trend.last < 3 * trend.noise:
        yield Finding(
            rule="learning-rate-constant",
            level="advice",
            what="the learning rate never changes, and the loss has stopped falling",
            why="with a decaying learning rate, the loss can fall further",
            evidence=(
                from_events(rate),
                from_events(
                    f"{loss.tag}: {number(trend.medians[6])} at two thirds, "
                    f"{number(trend.last)} at the end"
                ),
            ),
            next="use torch.optim.lr_scheduler.CosineAnnealingLR, or:\n"
            + suggest_smaller_rate(material, 3.0),
            source=LEARNING_RATES,
        )


def _make_zero_rate_finding(series: Series, what: str, text: str) -> Finding:
    return Finding(
        rule="learning-rate-zero",
        level="problem",
        what=what,
        why="steps of size 0 change nothing and cost the same",
        evidence=(from_events(text),),
        next="give the schedule the run's number of steps: epochs x batches per epoch",
        source=PLAYBOOK,
    )


def _make_no_overfitting_finding(tag: str, points: Sequence[tuple[int, float]]) -> Finding:
    best = min(points, key=lambda point: point[1])
    little = points[-1][1] - best[1] > LITTLE * abs(best[1])
    return Finding(
        rule="no-overfitting",
        level="good",
        what=f"hardly any overfitting, since step {best[0]}"
        if little
        else "no sign of overfitting",
        why="the model generalizes to data that it was not trained on"
        + (", though slightly less than at its best" if little else ""),
        evidence=(
            from_events(
                f"{tag}: lowest at step {best[0]} ({number(best[1])}), "
                f"{number(points[-1][1])} at the end"
            ),
        ),
        next="nothing to do",
        source=EARLY_STOPPING,
    )


def check_overfitting(material: RunData) -> Iterator[Answer]:
    """Detect overfitting: the held-out loss rises again, or the held-out accuracy lags."""
    loss = find_held_out_loss(material.scalars)
    trained, other = find_accuracies(material.scalars)
    if loss is None and other is None:
        if material.scalars.series:
            yield Unknown(
                rule="overfitting",
                what="whether it overfits",
                why="no held-out data was logged (a curve with val and loss in its name)",
                next="evaluate on a validation set after every epoch, and log val/loss",
            )
        return
    turned = _find_rise(material, loss) if loss is not None else None
    lags = _find_gap(trained, other) if trained is not None and other is not None else None
    if turned or lags:
        yield from (finding for finding in (turned or lags,) if finding)
        return
    points = finite_points(loss) if loss is not None else []
    if loss is not None and len(points) >= LEAST_EPOCHS:
        yield _make_no_overfitting_finding(loss.tag, points)
    elif loss is not None and len(points) == len(loss.values):
        what, next_ = "whether it overfits", "train longer, or evaluate more often"
        yield make_few_points_answer("overfitting", what, loss, LEAST_EPOCHS, next_)


def _find_rise(material: RunData, loss: Series) -> Finding | None:
    points = finite_points(loss)
    if len(points) < LEAST_EPOCHS:
        return None
    best = min(points, key=lambda point: point[1])
    first, last = points[0], points[-1]
    fallen, risen = first[1] - best[1], last[1] - best[1]
    ended = [value for step, value in points if step > best[0]]
    # The last point may be chance: the median of the later half must be above as well.
    later = median(ended[len(ended) // 2 :]) - best[1] if ended else 0.0
    if len(ended) < 2 or min(risen, later) <= RISEN * max(fallen, 0.05 * abs(best[1])):
        return None
    train = find_train_loss(material.scalars)
    own = finite_points(train) if train is not None else []
    before = [value for step, value in own if step <= best[0]]
    after = [value for step, value in own if step > best[0]]
    evidence = [
        from_events(
            f"{loss.tag}: lowest at step {best[0]} ({number(best[1])}), "
            f"{number(last[1])} at the end"
        )
    ]
    if train is not None and before and after:
        evidence.append(
            from_events(f"{train.tag}: {number(before[-1])} there, {number(after[-1])} at the end")
        )
    return Finding(
        rule="overfitting",
        level="problem" if risen > 0.5 * max(fallen, 0.0) else "advice",
        what=f"it overfits after step {best[0]}",
        why="after that step it memorizes the training data, which does not help on new data",
        evidence=tuple(evidence),
        next=f"use the checkpoint of step {best[0]}; then try more data or "
        "augmentation, weight decay, dropout, a smaller model, or stop earlier",
        source=EARLY_STOPPING,
    )


def _find_gap(trained: Series, other: Series) -> Finding | None:
    own, held = finite_points(trained), finite_points(other)
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
        what=f"accuracy on held-out data is {gap / scale * 100:.0f} points lower",
        why="it has memorized some of its training data, or the two data sets differ",
        evidence=(
            from_events(f"{trained.tag}: {number(recent)} (median of the last points)"),
            from_events(f"{other.tag}: {number(held[-1][1])}"),
        ),
        next="try more data or augmentation, weight decay, dropout, or a smaller model; and check "
        "that both data sets are prepared in the same way",
        source=EARLY_STOPPING,
    )


RULES = (check_gradients, check_learning_rate, check_overfitting)
