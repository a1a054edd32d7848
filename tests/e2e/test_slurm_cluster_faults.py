"""A class on a cluster one of whose machines fails, or leaves, as its staff meet it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from course_bed import CourseBed
from slurm_class_bed import (
    CLUSTER_LIMITS,
    HOMES,
    MARKS,
    list_hosts,
    run_class,
    run_course,
    run_machines,
)
from sshd_container import Sshd, wait_for

from labctl.courses.cluster_session import END_ACCOUNTS

pytestmark = MARKS


@pytest.fixture(scope="module")
def boxes(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """The controller, and two other nodes."""
    with run_machines(server_image, tmp_path_factory, ("gpu1", "gpu2", "gpu3")) as boxes:
        yield boxes


@pytest.fixture(scope="module")
def bed(boxes: list[Sshd], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    settings = CLUSTER_LIMITS.format(port=boxes[0].port, homes=HOMES)
    with run_class(boxes, folder, settings) as bed:
        yield bed


def course(bed: CourseBed, *words: str, code: int = 0) -> str:
    """What `labctl course ...` says, with its lines joined."""
    done = run_course(bed, *words)
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
        assert f"homes in course.yaml is /home, and the home of lab-alice is in {HOMES}" in output
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


def test_an_account_whose_uids_differ_stops_no_other(bed: CourseBed, boxes: list[Sshd]) -> None:
    for number, box in enumerate(boxes):
        box.sh(f"useradd --uid {3000 + number} --home-dir {HOMES}/lab-cid lab-cid")
    roster = bed.folder / "ml" / "roster.csv"
    roster.write_text(roster.read_text() + "cid,Cid,,,,yes\ndan,Dan,,,,yes\n")
    output = course(bed, "up", "--yes", code=1)
    assert "lab-cid cannot have the same uid on" in output
    assert "usermod --uid UID lab-cid" in output
    assert [read_groups(box, "lab-dan") for box in boxes] == ["labctl"] * 3
    assert read_groups(boxes[0], "lab-cid") == ""
    # After what the message says, the account comes too.
    for box in boxes[1:]:
        box.sh("usermod --uid 3000 lab-cid")
    course(bed, "up", "--yes")
    assert [read_groups(box, "lab-cid") for box in boxes] == ["labctl"] * 3


def test_a_machine_without_jobs_is_named_with_the_reason(bed: CourseBed, boxes: list[Sshd]) -> None:
    boxes[0].sh("scontrol update nodename=gpu2 state=drain reason='the disk is full'")
    for words in (["up", "--only", "alice", "--yes"], ["status", "--refresh"]):
        output = course(bed, *words)
        assert "Slurm starts no jobs on gpu2 (drain): the disk is full, by root" in output
        assert "scontrol update nodename=gpu2 state=resume" in output
    assert "gpu3" not in output
    boxes[0].sh("scontrol update nodename=gpu2 state=resume")
    assert "Slurm starts no jobs" not in course(bed, "status", "--refresh")


def test_a_machine_that_is_back_in_course_yaml_takes_jobs_again(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    path = bed.folder / "ml" / "course.yaml"
    text = path.read_text()
    job = "cd /tmp; sbatch --parsable --gres=gpu:1 --nodelist=gpu3 --wrap 'sleep 600'"
    number = boxes[0].sh(job, user="lab-alice").strip()
    wait_for(lambda: boxes[0].sh(f"squeue -h -j {number} -o %t").strip() == "R")
    path.write_text(text.replace(list_hosts(boxes), list_hosts(boxes[:2])))
    assert "waits for 1 job to end" in course(bed, "up", "--only", "alice", "--yes")
    assert list_nodes(boxes)[4:] == ["gpu3", "drng"]
    path.write_text(text)
    output = course(bed, "up", "--only", "alice", "--yes")
    assert f"127.0.0.1:{boxes[2].port} is in hosts again, and takes jobs again" in output
    assert list_nodes(boxes)[4:] == ["gpu3", "mix"]
    boxes[0].sh(f"scancel {number}")
    wait_for(lambda: list_nodes(boxes)[4:] == ["gpu3", "idle"])


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
