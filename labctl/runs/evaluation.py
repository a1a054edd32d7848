"""How well a checkpoint does on a split: what `labctl eval` keeps as `runs/<run>/evaluation.json`.

The file may be a stranger's (it comes home with a run): whatever does not fit together is refused.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import msgspec

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
    """An item that was classified wrongly. `probability` is what the model gave to `said`.

    `picture` is a data URI (PNG or JPEG), a path below the run's directory, or "".
    """

    item: str
    truth: str
    said: str
    probability: float
    picture: str = ""


class Evaluation(Value, frozen=True):
    """A checkpoint's answers on a split. Shares are from 0 to 1.

    `confusion` counts items: a row for each true class, a column for each answer, both in the
    order of `classes`. `baseline_accuracy` is that of always saying the training set's most
    frequent class; None where nobody counted. `where` is the machine that computed it. `worst`
    begins with the mistake that the model was surest of. Hashes are SHA-256 in hex, or "".
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

    @property
    def correct(self) -> int:
        return sum(row[number] for number, row in enumerate(self.confusion))


class ClassFigures(Value, frozen=True):
    """One class: `items` bear it, `said` were called it. A share of nothing is None."""

    name: str
    items: int
    said: int
    correct: int
    precision: float | None
    recall: float | None
    f1: float | None


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a file; NotFoundError where there is none, LabError where it is no such."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{path} is not there", hint="labctl eval") from None
    except OSError as error:
        raise LabError(f"{path} cannot be read", why=str(error), hint="labctl eval") from error
    return parse_evaluation(text, str(path))


def parse_evaluation(text: bytes, what: str = FILE) -> Evaluation:
    """The evaluation that JSON says; LabError (about `what`) where it is none."""
    if len(text) > LARGEST_BYTES:
        raise _refused(what, f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
    try:
        found = msgspec.json.decode(text, type=Evaluation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refused(what, str(error)) from None
    if wrong := _wrong(found):
        raise _refused(what, wrong)
    return found


def interval(correct: int, items: int, z: float = Z_95) -> tuple[float, float] | None:
    """Wilson's interval for a share of `items`; None where there are none.

    Unlike p ± z * sqrt(p(1-p)/n) it stays between 0 and 1, and is not empty at 100 %.
    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209; L. D. Brown, T. T. Cai, A. DasGupta,
    Statistical Science 16 (2001) 101, who recommend it.
    """
    if items <= 0:
        return None
    share, more = correct / items, z * z / items
    middle = (share + more / 2) / (1 + more)
    half = z / (1 + more) * math.sqrt(share * (1 - share) / items + more / (4 * items))
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    return low, 1.0 if correct == items else min(1.0, middle + half)


def class_figures(evaluation: Evaluation) -> tuple[ClassFigures, ...]:
    """Precision, recall and F1 of each class, in their order."""
    rows = evaluation.confusion
    said = [sum(column) for column in zip(*rows, strict=True)]
    return tuple(
        _figures(name, sum(rows[number]), said[number], rows[number][number])
        for number, name in enumerate(evaluation.classes)
    )


def _figures(name: str, items: int, said: int, correct: int) -> ClassFigures:
    return ClassFigures(
        name=name,
        items=items,
        said=said,
        correct=correct,
        precision=correct / said if said else None,
        recall=correct / items if items else None,
        # The harmonic mean of the two, written so that no hit at all is 0 and not 0 / 0.
        f1=2 * correct / (items + said) if items + said else None,
    )


def _wrong(one: Evaluation) -> str:
    """What does not fit together; "" where all does."""
    size = len(one.classes)
    if one.version != VERSION:
        return f"version {one.version} is unknown here, {VERSION} is known"
    if not 1 <= size <= MOST_CLASSES or len(set(one.classes)) != size:
        return f"classes: 1 to {MOST_CLASSES} different names are allowed"
    if any(not name or len(name) > LONGEST_NAME for name in one.classes):
        return f"classes: a name has 1 to {LONGEST_NAME} characters"
    if len(one.confusion) != size or any(len(row) != size for row in one.confusion):
        return f"confusion: {size} classes need {size} rows of {size} counts"
    if any(count < 0 for row in one.confusion for count in row):
        return "confusion: counts are not negative"
    if one.items < 1 or sum(map(sum, one.confusion)) != one.items:
        return f"confusion: its counts do not add up to the {one.items} items"
    if not math.isclose(one.accuracy, one.correct / one.items, abs_tol=1e-6):
        return f"accuracy: {one.accuracy:g} is not that of the confusion matrix"
    if one.baseline_accuracy is not None and not 0 <= one.baseline_accuracy <= 1:
        return "baseline_accuracy is no share"
    return next((wrong for mistake in one.worst if (wrong := _wrong_mistake(mistake, one))), "")


def _wrong_mistake(mistake: Mistake, one: Evaluation) -> str:
    if not {mistake.truth, mistake.said} <= set(one.classes):
        return f"worst: {mistake.item!r} names a class that is not there"
    if not 0 <= mistake.probability <= 1:
        return f"worst: {mistake.item!r} has a probability of {mistake.probability:g}"
    picture = mistake.picture
    if picture.startswith("data:"):
        return (
            "" if _PICTURE.fullmatch(picture) else f"worst: {mistake.item!r} has a strange picture"
        )
    outside = picture.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", picture)
    if outside or ":" in picture or "\0" in picture:
        return f"worst: {mistake.item!r} has a picture outside of the run"
    return ""


def _refused(what: str, why: str) -> LabError:
    return LabError(f"{what} is no evaluation", why=why, hint="labctl eval")
