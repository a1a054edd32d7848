"""Rules for a loss that shows that nothing was learned: flat, or at the level of guessing."""

from __future__ import annotations

import math

from labctl.insight.explain.curves import Trend, find_accuracies, finite_points
from labctl.insight.explain.evidence import Evidence, Finding, RunData, from_events
from labctl.insight.explain.rates import list_rates_at, suggest_other_learning_rate
from labctl.insight.explain.sources import RECIPE
from labctl.insight.explain.wording import join_suggestions, number, percent
from labctl.insight.scalars import Scalars, Series

# Numbers of classes for which the loss is compared with that of guessing, ln(classes).
CLASSES: tuple[int, ...] = (*range(2, 21), 100, 1000)
NEAR, VERY_NEAR = 0.03, 0.01
ACCURACY_NEAR = 0.25


def count_guessed_classes(scalars: Scalars, trend: Trend) -> int:
    """Return the number of classes among which the model only guesses; 0 if it was ever better.

    The cross entropy of a uniform guess among k classes is ln k. An accuracy must be near 1 / k.
    Without an accuracy, the loss must never have moved: any other may pass ln k by chance.
    """
    accuracy = _accuracy(scalars)
    unmoved = max(trend.medians) < min(trend.medians) * (1 + NEAR)
    for classes in CLASSES:
        chance = math.log(classes)
        off = abs(trend.last / chance - 1)
        if off > NEAR or min(trend.medians) < chance * (1 - NEAR):
            continue
        if accuracy is None:
            is_guess = unmoved and off <= VERY_NEAR
        else:
            is_guess = abs(accuracy * classes - 1) < ACCURACY_NEAR
        if is_guess:
            return classes
    return 0


def _accuracy(scalars: Scalars) -> float | None:
    """Return the last accuracy that was logged, from 0 to 1; on held-out data, if there is any."""
    trained, held_out = find_accuracies(scalars)
    curve = held_out or trained
    points = finite_points(curve) if curve is not None else []
    if not points:
        return None
    return points[-1][1] / (100 if points[-1][1] > 1 else 1)


def _chance_evidence(scalars: Scalars, classes: int) -> list[Evidence]:
    text = f"ln {classes} is {math.log(classes):.3f}: the loss of guessing among {classes} classes"
    accuracy = _accuracy(scalars)
    if accuracy is None:
        return [from_events(text)]
    return [
        from_events(
            f"{text}, which gets {percent(1 / classes)} right; accuracy {percent(accuracy)}"
        )
    ]


def make_guessing_finding(material: RunData, series: Series, trend: Trend, classes: int) -> Finding:
    """Report a loss that fell, perhaps from a high start, but only to the level of guessing."""
    lowest = number(min(trend.medians))
    text = f"{series.tag}: {number(trend.last)} at the end, never lower than {lowest}"
    return Finding(
        rule="loss-guesses",
        level="problem",
        what=f"nothing was learned: it guesses among {classes} classes",
        why="the learning rate is so large that the first steps destroyed the network, or far too "
        "small; or gradients do not reach the weights; or labels do not match their inputs",
        evidence=(
            from_events(f"{text} (medians of tenths)"),
            *_chance_evidence(material.scalars, classes),
            *list_rates_at(material, trend.ends[0]),
        ),
        next=suggest_other_learning_rate(material),
        source=RECIPE,
    )


def make_flat_finding(material: RunData, series: Series, trend: Trend) -> Finding:
    """Report a loss that never moved."""
    text = (
        f"{series.tag}: {number(trend.first)} at the start, {number(trend.last)} at the end "
        f"(medians of tenths; single points scatter by {number(trend.noise)})"
    )
    evidence = [from_events(text)]
    classes = count_guessed_classes(material.scalars, trend)
    evidence += _chance_evidence(material.scalars, classes) if classes else []
    evidence += list_rates_at(material, trend.ends[-1])
    return Finding(
        rule="loss-flat",
        level="problem",
        what="the loss does not fall" + (": it guesses" if classes else ""),
        why="nothing is learned: the learning rate is far too small or too large, gradients do not "
        "reach the weights (frozen, detached, no optimizer step), or labels do not match",
        evidence=tuple(evidence),
        next=join_suggestions(
            "first train on a single batch until the loss is nearly 0; if that fails, the code has "
            "a bug",
            suggest_other_learning_rate(material),
        ),
        source=RECIPE,
    )
