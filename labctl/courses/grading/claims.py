"""Comparison of a submission's own evaluation with the measurement on the hidden set."""

from __future__ import annotations

from labctl.courses.grading.results import GradeResults
from labctl.model import Value
from labctl.runs.evaluation import Evaluation, confidence_interval

# The key in results.json's `extra_data` that a claim is compared with: a share from 0 to 1.
METRIC = "accuracy"
# A larger number of items is an error, and its product with a share may not fit a float.
MOST_ITEMS = 2**53


class AccuracyComparison(Value, frozen=True):
    """A claimed and a measured accuracy, from 0 to 1; None if unknown.

    `agrees` is None if there is nothing to compare. `low` and `high` are the 95 percent interval of
    the measurement, if the number of items is known.
    """

    claimed: float | None = None
    measured: float | None = None
    tolerance: float = 0.0
    agrees: bool | None = None
    low: float | None = None
    high: float | None = None
    where: str = ""

    def describe(self) -> str:
        """Describe the comparison; "" if nothing was claimed or measured."""
        if self.claimed is None or self.measured is None:
            return ""
        span = "" if self.low is None else f" (95%: {self.low:.3f} to {self.high:.3f})"
        return (
            f"claims {self.claimed:.4f}, measured {self.measured:.4f}{span}, "
            f"tolerance {self.tolerance:g}"
        )


def read_measurement(results: GradeResults) -> tuple[float | None, int]:
    """Return the grader's measured share and its number of items; (None, 0) if it gave none."""
    value, items = results.extra_data.get(METRIC), results.extra_data.get("items")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return None, 0
    count = 0
    if isinstance(items, int) and not isinstance(items, bool) and 0 < items <= MOST_ITEMS:
        count = items
    return float(value), count


def compare_evaluation(
    evaluation: Evaluation | None, results: GradeResults, tolerance: float
) -> AccuracyComparison:
    """Compare the bundle's own evaluation, the claim, with the grader's measurement."""
    measured, items = read_measurement(results)
    claimed = None if evaluation is None else evaluation.accuracy
    span = (
        confidence_interval(round(measured * items), items)
        if measured is not None and items
        else None
    )
    agrees = None
    if claimed is not None and measured is not None:
        agrees = abs(claimed - measured) <= tolerance + 1e-9
    return AccuracyComparison(
        claimed=claimed,
        measured=measured,
        tolerance=tolerance,
        agrees=agrees,
        low=span[0] if span else None,
        high=span[1] if span else None,
        where=evaluation.where if evaluation else "",
    )
