"""A class on a cluster one of whose machines fails, or leaves, as its staff meet it."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from course_bed import CourseBed, course_bed
from slurm_machine import slurm_machine
from sshd_container import Sshd, docker, wait_for
from submit_bed import SSHD
from test_slurm_class import ROSTER

from labctl.courses.cluster_session import END_ACCOUNTS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")),
        reason="there is no sshd on this machine",
    ),
]
HOMES = "/srv/class"


@pytest.fixture(scope="module")
def boxes(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """Three machines that share one directory: the controller, and two nodes."""
    volume = f"labctl-test-homes-{uuid.uuid4().hex[:8]}"
    docker("volume", "create", volume)
    try:
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    slurm_machine(
                        server_image,
                        tmp_path_factory.mktemp(name),
                        ["--hostname", name, "-v", f"{volume}:{HOMES}"],
                    )
                )
                for name in ("gpu1", "gpu2", "gpu3")
            ]
    finally:
        docker("volume", "rm", "--force", volume)


@pytest.fixture(scope="module")
def bed(boxes: list[Sshd], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    shared = (
        f"shared: {{engine: slurm, controller: '127.0.0.1:{boxes[0].port}', homes: {HOMES}, "
        "gpus: 1, gpu_minutes: 1200, wall: 10m}\n"
    )
    with course_bed(folder, list_hosts(boxes), shared) as bed:
        (folder / "ml" / "roster.csv").write_text(ROSTER.format(alice="yes"))
        known = folder / "keeper-home" / ".ssh" / "known_hosts"
        known.parent.mkdir(parents=True)
        known.write_text("".join(f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in boxes))
        yield bed


def list_hosts(boxes: list[Sshd]) -> str:
    """The section `server` of course.yaml."""
    hosts = ", ".join(
        f"{{host: 127.0.0.1, port: {box.port}, user: student, identity: {box.key}}}"
        for box in boxes
    )
    return f"{{provider: static, static: {{hosts: [{hosts}]}}}}"


def course(bed: CourseBed, *words: str, code: int = 0) -> str:
    """What `labctl course ...` says, with its lines joined."""
    argv, environ = bed.command(*words)
    done = subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def read_groups(box: Sshd, account: str) -> str:
    """The groups of an account besides its own; "" without the account."""
    return box.sh(f"id -nG {account} 2>/dev/null | cut -s -d' ' -f2- || true").strip()


def list_nodes(boxes: list[Sshd]) -> list[str]:
    return boxes[0].sh("sinfo -h -N -o '%N %t'").split()


def stop_answering(box: Sshd) -> None:
    box.sh("systemctl stop ssh ssh.socket 2>/dev/null; pkill -x sshd || true")


def answer(box: Sshd) -> None:
    box.sh("systemctl start ssh")
    wait_for(lambda: "127.0.0.1" in box.sh("ss -ltn | grep ':22 ' && echo 127.0.0.1 || true"))


def test_a_machine_that_does_not_answer_is_named_and_the_others_are_set_up(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    # Files of an earlier term, whose owner has no account any more.
    boxes[0].sh(f"install -d -o 20000 -g 20000 {HOMES}/lab-old")
    stop_answering(boxes[2])
    name = f"127.0.0.1:{boxes[2].port}"
    assert name in course(bed, "plan", code=1)
    output = course(bed, "up", "--yes")
    assert f"{name} cannot be used now" in output
    assert "labctl course up" in output
    assert list_nodes(boxes) == ["gpu1", "idle", "gpu2", "idle"]
    for box in boxes[:2]:
        assert read_groups(box, "lab-alice") == read_groups(box, "lab-bob") == "labctl"
    assert read_groups(boxes[2], "lab-alice") == ""
    assert boxes[1].sh("id -u lab-alice; id -u lab-bob").split() == ["20001", "20002"]


def test_other_homes_in_the_middle_of_a_course_are_refused(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    path = bed.folder / "ml" / "course.yaml"
    text = path.read_text()
    path.write_text(text.replace(f"homes: {HOMES}", "homes: /home"))
    before = boxes[0].sh("getent passwd; ls -A /home")
    for words in (["plan"], ["up", "--yes"]):
        output = course(bed, *words, code=3 if words[0] == "up" else 1)
        assert f"homes in course.yaml is /home, and the accounts' homes are in {HOMES}" in output
    assert boxes[0].sh("getent passwd; ls -A /home") == before
    path.write_text(text)


def test_a_machine_that_answers_again_gets_what_was_not_done(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    answer(boxes[2])
    output = course(bed, "up", "--yes")
    assert "cannot be used now" not in output
    assert list_nodes(boxes) == ["gpu1", "idle", "gpu2", "idle", "gpu3", "idle"]
    records = [box.sh("getent passwd lab-alice lab-bob") for box in boxes]
    assert records[0] == records[1] == records[2]


def test_an_interrupted_join_is_completed(bed: CourseBed, boxes: list[Sshd]) -> None:
    # As after an interruption before slurmd was started and the last account was made.
    boxes[2].sh("systemctl disable --now slurmd; userdel lab-bob")
    boxes[0].sh("scontrol update nodename=gpu3 state=down reason=test")
    assert list_nodes(boxes)[4:] == ["gpu3", "down"]
    course(bed, "up", "--yes")
    assert list_nodes(boxes) == ["gpu1", "idle", "gpu2", "idle", "gpu3", "idle"]
    assert read_groups(boxes[2], "lab-bob") == "labctl"
    mark = boxes[0].sh("stat -c %Y /etc/slurm/slurm.conf")
    course(bed, "up", "--yes")
    assert boxes[0].sh("stat -c %Y /etc/slurm/slurm.conf") == mark


def test_an_account_ends_where_machines_answer_and_later_everywhere(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    stop_answering(boxes[2])
    output = course(bed, "down", "--only", "bob", "--yes", code=1)
    assert f"127.0.0.1:{boxes[2].port} cannot be used now" in output
    assert "account lab-bob has not ended on every machine" in output
    assert [read_groups(box, "lab-bob") for box in boxes] == [
        "labctl-ended",
        "labctl-ended",
        "labctl",
    ]
    assert "lab-alice" in boxes[0].sh("sacctmgr -nP show assoc format=user,grpsubmit")
    # The others can go on, although one account is still to end.
    course(bed, "up", "--only", "alice", "--yes")
    answer(boxes[2])
    course(bed, "down", "--only", "bob", "--yes")
    assert read_groups(boxes[2], "lab-bob") == "labctl-ended"


def test_a_machine_that_left_course_yaml_is_taken_out_of_the_cluster(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    path = bed.folder / "ml" / "course.yaml"
    path.write_text(path.read_text().replace(list_hosts(boxes), list_hosts(boxes[:2])))
    assert "gpu3 is in the cluster and no longer in hosts" in course(bed, "plan")
    output = course(bed, "up", "--only", "alice", "--yes")
    assert "gpu3 is no longer in hosts, and was taken out of the cluster" in output
    assert list_nodes(boxes) == ["gpu1", "idle", "gpu2", "idle"]
    assert "no longer in hosts" not in course(bed, "plan")
    boxes[2].sh(END_ACCOUNTS)
    assert read_groups(boxes[2], "lab-alice") == "labctl-ended"
