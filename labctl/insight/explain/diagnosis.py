"""Apply all rules to a run, and order the answers: problems, advice, good results, unknown."""

from __future__ import annotations

from labctl.insight.explain import (
    data,
    ending,
    fragmentation,
    gpu,
    gpu_loss,
    host,
    installs,
    learning,
    losses,
    memory,
    missing_path,
    missing_program,
)
from labctl.insight.explain.evidence import Finding, Rule, RunData, Unknown
from labctl.model import Value

RULES: tuple[Rule, ...] = (
    *gpu_loss.RULES,
    *missing_path.RULES,
    *missing_program.RULES,
    *ending.RULES,
    *memory.RULES,
    *fragmentation.RULES,
    *losses.RULES,
    *host.RULES,
    *gpu.RULES,
    *data.RULES,
    *installs.RULES,
    *learning.RULES,
)
ORDER = ("problem", "advice", "good")
# Finding -> findings that cover it, so that it is left out beside them.
COVERED_BY = {
    # On a busy server, the run's own loading and threads are not to blame.
    "data-wait": {"gpu-idle", "gpu-half-used", "gpu-fair", "host-busy"},
    "processor-idle": {"host-busy"},
    "processor-one-core": {"host-busy"},
    "disk-full": {"shm-full"},
    "file-missing": {"file-ignored"},
    "exception": {"file-ignored"},
}


class Diagnosis(Value, frozen=True):
    """`findings` by importance, and `unknown`: questions that the data cannot answer."""

    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]


def diagnose(material: RunData) -> Diagnosis:
    """Apply every rule to this run. Rules do not raise, whatever the input."""
    answers = [answer for rule in RULES for answer in rule(material)]
    rules = {answer.rule for answer in answers if isinstance(answer, Finding)}
    findings = [
        answer
        for answer in answers
        if isinstance(answer, Finding) and not rules & COVERED_BY.get(answer.rule, set())
    ]
    unknown = [answer for answer in answers if isinstance(answer, Unknown)]
    findings.sort(key=lambda answer: ORDER.index(answer.level))
    return Diagnosis(findings=tuple(findings), unknown=tuple(unknown))
