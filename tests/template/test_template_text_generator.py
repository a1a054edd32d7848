"""The template text-generator: a GPT that is stopped, continued, evaluated, and continues texts."""

from __future__ import annotations

import argparse
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import load_modules
from safetensors.torch import load_file
from template_program import PATIENCE_S, finish, read_json, start, wait_for_step

from labctl.insight.scalars import read_scalars
from labctl.runs.evaluation import read_evaluation

pytestmark = pytest.mark.train
NAME = "text-generator"
SMALL = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4")
model, predict, text, checkpoints = load_modules(NAME, "model", "predict", "text", "checkpoints")
SHAPE = model.Shape(context=16, layers=2, heads=2, width=16)


def make_model(**options: Any) -> Any:
    torch.manual_seed(1)
    network = model.GPT(SHAPE, **options)
    # New networks hardly tell tokens apart; this one does, as a trained one.
    for parameter in network.parameters():
        parameter.data *= 4 if parameter.dim() == 2 else 1
    return network


@pytest.mark.parametrize("prompt", [b"", b"The student", b"longer than the context that it sees"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_cache_changes_no_byte(prompt: bytes, temperature: float) -> None:
    network = make_model()
    arguments = (network, prompt, 5 * SHAPE.context, temperature)
    cached = predict.continue_text(*arguments)
    assert cached == predict.continue_text(*arguments, use_cache=False)
    assert cached.startswith(prompt)
    if temperature:
        assert len(set(cached)) > 10, "the same byte again and again says little"


@pytest.mark.long
def test_recomputed_activations_give_the_same_gradients() -> None:
    pieces = text.draw(torch.arange(256, dtype=torch.uint8), 4, 16, torch.Generator())
    gradients = []
    for checkpoint_activations in (False, True):
        network = make_model(checkpoint_activations=checkpoint_activations).train()
        torch.manual_seed(2)
        model.measure_loss(network(pieces[:, :-1]), pieces[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(map(torch.equal, *gradients))


@torch.no_grad()
def test_a_new_network_knows_nothing_and_reads_no_later_byte() -> None:
    torch.manual_seed(1)
    network = model.GPT(SHAPE).eval()
    tokens = torch.randint(256, (64, 17))
    loss = model.measure_loss(network(tokens[:, :-1]), tokens[:, 1:])
    assert float(loss) == pytest.approx(math.log(256), abs=0.05)
    changed = tokens[:, :-1].clone()
    changed[:, 9] = 0
    before, after = network(tokens[:, :-1]), network(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_each_byte_is_in_one_split_and_is_predicted_once(tmp_path: Path) -> None:
    whole, origin = text.load()
    assert origin == "the grammar in text.py"
    parts = text.split(whole, 16)
    assert b"".join(bytes(part.tolist()) for part in parts.values()) == whole
    pieces = text.cut(parts["test"], 16)
    predicted = pieces[:, 1:].flatten()
    assert torch.equal(predicted, parts["test"][1 : len(predicted) + 1].long())
    assert len(parts["test"]) - len(predicted) <= 16
    with pytest.raises(text.TextError, match="has no file named"):
        text.load(tmp_path)
    (tmp_path / "own.txt").write_bytes(b"\xff\x00" * 80)
    with pytest.raises(text.TextError, match="has 160 bytes"):
        text.split(text.load(tmp_path)[0], 16)


@pytest.mark.long
def test_a_training_stops_for_a_signal_and_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "stopped"
    options = (*SMALL, "--checkpoint-every", "25", "--steps")
    together = start(NAME, "train.py", *options, "60", run=whole)
    training = start(NAME, "train.py", *options, "60", run=run)
    wait_for_step(training, run, 10)
    training.send_signal(signal.SIGTERM)
    output, _ = training.communicate(timeout=PATIENCE_S)
    finish(together)
    # A busy machine may deliver the signal after the end.
    assert training.returncode in (143, 0), output
    if training.returncode:
        assert ", with a checkpoint" in output
        assert "resuming from" in finish(start(NAME, "train.py", *options, "60", run=run))
    first, second = (load_file(newest(each) / "model.safetensors") for each in (whole, run))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_json(whole, "metrics")["loss"] == read_json(run, "metrics")["loss"]
    assert read_json(run, "progress")["step"] == 60
    assert not list((run / "checkpoints").glob(".*"))


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_it_learns_and_is_evaluated_and_continues_a_text(tmp_path: Path) -> None:
    output = finish(start(NAME, "train.py", run=tmp_path))
    evaluation = read_evaluation(tmp_path / "logs" / "evaluation.json")
    assert evaluation.loss is not None
    assert evaluation.loss < 0.8, output
    assert evaluation.accuracy > 0.7
    assert evaluation.where == "server"
    assert evaluation.baseline_accuracy == pytest.approx(0.15, abs=0.05)
    tags = {series.tag for series in read_scalars(tmp_path / "logs").series}
    assert {"train/loss", "val/loss", "val/perplexity", "speed/tokens_per_second"} <= tags
    line = finish(start(NAME, "evaluate.py", run=tmp_path)).splitlines()[-1]
    said = json.loads(line)
    assert said["accuracy"] == evaluation.accuracy
    assert said["total"] == evaluation.items
    assert said["perplexity"] == pytest.approx(math.exp(evaluation.loss))
    words = ("predict.py", "The student", "--temperature", "0", "--count", "300")
    cached = finish(start(NAME, *words, run=tmp_path)).rsplit("\n\n", 1)[0]
    computed = finish(start(NAME, *words, "--no-cache", run=tmp_path)).rsplit("\n\n", 1)[0]
    assert cached == computed
    assert "." in cached
    assert max(len(line) for line in cached.splitlines()) < 100


def train_twice(run: Path, *switch: str) -> float:
    """Train 20 steps, resume for 20 more, and return the loss on test."""
    options = (*SMALL, "--dropout", "0", "--checkpoint-every", "20", "--steps")
    # torch.compile imports parts of PyTorch that PyTorch has deprecated.
    finish(start(NAME, "train.py", *options, "20", *switch, run=run, warnings_are_errors=False))
    words = ("train.py", *options, "40", *switch)
    output = finish(start(NAME, *words, run=run, warnings_are_errors=False))
    assert "resuming from" in output
    loss: float = read_json(run, "metrics")["loss"]
    return loss


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    return train_twice(tmp_path_factory.mktemp("plain"))


@pytest.mark.long
@pytest.mark.parametrize("switch", ["--compile", "--checkpoint-activations", "--amp=bf16"])
def test_a_switch_changes_hardly_any_number_and_resumes(
    tmp_path: Path, plain_loss: float, switch: str
) -> None:
    assert train_twice(tmp_path, switch) == pytest.approx(plain_loss, rel=1e-3)


def load_train(
    run: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[Any, argparse.Namespace]:
    """Import train.py as a run in this directory, started with these arguments."""
    monkeypatch.setenv("LABCTL_RUN_DIR", str(run))
    (train,) = load_modules(NAME, "train")
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    return train, train.parse_options()


def test_a_step_of_a_tiny_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, options = load_train(tmp_path, monkeypatch, *SMALL, "--steps", "2")
    stop = argparse.Namespace(exit_code=0)
    assert train.Training(options, stop).run() == 0
    assert read_json(tmp_path, "progress")["step"] == 2
    assert read_json(tmp_path, "metrics")["checkpoint"] == "step-00000002"
    assert read_evaluation(tmp_path / "logs" / "evaluation.json").loss is not None
    stop.exit_code = 143
    _, options = load_train(tmp_path, monkeypatch, *SMALL, "--steps", "4")
    assert train.Training(options, stop).run() == 143
    printed = capsys.readouterr().out
    assert "resuming from" in printed
    assert "stopped after step 2, with a checkpoint" in printed
    network, example = train.build_model()
    assert network(example).shape == (1, 96, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "3", "--width", "16"), "--width must be a multiple of --heads"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--compile",), "--compile needs a C++ compiler"),
    ],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        load_train(tmp_path, monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "DIRECTORY", tmp_path / "checkpoints")
    monkeypatch.setattr(checkpoints, "START", tmp_path / "start")
    assert checkpoints.latest() is None
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.9), (4, 0.8)):
        with checkpoints.writing(step, {"val_loss": loss}, {"seconds": 1.0}) as directory:
            (directory / "weights").write_bytes(bytes([step]) * 10)
    assert checkpoints.latest().step == 4
    assert checkpoints.best(tmp_path).step == 2
    checkpoints.prune(1)
    kept = [checkpoint.step for checkpoint in checkpoints.find(tmp_path)]
    assert kept == [2, 4]
    (tmp_path / "checkpoints" / "step-00000004" / "weights").write_bytes(b"x" * 10)
    assert checkpoints.latest().step == 2
    assert "skipped:" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text('["files"]')
    with pytest.raises(checkpoints.CheckpointError, match=r"python train\.py"):
        checkpoints.best(tmp_path)
