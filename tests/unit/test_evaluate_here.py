"""The last line of evaluate.py, and the metrics of a run: what counts as an accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.errors import LabError
from labctl.runs import evaluate
from labctl.runs.evaluate import read_server_accuracy
from labctl.runs.evaluation_script import run_script

HUGE = '{"accuracy": 1' + "0" * 400 + "}"


def run_program(root: Path, text: str) -> tuple[float, str, int]:
    (root / "evaluate.py").write_text(text)
    return run_script(root, root, root / "out.json", "labctl eval --on-server")


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ('{"accuracy": 0.5, "checkpoint": "step-1", "total": 10}', (0.5, "step-1", 10)),
        ('{"accuracy": 1}', (1.0, "", 0)),
        ('{"accuracy": "0.25", "checkpoint": 7, "total": "8"}', (0.25, "7", 8)),
        ('{"accuracy": 0.5, "total": null}', (0.5, "", 0)),
        ('{"accuracy": 0.5, "total": Infinity}', (0.5, "", 0)),
    ],
)
def test_the_last_line_is_read(tmp_path: Path, line: str, result: tuple[float, str, int]) -> None:
    assert run_program(tmp_path, f"print('working')\nprint({line!r})\n") == result


@pytest.mark.parametrize(
    "line", ["", "done", "[1]", "{}", '{"accuracy": null}', '{"accuracy": NaN}', HUGE]
)
def test_a_last_line_without_an_accuracy_is_an_error(tmp_path: Path, line: str) -> None:
    with pytest.raises(LabError, match="printed no accuracy"):
        run_program(tmp_path, f"print({line!r})\n")


@pytest.mark.parametrize(
    ("text", "accuracy"),
    [
        ('{"accuracy": 0.5}', 0.5),
        ('{"accuracy": 1, "checkpoint": "step-1"}', 1.0),
        ('{"accuracy": 0.5, "checkpoint": "step-2"}', None),
        ('{"accuracy": 0.5, "checkpoint": null}', None),
        ('{"accuracy": "0.5"}', None),
        (HUGE, None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_metrics_of_a_run_are_read(tmp_path: Path, text: str, accuracy: float | None) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.json").write_text(text)
    assert read_server_accuracy(tmp_path, "step-1") == accuracy


def test_a_link_out_of_the_lab_is_not_sent_to_the_server(tmp_path: Path) -> None:
    """A repository could have evaluate.py -> ~/.ssh/id_ed25519."""
    (tmp_path / "id_ed25519").write_text("private")
    lab = tmp_path / "lab"
    lab.mkdir()
    assert evaluate.read_own_script(lab) == ""
    (lab / "evaluate.py").symlink_to(tmp_path / "id_ed25519")
    assert evaluate.read_own_script(lab) == ""
    (lab / "evaluate.py").unlink()
    (lab / "evaluate.py").write_text("print(1)\n")
    assert evaluate.read_own_script(lab) == "print(1)\n"
