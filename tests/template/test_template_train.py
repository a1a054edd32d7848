"""Training for real, on a CPU: to the end, stopped, killed, and started again."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from options import parse_options
from places import from_environment
from safetensors.torch import load_file
from template_project import Program, finish, start, start_anew
from train import Training

from labctl.runs.evaluation import read_evaluation

pytestmark = pytest.mark.train

SHORT = ("--epochs", "4", "--batch-size", "16", "--checkpoint-every", "3", "--log-every", "1")
STEPS = 40  # of a SHORT run on the small dataset: 4 epochs of 160 / 16 steps


class StopAfter:
    """Stands in for a signal: asks to stop once the run has done `step` steps."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.training: Training | None = None

    @property
    def exit_code(self) -> int:
        assert self.training is not None
        return 143 if self.step is not None and self.training.at.step >= self.step else 0


def train(run: Path, data: Path, *arguments: str, stop_after: int | None = None) -> int:
    """Train in this process; the exit code."""
    stop = StopAfter(stop_after)
    options = parse_options("", ["--data", str(data), "--seed", "1", *arguments])
    stop.training = Training(options, from_environment({"LABCTL_RUN_DIR": str(run)}), stop)  # type: ignore[arg-type]
    return stop.training.run()


def load(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint that must not depend on how often the run was interrupted."""
    loaded: dict[str, Any] = {
        f"{file.stem}.{name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    state = json.loads((checkpoint / "state.json").read_text())
    del state["position"]["seconds"], state["run"]
    metrics = json.loads((checkpoint / "manifest.json").read_text())["metrics"]
    validation = {name: value for name, value in metrics.items() if name.startswith("val_")}
    return loaded | {"state": state, "metrics": validation}


def assert_same(found: Path, expected: Path) -> None:
    """Bit for bit: weights, moments, random numbers, position, figures on val."""
    one, other = load(found), load(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        assert same, f"{name} differs by {_distance(value, other[name])}"


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _distance(one: Any, other: Any) -> str:
    if not torch.is_tensor(one) or one.shape != other.shape:
        return f"{one!r:.80} against {other!r:.80}"
    apart = (one.double() - other.double()).abs()
    return f"{apart.max():g} at most, in {int((apart > 0).sum())} of {apart.numel()} numbers"


def scalars(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SHORT run on the small dataset that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole")
    assert train(run, small, *SHORT) == 0
    return run


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python train.py` on all the digits, as a student starts it."""
    run = tmp_path_factory.mktemp("default")
    output = finish(start_anew("train.py", run=run, data=digits))
    (run / "output").write_text(output)
    return run


@pytest.mark.long
class TestDefaultRun:
    """`scripts/demo` trains the same run."""

    def test_it_reads_the_digits(self, run: Path) -> None:
        metrics = json.loads((run / "logs" / "metrics.json").read_text())
        assert metrics["accuracy"] > 0.95
        assert metrics["accuracy"] == metrics["correct"] / metrics["total"]
        assert (metrics["total"], metrics["split"]) == (269, "test")
        assert metrics["run"] == "run-1"
        assert 0 < metrics["seconds"] < 2000
        assert f"test accuracy {metrics['accuracy']:.4f}" in (run / "output").read_text()

    def test_evaluate_comes_to_the_same_figure(self, run: Path, digits: Path) -> None:
        metrics = json.loads((run / "logs" / "metrics.json").read_text())
        arguments = (str(run), "--data", str(digits))
        output = finish(start_anew("evaluate.py", *arguments, run=run))
        only_json = finish(start("evaluate.py", *arguments, "--json", run=run))
        assert json.loads(output.splitlines()[-1]) == json.loads(only_json)
        del metrics["seconds"], metrics["run"]
        assert json.loads(only_json) == metrics

    def test_what_it_got_right_and_wrong_is_kept_for_the_report(self, run: Path) -> None:
        metrics = json.loads((run / "logs" / "metrics.json").read_text())
        found = read_evaluation(run / "logs" / "evaluation.json")
        assert (found.accuracy, found.items, found.where) == (metrics["accuracy"], 269, "server")

    def test_progress_ends_at_the_end(self, run: Path) -> None:
        progress = json.loads((run / "logs" / "progress.json").read_text())
        assert (progress["step"], progress["epoch"]) == (progress["total_steps"], 10)
        assert set(progress) == {
            *("step", "total_steps", "epoch", "epochs", "loss", "accuracy", "images_per_second")
        }

    def test_three_checkpoints_and_the_best_are_kept(self, run: Path) -> None:
        best = json.loads((run / "logs" / "metrics.json").read_text())["checkpoint"]
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert best in kept
        assert len(kept) == 3 + (best not in kept[-3:])
        assert sorted(path.name for path in newest(run).iterdir()) == [
            *("manifest.json", "model.safetensors", "optimizer.safetensors", "random.safetensors"),
            "state.json",
        ]

    def test_tensorboard_has_its_curves(self, run: Path) -> None:
        found = scalars(run / "logs")
        assert set(found) == {
            *("train/loss", "train/accuracy", "train/learning_rate", "train/gradient_norm"),
            *("speed/images_per_second", "speed/data_wait_share", "val/loss", "val/accuracy"),
            *("setup/batch_size", "setup/workers"),
        }
        assert found["setup/batch_size"] == [(0, 32.0)]
        assert found["train/loss"][-1][1] < 0.2 * found["train/loss"][0][1]
        assert all(0 <= share <= 1 for _, share in found["speed/data_wait_share"])
        assert len(found["val/accuracy"]) == 10

    def test_started_again_it_has_nothing_left_to_train(self, run: Path, digits: Path) -> None:
        before = json.loads((run / "logs" / "metrics.json").read_text())
        output = finish(start("train.py", run=run, data=digits))
        assert "resuming" in output
        assert "epoch" not in output
        assert json.loads((run / "logs" / "metrics.json").read_text()) == before


@pytest.mark.parametrize(
    ("stops", "more"),
    [
        pytest.param((14,), (), marks=pytest.mark.long),  # in the middle of an epoch
        pytest.param((20,), (), marks=pytest.mark.long),  # at the end of one
        ((1, 2, 19, 31), ()),
        ((5, 9), ("--accumulate", "3")),  # whose last group of an epoch is smaller
        pytest.param((14,), ("--workers", "2", "--epochs", "2"), marks=pytest.mark.long),
        pytest.param((14,), ("--batch-size", "auto"), marks=pytest.mark.long),
        pytest.param((14,), ("--amp", "bf16", "--epochs", "2"), marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, small: Path, stops: tuple[int, ...], more: tuple[str, ...]
) -> None:
    assert train(tmp_path / "whole", small, *SHORT, *more) == 0
    for stop in stops:
        assert train(tmp_path / "stopped", small, *SHORT, *more, stop_after=stop) == 143
        assert newest(tmp_path / "stopped").name == f"step-{stop:08d}"
        torch.rand(stop)  # another process would not have the same random numbers either
    assert train(tmp_path / "stopped", small, *SHORT, *more) == 0
    assert newest(tmp_path / "stopped").name == newest(tmp_path / "whole").name
    assert_same(newest(tmp_path / "stopped"), newest(tmp_path / "whole"))
    for name in ("accuracy", "loss", "checkpoint"):
        one, other = (
            json.loads((tmp_path / run / "logs" / "metrics.json").read_text())[name]
            for run in ("stopped", "whole")
        )
        assert one == other


@pytest.mark.long
def test_the_number_of_workers_changes_nothing(tmp_path: Path, small: Path, whole: Path) -> None:
    assert train(tmp_path, small, *SHORT, "--workers", "2") == 0
    assert_same(newest(tmp_path), newest(whole))


@pytest.mark.long
def test_another_seed_is_another_run(tmp_path: Path, small: Path, whole: Path) -> None:
    assert train(tmp_path, small, *SHORT, "--seed", "2") == 0
    assert load(newest(tmp_path))["metrics"] != load(newest(whole))["metrics"]


def wait_for_step(process: Program, run: Path, step: int) -> None:
    """Wait until a checkpoint of `step` or later is there."""
    deadline = time.monotonic() + 120
    while not any(int(path.name[5:]) >= step for path in (run / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_makes_a_checkpoint(
    tmp_path: Path, small: Path, number: signal.Signals, exit_code: int
) -> None:
    # So many epochs that it cannot end by itself, and no checkpoints but those after an epoch.
    arguments = ("--epochs", "2000", "--batch-size", "16", "--checkpoint-every", "100000")
    process = start("train.py", *arguments, run=tmp_path, data=small)
    wait_for_step(process, tmp_path, 10)
    process.send_signal(number)
    output = finish(process, exit_code)
    (step,) = (int(line.split()[3][:-1]) for line in output.splitlines() if "stopped" in line)
    assert newest(tmp_path).name == f"step-{step:08d}"
    process = start("train.py", *arguments, run=tmp_path, data=small)
    wait_for_step(process, tmp_path, step + 1)
    process.send_signal(signal.SIGTERM)
    assert f"resuming from {tmp_path}/checkpoints/step-{step:08d}" in finish(process, 143)


def test_a_new_run_continues_from_the_checkpoints_of_an_earlier_one(
    tmp_path: Path, small: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in lab.yaml `data: {start: ./runs/RUN/checkpoints}`."""
    earlier, run = tmp_path / "earlier", tmp_path / "run"
    assert train(earlier, small, *SHORT, stop_after=20) == 143
    assert "stopped after step 20, with a checkpoint\n" in capsys.readouterr().out
    run.mkdir()
    (earlier / "checkpoints").rename(run / "start")
    assert train(run, small, *SHORT, stop_after=30) == 143
    output = capsys.readouterr().out
    assert f"resuming from {run}/checkpoints/step-00000020" in output
    # Resumed itself, it continues from its own checkpoint.
    assert train(run, small, *SHORT) == 0
    assert f"resuming from {run}/checkpoints/step-00000030" in capsys.readouterr().out
    assert_same(newest(run), newest(whole))


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, small: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, small, *SHORT, stop_after=20) == 143
    weights = newest(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert train(tmp_path, small, *SHORT) == 0
    captured = capsys.readouterr()
    assert "skipped" in captured.err
    assert f"resuming from {tmp_path}/checkpoints/step-00000018" in captured.out
    assert_same(newest(tmp_path), newest(whole))


def assert_continuous(found: dict[str, list[tuple[int, float]]]) -> None:
    """Every step once and in order, however often some were done twice."""
    assert [step for step, _ in found["train/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in found["val/accuracy"]] == [10, 20, 30, 40]


def test_curves_go_on_after_a_resume(tmp_path: Path, small: Path, whole: Path) -> None:
    """Steps logged after the last checkpoint come again; TensorBoard shows them once."""
    assert train(tmp_path, small, *SHORT, stop_after=17) == 143
    shutil.rmtree(newest(tmp_path))  # as if it had been killed at 17, with the checkpoint of 15
    assert train(tmp_path, small, *SHORT) == 0
    found, expected = scalars(tmp_path / "logs"), scalars(whole / "logs")
    assert_continuous(found)
    for tag in ("train/loss", "train/learning_rate", "train/gradient_norm", "val/accuracy"):
        assert found[tag] == expected[tag]


@pytest.mark.long
def test_progress_is_never_half_written(tmp_path: Path, small: Path) -> None:
    arguments = ("--epochs", "40", "--batch-size", "16")
    process = start("train.py", *arguments, run=tmp_path, data=small)
    seen: set[int] = set()
    while process.poll() is None:
        try:
            progress = json.loads((tmp_path / "logs" / "progress.json").read_text())
        except FileNotFoundError:
            assert not seen  # once there, it is never away
            continue
        assert 0 < progress["step"] <= progress["total_steps"] == 400
        assert math.isfinite(progress["loss"])
        seen.add(progress["step"])
        time.sleep(0.001)
    finish(process)
    assert len(seen) > 1


def test_without_a_dataset_it_makes_the_digits(tmp_path: Path) -> None:
    """The place that labctl mounts is read-only: the run's own directory is the next best."""
    locked = tmp_path / "data"
    locked.touch()  # nothing can be made below a file
    process = start("train.py", "--epochs", "1", run=tmp_path / "run", data=locked / "digits")
    output = finish(process)
    assert f"made the handwritten digits in {tmp_path}/run/dataset" in output
    assert (tmp_path / "run" / "dataset" / "train" / "9").is_dir()


def test_on_a_laptop_everything_lies_beside_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options("", ["--epochs", "1"])
    stop = StopAfter()
    stop.training = Training(options, from_environment({}), stop)  # type: ignore[arg-type]
    assert stop.training.run() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "dataset", "logs"]


def test_the_lines_of_a_long_epoch_and_before_it_fit_80_columns(
    tmp_path: Path, small: Path
) -> None:
    output = finish(start("train.py", "--epochs", "1", run=tmp_path / "run", data=small))
    about, settings = output.splitlines()[:2]
    about = about.replace(str(small), "/lab/data/digits")
    about = about.replace("run run-1:", "run 1128-034916-b4aa:")
    expected = r"run 1128-034916-b4aa: \d+ images of /lab/data/digits, [\d,]+ parameters"
    assert re.fullmatch(expected, about)
    assert len(about) + len(",000") <= 80
    assert settings == "on cpu, float32, batches of 32"
    (line,) = re.findall("^epoch .*", output, re.MULTILINE)
    longest = re.sub(r"epoch \S+  step \S+", "epoch 100/100  step 1000/1000", line)
    longest = re.sub(r"\d+ (\w+/s)$", r"99999 \1", longest)
    assert "1000/1000" in longest
    assert "99999 " in longest
    assert len(longest) <= 80


def test_images_in_colour_and_of_any_size(tmp_path: Path) -> None:
    from PIL import Image

    for part, number in (("train", 12), ("val", 4), ("test", 4)):
        for label, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
            folder = tmp_path / "data" / part / label
            folder.mkdir(parents=True)
            for image in range(number):
                Image.new("RGB", (30 + image, 40), colour).save(folder / f"{image}.jpg")
    run = tmp_path / "run"
    arguments = ("--epochs", "8", "--image-size", "24", "--batch-size", "4")
    assert train(run, tmp_path / "data", *arguments) == 0
    assert json.loads((run / "logs" / "metrics.json").read_text())["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("more", "reason"), [(("--image-size", "8"), "other shape"), (("--data", "."), "train")]
)
def test_a_checkpoint_of_something_else_is_not_trained_further(
    tmp_path: Path, small: Path, more: tuple[str, ...], reason: str
) -> None:
    assert train(tmp_path, small, *SHORT, stop_after=3) == 143
    output = finish(start("train.py", *SHORT, *more, run=tmp_path, data=small), exit_code=1)
    assert reason in output
    assert output.startswith("train: ") or "\ntrain: " in output


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, small: Path) -> None:
    arguments = (*SHORT, "--lr", "1e30", "--clip", "1e30")
    output = finish(start("train.py", *arguments, run=tmp_path, data=small), exit_code=1)
    assert "try a smaller --lr" in output
