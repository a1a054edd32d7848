"""Training in several processes that torchrun starts: gradients over gloo, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from template_project import PATIENCE_S, TEMPLATE, finish
from test_template_train import assert_same, newest, scalars, wait_for_step

pytestmark = pytest.mark.train

SHORT = ("--epochs", "2", "--batch-size", "15", "--checkpoint-every", "4", "--log-every", "1")
# Random numbers would differ: without dropout the processes compute what one computes.
WITHOUT_DROPOUT = """\
import functools, model, train
train.Classifier = functools.partial(model.Classifier, dropout=0.0)
train.main()
"""


def start(processes: int, run: Path, data: Path, *arguments: str) -> subprocess.Popen[str]:
    """Train without dropout in so many processes."""
    run.mkdir(exist_ok=True)
    (run / "train_exactly.py").write_text(WITHOUT_DROPOUT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*(launcher if processes > 1 else []), "train_exactly.py", *arguments]
    return subprocess.Popen(
        [sys.executable, "-B", *words, "--data", str(data), "--seed", "1"],
        cwd=run,
        env={**os.environ, "PYTHONPATH": str(TEMPLATE), "LABCTL_RUN_DIR": str(run)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(processes: int, run: Path, data: Path, *arguments: str) -> str:
    return finish(start(processes, run, data, *arguments))


@pytest.fixture(scope="module")
def alone(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone")
    train(1, run, small, *SHORT)
    return run


@pytest.mark.long
def test_two_processes_learn_what_one_learns(tmp_path: Path, small: Path, alone: Path) -> None:
    """No two equal parts make a batch of 15: an image that fills a part up does not count."""
    output = train(2, tmp_path, small, *SHORT)
    assert output.count("epoch 2/2  step 22/22") == 1, "one process writes for all"
    assert ", 2 processes" in output
    together, expected = scalars(tmp_path / "logs"), scalars(alone / "logs")
    for tag in ("train/loss", "train/gradient_norm", "val/loss", "val/accuracy"):
        assert [step for step, _ in together[tag]] == [step for step, _ in expected[tag]]
        values, wanted = ([value for _, value in found[tag]] for found in (together, expected))
        assert values == pytest.approx(wanted, rel=0.02, abs=0.01), tag
    weights, one = (load_file(newest(run) / "model.safetensors") for run in (tmp_path, alone))
    assert all(torch.allclose(weights[name], one[name], atol=0.02) for name in one)
    metrics = json.loads((tmp_path / "logs" / "metrics.json").read_text())
    assert metrics["total"] == 40


@pytest.mark.long
def test_a_stopped_training_goes_on_with_any_number_of_processes(
    tmp_path: Path, small: Path
) -> None:
    """The same number continues to the bit; torchrun itself ends with 1 after SIGTERM."""
    train(2, tmp_path / "whole", small, *SHORT)
    run = tmp_path / "stopped"
    process = start(2, run, small, *SHORT)
    wait_for_step(process, run, 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    stopped_at = int(newest(run).name.removeprefix("step-"))
    assert stopped_at < 22, output
    assert f"resuming from {run}/checkpoints/step-{stopped_at:08d}" in train(2, run, small, *SHORT)
    assert_same(newest(run), newest(tmp_path / "whole"))
    assert "step 33/33" in train(1, run, small, *SHORT, "--epochs", "3")


def test_a_share_is_equally_long_on_all_ranks() -> None:
    shares = [Ranks(rank, 3).share([5, 6, 7, 8]) for rank in range(3)]
    assert shares == [[5, 8], [6, ~5], [7, ~5]]
    assert [Ranks(rank, 2).share([9]) for rank in range(2)] == [[9], [~9]]
    assert Ranks().share([5, 6]) == [5, 6]
