"""`labctl rehearse aws` as a process: what it prints, and what is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from rehearsal_bed import DLAMI, ONCE, wait_for

from labctl.providers.local import engine
from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.core.machines import PID_LABEL

PROGRAM = (
    "import sys\n"
    "from labctl.cli.exit_codes import run_and_exit\n"
    "from labctl.cli.rehearse import rehearse_command\n"
    "sys.exit(run_and_exit(rehearse_command))"
)


@contextmanager
def rehearsing(
    images: Building, *words: str, ignoring: signal.Signals | None = None
) -> Iterator[tuple[Any, dict[str, str]]]:
    """The process, and what it says to export."""
    environment = {**os.environ, "LABCTL_BASE_IMAGE": images.base_image}
    first = f"import signal; signal.signal({int(ignoring)}, signal.SIG_IGN)\n" if ignoring else ""
    argv = [sys.executable, "-c", first + PROGRAM, "aws", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes, text=True, env=environment) as process:
        try:
            exports: dict[str, str] = {}
            for line in process.stdout:
                name, _, value = line.strip().removeprefix("export ").partition("=")
                exports[name] = value
                if name == "LABCTL_SERVER_AWS_ADDRESS_FROM":
                    break
            yield process, exports
        finally:
            process.kill()


def run_one(exports: dict[str, str]) -> str:
    """One instance in a rehearsal that another process runs."""
    access = {
        "endpoint_url": exports["AWS_ENDPOINT_URL"],
        "aws_access_key_id": exports["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": exports["AWS_SECRET_ACCESS_KEY"],
        "region_name": exports["AWS_REGION"],
        "config": ONCE,
    }
    ec2, ssm = boto3.client("ec2", **access), boto3.client("ssm", **access)
    ec2.create_key_pair(KeyName="lab")
    ami = ssm.get_parameter(Name=DLAMI)["Parameter"]["Value"]
    kinds = {"InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 1}
    made = ec2.run_instances(ImageId=ami, KeyName="lab", **kinds)
    return str(made["Instances"][0]["InstanceId"])


def made_by(pid: int) -> list[Any]:
    """The containers and networks of a rehearsal's process."""
    with engine.connect() as docker:
        only = {"label": PID_LABEL}
        containers = docker.containers.list(all=True, filters=only, ignore_removed=True)
        networks = docker.networks.list(filters={"label": PID_LABEL})
        labels = [one.labels for one in containers]
        labels += [one.attrs["Labels"] for one in networks]
    return [each for each in labels if each[PID_LABEL].startswith(f"{pid}-")]


@pytest.mark.engine
def test_ctrl_c_leaves_nothing(images: Building) -> None:
    with rehearsing(images, "--boot", "sshd", "--region", "eu-west-1") as (process, exports):
        assert exports["AWS_REGION"] == "eu-west-1"
        run_one(exports)
        wait_for(lambda: len(made_by(process.pid)) == 2)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0
        assert "removing 1 instance" in told
        assert made_by(process.pid) == []


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_background_job_that_ignored_ctrl_c_ends_whole_all_the_same(
    images: Building, number: signal.Signals
) -> None:
    """As `labctl rehearse aws &` in a script; the signals of an impatient person come along."""
    with rehearsing(images, "--boot", "sshd", ignoring=signal.SIGINT) as (process, exports):
        run_one(exports)
        wait_for(lambda: len(made_by(process.pid)) == 2)
        for each in (number, signal.SIGINT, signal.SIGTERM):
            process.send_signal(each)
        process.communicate(timeout=240)
        assert process.returncode == 0
        assert made_by(process.pid) == []


@pytest.mark.long
@pytest.mark.engine
def test_what_a_killed_one_leaves_is_removed_by_the_next(images: Building) -> None:
    with rehearsing(images, "--boot", "sshd") as (process, exports):
        run_one(exports)
        wait_for(lambda: len(made_by(process.pid)) == 2)
        with Rehearsal(Scenario(boot="sshd"), images):
            assert len(made_by(process.pid)) == 2, "a rehearsal that runs is left alone"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Rehearsal(Scenario(boot="sshd"), images):
            assert made_by(process.pid) == []


def test_wrong_settings_end_it_before_anything_starts() -> None:
    argv = [sys.executable, "-c", PROGRAM, "aws", "--set", "delays.bot=1s"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean boot?" in done.stderr
