"""What several runs of a lab reached, cost and had set differently, and whether that is chance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from labctl.insight.compare.code import describe_code
from labctl.insight.compare.curves import CurveValues, compare_curves
from labctl.insight.compare.pairs import (
    PairComparison,
    adjust_pairs,
    find_item_difference,
    run_paired_test,
)
from labctl.insight.compare.settings import SettingDifference, find_differences
from labctl.insight.report.charts import Chart
from labctl.insight.report.facts import ReportFacts
from labctl.model import Value
from labctl.runs.checkpointed_runs import has_saved_none
from labctl.runs.evaluation import Evaluation, Predictions, confidence_interval

# McNemar's test assumes independent items. Consecutive tokens of a text are not: with them, it
# would call differences significant that another text would not show.
NO_TEST_FOR_TEXT = (
    "predicts text. McNemar's test needs items that do not depend on each other, and each token "
    "depends on those before it; compare the losses instead"
)
# The letters of the runs in tables and charts; more curves in one plot could not be told apart.
LABELS = "ABCDEF"
MOST_RUNS = len(LABELS)


class ComparedRun(Value, frozen=True):
    """One run: its letter, the result of its evaluation, and what it cost.

    Shares are from 0 to 1; `low` and `high` are the 95% interval (Wilson) of `accuracy`. None is
    not measured.
    """

    label: str
    run: str
    state: str
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    correct: int | None = None
    items: int | None = None
    split: str = ""
    checkpoint: str = ""
    took_s: float | None = None
    cost_usd: float | None = None
    price_usd_per_hour: float | None = None


class ComparisonResult(Value, frozen=True):
    """Several runs side by side; `differences` and `curves` have values in the order of `runs`.

    `code` says whether their code differs.
    """

    runs: tuple[ComparedRun, ...]
    differences: tuple[SettingDifference, ...]
    curves: tuple[CurveValues, ...]
    pairs: tuple[PairComparison, ...]
    notes: tuple[str, ...] = ()
    code: str = ""


def compare_runs(runs: Sequence[ReportFacts]) -> tuple[ComparisonResult, tuple[Chart, ...]]:
    """Compare two to MOST_RUNS runs; return the comparison and the charts of their curves."""
    labels = LABELS[: len(runs)]
    labeled = list(zip(labels, runs, strict=True))
    curves, charts = compare_curves(runs, labels)
    pairs = [_compare_pair(*one) for one in itertools.combinations(labeled, 2)]
    comparison = ComparisonResult(
        runs=tuple(_describe_run(label, facts) for label, facts in labeled),
        differences=find_differences(runs),
        curves=curves,
        pairs=adjust_pairs(pairs),
        notes=tuple(f"{label}: {note}" for label, facts in labeled for note in facts.notes),
        code=describe_code(runs, labels),
    )
    return comparison, charts


def _describe_run(label: str, facts: ReportFacts) -> ComparedRun:
    run, evaluation = facts.run, facts.evaluation
    described = ComparedRun(
        label=label,
        run=run.id,
        state=run.summary or run.state_text,
        took_s=run.ended_at - run.started_at if run.ended_at and run.started_at else None,
        cost_usd=facts.bill.run_usd,
        price_usd_per_hour=facts.bill.price_usd_per_hour,
    )
    if evaluation is None:
        return described
    low, high = confidence_interval(evaluation.correct, evaluation.items) or (None, None)
    return replace(
        described,
        accuracy=evaluation.accuracy,
        low=low,
        high=high,
        correct=evaluation.correct if evaluation.items else None,
        items=evaluation.items or None,
        split=evaluation.split,
        checkpoint=evaluation.checkpoint,
    )


def _compare_pair(
    first: tuple[str, ReportFacts], second: tuple[str, ReportFacts]
) -> PairComparison:
    pair = PairComparison(first=first[0], second=second[0])
    evaluations = []
    for label, facts in (first, second):
        if _is_text_model(facts.evaluation):
            return replace(pair, reason=f"{label} {NO_TEST_FOR_TEXT}")
        if reason := _find_missing_part(facts.evaluation):
            if facts.evaluation is None and has_saved_none(facts.run) and not facts.checkpoints:
                return replace(pair, reason=f"{label} {reason}, as it saved no checkpoint")
            hint = f"labctl eval {facts.run.id}"
            return replace(pair, reason=f"{label} {reason}", hint=hint)
        evaluations += [facts.evaluation] if facts.evaluation else []
    if reason := _find_difference(*evaluations):
        return replace(pair, reason=reason)
    one, other = (_get_predictions(evaluation) for evaluation in evaluations)
    return replace(pair, test=run_paired_test(one, other))


def _get_predictions(evaluation: Evaluation) -> Predictions:
    assert evaluation.predictions is not None, "checked by _find_missing_part"
    return evaluation.predictions


def _is_text_model(evaluation: Evaluation | None) -> bool:
    """Tell whether it has a loss but no classes, as that of a model that predicts tokens has."""
    return evaluation is not None and not evaluation.classes and evaluation.loss is not None


def _find_missing_part(evaluation: Evaluation | None) -> str:
    """Describe what a run's evaluation lacks for a paired test; "" if it lacks nothing."""
    if evaluation is None:
        return "was not evaluated"
    if evaluation.predictions is None:
        return "has no prediction for each item: its evaluate.py did not write `predictions`"
    if not evaluation.data_sha256:
        return "has no hash of its test set: its evaluate.py did not write `data_sha256`"
    return ""


def _find_difference(first: Evaluation, second: Evaluation) -> str:
    """Describe why two evaluations are not of the same items; "" if they are."""
    if first.split != second.split:
        return f"one was evaluated on {first.split}, the other on {second.split}"
    if first.data_sha256 != second.data_sha256 or first.items != second.items:
        return "they were evaluated on different test sets"
    if first.classes != second.classes:
        return "they have different classes"
    return find_item_difference(_get_predictions(first), _get_predictions(second))
