"""Models from code: how the child is asked, and every way in which it cannot answer."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.errors import LabError, NotFoundError, UsageError
from labctl.estimate import measure
from labctl.estimate.fit_time import compute_fit_seconds
from labctl.estimate.plan import FitMeasurement, ModelMeasurement, ModelPlan
from labctl.events import SilentReporter, Step
from labctl.insight.model_measurement import (
    MARK,
    ModelSource,
    find_lab_python,
    measure_model,
    parse_target,
)

PLAN = ModelPlan(precision="fp32", optimizer="adamw", batch=8)
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: labctl[train]"
)


class StepReporter(SilentReporter):
    """Keeps the names of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, bool]] = []

    def emit(self, event: object) -> None:
        if isinstance(event, Step):
            self.steps.append((event.name, event.done))


def python_without_torch(root: Path) -> Path:
    """A virtual environment of the lab, with nothing installed in it."""
    path = root / ".venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def code(tmp_path: Path) -> Callable[..., ModelSource]:
    """A lab's train.py with this text."""

    def make(text: str, function: str = "build_model", **more: object) -> ModelSource:
        (tmp_path / "train.py").write_text(text)
        found = ModelSource(file=tmp_path / "train.py", function=function, root=tmp_path)
        return ModelSource(
            **{name: more.get(name, getattr(found, name)) for name in ModelSource.__struct_fields__}
        )

    return make


def test_the_mark_is_the_same_on_both_sides() -> None:
    assert measure.MARK == MARK


def test_a_target_is_a_file_and_a_function(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert parse_target("train.py:build_model", tmp_path) == (tmp_path / "train.py", "build_model")


@pytest.mark.parametrize("text", ["train.py", ":build", "train.py:", "train.py:not a name"])
def test_what_is_no_target(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        parse_target(text, tmp_path)
    assert raised.value.hint == "labctl estimate FILE.py:FUNCTION"


def test_a_file_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    with pytest.raises(NotFoundError, match="has no file train") as raised:
        parse_target("train.py:build_model", tmp_path)
    assert "model.py" in raised.value.why


def test_the_labs_own_environment_comes_first(tmp_path: Path) -> None:
    assert find_lab_python(tmp_path) == sys.executable
    own = python_without_torch(tmp_path)
    assert find_lab_python(tmp_path) == str(own)


def test_a_python_without_torch_is_told_with_how_to_get_it(
    code: Callable[..., ModelSource], tmp_path: Path
) -> None:
    own = python_without_torch(tmp_path)
    reporter = StepReporter()
    with pytest.raises(LabError, match="PyTorch is not installed") as raised:
        measure_model(code("import torch\ndef build_model(): ...\n"), PLAN, reporter)
    assert f"{own} -m pip install torch" in raised.value.hint
    assert "--params" in raised.value.hint
    assert reporter.steps == [("building train.py:build_model", False)]


def test_a_python_that_is_not_there(code: Callable[..., ModelSource]) -> None:
    with pytest.raises(LabError, match="cannot be started"):
        measure_model(code("", python="/no/such/python"), PLAN, SilentReporter())


@needs_torch
@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("def other(): ...\nimport os\nfrom os.path import join\n", NotFoundError, "no function"),
        (
            "def build_model(): return 7\n",
            LabError,
            "did not return a model that labctl can measure",
        ),
        pytest.param(
            "def build_model(): raise ValueError('broken here')\n",
            LabError,
            "failed",
            marks=pytest.mark.long,
        ),
        pytest.param("def build_model(:\n", LabError, "failed", marks=pytest.mark.long),
        ("import no_such_package\n", LabError, "cannot be imported"),
        pytest.param(
            "import torch\ndef build_model(): return torch.nn.Identity()\n",
            UsageError,
            "input shape of",
            marks=pytest.mark.long,
        ),
        (
            "import torch\nclass Words(torch.nn.Linear):\n"
            "    def forward(self, x): return 'words'\n"
            "def build_model(): return Words(4, 4)\n",
            LabError,
            "cannot be measured",
        ),
    ],
)
def test_code_that_cannot_be_measured_says_why(
    code: Callable[..., ModelSource], text: str, kind: type[LabError], said: str
) -> None:
    with pytest.raises(kind, match=said) as raised:
        measure_model(code(text), PLAN, SilentReporter())
    assert raised.value.why
    assert raised.value.hint


