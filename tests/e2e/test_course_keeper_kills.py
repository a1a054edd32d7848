"""A keeper that is killed inside a create, and a server that staff ends beneath it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from course_bed import CourseBed, course_bed
from sshd_container import wait_for
from submit_bed import COMMAND_S, SSHD

from labctl.model import Server
from labctl.providers.local import cache, engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")),
        reason="there is no sshd on this machine",
    ),
]
# `labctl` whose keeper gives up a new server that never answers after 30 s instead of 120.
IMPATIENT = """\
from labctl.cli import main
from labctl.servers import reachability
reachability.SSH_DEADLINE_S = 30.0
main()"""


@pytest.fixture
def bed(server_image: str, tmp_path: Path) -> Iterator[CourseBed]:
    with course_bed(tmp_path, "{provider: local}", "image: {build: image}\n") as made:
        image = tmp_path / "ml" / "image"
        image.mkdir()
        (image / "Dockerfile").write_text("FROM scratch\n")
        yield made
        argv, environ = made.command("down", "--yes", "--discard")
        subprocess.run(argv, env=environ, capture_output=True, timeout=COMMAND_S, check=False)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "serve.log").open("w+") as file:
        yield file


@pytest.fixture
def lab(bed: CourseBed) -> Path:
    """Alice's, who has joined."""
    said = bed.labctl("alice", "join", str(bed.invited("alice")), "--yes", "--json")[0]
    return Path(json.loads(said)["joined"]["directory"])


def containers(bed: CourseBed) -> list[Any]:
    """Every server that was made for alice's seat and is still there, running or not."""
    label = f"labctl.lab-id={bed.course.find_seat('alice').lab_id}"
    with engine.connect() as docker:
        # The container that reads the volumes of the pool may end meanwhile.
        every = docker.containers.list(all=True, ignore_removed=True, filters={"label": label})
        return [one for one in every if not cache.is_claim(one)]


def attempted(bed: CourseBed) -> bool:
    """Whether the keeper has written down that it is about to ask for a server."""
    lab_id = bed.course.find_seat("alice").lab_id
    return bool(bed.staff().state.list_open_attempts(lab_id)) or bool(containers(bed))


@contextmanager
def going_up(bed: CourseBed, lab: Path) -> Iterator[subprocess.Popen[str]]:
    """Alice's `labctl up`, while it waits."""
    environ = {**bed.command()[1], "HOME": str(bed.home("alice"))}
    words = [sys.executable, "-m", "labctl", "up", "--yes", "--json"]
    with subprocess.Popen(
        words,
        cwd=lab,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("reached", [attempted, containers])
def test_a_keeper_killed_inside_a_create_leaves_one_server(
    reached: Callable[[CourseBed], object], bed: CourseBed, lab: Path, log: IO[str]
) -> None:
    """The next keeper goes on with what the first one began, while the student still waits."""
    keeper = bed.serve(log)
    with going_up(bed, lab) as student:
        try:
            wait_for(lambda: reached(bed) or student.poll() is not None, COMMAND_S)
            assert student.poll() is None, student.communicate()
        finally:
            keeper.kill()
            keeper.wait(COMMAND_S)
        keeper = bed.serve(log)
        try:
            said, err = student.communicate(timeout=COMMAND_S)
            assert student.returncode == 0, err
            server = msgspec.convert(json.loads(said)["server"], Server)
            assert server.state == "running"
            assert len(containers(bed)) == 1
            ups = bed.course.ledger.list_entries(seat="alice", kind="up")
            assert len({one.detail["server_id"] for one in ups}) == 1
            assert bed.labctl("alice", "ssh", "--", "echo", "in", cwd=lab)[0] == "in\n"
            bed.labctl("alice", "down", "--yes", cwd=lab)
            assert containers(bed) == []
        finally:
            keeper.terminate()
            assert keeper.wait(COMMAND_S) == 0


def test_staff_ends_a_server_while_its_student_waits_for_it(
    bed: CourseBed, lab: Path, log: IO[str]
) -> None:
    """The student is answered, the keeper lives, and the next `up` makes another one."""
    keeper = bed.serve(log, IMPATIENT)
    try:
        with going_up(bed, lab) as student:
            wait_for(lambda: [one for one in containers(bed) if one.status == "running"], COMMAND_S)
            # It answers nobody from now on, and so the keeper is in the midst of it.
            (machine,) = containers(bed)
            machine.exec_run(["sh", "-c", "kill -STOP -1"])
            argv, environ = bed.command("down", "--yes", "--json")
            done = subprocess.run(
                argv, env=environ, capture_output=True, text=True, timeout=COMMAND_S, check=False
            )
            assert done.returncode == 0, done.stderr
            assert containers(bed) == []
            _, err = student.communicate(timeout=COMMAND_S)
            assert student.returncode != 0
            assert "labctl: " in err
        assert keeper.poll() is None
        body = bed.labctl("alice", "up", "--yes", "--json", cwd=lab)[0]
        assert msgspec.convert(json.loads(body)["server"], Server).state == "running"
        assert len(containers(bed)) == 1
        assert "Traceback" not in Path(log.name).read_text()
    finally:
        keeper.terminate()
        assert keeper.wait(COMMAND_S) == 0
