from __future__ import annotations

import hashlib
import json
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import CheckpointError
from template_project import run_script

pytestmark = pytest.mark.train


def write(directory: Path, step: int, val_accuracy: float | None = None) -> Path:
    metrics = {} if val_accuracy is None else {"val_accuracy": val_accuracy, "val_loss": 0.5}
    tensors = {"model": {"weight": torch.full((3, 2), float(step))}, "optimizer": {}}
    return checkpoints.write(directory, step, 1, metrics, tensors, {"position": step})


def damage(path: Path) -> None:
    """Change one byte, leaving the size as it was."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_is_what_labctl_pull_expects(tmp_path: Path) -> None:
    path = write(tmp_path, 100, val_accuracy=0.9)
    assert path == tmp_path / "step-00000100"
    manifest = json.loads((path / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("version", "step", "epoch", "metrics")} == {
        "version": 1,
        "step": 100,
        "epoch": 1,
        "metrics": {"val_accuracy": 0.9, "val_loss": 0.5},
    }
    others = {file.name: file.read_bytes() for file in path.iterdir()}
    del others["manifest.json"]
    assert manifest["files"] == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in others.items()
    }
    assert set(others) == {"model.safetensors", "optimizer.safetensors", "state.json"}


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, 7)
    checkpoint = checkpoints.latest(tmp_path)
    assert checkpoint is not None
    assert checkpoints.load_state(checkpoint) == {"position": 7}
    assert checkpoints.load_tensors(checkpoint, "model")["weight"].tolist() == [[7, 7]] * 3


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2) / file)
    checkpoint = checkpoints.latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert f"skipped: {tmp_path / 'step-00000002'}: {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "manifest", ["", "{", "[]", '{"version": 2}', '{"version": 1, "step": 2, "files": {}}', None]
)
def test_a_checkpoint_without_a_valid_manifest_is_skipped(
    tmp_path: Path, manifest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / "manifest.json"
    if manifest is None:
        path.unlink()
    else:
        path.write_text(manifest)
    checkpoint = checkpoints.latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "skipped" in capsys.readouterr().err


def test_a_missing_file_counts_as_damage(tmp_path: Path) -> None:
    (write(tmp_path, 1) / "optimizer.safetensors").unlink()
    assert checkpoints.latest(tmp_path) is None


def test_none_is_found_where_none_is(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoints.best(tmp_path)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, accuracy in enumerate([0.5, 0.9, 0.7, None, 0.8, 0.6], start=1):
        write(tmp_path, step, accuracy)
        checkpoints.prune(tmp_path, keep=2)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "5", "6"]
    assert checkpoints.best(tmp_path).step == 2


def test_the_best_is_found_from_anywhere_above(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a" / "checkpoints", 1, 0.5)
    best = write(tmp_path / "runs" / "b" / "checkpoints", 1, 0.6)
    for path in (best, best.parent, best.parent.parent, tmp_path):
        assert checkpoints.best(path).path == best
    damage(best / "model.safetensors")
    assert checkpoints.best(tmp_path).metrics["val_accuracy"] == 0.5


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    damage(write(tmp_path, 3) / "model.safetensors")
    write(tmp_path, 3)
    checkpoints.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert checkpoints.latest(tmp_path) is not None


def test_what_an_interrupted_run_left_is_removed(tmp_path: Path) -> None:
    partial = tmp_path / ".step-00000100.partial-0badcafe"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    other = tmp_path / "mine.txt"
    other.touch()
    checkpoints.clean(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


# Forks: children start at once, and milliseconds later they are killed.
# It goes on until so many checkpoints were written, and so many kills came in the middle of one.
ENOUGH = 20
KILLED_WRITERS = """
import os, pathlib, random, signal, sys, time
import torch, checkpoints

directory, enough, least, most = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
weights = {"weight": torch.zeros(50_000)}
moments = random.Random(1)

def write_for_ever(step):
    while True:
        step += 1
        checkpoints.write(directory, step, 1, {}, {"model": weights}, {"step": step})
        checkpoints.prune(directory, keep=3)

newest, partials = 0, 0
for number in range(most):
    if number >= least and min(newest, partials) > enough:
        break
    child = os.fork()
    if not child:
        write_for_ever(newest)
    time.sleep(moments.uniform(0.0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = checkpoints.latest(directory)
    assert newest == 0 or found, "nothing left to load"
    if found:
        assert found.step >= newest, (found.step, newest)
        assert checkpoints.load_state(found) == {"step": found.step}
        newest = found.step
    partials += len(list(directory.glob(".step-*")))
    checkpoints.clean(directory)
print(newest, partials)
"""


@pytest.mark.long
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "killed_writers.py"
    script.write_text(KILLED_WRITERS)
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    output = run_script(script, str(directory), str(ENOUGH), "40", "1000", run=tmp_path)
    assert "skipped" not in output  # nothing half-made ever bore a checkpoint's name
    newest, partials = map(int, output.split())
    assert newest > ENOUGH
    assert partials > ENOUGH  # else no kill came in the middle of a write
