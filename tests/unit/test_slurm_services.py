"""Services and runs of a cluster, as its login node lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labctl.agent.host.paths import write_json
from labctl.agent.reply import Failure
from labctl.agent.runs import slurm_services
from labctl.agent.runs.attempt_directories import find_attempt_directory
from labctl.agent.runs.process_services import find_service_record
from labctl.agent.runs.services import ensure_token, find_token
from labctl.agent.runs.slurm_attempts import write_attempt
from labctl.agent.runs.slurm_executor import find_newest_job
from labctl.wire.codec import to_json
from labctl.wire.runs import SLURM, SlurmAttemptRecord
from labctl.wire.services import JobServiceRecord, StopServiceRequest

LAB_ID = "0f1e2d3c4b5a"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def answer(home: Path, program: str, text: str) -> None:
    """Have a program of Slurm print a text."""
    path = home / "bin" / program
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    path.chmod(0o755)


def test_the_newest_run_is_the_one_that_was_submitted_last(home: Path) -> None:
    """A job that Slurm starts again changes its directory."""
    for number, run in enumerate(("early", "late"), 1):
        directory = find_attempt_directory(f"digits-{run}-1")
        directory.mkdir(parents=True)
        record = SlurmAttemptRecord(run, LAB_ID, "/r", f"n-{run}", float(number), str(number))
        write_attempt(directory.name, record)
    os.utime(find_attempt_directory("digits-late-1"), (1, 1))
    rows = "{0}|n-early|RUNNING|None|0|N/A|normal|ml|\n{1}|n-late|RUNNING|None|0|N/A|normal|ml|\n"
    answer(home, "squeue", rows.format(1, 2))
    assert find_newest_job(LAB_ID) == ("late", "2")


def test_a_service_whose_step_does_not_end_is_not_called_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_services, "ENDS_WITHIN_S", 0.1)
    root = home / "labctl" / "digits"
    (root / ".labctl").mkdir(parents=True)
    (root / ".labctl" / "id").write_text(LAB_ID)
    step = "labctl-service-jupyter-ab12cd"
    record = JobServiceRecord("night", "7", step, "")
    write_json(find_service_record(root, "jupyter"), to_json(record))
    ensure_token(root, "jupyter")
    answer(home, "squeue", f"7.1|{step}\n")
    answer(home, "scancel", "")
    request = StopServiceRequest("digits", LAB_ID, "jupyter", SLURM)
    with pytest.raises(Failure, match="the service jupyter has not ended"):
        slurm_services.stop(request)
    assert find_service_record(root, "jupyter").exists()
    answer(home, "squeue", "")
    assert slurm_services.stop(request).stopped == ()
    assert not find_token(root, "jupyter").exists()
