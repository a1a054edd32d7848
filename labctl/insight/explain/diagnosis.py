"""All rules asked, and their answers in order: problems, advice, what is good, what is unknown."""

from __future__ import annotations

from labctl.insight.explain import data, ending, gpu, gpu_loss, learning, losses, memory
from labctl.insight.explain.evidence import Finding, Material, Rule, Unknown
from labctl.model import Value

RULES: tuple[Rule, ...] = (
    *gpu_loss.RULES,
    *ending.RULES,
    *memory.RULES,
    *losses.RULES,
    *gpu.RULES,
    *data.RULES,
    *learning.RULES,
)
ORDER = ("problem", "advice", "good")
# Rules whose finding is part of another's, where that was found.
SAID_BY = {"data-wait": {"gpu-idle", "gpu-half-used", "gpu-fair"}, "disk-full": {"shm-full"}}


class Verdict(Value, frozen=True):
    """`findings` in the order in which they matter; `unknown` is what could not be told."""

    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]


def verdict(material: Material) -> Verdict:
    """What every rule says of this run. No input makes one fail."""
    answers = [answer for rule in RULES for answer in rule(material)]
    rules = {one.rule for one in answers if isinstance(one, Finding)}
    findings = [
        one
        for one in answers
        if isinstance(one, Finding) and not rules & SAID_BY.get(one.rule, set())
    ]
    unknown = [one for one in answers if isinstance(one, Unknown)]
    findings.sort(key=lambda one: ORDER.index(one.level))
    return Verdict(findings=tuple(findings), unknown=tuple(unknown))
