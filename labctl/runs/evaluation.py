"""The evaluation of a checkpoint on a split, which `labctl eval` stores as evaluation.json.

The file may come from an untrusted run, so it is refused if its parts are inconsistent.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError
from labctl.model import Value

VERSION = 1
FILE = "evaluation.json"
LARGEST_BYTES = 32 * 1024**2
MOST_CLASSES = 1000
LONGEST_NAME = 200
# The 97.5th percentile of the normal distribution: 95 of 100 intervals hold the true share.
Z_95 = 1.959963984540054
_PICTURE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")


class Mistake(Value, frozen=True):
    """An item that was classified wrongly as `predicted`, with this `probability`.

    `picture` is a data URI (PNG or JPEG), a path below the run's directory, or "".
    """

    item: str
    truth: str
    predicted: str = msgspec.field(name="said")
    probability: float
    picture: str = ""


class Predictions(Value, frozen=True):
    """The true and the predicted class of every item, as numbers of `Evaluation.classes`.

    Both are in the same order of the items, which `order_sha256` identifies: the SHA-256 in hex of
    their names, each followed by a line feed.
    """

    order_sha256: str
    truth: tuple[int, ...]
    predicted: tuple[int, ...] = msgspec.field(name="said")

    @property
    def correct(self) -> int:
        return sum(map(operator.eq, self.truth, self.predicted))


class Evaluation(Value, frozen=True):
    """A checkpoint's predictions on a split. Shares are from 0 to 1.

    `confusion` counts items: a row for each true class, a column for each predicted class, both in
    the order of `classes`. Both are empty if only the accuracy is known, and `items` is 0 if their
    number is not. `baseline_accuracy` is that of always predicting the training set's majority
    class; None if not computed. `where` is the machine that computed the evaluation.
    `worst` lists mistakes, the most confident first. Hashes are SHA-256 in hex, or "".
    `predictions` are those of each item, None if evaluate.py wrote none.
    `checkpoint_fingerprints` are of all checkpoints that the run had then (wire/checkpoints.py).
    """

    checkpoint: str
    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    accuracy: float
    items: int
    version: int = VERSION
    checkpoint_sha256: str = ""
    data_sha256: str = ""
    split: str = "test"
    baseline_accuracy: float | None = None
    loss: float | None = None
    where: Literal["here", "server"] = "here"
    device: str = ""
    at: float = 0.0
    worst: tuple[Mistake, ...] = ()
    predictions: Predictions | None = None
    checkpoint_fingerprints: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def correct(self) -> int:
        if not self.classes:
            return round(self.accuracy * self.items)
        return sum(row[number] for number, row in enumerate(self.confusion))


class ClassMetrics(Value, frozen=True):
    """One class: `items` belong to it, `predicted` were predicted as it.

    A share of zero items is None.
    """

    name: str
    items: int
    predicted: int = msgspec.field(name="said")
    correct: int
    precision: float | None
    recall: float | None
    f1: float | None


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation; NotFoundError if the file is missing, LabError if it is invalid."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist", hint="labctl eval") from None
    except OSError as error:
        raise LabError(f"{path} cannot be read", why=str(error), hint="labctl eval") from error
    return parse_evaluation(text, str(path))


def parse_evaluation(text: bytes, what: str = FILE) -> Evaluation:
    """Parse an evaluation from JSON; LabError (about `what`) if it is invalid."""
    if len(text) > LARGEST_BYTES:
        raise _make_invalid_error(what, f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
    try:
        evaluation = decode_json(text, Evaluation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _make_invalid_error(what, str(error)) from None
    if problem := _find_problem(evaluation):
        raise _make_invalid_error(what, problem)
    return evaluation


def confidence_interval(correct: int, items: int) -> tuple[float, float] | None:
    """Return Wilson's interval for the share `correct` / `items`; None for 0 items.

    Unlike p ± z * sqrt(p(1-p)/n) it stays between 0 and 1, and is not empty at 100%.
    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209; L. D. Brown, T. T. Cai, A. DasGupta,
    Statistical Science 16 (2001) 101, who recommend it.
    """
    if items <= 0:
        return None
    share, more = correct / items, Z_95 * Z_95 / items
    middle = (share + more / 2) / (1 + more)
    half = Z_95 / (1 + more) * math.sqrt(share * (1 - share) / items + more / (4 * items))
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    return low, 1.0 if correct == items else min(1.0, middle + half)


def compute_class_metrics(evaluation: Evaluation) -> tuple[ClassMetrics, ...]:
    """Compute precision, recall and F1 of each class, in the order of `classes`."""
    rows = evaluation.confusion
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    return tuple(
        _figures(name, sum(rows[number]), predicted[number], rows[number][number])
        for number, name in enumerate(evaluation.classes)
    )


def _figures(name: str, items: int, predicted: int, correct: int) -> ClassMetrics:
    return ClassMetrics(
        name=name,
        items=items,
        predicted=predicted,
        correct=correct,
        precision=correct / predicted if predicted else None,
        recall=correct / items if items else None,
        # The harmonic mean of the two, written so that a class without hits gets 0, not 0 / 0.
        f1=2 * correct / (items + predicted) if items + predicted else None,
    )


def _find_problem(evaluation: Evaluation) -> str:
    """Describe the first inconsistency; "" if none exists."""
    size = len(evaluation.classes)
    if evaluation.version != VERSION:
        return f"version {evaluation.version} is not supported, only {VERSION} is"
    if not (evaluation.classes or evaluation.confusion or evaluation.worst):
        return _find_summary_problem(evaluation)
    if not 1 <= size <= MOST_CLASSES or len(set(evaluation.classes)) != size:
        return f"classes: expected 1 to {MOST_CLASSES} distinct names"
    if any(not name or len(name) > LONGEST_NAME for name in evaluation.classes):
        return f"classes: expected names of 1 to {LONGEST_NAME} characters"
    if len(evaluation.confusion) != size or any(len(row) != size for row in evaluation.confusion):
        return f"confusion: {size} classes need {size} rows of {size} counts"
    if any(count < 0 for row in evaluation.confusion for count in row):
        return "confusion: counts must not be negative"
    if evaluation.items < 1 or sum(map(sum, evaluation.confusion)) != evaluation.items:
        return f"confusion: the counts do not add up to {evaluation.items} items"
    if not math.isclose(evaluation.accuracy, evaluation.correct / evaluation.items, abs_tol=1e-6):
        return f"accuracy: {evaluation.accuracy:g} does not match the confusion matrix"
    if evaluation.baseline_accuracy is not None and not 0 <= evaluation.baseline_accuracy <= 1:
        return "baseline_accuracy: expected a number from 0 to 1"
    problems = (_find_mistake_problem(mistake, evaluation) for mistake in evaluation.worst)
    problem = next((problem for problem in problems if problem), "")
    return problem or _find_predictions_problem(evaluation)


def _find_predictions_problem(evaluation: Evaluation) -> str:
    """Describe a contradiction between the predictions and the confusion matrix."""
    predictions = evaluation.predictions
    if predictions is None:
        return ""
    if not re.fullmatch("[0-9a-f]{64}", predictions.order_sha256):
        return "predictions: order_sha256 is not a SHA-256 in hex"
    lengths = {len(predictions.truth), len(predictions.predicted)}
    if lengths != {evaluation.items}:
        return f"predictions: expected {evaluation.items} of both truth and said"
    pairs = Counter(zip(predictions.truth, predictions.predicted, strict=True))
    counts = {
        (row, column): count
        for row, counts in enumerate(evaluation.confusion)
        for column, count in enumerate(counts)
        if count
    }
    return "" if pairs == counts else "predictions: they do not match the confusion matrix"


def _find_summary_problem(evaluation: Evaluation) -> str:
    """Describe what is wrong with an evaluation that has no classes."""
    if not 0 <= evaluation.accuracy <= 1:
        return f"accuracy: expected a number from 0 to 1, got {evaluation.accuracy:g}"
    return "" if evaluation.items >= 0 else "items: expected 0 or more"


def _find_mistake_problem(mistake: Mistake, evaluation: Evaluation) -> str:
    if not {mistake.truth, mistake.predicted} <= set(evaluation.classes):
        return f"worst: {mistake.item!r} names an unknown class"
    if not 0 <= mistake.probability <= 1:
        return f"worst: {mistake.item!r} has a probability of {mistake.probability:g}"
    picture = mistake.picture
    if picture.startswith("data:"):
        return (
            ""
            if _PICTURE.fullmatch(picture)
            else f"worst: {mistake.item!r} has an invalid picture (not a PNG or JPEG data URI)"
        )
    outside = picture.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", picture)
    if outside or ":" in picture or "\0" in picture:
        return f"worst: {mistake.item!r} has a picture outside the run's directory"
    return ""


def _make_invalid_error(what: str, why: str) -> LabError:
    return LabError(f"{what} is not a valid evaluation", why=why, hint="labctl eval")
