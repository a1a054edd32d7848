"""The grader where staff name none: how many of the labels did the predictions hit?

Both are CSV with the columns item and label; labels.csv lies in the labels' directory. Writes
results.json in Gradescope's form. What it says names no label: students read it.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

MOST_FIELD = 10000


class BadTableError(Exception):
    """A table that is none."""


def read(path: Path) -> dict[str, str]:
    """item -> label; BadTableError with what is wrong."""
    csv.field_size_limit(MOST_FIELD)
    found: dict[str, str] = {}
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
                if item in found:
                    raise BadTableError(f"line {number} names an item for the second time")
                found[item] = label
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadTableError(f"it is no CSV in UTF-8: {error}") from None
    return found


def judge(labels: dict[str, str], said: dict[str, str], points: float) -> dict[str, object]:
    """results.json. An item without an answer is a wrong one; others are not counted."""
    correct = sum(1 for item, label in labels.items() if said.get(item) == label)
    silent = sum(1 for item in labels if item not in said)
    accuracy = correct / len(labels)
    text = f"{correct} of {len(labels)} hidden items are right: accuracy {accuracy:.4f}"
    if silent:
        text += f"; {silent} have no answer"
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
    labels = read(Path(os.environ["LABCTL_LABELS"]) / "labels.csv")
    if not labels:
        raise BadTableError("labels.csv names no item")
    try:
        results = judge(labels, read(Path(os.environ["LABCTL_PREDICTIONS"])), points)
    except BadTableError as error:
        text = f"the predictions cannot be read: {error}"
        results = {"score": 0.0, "output": text, "extra_data": {"accuracy": 0.0}}
    Path(os.environ["LABCTL_RESULTS"]).write_text(json.dumps(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
