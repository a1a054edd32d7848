"""One command for one job: a real server, the run, its results here, and no server left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import UNTIL_GO, LabDirectory, Process, make_lab

pytestmark = pytest.mark.engine
LEAVES_MODEL = "echo out; echo weights > /lab/run/checkpoints/model.pt"


@pytest.fixture
def lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    """A lab without a server, which has none afterwards either."""
    made = make_lab(tmp_path_factory.mktemp("job"), "e2e-job", base_image)
    made.labctl("trust", "--yes")
    yield made
    made.labctl("down", "--yes", "--discard", code=None)


def start_job(lab: LabDirectory, run: str, *options: str) -> Process:
    """A followed job that leaves a model and waits until `lab.let_go`."""
    shell = f"{LEAVES_MODEL}; {UNTIL_GO}"
    process = lab.start("run", *options, "--id", run, "--", "sh", "-c", shell)
    process.said("out\n")
    return process


def read_ssh_config(lab: LabDirectory) -> str:
    """The ssh_config of the lab's user, who has no other lab; "" without one."""
    file = Path(lab.environ["HOME"]) / ".ssh" / "config"
    return file.read_text() if file.exists() else ""


def require_no_server(lab: LabDirectory) -> None:
    assert "Include" not in read_ssh_config(lab)
    assert lab.json("status", "--refresh")["server"] is None
    # Other labs of this machine may have servers.
    servers = lab.json("orphans", code=None)["orphans"]["servers"]
    assert [server for server in servers if server["lab"] == lab.name] == []


def read_model(lab: LabDirectory, run: str) -> str:
    return (lab.root / "runs" / run / "checkpoints" / "model.pt").read_text()


@pytest.mark.long
def test_a_job_returns_results_and_exit_code_and_removes_its_server(
    lab: LabDirectory,
) -> None:
    done = lab.run(f"{LEAVES_MODEL}; exit 3", "--up", "--down", "--id", "job", code=3)
    assert done.stdout == "out\n"
    assert "run job: failed with exit code 3" in done.stderr
    assert "Nothing is left running or billing." in done.stderr
    assert read_model(lab, "job") == "weights\n"
    require_no_server(lab)
    again = lab.run("true", "--up", "--down", "--id", "job", code=255)
    assert "run job has already ended" in again.stderr
    assert lab.labctl("logs", "job").stdout == "out\n"


@pytest.mark.long
def test_the_last_of_two_jobs_ends_the_server(lab: LabDirectory) -> None:
    first = start_job(lab, "first", "--up", "--down")
    lab.server_id = lab.json("status")["server"]["id"]
    second = lab.run(LEAVES_MODEL, "--up", "--down", "--id", "second")
    assert "first is still running on it" in second.stderr
    assert "labctl down" in second.stderr
    assert read_model(lab, "second") == "weights\n"
    lab.let_go("first")
    first.end(0)
    assert "removed " in first.stderr
    assert read_model(lab, "first") == "weights\n"
    require_no_server(lab)


@pytest.mark.long
def test_a_signal_keeps_run_and_server_and_the_next_job_removes_it(lab: LabDirectory) -> None:
    job = start_job(lab, "night", "--up", "--down")
    assert "Include" in read_ssh_config(lab)
    lab.server_id = lab.json("status")["server"]["id"]
    job.popen.send_signal(signal.SIGTERM)
    job.end(130)
    for text in ("run night is still running (free)", "labctl down", "SIGTERM"):
        assert text in job.stderr
    assert "interrupted (SIGTERM) while it followed night" in lab.labctl("status").stdout
    assert lab.seen("night")["state"] == "running"
    lab.let_go("night")
    lab.student("mkdir papers && echo by hand >papers/notes.txt")
    done = lab.start(
        "run", "--down", "--id", "night", "--", "sh", "-c", f"{LEAVES_MODEL}; {UNTIL_GO}"
    )
    done.end(0)
    assert "run night found" in done.stderr
    (copied,) = (lab.root / "server-home").glob("*/papers/notes.txt")
    assert copied.read_text() == "by hand\n"
    assert read_model(lab, "night") == "weights\n"
    require_no_server(lab)


@pytest.mark.long
def test_a_failed_build_leaves_its_log_here_and_no_server(lab: LabDirectory) -> None:
    dockerfile = (lab.root / "Dockerfile").read_text()
    with lab.holding("Dockerfile", dockerfile + "RUN echo no such thing; false\n"):
        failed = lab.labctl("run", "--up", "--down", code=255)
    assert "the image build failed" in failed.stderr
    assert "removed " in failed.stderr
    log = Path(failed.stderr.split("next: less ")[1].split()[0])
    assert "no such thing" in log.read_text()
    require_no_server(lab)
