"""The learning rate and the gradient norm at a step, and the rate and maximum norm to try next."""

from __future__ import annotations

from statistics import median

from labctl.insight.explain.curves import (
    find_gradient_norm_series,
    find_learning_rate,
    finite_points,
    value_at,
)
from labctl.insight.explain.evidence import Evidence, RunData, from_events
from labctl.insight.explain.wording import LEARNING_RATE, build_command, find_numeric_option, number

# Suggestions are never larger than this, however large the rate was.
LARGEST_RATE = 0.1
# From here, a rate at which nothing is learned is more often too large than too small.
HIGH_RATE = 0.03
# The usual maximum norm. A smaller one would scale down nearly every step of usual size.
LEAST_CLIP_NORM = 1.0


def find_rate(material: RunData) -> float:
    """Return the command's learning rate, else the largest that was logged, else 0."""
    curve = find_learning_rate(material.scalars)
    logged_rates = [value for _, value in finite_points(curve) if value > 0] if curve else []
    return find_numeric_option(material, LEARNING_RATE) or max(logged_rates, default=0.0)


def suggest_smaller_rate(material: RunData, factor: float = 10.0) -> str:
    """Suggest a learning rate that is `factor` times smaller."""
    now = find_rate(material)
    if not now:
        return f"try a learning rate {factor:g} times smaller"
    rate = f"{min(now / factor, LARGEST_RATE):.2g}"
    return build_command(material, {LEARNING_RATE: rate}, f"try a learning rate of {rate}")


def suggest_other_learning_rate(material: RunData) -> str:
    """Suggest a rate where nothing is learned: ten times smaller if it is high, else larger."""
    now = find_rate(material)
    if not now:
        return "try learning rates 10 times larger and smaller"
    if now >= HIGH_RATE:
        return suggest_smaller_rate(material)
    rate = f"{now * 10:.2g}"
    return build_command(material, {LEARNING_RATE: rate}, f"try a learning rate of {rate}")


def suggest_clip_norm(material: RunData) -> str:
    """Suggest a maximum norm, twice the usual one; "" if the norms are so small that it is useless.

    Pascanu et al. take the average norm as the scale of the maximum.
    """
    curve = find_gradient_norm_series(material.scalars)
    norms = [value for _, value in finite_points(curve)] if curve is not None else []
    if not norms:
        return f"{LEAST_CLIP_NORM:g}"
    if max(norms) <= LEAST_CLIP_NORM:
        return ""
    # One digit: the norms vary more than the second one says.
    return f"{max(LEAST_CLIP_NORM, float(f'{2 * median(norms):.1g}')):g}"


def list_rates_at(material: RunData, step: int) -> list[Evidence]:
    """List the learning rate and the gradient norm at a step, as evidence."""
    evidence = []
    for curve in (
        find_learning_rate(material.scalars),
        find_gradient_norm_series(material.scalars),
    ):
        value = value_at(curve, step)
        if curve is not None and value is not None:
            evidence.append(from_events(f"{curve.tag}: {number(value)} at that step"))
    return evidence
