"""The comparison of runs: the test of a difference, settings, curves, and what is not compared."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compared_runs import make_evaluation
from hypothesis import given
from hypothesis import strategies as st
from report_facts import facts, series

from labctl.errors import LabError
from labctl.insight.compare.comparison import MOST_RUNS, compare_runs
from labctl.insight.compare.mcnemar import MOST_EXACT, adjust_for_several, run_mcnemar_test
from labctl.insight.compare.page import build_comparison_page, make_curve_rows
from labctl.insight.compare.settings import parse_command
from labctl.insight.compare.wording import describe_pairs
from labctl.insight.report.facts import ReportFacts
from labctl.insight.report.render import render
from labctl.insight.scalars import Scalars
from labctl.model import Run
from labctl.runs.evaluation import Evaluation, Predictions, parse_evaluation
from labctl.runs.provenance import RunOrigin

ROOT = Path(__file__).parents[2]


def ran(name: str, found: Evaluation | None, *words: str, **changes: Any) -> ReportFacts:
    run = Run(id=name, lab_id="l1", server_id="s1", state="exited", command=("python", *words))
    return facts(run=run, evaluation=found, code=RunOrigin(command=run.command), **changes)


def pair_text(first: Evaluation | None, second: Evaluation | None) -> str:
    comparison, _ = compare_runs([ran("one", first), ran("two", second)])
    return describe_pairs(comparison.pairs)[0]


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 12), (12, 3), (7, 7), (40, 61)])
def test_the_exact_test_is_the_binomial_one(first: int, second: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    result = run_mcnemar_test(first, second)
    assert result.method == "exact"
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert result.p_value == pytest.approx(expected, rel=1e-9)


def test_many_discordant_items_use_the_chi_squared_distribution() -> None:
    stats = pytest.importorskip("scipy.stats")
    for first, second in [(600, 500), (550, 551), (2000, 1)]:
        result = run_mcnemar_test(first, second)
        assert result.method == "chi-squared"
        statistic = (abs(first - second) - 1) ** 2 / (first + second)
        assert result.p_value == pytest.approx(stats.chi2.sf(statistic, 1), rel=1e-9)
    # Where one method follows the other, they agree.
    exact, other = run_mcnemar_test(540, MOST_EXACT - 540), run_mcnemar_test(541, MOST_EXACT - 540)
    assert exact.p_value == pytest.approx(other.p_value, abs=2e-3)


def test_several_tests_are_adjusted_by_holm() -> None:
    assert adjust_for_several([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert adjust_for_several([0.9, 0.5]) == (1.0, 1.0)
    assert adjust_for_several([]) == ()


@given(st.lists(st.floats(0, 1), max_size=8))
def test_adjusted_values_keep_their_order_and_are_no_smaller(values: list[float]) -> None:
    adjusted = adjust_for_several(values)
    assert all(value <= more <= 1 for value, more in zip(values, adjusted, strict=True))
    ranked = sorted(zip(values, adjusted, strict=True))
    assert all(one[1] <= other[1] for one, other in itertools.pairwise(ranked))


def test_a_difference_that_is_chance_and_one_that_is_not() -> None:
    truth = [0, 1] * 20
    wrong_on = [
        [1 - one if place < wrong else one for place, one in enumerate(truth)] for wrong in (2, 12)
    ]
    good, bad = (make_evaluation(truth, said) for said in wrong_on)
    text = pair_text(good, bad)
    assert "Only A is right on 10\u00a0items, only B on 0." in text
    assert "McNemar's test (exact): p = 0.002. A is better: this is significant at 5%." in text
    slightly = make_evaluation(truth, [1 - truth[0], *truth[1:]])
    assert "p = 1. This may be chance: it is not significant at 5%." in pair_text(good, slightly)
    assert pair_text(good, good) == "A and B are right and wrong on the same items."


def test_what_cannot_be_compared_is_named() -> None:
    truth = [0, 1, 0, 1]
    found = make_evaluation(truth, truth)
    others = {
        "B was not evaluated": None,
        "B has no prediction for each item": msgspec.structs.replace(found, predictions=None),
        "B has no hash of its test set": msgspec.structs.replace(found, data_sha256=""),
        "they were evaluated on different test sets": msgspec.structs.replace(
            found, data_sha256="e" * 64
        ),
        "one was evaluated on test, the other on val": msgspec.structs.replace(found, split="val"),
        "they have different classes": msgspec.structs.replace(found, classes=("dog", "cat")),
        "not in the same order": make_evaluation(
            truth,
            truth,
            predictions=Predictions(
                order_sha256="0" * 64, truth=tuple(truth), predicted=tuple(truth)
            ),
        ),
        "disagree about the true classes": make_evaluation([1, 0, 1, 0], truth),
    }
    for reason, other in others.items():
        text = pair_text(found, other)
        assert text.startswith("A and B are not compared: "), text
        assert reason in text
        assert "p =" not in text


def test_settings_that_differ_and_hidden_ones() -> None:
    first = ran("one", None, "train.py", "--lr=0.1", "--amp", "--api-key", "abc")
    second = ran("two", None, "train.py", "--lr", "0.01", "--api-key", "xyz")
    comparison, _ = compare_runs([first, second])
    differences = {one.name: one.values for one in comparison.differences}
    assert differences["--lr"] == ("0.1", "0.01")
    assert differences["--amp"] == ("yes", "-")
    assert differences["--api-key"] == ("hidden", "hidden")
    assert "command" not in differences
    assert parse_command(["x", "--shift", "-1", "-v"]) == {
        "command": "x",
        "--shift": "-1",
        "-v": "yes",
    }


def test_curves_of_three_runs_are_in_one_plot_with_a_color_for_each_run() -> None:
    def logged(name: str, *tags: str) -> ReportFacts:
        curves = tuple(series(tag, 0.1, 0.5, float("nan")) for tag in tags)
        return ran(name, None, scalars=Scalars(series=curves, files=1))

    runs = [
        logged("a", "val/accuracy", "train/accuracy"),
        logged("b", "train/loss"),
        logged("c", "val/accuracy", "train/loss"),
    ]
    comparison, charts = compare_runs(runs)
    assert [(one.name, one.data) for one in comparison.curves] == [
        ("accuracy", "validation"),
        ("loss", "training"),
    ]
    assert [[line.label for line in chart.lines] for chart in charts] == [["A", "C"], ["B", "C"]]
    assert [[line.style for line in chart.lines] for chart in charts] == [[0, 2], [1, 2]]
    accuracy, loss = comparison.curves
    assert (accuracy.best, accuracy.steps) == ((0.5, None, 0.5), (20, None, 20))
    assert loss.best == (None, 0.1, 0.1)


def test_only_a_curve_whose_values_can_be_better_has_a_best_one() -> None:
    tags = ("train/loss", "data/wait_share", "train/gradient_norm", "train/learning_rate")

    def logged(name: str) -> ReportFacts:
        curves = tuple(series(tag, 0.5, 0.1, 0.3) for tag in tags)
        return ran(name, None, scalars=Scalars(series=curves, files=1))

    comparison, _ = compare_runs([logged("a"), logged("b")])
    rows = {row.name: row.values[0] for row in make_curve_rows(comparison.curves)}
    assert len(comparison.curves) == len(tags), "each has a chart"
    assert rows == {"training loss": "0.1 at step 20", "wait share": "10.0% at step 20"}


def test_the_page_escapes_names_and_shows_every_run() -> None:
    truth = [0, 1] * 20
    hostile = "<script>alert(1)</script>"
    runs = [
        ran(
            f"run{n}",
            make_evaluation(truth, [1 - truth[0], *truth[1:]]),
            "train.py",
            f"--name={hostile}{n}",
        )
        for n in range(MOST_RUNS)
    ]
    comparison, charts = compare_runs(runs)
    made = build_comparison_page(hostile, comparison, charts, made_at=0.0, labctl="1")
    page = render(made, ROOT / "templates" / "report", "comparison.html.j2")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > MOST_RUNS
    assert all(f"run{n}" in page for n in range(MOST_RUNS))
    assert len(comparison.pairs) == MOST_RUNS * (MOST_RUNS - 1) // 2


def test_text_models_are_compared_by_their_losses_and_nothing_is_to_be_repeated() -> None:
    found = make_evaluation([0, 1, 1], [0, 1, 0])
    text = msgspec.structs.replace(
        found, classes=(), confusion=(), predictions=None, loss=1.5, accuracy=0.5, items=2000
    )
    comparison, _ = compare_runs([ran("one", text), ran("two", text)])
    (pair,) = comparison.pairs
    assert describe_pairs(comparison.pairs) == (
        "A and B are not compared: A predicts text. McNemar's test needs items that do not depend "
        "on each other, and each token depends on those before it; compare the losses instead.",
    )
    assert pair.hint == ""
    bare = msgspec.structs.replace(text, loss=None)
    (pair,) = compare_runs([ran("one", bare), ran("two", found)])[0].pairs
    assert (pair.reason[:26], pair.hint) == ("A has no prediction for ea", "labctl eval one")


def test_predictions_that_contradict_the_confusion_matrix_are_refused() -> None:
    body = json.loads(msgspec.json.encode(make_evaluation([0, 1, 1], [0, 1, 0])))
    assert parse_evaluation(json.dumps(body).encode()).predictions is not None
    for change in (
        {"said": [0, 1, 1]},
        {"said": [0, 1]},
        {"truth": [0, 1, 9]},
        {"order_sha256": "x"},
    ):
        wrong = body | {"predictions": body["predictions"] | change}
        with pytest.raises(LabError, match="not a valid evaluation"):
            parse_evaluation(json.dumps(wrong).encode())
