"""The sentences about two models, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.insight.compare.mcnemar import SIGNIFICANCE, PairedTest
from labctl.insight.compare.pairs import PairComparison
from labctl.insight.report.formatting import count

SMALLEST_P_VALUE = 0.001
METHODS = {"exact": "exact", "chi-squared": "chi-squared with Edwards' correction"}
SAME_SETTINGS = "No recorded setting differs."


def describe_pairs(pairs: Sequence[PairComparison]) -> tuple[str, ...]:
    """Describe each pair in sentences: its test, adjusted for that of the others."""
    tests = sum(pair.test is not None for pair in pairs)
    return tuple(_describe_pair(pair, tests) for pair in pairs)


def _describe_pair(pair: PairComparison, tests: int) -> str:
    """Say how two models differ and whether that is chance, or why it is unknown."""
    names = f"{pair.first} and {pair.second}"
    if pair.test is None:
        return f"{names} are not compared: {pair.reason}."
    test = pair.test
    if not test.only_first + test.only_second:
        return f"{names} are right and wrong on the same items."
    text = (
        f"Only {pair.first} is right on {count(test.only_first, 'item')}, "
        f"only {pair.second} on {test.only_second:,}. {_describe_p_value(test)}"
    )
    assert pair.adjusted_p_value is not None
    if tests > 1:
        text += f"; with {tests} comparisons, {_format_p_value(pair.adjusted_p_value)} (Holm)"
    level = f"{SIGNIFICANCE:.0%}"
    if not pair.better:
        return f"{text}. This may be chance: it is not significant at {level}."
    return f"{text}. {pair.better} is better: this is significant at {level}."


def _describe_p_value(test: PairedTest) -> str:
    return f"McNemar's test ({METHODS[test.method]}): {_format_p_value(test.p_value)}"


def _format_p_value(p_value: float) -> str:
    if p_value < SMALLEST_P_VALUE:
        return f"p < {SMALLEST_P_VALUE}"
    return f"p = {p_value:.2g}" if p_value < 0.995 else "p = 1"
