"""Weights with fewer bits beside the original ones: size, latency, and accuracy with interval."""

from __future__ import annotations

from labctl.insight.compare.wording import describe_pairs
from labctl.insight.quantization.measurements import QuantizedModel, QuantizedRow
from labctl.insight.quantization.paired_tests import compare_rows
from labctl.insight.report.formatting import (
    SPACE,
    bare_percent,
    count,
    number,
    percent,
    size,
)
from labctl.model import Value
from labctl.runs.evaluation import confidence_interval


class WeightsRow(Value, frozen=True):
    weights: str
    size: str
    latency: str
    accuracy: str
    interval: str


class QuantizationPart(Value, frozen=True):
    """The report's part on quantized weights.

    `verdict` says how much smaller they are, and what the intervals mean if there are no `tests`:
    sentences about McNemar's test of each two rows.
    """

    rows: tuple[WeightsRow, ...]
    verdict: str
    tests: tuple[str, ...]
    note: str


def describe_quantization(result: QuantizedModel) -> QuantizationPart:
    """List the ways to store the weights, and say whether their accuracies differ."""
    tests, sizes = describe_pairs(compare_rows(result)), _compare_sizes(result)
    return QuantizationPart(
        rows=tuple(_make_row(row) for row in result.rows),
        verdict=sizes if tests else f"{sizes} {_compare_intervals(result)}",
        tests=tests,
        note=result.note,
    )


def _make_row(row: QuantizedRow) -> WeightsRow:
    low, high = _interval(row)
    return WeightsRow(
        weights=row.name,
        size=size(row.size_bytes),
        latency=f"{number(row.latency_ms, 3)}{SPACE}ms",
        accuracy=percent(row.accuracy),
        interval=f"{bare_percent(low)} to {percent(high)}",
    )


def _interval(row: QuantizedRow) -> tuple[float, float]:
    bounds = confidence_interval(row.correct, row.total)
    assert bounds is not None, "a row has items"
    return bounds


def _compare_sizes(result: QuantizedModel) -> str:
    first, last = result.rows[0], result.rows[-1]
    times = first.size_bytes / last.size_bytes
    return f"{last.name} is {times:.1f} times smaller than {first.name}."


def _compare_intervals(result: QuantizedModel) -> str:
    """Say which intervals do not overlap with that of the original weights."""
    first, *others = result.rows
    low, high = _interval(first)
    apart = []
    for row in others:
        row_low, row_high = _interval(row)
        if row_high < low:
            apart.append(f"{row.name} is less accurate than {first.name}")
        elif row_low > high:
            apart.append(f"{row.name} is more accurate than {first.name}")
    if apart:
        return f"{' and '.join(apart)}: the 95% intervals do not overlap."
    items = count(first.total, "item")
    return (
        f"All 95% intervals overlap with that of {first.name}: {items} do not show that rounding "
        "changed the accuracy."
    )
