"""Evaluations: figures against published examples, and files that do not fit together refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.errors import LabError, NotFoundError
from labctl.runs.evaluation import (
    LARGEST_BYTES,
    Evaluation,
    compute_class_metrics,
    confidence_interval,
    parse_evaluation,
    read_evaluation,
)

BODY: dict[str, Any] = {
    "version": 1,
    "checkpoint": "step-00000320",
    "split": "test",
    "classes": ["cat", "dog"],
    "confusion": [[8, 2], [1, 9]],
    "accuracy": 0.85,
    "items": 20,
    "baseline_accuracy": 0.5,
    "where": "server",
    "worst": [
        {
            "item": "cat/1.png",
            "truth": "cat",
            "said": "dog",
            "probability": 0.97,
            "picture": "a.png",
        }
    ],
}


def text(**changes: Any) -> bytes:
    return msgspec.json.encode(BODY | changes)


@pytest.mark.parametrize(
    ("correct", "items", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_as_published(correct: int, items: int, low: float, high: float) -> None:
    found = confidence_interval(correct, items)
    assert found is not None
    assert found == pytest.approx((low, high), abs=5e-5)


def test_of_nothing_there_is_no_interval() -> None:
    assert confidence_interval(0, 0) is None


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_share_and_stays_a_share(case: tuple[int, int]) -> None:
    correct, items = case
    low, high = confidence_interval(correct, items) or (-1.0, 2.0)
    assert 0 <= low <= correct / items <= high <= 1
    assert low < high


def test_precision_recall_and_f1() -> None:
    cat, dog = compute_class_metrics(parse_evaluation(text()))
    assert (cat.items, cat.predicted, cat.correct) == (10, 9, 8)
    assert (cat.precision, cat.recall) == (8 / 9, 0.8)
    assert cat.f1 == pytest.approx(2 * (8 / 9) * 0.8 / (8 / 9 + 0.8))
    assert dog.recall == 0.9


def test_a_class_that_nobody_named_and_nothing_bears_has_no_figures() -> None:
    found = parse_evaluation(
        text(
            classes=["a", "b", "c"],
            confusion=[[2, 0, 0], [2, 0, 0], [0, 0, 0]],
            items=4,
            worst=[],
            accuracy=0.5,
        )
    )
    _, b, c = compute_class_metrics(found)
    assert (b.precision, b.recall, b.f1) == (None, 0.0, 0.0)
    assert (c.precision, c.recall, c.f1) == (None, None, None)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    found = parse_evaluation(text())
    (tmp_path / "evaluation.json").write_bytes(msgspec.json.encode(found))
    assert read_evaluation(tmp_path / "evaluation.json") == found
    assert isinstance(found, Evaluation)
    assert found.correct == 17


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"classes": []}, "classes"),
        ({"classes": ["cat", "cat"]}, "distinct"),
        ({"classes": ["cat", "x" * 201]}, "characters"),
        ({"confusion": [[8, 2]]}, "rows"),
        ({"confusion": [[8, 2], [1]]}, "rows"),
        ({"confusion": [[11, -1], [1, 9]]}, "negative"),
        ({"confusion": [[8, 2], [1, 8]]}, "add up"),
        ({"confusion": [[0, 0], [0, 0]], "items": 0, "accuracy": 0}, "add up"),
        ({"accuracy": 0.99}, "confusion matrix"),
        ({"classes": [], "confusion": [], "worst": [], "accuracy": 1.5}, "from 0 to 1"),
        ({"classes": [], "confusion": [], "worst": [], "items": -1}, "0 or more"),
        ({"baseline_accuracy": 1.5}, "from 0 to 1"),
        ({"where": "elsewhere"}, "where"),
        ({"worst": [BODY["worst"][0] | {"said": "<b>"}]}, "unknown class"),
        ({"worst": [BODY["worst"][0] | {"probability": 7}]}, "probability"),
        ({"worst": [BODY["worst"][0] | {"picture": "../../.ssh/id_ed25519"}]}, "outside"),
        ({"worst": [BODY["worst"][0] | {"picture": "/etc/passwd"}]}, "outside"),
        ({"worst": [BODY["worst"][0] | {"picture": "https://example.org/a.png"}]}, "outside"),
        (
            {"worst": [BODY["worst"][0] | {"picture": "data:text/html;base64,AAAA"}]},
            "invalid picture",
        ),
        (
            {"worst": [BODY["worst"][0] | {"picture": 'data:image/png;base64,A" onerror="'}]},
            "invalid picture",
        ),
        (
            {"worst": [BODY["worst"][0] | {"picture": "data:image/svg+xml;base64,AAAA"}]},
            "invalid picture",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError) as caught:
        parse_evaluation(text(**changes))
    assert said in caught.value.why
    assert caught.value.hint == "labctl eval"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        text()[:-20],
        b"\xff\xfe",
        b"[" * 100_000,
        text().replace(b"0.85", b"NaN"),
        text().replace(b"0.97", b"Infinity"),
        text().replace(b"0.85", b"1e999"),
    ],
)
def test_what_is_no_evaluation_at_all_is_refused(content: bytes) -> None:
    with pytest.raises(LabError):
        parse_evaluation(content)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    with path.open("wb") as file:
        file.truncate(LARGEST_BYTES * 100)
    with pytest.raises(LabError, match="is not a valid evaluation"):
        read_evaluation(path)


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_evaluation(tmp_path / "evaluation.json")
    with pytest.raises(LabError, match="cannot be read"):
        read_evaluation(tmp_path)
