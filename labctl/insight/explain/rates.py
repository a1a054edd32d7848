"""The learning rate and the gradient norm at a step, and which rate to try next."""

from __future__ import annotations

from labctl.insight.explain.curves import at, finite, gradient_norm, learning_rate
from labctl.insight.explain.evidence import Evidence, Material, logged
from labctl.insight.explain.wording import LEARNING_RATE, again, given_number, number

# What is larger is no next thing to try, however large the rate was.
LARGEST_RATE = 0.1
# From here on a rate that teaches nothing is more often too large than too small.
HIGH_RATE = 0.03


def rate_now(material: Material) -> float:
    """As the command says it, else the largest that was logged; 0 where neither does."""
    curve = learning_rate(material.scalars)
    known = [value for _, value in finite(curve) if value > 0] if curve else []
    return given_number(material, LEARNING_RATE) or max(known, default=0.0)


def smaller_rate(material: Material, factor: float = 10.0) -> str:
    """What to type for a learning rate that is so many times smaller."""
    now = rate_now(material)
    if not now:
        return f"a learning rate {factor:g} times smaller"
    rate = f"{min(now / factor, LARGEST_RATE):.2g}"
    return again(material, {LEARNING_RATE: rate}, f"a learning rate of {rate}")


def other_rate(material: Material) -> str:
    """What to type where the rate teaches nothing: ten times smaller if it is high, else larger."""
    now = rate_now(material)
    if not now:
        return "learning rates 10 times larger and smaller"
    if now >= HIGH_RATE:
        return smaller_rate(material)
    rate = f"{now * 10:.2g}"
    return again(material, {LEARNING_RATE: rate}, f"a learning rate of {rate}")


def beside(material: Material, step: int) -> list[Evidence]:
    """Learning rate and gradient norm at a step."""
    found = []
    for curve in (learning_rate(material.scalars), gradient_norm(material.scalars)):
        value = at(curve, step)
        if curve is not None and value is not None:
            found.append(logged(f"{curve.tag}: {number(value)} then"))
    return found
