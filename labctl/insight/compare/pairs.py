"""Two models that classified the same items: the paired test of their difference."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from labctl.insight.compare.mcnemar import (
    SIGNIFICANCE,
    PairedTest,
    adjust_for_several,
    run_mcnemar_test,
)
from labctl.model import Value
from labctl.runs.evaluation import Predictions


class PairComparison(Value, frozen=True):
    """Two models, by their names: the test of their difference, or why it was not made.

    `is_significant` is decided by `adjusted_p_value`, which allows for the number of pairs.
    """

    first: str
    second: str
    test: PairedTest | None = None
    adjusted_p_value: float | None = None
    is_significant: bool | None = None
    reason: str = ""
    hint: str = ""

    @property
    def better(self) -> str:
        """The name of the model that is significantly better; "" if neither is."""
        if self.test is None or not self.is_significant:
            return ""
        return self.first if self.test.only_first > self.test.only_second else self.second


def find_item_difference(first: Predictions, second: Predictions) -> str:
    """Describe why predictions are not of the same items in the same order; "" if they are."""
    if first.order_sha256 != second.order_sha256:
        return "their predictions are not in the same order of the items"
    if first.truth != second.truth:
        return "their evaluations disagree about the true classes"
    return ""


def run_paired_test(first: Predictions, second: Predictions) -> PairedTest:
    """Test two models by the items that only the first, or only the second, got right."""
    only_first = only_second = 0
    for truth, one, other in zip(first.truth, first.predicted, second.predicted, strict=True):
        only_first += one == truth != other
        only_second += other == truth != one
    return run_mcnemar_test(only_first, only_second)


def adjust_pairs(pairs: Sequence[PairComparison]) -> tuple[PairComparison, ...]:
    """Decide which differences are significant, by p-values adjusted for the number of tests."""
    p_values = adjust_for_several([pair.test.p_value for pair in pairs if pair.test])
    adjusted = iter(p_values)
    return tuple(
        replace(pair, adjusted_p_value=value, is_significant=value < SIGNIFICANCE)
        if pair.test and (value := next(adjusted)) is not None
        else pair
        for pair in pairs
    )
