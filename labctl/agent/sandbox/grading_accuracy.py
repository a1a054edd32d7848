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


def score_predictions(
    labels: dict[str, str], predictions: dict[str, str], points: float
) -> dict[str, object]:
    """Return results.json. A missing prediction counts as wrong; unknown items are ignored."""
    correct = sum(1 for item, label in labels.items() if predictions.get(item) == label)
    missing = sum(1 for item in labels if item not in predictions)
    accuracy = correct / len(labels)
    text = f"{correct} of {len(labels)} hidden items are correct: accuracy {accuracy:.4f}"
    if missing:
        text += f"; {missing} have no prediction"
    return {
        "score": round(points * accuracy, 4),
        "output": text,
        "tests": [
            {
                "name": "hidden items",
                "score": round(points * accuracy, 4),
                "max_score": points,
                "output": text,
            }
        ],
        "extra_data": {"accuracy": accuracy, "items": len(labels), "correct": correct},
    }


def main() -> int:
    points = float(os.environ["LABCTL_POINTS"])
    labels = read_table(Path(os.environ["LABCTL_LABELS"]) / "labels.csv")
    if not labels:
        raise BadTableError("labels.csv names no item")
    try:
        results = score_predictions(
            labels, read_table(Path(os.environ["LABCTL_PREDICTIONS"])), points
        )
    except BadTableError as error:
        text = f"the predictions cannot be read: {error}"
        results = {"score": 0.0, "output": text, "extra_data": {"accuracy": 0.0}}
    Path(os.environ["LABCTL_RESULTS"]).write_text(json.dumps(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
