"""A seat's budget runs out during a run: its results outlive the server; the student reads why.

A keeper on a real sshd, with a rehearsed EC2 whose machines boot. The servers have no instance
profile and the course has no store, so that a server by itself can save nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aws_bed import ROLE, Bed
from course_bed import CourseBed, course_bed
from lab_servers import wait_for
from submit_bed import COMMAND_S, SSHD

from labctl.courses.rpc import socket_path
from labctl.rehearsal.aws.scenario import Spot

pytest_plugins = ["aws_fixtures"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not Path(SSHD).exists(), reason="there is no sshd on this machine"),
]
PRICE_USD = 0.30
BUDGET_USD = "0.01"  # 120 s at that price: the run stops after 60 s, half is for saving it
END_S = 300.0
IMPORT = """\
programs="/bin/bash /bin/sh /bin/sleep /bin/mkdir /bin/head /bin/cat /usr/bin/env /usr/bin/id"
tar -chP $programs $(ldd $programs | grep -o '/lib[^ ]*' | sort -u) | docker import - shell:1"""
TRAIN = """\
cd /lab/run/checkpoints; mkdir first; head -c 300000 /dev/urandom > first/model
trap 'mkdir last; echo weights > last/model; echo {} > last/manifest.json; exit 3' TERM
echo begun; while :; do sleep 0.1; done"""
# `labctl` whose keeper sweeps every few seconds instead of once a minute.
KEEPER = """\
from labctl.cli import main
from labctl.courses.scheduler import EVERY_S
EVERY_S.update(sweep=3.0, watch=3.0)
main()"""
CHECKPOINT = "labctl/ml-2026-alice/runs/night/checkpoints/first/model"


@pytest.fixture
def course(machines: Bed, tmp_path: Path) -> Iterator[CourseBed]:
    kinds, zones = ("g4dn.xlarge", "g5.xlarge"), "abcd"
    prices = {f"{kind}/us-east-1{zone}": PRICE_USD for kind in kinds for zone in zones}
    server = "{provider: aws, gpu: auto, spot: only}"
    more = "per_student: {budget: 1}\nimage: {build: image}\n"
    with machines.set(spot=Spot(prices=prices)), course_bed(tmp_path, server, more) as made:
        image = made.folder / "ml" / "image"
        image.mkdir()
        (image / "Dockerfile").write_text("FROM scratch\n")
        yield made


def keeper_environ(course: CourseBed, machines: Bed) -> dict[str, str]:
    home = course.folder / "keeper-home"
    home.mkdir(exist_ok=True)
    return {
        **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
        **machines.rehearsal.environment,
        "HOME": str(home),
        "LABCTL_SERVER_AWS_SCHEDULER_ROLE": ROLE,
        "LABCTL_SERVER_AWS_SETTLE": "1s",
    }


@contextmanager
def served(course: CourseBed, machines: Bed) -> Iterator[Path]:
    """`labctl course serve` in a process of its own; the file of what it says."""
    said = course.folder / "serve.log"
    words = ["course", "serve", "--authorized-keys", str(course.machine.keys)]
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, "-C", str(course.folder / "ml"), *words],
            env=keeper_environ(course, machines),
            stderr=log,
        )
        try:
            path = socket_path(course.course.id)
            wait_for(lambda: path.exists() or process.poll() is not None, COMMAND_S)
            yield said
            assert process.poll() is None, said.read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(COMMAND_S)


def staff(course: CourseBed, machines: Bed, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "labctl", "-C", str(course.folder / "ml"), "course", *words],
        env=keeper_environ(course, machines),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def joined(course: CourseBed) -> Path:
    """Where alice works, with a run that trains until it is stopped."""
    file = course.invited("alice")
    body = json.loads(course.labctl("alice", "join", str(file), "--yes", "--json")[0])
    lab = Path(body["joined"]["directory"])
    text = (lab / "lab.yaml").read_text()
    run = json.dumps(["bash", "-c", TRAIN])
    kept = [line for line in text.splitlines() if not line.startswith(("image:", "run:"))]
    (lab / "lab.yaml").write_text("\n".join([*kept, "image: shell:1", f"run: {run}", ""]))
    return lab


def training(course: CourseBed, machines: Bed, lab: Path) -> str:
    """A server with a live run and little money; the hash of its checkpoint."""

    course.labctl("alice", "up", "--yes", cwd=lab)
    sh(course, IMPORT)
    course.labctl("alice", "run", "--detach", "--id", "night", cwd=lab)
    wait_for(lambda: "300000" in sh(course, f"stat -c %s {CHECKPOINT} || true"))
    staff(course, machines, "budget", "alice", BUDGET_USD, "--why", "a test")
    return sh(course, f"sha256sum {CHECKPOINT}").split()[0]


def sh(course: CourseBed, line: str) -> str:
    """A line on alice's server, as its account."""
    config = course.home("alice") / ".ssh" / "config"
    words = ["ssh", "-F", str(config), "ml-2026-alice", line]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def downs(course: CourseBed) -> list[Any]:
    return course.course.ledger.list_entries(seat="alice", kind="down")


def run_there(course: CourseBed) -> list[Path]:
    """The run's directory in the course's folder, where it came home."""
    return list((course.folder / "ml" / ".course" / "seats" / "alice").glob("labs/*/runs/night"))


@pytest.mark.long
def test_the_keeper_brings_results_home_before_the_budget_ends_the_server(
    course: CourseBed, machines: Bed
) -> None:
    lab = joined(course)
    with served(course, machines) as said:
        sha256 = training(course, machines, lab)
        [instance] = machines.living()
        wait_for(lambda: downs(course), END_S)
        machines.rehearsal.wait(instance, "terminated", COMMAND_S)
        wait_for(lambda: reads_why(course, lab), COMMAND_S)
        spent = json.loads(staff(course, machines, "cost", "--json"))
    [run] = run_there(course)
    model = run / "checkpoints" / "first" / "model"
    assert hashlib.sha256(model.read_bytes()).hexdigest() == sha256, said.read_text()
    assert (run / "checkpoints" / "last" / "model").read_text() == "weights\n"
    [end] = downs(course)
    assert (end.why, end.detail["saved"]) == ("its budget is used up", "home")
    [seat] = [one for one in spent["costs"]["seats"] if one["seat"] == "alice"]
    assert seat["usd"] <= float(BUDGET_USD) + 0.001, "saving is inside the budget"


def reads_why(course: CourseBed, lab: Path) -> bool:
    """Whether alice reads why her server ended: once the keeper has looked at the server again."""
    status = course.labctl("alice", "status", "--refresh", cwd=lab)[0]
    assert "for an unknown reason" not in status
    why = "its budget is used up; the course has saved its results: labctl pull --from-course"
    return why in status
