"""What was measured of weights with fewer bits: from quantize.py, or from a run's QAT.

Both may come from an untrusted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.runs.evaluation import Predictions

# What a training with QAT writes to its logs.
FILE = "quantization.json"
LARGEST_BYTES = 32 * 1024**2
ShortText = Annotated[str, msgspec.Meta(max_length=80)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class QuantizedRow(Value, frozen=True):
    """One way to store the weights, and what was measured with it.

    `predictions` are those of each item; None for a text, whose tokens are not independent, and
    from a program that wrote none.
    """

    name: ShortText
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    latency_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    correct: Count
    total: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    predictions: Predictions | None = None

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


class QuantizedModel(Value, frozen=True):
    """The rows, the original weights first. Rounding is no error: accuracy may rise by chance.

    `note` says how the rows came about, if they are not of the same weights.
    """

    model: Annotated[str, msgspec.Meta(max_length=200)]
    rows: Annotated[tuple[QuantizedRow, ...], msgspec.Meta(min_length=2, max_length=20)]
    note: Annotated[str, msgspec.Meta(max_length=500)] = ""


def parse_result(output: str) -> QuantizedModel:
    """Read the last line that the program printed; ValueError, with the reason, otherwise."""
    lines = output.strip().splitlines()
    return _parse(lines[-1] if lines else "")


def read_quantization(path: Path) -> QuantizedModel | None:
    """Read the file that a training with QAT wrote; None if it does not exist.

    Raises OSError if it cannot be read, and ValueError with the reason if it is not valid.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
    return _parse(text)


def _parse(text: str | bytes) -> QuantizedModel:
    try:
        result = decode_json(text, QuantizedModel)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no comparison: {error}") from None
    if any(row.correct > row.total for row in result.rows):
        raise ValueError("a comparison with more correct answers than items")
    for row in result.rows:
        _check_predictions(row)
    return result


def _check_predictions(row: QuantizedRow) -> None:
    """ValueError if the predictions contradict the counts of the row."""
    predictions = row.predictions
    if predictions is None:
        return
    if {len(predictions.truth), len(predictions.predicted)} != {row.total}:
        raise ValueError(f"a comparison without predictions of all {row.total} items")
    if predictions.correct != row.correct:
        raise ValueError("a comparison with predictions that do not match the correct answers")
