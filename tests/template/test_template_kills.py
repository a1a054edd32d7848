"""The sample project is killed: what it leaves can always be gone on from.

LABCTL_KILLS says how often, at random moments.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import killed_training
import pytest
from template_project import run_script
from test_template_train import SHORT, assert_same, load, newest, scalars, train

pytestmark = pytest.mark.train

KILLS = int(os.environ.get("LABCTL_KILLS", "14"))
STEPS = 10 * killed_training.epochs(KILLS)

# Each audit event is a moment just before something is done to the file system, or read from it.
EVERY_MOMENT = """
import os, pathlib, shutil, signal, sys
import torch, checkpoints

before, directory = pathlib.Path(sys.argv[1]) / "before", pathlib.Path(sys.argv[1]) / "after"
tensors = {"model": {"weight": torch.zeros(1000)}, "optimizer": {}}

def write(place, step):
    checkpoints.write(place, step, 1, {}, tensors, {"step": step})
    checkpoints.prune(place, keep=2)

def killed_before(moment):
    count = 0
    def audit(event, arguments):
        nonlocal count
        if event == "open" or event.startswith(("os.", "shutil.")):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if not child:
        sys.addaudithook(audit)
        write(directory, 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

for step in (1, 2, 3):
    write(before, step)
moment, killed, halves, new = 0, True, 0, 0
while killed:
    moment += 1
    shutil.copytree(before, directory)
    killed = killed_before(moment)
    for path in directory.glob("step-*"):
        checkpoints.verify(checkpoints.read(path))
    found = checkpoints.latest(directory)
    assert found and found.step in (3, 4), (moment, found)
    assert checkpoints.load_state(found) == {"step": found.step}
    halves += bool(list(directory.glob(".step-*")))
    new += killed and found.step == 4
    checkpoints.clean(directory)
    shutil.rmtree(directory)
assert found.step == 4
print(moment, halves, new)
"""


@pytest.mark.long
def test_a_kill_before_each_file_operation_leaves_whole_checkpoints(tmp_path: Path) -> None:
    script = tmp_path / "every_moment.py"
    script.write_text(EVERY_MOMENT)
    output = run_script(script, str(tmp_path), run=tmp_path)
    assert "skipped" not in output
    moments, halves, new = map(int, output.split())
    assert moments > 20
    assert halves > 10  # else no kill came in the middle of a write
    assert new > 2  # nor in the middle of the removal of older ones


@pytest.mark.long
def test_killed_at_random_moments_it_arrives_where_it_would_have(
    tmp_path: Path, small: Path
) -> None:
    """Half of the kills come with a notice: then no step is lost; else at most an interval's."""
    program = Path(__file__).with_name("killed_training.py")
    output = run_script(program, str(small), str(tmp_path), str(KILLS), run=tmp_path)
    log = (tmp_path / "killed.log").read_text()
    assert "skipped" not in log  # nothing half-made ever bore a checkpoint's name
    assert "resuming from" in log
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))
    outcome = json.loads(output.splitlines()[-1])
    killed, whole = outcome["killed"], outcome["whole"]
    assert killed["code"] == whole["code"] == 0
    assert killed["step"] == whole["step"] == STEPS
    # A kill may come after a checkpoint's last step and before it is there.
    assert max(killed["lost"]) <= killed_training.EVERY
    assert killed["slowest_s"] < killed_training.NOTICE_S
    final = f"checkpoints/step-{STEPS:08d}"
    assert_same(tmp_path / "killed" / final, tmp_path / "whole" / final)
    found = scalars(tmp_path / "killed" / "logs")
    assert [step for step, _ in found["train/loss"]] == list(range(1, STEPS + 1))
    assert found["train/loss"] == scalars(tmp_path / "whole" / "logs")["train/loss"]
    print(f"{KILLS} kills: lost {killed['lost']}, at most {killed['slowest_s']:.2f} s to end")


@pytest.mark.long
def test_who_is_asked_to_stop_does_not_validate_first(tmp_path: Path, small: Path) -> None:
    """That may take longer than there is time; it is done after the resume."""
    assert train(tmp_path, small, *SHORT, stop_after=20) == 143  # after the last batch of an epoch
    assert newest(tmp_path).name == "step-00000020"
    assert not [name for name in load(newest(tmp_path))["metrics"] if name.startswith("val_")]
    assert [step for step, _ in scalars(tmp_path / "logs")["val/accuracy"]] == [10]
    assert train(tmp_path, small, *SHORT) == 0
    assert [step for step, _ in scalars(tmp_path / "logs")["val/accuracy"]] == [10, 20, 30, 40]
