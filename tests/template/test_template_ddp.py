"""The template ddp: gradients, whole, compressed or seldom, over gloo, on the CPU."""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from template_project import PATIENCE_S, REPOSITORY, finish
from torch import nn
from torchrun import start

from labctl.insight.report.speedup_chart import describe_speedup
from labctl.insight.speedup import read_speedup

pytestmark = pytest.mark.train
SMALL = ("--width", "64")


def load_weights(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    weights: dict[str, torch.Tensor] = state["model"]
    return weights


def read_accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)", output)[-1])


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    trainings = [
        start("ddp", run, *SMALL, "--epochs", "1", processes=processes)
        for processes, run in enumerate(runs, 1)
    ]
    alone, together = (finish(training) for training in trainings)
    assert together.count("step 25/25") == 1, "one process writes for all"
    assert read_accuracy(together) == pytest.approx(read_accuracy(alone), abs=0.01)
    first, second = map(load_weights, runs)
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)
    assert list((tmp_path / "two" / "logs").glob("events.*"))


@pytest.mark.long
@pytest.mark.parametrize(
    "switch", [("--compress", "fp16"), ("--compress", "powersgd"), ("--sync-every", "8")]
)
def test_a_cheaper_exchange_learns_too_and_goes_on(tmp_path: Path, switch: tuple[str, str]) -> None:
    assert read_accuracy(finish(start("ddp", tmp_path, *switch, "--epochs", "2"))) > 0.8
    output = finish(start("ddp", tmp_path, *switch, "--epochs", "4"))
    assert "resuming after step 50" in output
    assert read_accuracy(output) > 0.9


@pytest.mark.long
def test_a_stopped_training_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    arguments = (*SMALL, "--epochs", "20")
    whole, run = tmp_path / "whole", tmp_path / "stopped"
    finish(start("ddp", whole, *arguments))
    training = start("ddp", run, *arguments)
    give_up = time.monotonic() + PATIENCE_S
    while not (run / "logs" / "progress.json").exists():
        assert training.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.01)
    training.send_signal(signal.SIGTERM)
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode != 0
    assert ", with a checkpoint" in output
    assert not list((run / "checkpoints").glob("*.partial"))
    assert "resuming after step" in finish(start("ddp", run, *arguments))
    first, second = load_weights(whole), load_weights(run)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
def test_the_report_draws_what_was_measured(tmp_path: Path) -> None:
    output = finish(start("ddp", tmp_path, *SMALL, "--measure"))
    speedup = read_speedup(tmp_path / "logs" / "speedup.json")
    assert speedup is not None
    assert (speedup.device, speedup.backend, speedup.batch_size) == ("cpu", "gloo", 60)
    assert [row.processes for row in speedup.rows] == [1, 2, 2, 2, 2]
    part = describe_speedup(speedup)
    assert part.chart is not None
    labels = [line.label for line in part.chart.lines]
    assert labels == ["whole", "fp16", "powersgd", "every 8 steps", "ideal"]
    assert all(label in output for label in labels[:-1])


@pytest.mark.long
def test_compression_is_refused_for_parameters(tmp_path: Path) -> None:
    words = ("--compress", "fp16", "--sync-every", "4")
    assert "parameters are sent" in finish(start("ddp", tmp_path, *words, processes=1), 2)


def load_exchange() -> ModuleType:
    path = REPOSITORY / "templates" / "ddp" / "exchange.py"
    spec = importlib.util.spec_from_file_location("ddp_exchange", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bytes_of_each_exchange() -> None:
    count_bytes = load_exchange().count_bytes
    model = nn.Linear(100, 200)
    whole = (100 * 200 + 200) * 4
    assert count_bytes(model, "none", 1, 1) == 0
    assert count_bytes(model, "none", 1, 2) == whole
    assert count_bytes(model, "none", 1, 4) == 1.5 * whole
    assert count_bytes(model, "none", 8, 2) == whole / 8
    assert count_bytes(model, "fp16", 1, 2) == whole / 2
    assert count_bytes(model, "powersgd", 1, 2) == (4 * (100 + 200) + 200) * 4
