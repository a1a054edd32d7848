"""A lab in a rehearsed pod, by the commands that a student types, from `up` to `down`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labctl import Lab
from labctl.events import Question, SilentReporter
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.core.scenario import CallFailure
from labctl.rehearsal.runpod import RunPodRehearsal, RunPodScenario

pytestmark = [pytest.mark.engine, pytest.mark.long]
ROOT = Path(__file__).parents[2]
LAB_YAML = "lab: pods\nserver: {provider: runpod, gpu: auto, ttl: 2h}\nrun: python3 train.py\n"
TRAIN = """
import os
with open(os.path.join(os.environ["LABCTL_CHECKPOINT_DIR"], "model"), "w") as file:
    file.write("weights")
print("trained in", os.getcwd())
"""
DESCRIPTION = Path(os.environ.get("LABCTL_API_DESCRIPTIONS", ""), "runpod-v2.json")
Labctl = Callable[..., str]


class ConsentingReporter(SilentReporter):
    """Answers yes, and remembers the questions."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def confirm(self, question: Question) -> bool:
        self.questions.append(question)
        return True


@pytest.fixture(scope="module")
def rehearsal() -> Iterator[RunPodRehearsal]:
    building = Building(
        data_dir=ROOT,
        base_image=os.environ.get("LABCTL_BASE_IMAGE", ""),
        progress=lambda text, done, of: None,
    )
    description = str(DESCRIPTION) if DESCRIPTION.is_file() else ""
    with RunPodRehearsal(RunPodScenario(description=description), building) as cloud:
        yield cloud


@pytest.fixture(scope="module")
def project(rehearsal: RunPodRehearsal, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home") / "pods"
    directory.mkdir()
    (directory / "lab.yaml").write_text(LAB_YAML)
    (directory / "train.py").write_text(TRAIN)
    return directory


@pytest.fixture(scope="module")
def environ(rehearsal: RunPodRehearsal, project: Path) -> dict[str, str]:
    home = {"HOME": str(project.parent), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    return {**home, **rehearsal.environment}


@pytest.fixture(scope="module")
def labctl(project: Path, environ: dict[str, str]) -> Labctl:
    def call(*words: str, code: int = 0, **variables: str) -> str:
        command = [sys.executable, "-m", "labctl", *words]
        env = {**environ, **variables}
        done = subprocess.run(
            command, cwd=project, env=env, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


@pytest.fixture(scope="module")
def pod(rehearsal: RunPodRehearsal, project: Path, environ: dict[str, str], labctl: Labctl) -> str:
    """The id of the lab's pod, whose cost a person consented to, from the second offer."""
    assert "type 180.00" in labctl("up", "--yes", code=3)
    assert rehearsal.instances == {}
    rehearsal.change(failed=(CallFailure(action="createPod", status=400),))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        reporter = ConsentingReporter()
        Lab.load(project, reporter=reporter).up()
    assert [one.typed for one in reporter.questions if one.about == "billing"] == ["180.00"]
    [name] = rehearsal.instances
    assert rehearsal.find_instance(name).region == rehearsal.scenario.regions[1]
    return name


def test_a_run_is_a_process_and_its_results_come_home(
    pod: str, labctl: Labctl, project: Path, rehearsal: RunPodRehearsal
) -> None:
    assert "trained in /workspace/root/labctl/pods/runs/first/code" in labctl(
        "run", "--id", "first"
    )
    labctl("pull", "first")
    assert (project / "runs" / "first" / "checkpoints" / "model").read_text() == "weights"
    assert "runs are plain processes" in labctl("status")
    runs = json.loads(labctl("status", "--refresh", "--json"))["runs"]
    assert [(run["id"], run["executor"]) for run in runs] == [("first", "process")]
    assert rehearsal.execute(pod, "command -v docker")[0] != 0
    record = rehearsal.find_instance(pod)
    # The key that came in the environment was replaced, and the name has the new one.
    assert ".k." in record.name


def test_another_account_is_refused_and_nothing_is_called_gone(
    pod: str, labctl: Labctl, rehearsal: RunPodRehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "key", "rpa_of_somebody_else")
    rehearsal.change(account="user_else")
    refused = labctl("down", "--yes", code=3, RUNPOD_API_KEY=rehearsal.key)
    assert "user_rehearsal" in refused
    monkeypatch.undo()
    rehearsal.change(account="user_rehearsal")
    assert rehearsal.instances == {pod: "running"}


def test_without_any_record_the_pod_is_found(pod: str, labctl: Labctl, tmp_path: Path) -> None:
    assert pod in labctl("orphans", "--provider", "runpod", code=1, HOME=str(tmp_path))


def test_a_stopped_pod_keeps_its_runs_and_its_host_key(
    pod: str, labctl: Labctl, rehearsal: RunPodRehearsal
) -> None:
    said = labctl("stop", "--yes")
    assert "$10.00 a month" in said
    rehearsal.wait(pod, "stopped")
    labctl("start", "--yes")
    assert labctl("ssh", "--", "cat", "labctl/pods/runs/first/checkpoints/model") == "weights"


def test_a_pod_without_a_key_of_its_own_falls_silent_at_its_end(
    pod: str, labctl: Labctl, rehearsal: RunPodRehearsal
) -> None:
    """Then a keeper sees that it does not answer, and ends it."""
    code, said = rehearsal.execute(pod, "poweroff")
    assert code != 0
    assert "cannot stop itself" in said or said == ""
    end = time.monotonic() + 30
    while "sshd" in rehearsal.execute(pod, "cat /proc/[0-9]*/comm")[1]:
        assert time.monotonic() < end, "sshd goes on"
        time.sleep(0.2)


def test_down_ends_it_and_nothing_is_left(
    pod: str, labctl: Labctl, rehearsal: RunPodRehearsal
) -> None:
    labctl("down", "--yes", "--discard")
    rehearsal.wait(pod, "ended")
    assert "Found nothing" in labctl("orphans")
    assert rehearsal.violations == []
