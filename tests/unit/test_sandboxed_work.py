"""Evaluations and gradings on a server: what their containers have, what is kept of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from labctl.agent.host.engine_objects import Container, ContainerState, Image, NewContainer
from labctl.agent.host.paths import lab_dir, write_json
from labctl.agent.reply import Failure
from labctl.agent.sandbox import evaluation, grading, public_tests, sandbox
from labctl.wire import checkpoints
from labctl.wire.checkpoints import fingerprint_checkpoints
from labctl.wire.codec import to_json
from labctl.wire.sandbox import (
    CheckReply,
    CheckRequest,
    EvaluateReply,
    EvaluateRequest,
    GradeReply,
    GradeRequest,
    ProgramResult,
    SandboxLimits,
)
from labctl.wire.verbs import LabRequest

LAB_ID = "0f1e2d3c4b5a"
IMAGE = Image("sha256:" + "ab" * 32)
GRADE = GradeRequest(
    lab="ml", lab_id=LAB_ID, image="x:1", job="g-1", submission="sub-1", inputs="", labels="hw-l",
    grader="hw-g", predict=("python", "predict.py"), grade=("python", "grade.py"), points=50.0,
    timeout_s=60.0, limits=SandboxLimits(2**30, 1.0, 64, 2**20, 2**20),
)  # fmt: skip
# As versions before typed messages stored it.
STORED = {
    "predict": {"outcome": "ok", "code": 0, "said": "hello", "seconds": 1.5},
    "grade": {"outcome": "ok", "code": 0, "said": "", "seconds": 0.25},
    "results": '{"score": 50}',
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run, whose specification an earlier version wrote."""
    monkeypatch.setenv("HOME", str(tmp_path))
    passwd = tmp_path / "labctl" / ".passwd" / ("passwd-" + "ab" * 12)
    passwd.parent.mkdir(parents=True)
    passwd.touch()
    directory = lab_dir("digits", LAB_ID) / "runs" / "night"
    for name in ("code", "checkpoints", ".labctl"):
        (directory / name).mkdir(parents=True)
    (directory / "code" / "evaluate.py").touch()
    (directory / "checkpoints" / "model.pth").touch()
    spec = {
        "id": "night", "lab": "digits", "lab_id": LAB_ID, "command": ["python", "train.py"],
        "image": "digits:1", "env": {"SEED": "1"}, "secrets": ["TOKEN"], "outputs": ["logs"],
        "gpus": "all", "memory_bytes": 2**30, "cpus": 1.5, "shm_bytes": 2**20, "tty": False,
    }  # fmt: skip
    write_json(directory / ".labctl" / "spec.json", spec)
    return directory


