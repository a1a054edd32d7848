"""Rules about the loss: NaN, diverging, flat, with spikes, still falling.

Thresholds without a source are rules of thumb; steps are those of TensorBoard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from labctl.insight.explain.curves import (
    LEAST_POINTS,
    Trend,
    find_gradient_norm_series,
    find_spikes,
    find_train_loss,
    find_train_losses,
    finite_points,
    summarize_trend,
    value_at,
)
from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    Unknown,
    from_events,
    from_log,
)
from labctl.insight.explain.no_learning import (
    count_guessed_classes,
    make_flat_finding,
    make_guessing_finding,
)
from labctl.insight.explain.rates import list_rates_at, suggest_clip_norm, suggest_smaller_rate
from labctl.insight.explain.sources import LEARNING_RATES, MIXED_PRECISION, PLAYBOOK, RECIPE
from labctl.insight.explain.wording import (
    CLIP,
    EPOCHS,
    build_command,
    find_accepted_option,
    find_numeric_option,
    join_suggestions,
    make_few_points_answer,
    number,
    percent,
)
from labctl.insight.scalars import Series

IN_LOG = re.compile(r"\b(loss)\b[^\n]{0,40}?\b(nan|inf|-inf)\b", re.IGNORECASE)
FLAT_SHARE = 0.02
RISE_OF_FALL = 0.5
SPIKE_TIMES = 3.0
# The least height of a spike, as a share of the loss's whole fall.
SPIKE_OF_FALL = 0.2
MANY_SPIKES = 0.02
# The share of the whole fall in the last fifth from which the loss is still falling.
STILL_FALLING = 0.1


def check_finite(material: RunData) -> Iterator[Answer]:
    """Find NaN or infinity in a loss curve, or in the log."""
    for series in find_train_losses(material.scalars):
        bad = next((i for i, v in enumerate(series.values) if not math.isfinite(v)), None)
        if bad is not None:
            yield _make_not_finite_finding(material, series, bad)
            return
    match = IN_LOG.search(material.log)
    if match:
        line = next(line for line in material.log.splitlines() if match[0] in line)
        evidence = [from_log(line.strip()[:200])]
        curve = find_train_loss(material.scalars)
        points = finite_points(curve) if curve is not None else []
        if curve is not None and points:
            step, value = points[-1]
            evidence.append(from_events(f"{curve.tag}: {number(value)} at step {step}, the last"))
            evidence += list_rates_at(material, step)
        yield _make_nan_finding(material, match[2].lower(), "", tuple(evidence))


def _make_not_finite_finding(material: RunData, series: Series, bad: int) -> Finding:
    step, value = series.steps[bad], series.values[bad]
    name = "NaN" if math.isnan(value) else "infinite"
    if bad == 0:
        return Finding(
            rule="loss-nan-from-the-start",
            level="problem",
            what=f"the loss is {name} from its first point",
            why="the learning rate is probably not the cause: look for NaN in the data, log(0) or "
            "a division by zero in the loss, or numbers too large for fp16",
            evidence=(
                from_events(f"{series.tag}: {name} at step {step}, the first that was logged"),
            ),
            next="torch.autograd.set_detect_anomaly(True) finds the operation; and check one "
            "batch: assert torch.isfinite(inputs).all()",
            source=RECIPE,
        )
    evidence = [
        from_events(
            f"{series.tag}: {number(series.values[bad - 1])} at step {series.steps[bad - 1]}, "
            f"{name} at step {step}"
        )
    ]
    evidence += list_rates_at(material, series.steps[bad - 1])
    return _make_nan_finding(material, name, f" at step {step}", tuple(evidence))


def _make_nan_finding(
    material: RunData, name: str, where: str, evidence: tuple[Evidence, ...]
) -> Finding:
    half = "float16" in material.log or "fp16" in material.log
    why = "the steps were too large: the loss grew until it overflowed"
    if half:
        why += "; fp16 overflows at 65504, so use bf16 or loss scaling"
    return Finding(
        rule="loss-nan",
        level="problem",
        what=f"the loss became {name}{where}",
        why=why,
        evidence=evidence,
        next=join_suggestions(suggest_smaller_rate(material), _suggest_clipping(material)),
        source=MIXED_PRECISION if half else PLAYBOOK,
    )


def _suggest_clipping(material: RunData) -> str:
    if find_accepted_option(material, CLIP):
        return ""
    norm = suggest_clip_norm(material)
    return f"and clip gradients to a norm of {norm}" if norm else ""


def check_trend(material: RunData) -> Iterator[Answer]:
    """Judge the trend of the loss: up, flat, down and up again, still falling, or down."""
    series = find_train_loss(material.scalars)
    if series is None:
        yield _unknown_loss(material)
        return
    trend = summarize_trend(series)
    if trend is None:
        if len(finite_points(series)) == len(series.values):
            what, next_ = "the trend of the loss", "log it more often, or train longer"
            yield make_few_points_answer("loss", what, series, LEAST_POINTS, next_)
        return
    yield from _judge_trend(material, series, trend)


def _unknown_loss(material: RunData) -> Unknown:
    tags = [series.tag for series in material.scalars.series if not series.tag.startswith("setup/")]
    if tags:
        why = f"no curve has `loss` in its name; there are: {', '.join(tags[:6])}"
    elif material.scalars.series:
        so_far = "" if material.run.has_ended else " so far"
        why = f"it logged only its settings{so_far}, as setup/..."
    elif material.scalars.files:
        why = (
            "it has not logged a curve yet"
            if not material.run.has_ended
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


def _judge_trend(material: RunData, series: Series, trend: Trend) -> Iterator[Finding]:
    low = trend.medians[trend.lowest]
    fallen, risen = trend.first - low, trend.last - low
    # A fall or rise counts only if it exceeds the scatter of single points.
    scatter = 2 * trend.noise
    if risen > max(RISE_OF_FALL * fallen, scatter):
        yield _make_rise_finding(material, series, trend)
    elif fallen <= max(FLAT_SHARE * abs(trend.first), scatter / 2):
        yield make_flat_finding(material, series, trend)
    elif (classes := count_guessed_classes(material.scalars, trend)) > 0:
        yield make_guessing_finding(material, series, trend, classes)
    else:
        late = trend.medians[-3] - trend.last
        if trend.lowest == len(trend.medians) - 1 and late > STILL_FALLING * fallen:
            yield _make_still_falling_finding(material, series, trend, late / fallen)
        else:
            yield _make_fall_finding(series, trend)


def _make_rise_finding(material: RunData, series: Series, trend: Trend) -> Finding:
    low, beyond = trend.lowest, trend.last > trend.first
    step = trend.ends[low]
    text = (
        f"{series.tag}: {number(trend.first)} at the start, {number(trend.medians[low])} "
        f"around step {step}, {number(trend.last)} at the end (medians of tenths)"
    )
    return Finding(
        rule="loss-diverging",
        level="problem",
        what="the loss diverges" if beyond else f"the loss rises again after step {step}",
        why="the steps are too large"
        + ("" if beyond else " for this stage of the training, or the data changed"),
        evidence=(from_events(text), *list_rates_at(material, trend.ends[-1])),
        next=join_suggestions(
            suggest_smaller_rate(material, 10.0 if beyond else 3.0),
            "" if beyond else "or use a learning rate that decays, with warm-up",
        ),
        source=PLAYBOOK,
    )


def _make_still_falling_finding(
    material: RunData, series: Series, trend: Trend, late: float
) -> Finding:
    epochs = find_numeric_option(material, EPOCHS)
    more = str(int(epochs * 2)) if epochs else "20"
    text = (
        f"{series.tag}: {number(trend.first)} to {number(trend.last)}; {percent(late)} of that in "
    )
    return Finding(
        rule="loss-still-falling",
        level="advice",
        what="the loss was still falling at the end",
        why="more or larger steps would reduce it further",
        evidence=(from_events(text + "the last fifth"), *list_rates_at(material, trend.ends[-1])),
        next=build_command(material, {EPOCHS: more}, "train longer, or use a larger learning rate"),
        source=LEARNING_RATES,
    )


def _make_fall_finding(series: Series, trend: Trend) -> Finding:
    return Finding(
        rule="loss-falls",
        level="good",
        what=f"the median loss fell from {number(trend.first)} to {number(trend.last)}",
        why="it has learned as much as it can at this learning rate",
        evidence=(from_events(f"{series.tag}: medians of the first and last tenth of its points"),),
        next="nothing to do",
        source=PLAYBOOK,
    )


def check_spikes(material: RunData) -> Iterator[Answer]:
    """Find single points far above their neighbors."""
    series = find_train_loss(material.scalars)
    trend = summarize_trend(series) if series is not None else None
    if series is None or trend is None:
        return
    fallen = trend.first - trend.medians[trend.lowest]
    found = find_spikes(series, SPIKE_TIMES, SPIKE_OF_FALL * max(fallen, 0.0))
    if not found:
        return
    norm = find_gradient_norm_series(material.scalars)
    evidence = []
    for spike in sorted(found, key=lambda spike: -spike.value)[:3]:
        size = value_at(norm, spike.step)
        norm_text = f", gradient norm {number(size)}" if size is not None else ""
        evidence.append(
            from_events(
                f"{series.tag}: {number(spike.value)} at step {spike.step}, "
                f"{number(spike.baseline)} around it{norm_text}"
            )
        )
    many = len(found) > MANY_SPIKES * len(series.values)
    others = filter(None, [_suggest_clipping(material), "and look at the batches of those steps"])
    yield Finding(
        rule="loss-spikes",
        level="problem" if many else "advice",
        what=f"the loss has spikes ({len(found)} of {len(series.values)} points)",
        why="some batches cause it: odd or wrongly labeled examples, or steps that are almost too "
        "large to be stable",
        evidence=tuple(evidence),
        next=join_suggestions(suggest_smaller_rate(material, 3.0), ", ".join(others)),
        source=PLAYBOOK,
    )


RULES = (check_finite, check_trend, check_spikes)
