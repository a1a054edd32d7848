"""The default grader: the share of labels that the predictions match.

Both are CSV files with the columns item and label; labels.csv is in the labels' directory. Writes
results.json in Gradescope's format. Its text names no label, since students read it.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

MOST_FIELD = 10000


class BadTableError(Exception):
    """A file that is not a valid table."""


def read_table(path: Path) -> dict[str, str]:
    """Read item -> label. BadTableError says what is wrong."""
    csv.field_size_limit(MOST_FIELD)
    table: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if number == 1 and [cell.strip().lower() for cell in row] == ["item", "label"]:
                    continue
                if not row:
                    continue
                if len(row) != 2:
                    raise BadTableError(f"line {number} has {len(row)} columns, not item and label")
                item, label = row[0].strip(), row[1].strip()
                if item in table:
                    raise BadTableError(f"line {number} repeats an item")
                table[item] = label
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadTableError(f"not a CSV file in UTF-8: {error}") from None
    return table


class Score(NamedTuple):
    """How many of the labels' `items` the predictions match, and how many they do not mention."""

    items: int
    correct: int
    missing: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.items


def score_predictions(labels: dict[str, str], predictions: dict[str, str]) -> Score:
    """Score the predictions. A missing one counts as wrong; unknown items are ignored."""
    correct = sum(1 for item, label in labels.items() if predictions.get(item) == label)
    missing = sum(1 for item in labels if item not in predictions)
    return Score(len(labels), correct, missing)


def format_results(score: Score, points: float) -> str:
    """Return results.json for a score."""
    text = (
        f"{score.correct} of {score.items} hidden items are correct: accuracy {score.accuracy:.4f}"
    )
    if score.missing:
        text += f"; {score.missing} have no prediction"
    earned = round(points * score.accuracy, 4)
    test = {"name": "hidden items", "score": earned, "max_score": points, "output": text}
    extra = {"accuracy": score.accuracy, "items": score.items, "correct": score.correct}
    return json.dumps({"score": earned, "output": text, "tests": [test], "extra_data": extra})


def main() -> int:
    points = float(os.environ["LABCTL_POINTS"])
    labels = read_table(Path(os.environ["LABCTL_LABELS"]) / "labels.csv")
    if not labels:
        raise BadTableError("labels.csv names no item")
    try:
        predictions = read_table(Path(os.environ["LABCTL_PREDICTIONS"]))
        results = format_results(score_predictions(labels, predictions), points)
    except BadTableError as error:
        text = f"the predictions cannot be read: {error}"
        results = json.dumps({"score": 0.0, "output": text, "extra_data": {"accuracy": 0.0}})
    Path(os.environ["LABCTL_RESULTS"]).write_text(results, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