class Engine:
    """The engine's part of an evaluation: the program writes `result` and ends at once."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.output, self.result = evaluation.OUT, b""
        self.code = 0
        self.bodies: list[NewContainer] = []
        engine = evaluation.engine
        monkeypatch.setattr(engine, "remove_container", lambda name: None)
        monkeypatch.setattr(engine, "inspect_image", lambda reference: IMAGE)
        monkeypatch.setattr(engine, "create_container", self.create)
        monkeypatch.setattr(engine, "start_container", self.start)
        monkeypatch.setattr(engine, "inspect_container", self.inspect)
        bin_dir = run.parents[1] / "bin"
        bin_dir.mkdir()
        (bin_dir / "docker").write_text("#!/bin/sh\necho printed\n")
        (bin_dir / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")

    def create(self, name: str, body: NewContainer) -> bool:
        self.bodies.append(body)
        return True

    def start(self, name: str) -> None:
        (output,) = (mount for mount in self.bodies[-1].HostConfig.Mounts if not mount.ReadOnly)
        Path(output.Source, self.output).write_bytes(self.result)

    def inspect(self, name: str) -> Container:
        return Container(State=ContainerState(ExitCode=self.code))


@pytest.fixture
def engine(run: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(run, monkeypatch)


def evaluate(checkpoint: str = "", gpus: str = "") -> EvaluateReply:
    return evaluation.evaluate(EvaluateRequest("digits", LAB_ID, "night", checkpoint, gpus))


def test_a_run_that_writes_checkpoints_meanwhile_does_not_end_an_evaluation(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run writes a draft and renames it, also between a listing and a look at its files."""
    checkpoint = run / "checkpoints" / "last"
    checkpoint.mkdir(parents=True)
    draft = checkpoint / "model.pt.tmp"
    draft.write_bytes(b"weights")
    real = os.walk

    def walk(place: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        listed = list(real(place))
        if any(draft.name in names for _, _, names in listed):
            draft.rename(checkpoint / "model.pt")
        return iter(listed)

    monkeypatch.setattr(checkpoints, "os", SimpleNamespace(walk=walk))
    assert evaluate().code == 0


def test_an_evaluation_reads_the_run_and_writes_its_result_alone(run: Path, engine: Engine) -> None:
    engine.result = b'{"accuracy": 0.5, "worst": [{"item": "1"}]}'
    found = fingerprint_checkpoints(run / "checkpoints")
    assert evaluate() == EvaluateReply(
        code=0,
        said="printed\n",
        evaluation={"accuracy": 0.5, "worst": [{"item": "1"}]},
        last_line="printed",
        checkpoint_fingerprints=found,
    )
    (body,) = engine.bodies
    host = body.HostConfig
    mounts = {mount.Target: mount for mount in host.Mounts}
    assert mounts["/lab/code"].Source == str(run / "code")
    assert [target for target, mount in mounts.items() if not mount.ReadOnly] == ["/lab/evaluation"]
    assert (host.NetworkMode, host.CapDrop, host.ReadonlyRootfs) == ("none", ("ALL",), True)
    assert (host.Memory, host.NanoCpus, host.ShmSize) == (2**30, 1_500_000_000, 2**20)
    assert host.DeviceRequests == (), "the request chooses the GPUs, and not the run"
    assert {"SEED=1", "LABCTL_RUN_ID=night", "HOME=/tmp"} <= set(body.Env)
    assert body.Labels == {"labctl.lab-id": LAB_ID, "labctl.runs.evaluation": "night"}
    assert (body.Cmd or ())[-1] == "/lab/run/checkpoints"
    assert not list((run / ".labctl").glob("evaluation-*"))


@pytest.mark.parametrize(
    "result", [b"", b"{", b"[" * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 70 + b"1" + b"}" * 70]
)
def test_what_is_no_result_ends_nothing(engine: Engine, result: bytes) -> None:
    engine.result, engine.code = result, 3
    reply = evaluate()
    assert (reply.code, reply.said, reply.evaluation) == (3, "printed\n", None)


def test_an_evaluation_without_its_image_or_checkpoint(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failure, match="has no checkpoints/step-2"):
        evaluate("checkpoints/step-2")
    monkeypatch.setattr(evaluation.engine, "inspect_image", lambda reference: None)
    assert evaluate() == EvaluateReply(missing="digits:1")


def test_an_evaluation_of_a_run_that_saved_nothing(run: Path, engine: Engine) -> None:
    (run / "checkpoints" / "model.pth").unlink()
    (run / "checkpoints" / "step-1").mkdir()
    assert evaluate() == EvaluateReply(lacks="checkpoints")
    assert not engine.bodies


def test_the_labs_program_evaluates_a_run_whose_code_has_none(run: Path, engine: Engine) -> None:
    (run / "code" / "evaluate.py").unlink()
    assert evaluate() == EvaluateReply(lacks="program")
    request = EvaluateRequest("digits", LAB_ID, "night", program="print(1)\n")
    assert evaluation.evaluate(request).used_program
    assert (engine.bodies[-1].Cmd or ())[-2] == "/lab/evaluation/evaluate.py"


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a lab's grading on a server that has the image."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(grading.engine, "inspect_image", lambda reference: IMAGE)
    top = lab_dir("ml", LAB_ID) / "grading"
    for name in ("sub-1", "hw-l", "hw-g"):
        (top / name).mkdir(parents=True)
    return top


class Programs:
    """The sandbox's part: each container in order, and how its program ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results = [("ok", b"1,a\n"), ("ok", b'{"score": 40}')]
        self.names: list[str] = []
        self.bodies: list[NewContainer] = []
        monkeypatch.setattr(sandbox, "run_sandboxed", self.run)

    def run(
        self, name: str, body: NewContainer, deadline_s: float, most_bytes: int
    ) -> sandbox.SandboxResult:
        outcome, output = self.results[len(self.names)]
        self.names.append(name)
        self.bodies.append(body)
        return sandbox.SandboxResult(ProgramResult(outcome, 0, "", 0.5), output)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(monkeypatch)


def test_a_job_is_done_once_and_its_result_has_the_keys_of_earlier_versions(
    top: Path, programs: Programs
) -> None:
    ran = ProgramResult("ok", 0, "", 0.5)
    reply = grading.grade(GRADE)
    assert reply == GradeReply(ran, ran, '{"score": 40}') == grading.grade(GRADE)
    assert programs.names == ["labctl-predict-g-1", "labctl-grade-g-1"]
    student, staff = (
        {mount.Target for mount in body.HostConfig.Mounts} for body in programs.bodies
    )
    assert student == {"/lab/code", "/lab/model", "/lab/labctl"}
    assert staff == {"/lab/predictions", "/lab/code", "/lab/labels", "/lab/labctl"}
    assert "LABCTL_POINTS=50.0" in programs.bodies[1].Env
    stored = top / ".jobs" / "g-1" / "reply.json"
    assert json.loads(stored.read_text()) == {
        "predict": to_json(ran), "grade": to_json(ran), "results": '{"score": 40}'
    }  # fmt: skip
    assert stored.stat().st_mode & 0o777 == 0o600
    assert not (top / ".jobs" / "g-1" / "predictions").exists()


def test_a_result_that_an_earlier_version_stored_counts(top: Path, programs: Programs) -> None:
    (top / ".jobs" / "g-1").mkdir(parents=True)
    write_json(top / ".jobs" / "g-1" / "reply.json", STORED)
    predict, grade = ProgramResult("ok", 0, "hello", 1.5), ProgramResult("ok", 0, "", 0.25)
    assert grading.grade(GRADE) == GradeReply(predict, grade, '{"score": 50}')
    failed = {**STORED, "grade": None, "results": None}
    write_json(top / ".jobs" / "g-1" / "reply.json", failed)
    assert grading.grade(GRADE) == GradeReply(predict)
    assert programs.names == []


@pytest.mark.parametrize("text", ["", "{", "{}", '{"predict": {"outcome": "ok"}}'])
def test_a_damaged_result_is_made_anew(top: Path, programs: Programs, text: str) -> None:
    (top / ".jobs" / "g-1").mkdir(parents=True)
    (top / ".jobs" / "g-1" / "reply.json").write_text(text)
    assert grading.grade(GRADE).results == '{"score": 40}'


def test_staffs_own_failure_is_not_kept_and_a_students_is(top: Path, programs: Programs) -> None:
    programs.results = [("ok", b"1,a\n"), ("exit", b""), ("exit", b"")]
    assert grading.grade(GRADE).results is None
    stored = top / ".jobs" / "g-1" / "reply.json"
    assert not stored.exists()
    assert grading.grade(GRADE) == GradeReply(ProgramResult("exit", 0, "", 0.5))
    assert json.loads(stored.read_text())["grade"] is None


def test_all_is_cleared(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "list_labeled_containers", lambda label: [])
    assert grading.clear(LabRequest("ml", LAB_ID)).cleared
    assert not top.exists()
    monkeypatch.setattr(grading.engine, "inspect_image", lambda reference: None)
    assert grading.grade(GRADE) == GradeReply(missing="x:1")


# The public tests of an assignment.


def check(*tests: str) -> CheckReply:
    return public_tests.check(CheckRequest("digits", LAB_ID, "night", tests))


def test_a_check_runs_pytest_on_the_pushed_code_and_returns_its_results(
    run: Path, engine: Engine
) -> None:
    code = run.parents[1] / "code"
    code.mkdir()
    engine.output, engine.result, engine.code = "results.xml", b"<testsuites/>", 1
    assert check("tests/test_a.py", "tests/test_b.py") == CheckReply(
        code=1, said="printed\n", results="<testsuites/>"
    )
    (body,) = engine.bodies
    mounts = {mount.Target: mount for mount in body.HostConfig.Mounts}
    assert mounts["/lab/code"].Source == str(code)
    assert [target for target, mount in mounts.items() if not mount.ReadOnly] == ["/lab/check"]
    assert (body.HostConfig.NetworkMode, body.HostConfig.CapDrop) == ("none", ("ALL",))
    assert (body.Cmd or ())[-3:] == ("--", "tests/test_a.py", "tests/test_b.py")
    assert not list((run / ".labctl").glob("check-*"))


@pytest.mark.parametrize("path", ["../test_x.py", "/etc/passwd", "link/test_x.py"])
def test_a_check_runs_no_test_outside_of_the_code(path: str, run: Path, engine: Engine) -> None:
    (run.parents[1] / "code").mkdir()
    (run.parents[1] / "code" / "link").symlink_to("/etc")
    with pytest.raises(Failure):
        check(path)
    assert engine.bodies == []


def test_a_check_without_code_or_image_says_what_is_missing(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failure, match="no pushed code"):
        check("tests/test_a.py")
    (run.parents[1] / "code").mkdir()
    monkeypatch.setattr(evaluation.engine, "inspect_image", lambda reference: None)
    assert check("tests/test_a.py").missing
    assert engine.bodies == []


def test_a_check_reads_no_results_that_are_a_link_or_too_large(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parents[1] / "code").mkdir()
    monkeypatch.setattr(public_tests, "LARGEST_BYTES", 4)
    engine.output, engine.result = "results.xml", b"12345"
    assert check("tests/test_a.py").results == ""