@needs_torch
def test_functions_of_the_file_alone_are_named(code: Callable[..., ModelSource]) -> None:
    with pytest.raises(NotFoundError) as raised:
        measure_model(code("from os.path import join\ndef mine(): ...\n"), PLAN, SilentReporter())
    assert raised.value.why == "its functions: mine"


@needs_torch
def test_more_memory_than_there_is_fails_here_and_not_the_machine(
    code: Callable[..., ModelSource],
) -> None:
    text = "import torch\ndef build_model(): return torch.nn.Linear(2_000_000, 2_000_000)\n"
    with pytest.raises(LabError, match="more memory than this machine"):
        measure_model(code(text), PLAN, SilentReporter())


@needs_torch
def test_what_takes_too_long_is_ended_with_all_that_it_started(
    code: Callable[..., ModelSource], tmp_path: Path
) -> None:
    """The child writes its grandchild's id into a pipe's end that only they hold open."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    text = (
        "import subprocess, sys\n"
        "def build_model():\n"
        f"    file = open({str(fifo)!r}, 'w')\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                     stdout=file).wait()\n"
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    began = time.monotonic()
    with pytest.raises(LabError, match="did not finish within 5 s") as raised:
        measure_model(code(text, time_limit_s=5), PLAN, SilentReporter())
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # every writer is gone
    os.close(reader)
    assert time.monotonic() - began < 60
    assert "--time-limit" in raised.value.hint


@needs_torch
def test_what_the_code_prints_and_its_own_modules_do_no_harm(
    code: Callable[..., ModelSource], tmp_path: Path
) -> None:
    (tmp_path / "plan.py").write_text("WIDTH = 3\n")
    text = (
        "import torch, plan, sys\nprint('hello', end='')\n"
        "def build_model():\n    print('building')\n"
        "    return torch.nn.Linear(plan.WIDTH, 2), torch.zeros(1, 3)\n"
    )
    found = measure_model(code(text), PLAN, SilentReporter())
    assert isinstance(found, ModelMeasurement)
    assert found.parameters == 8
    assert found.input_from == "build_model"
    assert not (tmp_path / "__pycache__").exists()


FITTED = """\
import numpy, time
class Sleeper:
    def fit(self, rows, labels):
        assert len(rows) == len(labels)
        time.sleep(len(rows) * 4e-5)
def build_model():
    return Sleeper(), (numpy.zeros((4000, 7)), numpy.zeros(4000))
"""


def test_a_model_for_tables_is_trained_on_parts_of_its_rows(
    code: Callable[..., ModelSource],
) -> None:
    found = measure_model(code(FITTED), PLAN, SilentReporter())
    assert isinstance(found, FitMeasurement)
    assert (found.name, found.rows, found.columns) == ("Sleeper", 4000, 7)
    assert [rows for rows, _ in found.trials] == [200, 400, 800, 1600]
    # A busy machine sleeps longer, never shorter.
    assert 0.1 < compute_fit_seconds(found, 4000) < 10


def test_a_model_for_tables_without_a_table_says_what_to_return(
    code: Callable[..., ModelSource],
) -> None:
    text = FITTED.replace("numpy.zeros(4000)", "numpy.zeros(3999)")
    with pytest.raises(LabError, match="no table to train it on") as raised:
        measure_model(code(text), PLAN, SilentReporter())
    assert "(model, (rows, labels))" in raised.value.hint
