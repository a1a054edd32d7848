"""Test whether weights with fewer bits predict worse, from what each row predicts of each item."""

from __future__ import annotations

import itertools

from labctl.insight.compare.pairs import (
    PairComparison,
    adjust_pairs,
    find_item_difference,
    run_paired_test,
)
from labctl.insight.quantization.measurements import QuantizedModel, QuantizedRow


def compare_rows(result: QuantizedModel) -> tuple[PairComparison, ...]:
    """Compare each two rows that have predictions by McNemar's test."""
    rows = [row for row in result.rows if row.predictions is not None]
    return adjust_pairs([_compare(*pair) for pair in itertools.combinations(rows, 2)])


def _compare(first: QuantizedRow, second: QuantizedRow) -> PairComparison:
    assert first.predictions is not None, "chosen by compare_rows"
    assert second.predictions is not None, "chosen by compare_rows"
    reason = find_item_difference(first.predictions, second.predictions)
    test = None if reason else run_paired_test(first.predictions, second.predictions)
    return PairComparison(first=first.name, second=second.name, test=test, reason=reason)
