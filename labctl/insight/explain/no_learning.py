"""A loss that shows that nothing was learned: flat, or where guessing alone would be."""

from __future__ import annotations

import math

from labctl.insight.explain.curves import Course, accuracies, finite
from labctl.insight.explain.evidence import Evidence, Finding, Material, logged
from labctl.insight.explain.rates import beside, other_rate
from labctl.insight.explain.sources import RECIPE
from labctl.insight.explain.wording import number, percent
from labctl.insight.scalars import Scalars, Series

# For so many classes the loss of guessing is known: ln(classes).
CLASSES: tuple[int, ...] = (*range(2, 21), 100, 1000)
NEAR, VERY_NEAR = 0.03, 0.01
ACCURACY_NEAR = 0.25


def guessed(scalars: Scalars, found: Course) -> int:
    """Among how many classes the loss says that it guesses; 0 where it was ever better.

    The cross entropy of a uniform guess among k classes is ln k. An accuracy must be near 1 / k;
    without one only a loss that never moved tells: any other may well come by such a number.
    """
    accuracy = _accuracy(scalars)
    unmoved = max(found.medians) < min(found.medians) * (1 + NEAR)
    for classes in CLASSES:
        chance = math.log(classes)
        off = abs(found.last / chance - 1)
        if off > NEAR or min(found.medians) < chance * (1 - NEAR):
            continue
        if accuracy is None:
            told = unmoved and off <= VERY_NEAR
        else:
            told = abs(accuracy * classes - 1) < ACCURACY_NEAR
        if told:
            return classes
    return 0


def _accuracy(scalars: Scalars) -> float | None:
    """The last that was logged, as a share; of held-out data, if there is."""
    trained, held_out = accuracies(scalars)
    curve = held_out or trained
    points = finite(curve) if curve is not None else []
    if not points:
        return None
    return points[-1][1] / (100 if points[-1][1] > 1 else 1)


def _chance(scalars: Scalars, classes: int) -> list[Evidence]:
    said = f"ln {classes} is {math.log(classes):.3f}: who guesses among {classes} gets that loss"
    accuracy = _accuracy(scalars)
    if accuracy is None:
        return [logged(said)]
    return [
        logged(f"{said}, and {percent(1 / classes)} right; the accuracy is {percent(accuracy)}")
    ]


def guesses(material: Material, series: Series, found: Course, classes: int) -> Finding:
    """It fell, perhaps from a wild beginning, but to no more than guessing."""
    lowest = number(min(found.medians))
    said = f"{series.tag}: {number(found.last)} at the end, never lower than {lowest}"
    return Finding(
        rule="loss-guesses",
        level="problem",
        what=f"nothing was learned: it guesses among {classes}",
        why="a learning rate so large that the first steps destroyed the network, or one far too "
        "small; gradients that do not reach the weights; labels that do not match",
        evidence=(
            logged(f"{said} (medians of tenths)"),
            *_chance(material.scalars, classes),
            *beside(material, found.ends[0]),
        ),
        next=other_rate(material),
        source=RECIPE,
    )


def flat(material: Material, series: Series, found: Course) -> Finding:
    """It never moved."""
    said = (
        f"{series.tag}: {number(found.first)} in the beginning, {number(found.last)} at the end "
        f"(medians of tenths; single points scatter by {number(found.noise)})"
    )
    evidence = [logged(said)]
    classes = guessed(material.scalars, found)
    evidence += _chance(material.scalars, classes) if classes else []
    evidence += beside(material, found.ends[-1])
    return Finding(
        rule="loss-flat",
        level="problem",
        what="the loss does not fall" + (": it guesses" if classes else ""),
        why="nothing is learned: a learning rate far too small or too large, gradients that do not "
        "reach the weights (frozen, detached, no optimizer step), or labels that do not match",
        evidence=tuple(evidence),
        next="first train on a single batch until the loss is nearly 0; if that fails the code is "
        f"wrong. Then {other_rate(material)}",
        source=RECIPE,
    )
