"""The learning rate and the gradient norm at a step, and the rate to try next."""

from __future__ import annotations

from labctl.insight.explain.curves import at, finite, gradient_norm, learning_rate
from labctl.insight.explain.evidence import Evidence, Material, logged
from labctl.insight.explain.wording import LEARNING_RATE, again, given_number, number

# Suggestions are never larger than this, however large the rate was.
LARGEST_RATE = 0.1
# From here, a rate at which nothing is learned is more often too large than too small.
HIGH_RATE = 0.03


def rate_now(material: Material) -> float:
    """Return the command's learning rate, else the largest that was logged, else 0."""
    curve = learning_rate(material.scalars)
    logged_rates = [value for _, value in finite(curve) if value > 0] if curve else []
    return given_number(material, LEARNING_RATE) or max(logged_rates, default=0.0)


def smaller_rate(material: Material, factor: float = 10.0) -> str:
    """Suggest a learning rate that is `factor` times smaller."""
    now = rate_now(material)
    if not now:
        return f"try a learning rate {factor:g} times smaller"
    rate = f"{min(now / factor, LARGEST_RATE):.2g}"
    return again(material, {LEARNING_RATE: rate}, f"try a learning rate of {rate}")


def other_rate(material: Material) -> str:
    """Suggest a rate where nothing is learned: ten times smaller if it is high, else larger."""
    now = rate_now(material)
    if not now:
        return "try learning rates 10 times larger and smaller"
    if now >= HIGH_RATE:
        return smaller_rate(material)
    rate = f"{now * 10:.2g}"
    return again(material, {LEARNING_RATE: rate}, f"try a learning rate of {rate}")


def beside(material: Material, step: int) -> list[Evidence]:
    """List the learning rate and the gradient norm at a step, as evidence."""
    evidence = []
    for curve in (learning_rate(material.scalars), gradient_norm(material.scalars)):
        value = at(curve, step)
        if curve is not None and value is not None:
            evidence.append(logged(f"{curve.tag}: {number(value)} at that step"))
    return evidence
