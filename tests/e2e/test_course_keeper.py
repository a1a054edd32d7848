"""A course's keeper over a real sshd: joining, servers, and what a student's key cannot do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from course_bed import CourseBed, course_bed, keeping
from submit_bed import COMMAND_S, SSHD

from labctl.config import find_paths, student_key
from labctl.courses.context import SEATS
from labctl.courses.invitation import JoinFile, derive_enrollment_key
from labctl.courses.keys import AuthorizedKeys, keeper_dir
from labctl.courses.preflight import _check_keys
from labctl.courses.publish import store_host_key
from labctl.courses.rpc import socket_path
from labctl.model import Server
from labctl.servers.host_keys import ensure_key_pair
from labctl.submissions.connection_limits import MAX_CONNECTIONS, hold_connection
from labctl.wire.keeper import SAVED_PART_BYTES

pytestmark = pytest.mark.skipif(
    not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd on this machine"
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("keeper")
    with course_bed(folder, "{provider: local}", "image: {build: image}\n") as made:
        image = made.folder / "ml" / "image"
        image.mkdir()
        (image / "Dockerfile").write_text("FROM scratch\n")
        yield made


@contextmanager
def served(bed: CourseBed) -> Iterator[None]:
    """`labctl course serve` in a process of its own."""
    with (bed.folder / "serve.log").open("w+") as log:
        process = bed.serve(log)
        try:
            yield
            assert process.poll() is None, log.read()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(COMMAND_S) == 0
        assert not socket_path(bed.course.id).exists()


def ssh(
    bed: CourseBed, identity: Path, request: str, said: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """What a student's own ssh gets, with this key and no other."""
    known = bed.folder / "known_hosts"
    known.write_text(f"keeper {bed.machine.host_key}\n")
    keeper = bed.course.config.keeper
    assert keeper is not None
    options = ["BatchMode=yes", "IdentitiesOnly=yes", "HostKeyAlias=keeper", "LogLevel=ERROR"]
    options += [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes"]
    return subprocess.run(
        ["ssh", "-F", "none", "-i", str(identity), "-p", str(keeper.port)]
        + [word for option in options for word in ("-o", option)]
        + ["--", f"{keeper.user}@{keeper.host}", request],
        input=said.decode("latin-1"),
        encoding="latin-1",
        capture_output=True,
        timeout=COMMAND_S,
        check=False,
    )


@pytest.mark.engine
def test_a_student_joins_and_has_a_server_until_down(bed: CourseBed) -> None:
    """The whole way, with the keeper as it is started: the student has no account anywhere."""
    file = bed.invited("alice")
    assert file.stat().st_mode & 0o777 == 0o600
    joined = json.loads(bed.labctl("alice", "join", str(file), "--yes", "--json")[0])["joined"]
    assert joined["assignments"] == ["hw3"]
    lab = Path(joined["directory"])
    assert "provider: course" in (lab / "lab.yaml").read_text()
    assert [one.student for one in bed.course.ledger.list_entries(kind="joined")] == ["alice"]
    with served(bed):
        body = bed.labctl("alice", "up", "--yes", "--json", cwd=lab)[0]
        server = msgspec.convert(json.loads(body)["server"], Server)
        assert (server.provider, server.lab) == ("course", "ml-2026-alice")
        assert bed.labctl("alice", "ssh", "--", "echo", "I am in", cwd=lab)[0] == "I am in\n"
        laptop = _join_again(bed, "alice", "alices-laptop")
        said = bed.labctl("alices-laptop", "status", cwd=laptop)[0]
        assert "your server is running, but this lab does not use it yet (" in said
        assert "labctl up      use it here too" in said
        bed.labctl("alices-laptop", "up", "--yes", cwd=laptop)
        said = bed.labctl("alices-laptop", "status", "--refresh", cwd=laptop)[0]
        assert said.startswith("ml-2026-alice: running")
        bed.labctl("alices-laptop", "down", "--yes", cwd=laptop)
        # Within the course's longest life of 12 h, and not beyond it.
        extended = bed.labctl("alice", "extend", "1h", cwd=lab)[0]
        assert re.search(r"stops in (9 h|8 h 5\d min)", extended)
        said = bed.labctl("alice", "extend", "9h", code=3, cwd=lab)[1]
        assert "at most 12 h" in said
        bed.labctl("alice", "down", "--yes", cwd=lab)
    kinds = [one.kind for one in bed.course.ledger.list_entries(seat="alice")]
    assert kinds[:2] == ["joined", "up"]
    assert "down" in kinds


def _join_again(bed: CourseBed, student: str, device: str) -> Path:
    """Join as the student on another device; return the lab's directory there."""
    arguments = ("join", str(bed.invited(student)), "--yes", "--json")
    return Path(json.loads(bed.labctl(device, *arguments)[0])["joined"]["directory"])


def test_a_join_file_works_once(bed: CourseBed, tmp_path: Path) -> None:
    file = bed.invited("bob")
    before = bed.machine.keys.read_text()
    bed.labctl("bob", "join", str(file), "--yes")
    assert "labctl-join:" not in bed.machine.keys.read_text() != before
    # For bob again: nothing new, and nothing lost.
    assert "had already joined" in bed.labctl("bob", "join", str(file), "--yes", "--into", "b2")[0]
    # For somebody who got hold of the file: nothing.
    said = bed.labctl("mallory", "join", str(file), "--yes", code=3)[1]
    assert "already used or revoked" in said
    assert not (bed.home("mallory") / "ml-2026").exists()


def test_the_check_tries_every_key_at_the_keepers_sshd(bed: CourseBed, tmp_path: Path) -> None:
    store_host_key(bed.course, bed.machine.host_key)
    seats = bed.course.list_seats()
    for student in ("alice", "bob"):
        bed.keys.admit(student, ensure_key_pair(tmp_path / student))
    _, good = _check_keys(bed.staff(), seats, AuthorizedKeys(bed.course, bed.machine.keys))
    assert (good.ok, good.detail) == (True, "it accepts 2 of 2 keys")
    elsewhere = tmp_path / "authorized_keys"
    elsewhere.write_text(bed.machine.keys.read_text())
    bed.keys.expel(["alice"])
    joined, bad = _check_keys(bed.staff(), seats, AuthorizedKeys(bed.course, elsewhere))
    assert (joined.ok, bad.ok) == (False, False)
    assert bad.detail == "it accepts 1 of 2 keys; rejected: alice"
    assert "labctl course invite alice" in bad.next
    store_host_key(bed.course, ensure_key_pair(tmp_path / "another").rpartition(" ")[0])
    _, stranger = _check_keys(bed.staff(), seats, AuthorizedKeys(bed.course, bed.machine.keys))
    assert not stranger.ok
    assert "cannot be reached" in stranger.detail
    store_host_key(bed.course, bed.machine.host_key)
    bed.keys.expel()


def test_a_code_enrols_a_key_and_opens_nothing_else(bed: CourseBed, tmp_path: Path) -> None:
    file = msgspec.json.decode(bed.invited("carol").read_bytes(), type=JoinFile)
    identity = tmp_path / "code"
    identity.write_bytes(derive_enrollment_key(file.join)[0])
    identity.chmod(0o600)
    for request in ("id", "labctl-course", "labctl-join; id"):
        done = ssh(bed, identity, request)
        assert (done.returncode, done.stdout) == (3, "")
        assert "can only register one key" in done.stderr
    bed.keys.withdraw(["carol"])
    assert ssh(bed, identity, "labctl-join").returncode == 255


def test_a_students_key_opens_the_door_and_no_shell(bed: CourseBed) -> None:
    bed.labctl("dora", "submit", "--key", code=0)
    identity = student_key(find_paths({"HOME": str(bed.home("dora"))}))
    public = identity.with_name("id_ed25519.pub").read_text()
    bed.keys.admit("carol", public)
    for request in ("labctl-course; id", "labctl-course\nid", "rsync --server ."):
        done = ssh(bed, identity, request)
        assert (done.returncode, done.stdout) == (3, "")
        assert "can only request servers and submit work" in done.stderr
    assert bed.keys.expel(["carol"]) == ["carol"]
    assert ssh(bed, identity, "labctl-course").returncode == 255


HOSTILE: tuple[tuple[object, str], ...] = (
    ({"do": "servers", "student": "bob"}, "PolicyError"),
    ({"do": "create; id", "lab": "x"}, "UsageError"),
    (
        {
            "do": "create",
            "lab": "$(id)",
            "lab_id": "0f" * 6,
            "token": "aa" * 8,
            "public_key": "ssh-ed25519 AAAA",
            "offer": {},
        },
        "UsageError",
    ),
    ({"do": "find", "id": "course-00000000-`id`", "wait_s": 10**9}, ""),
    ({"do": "terminate", "id": "../../bob"}, ""),
    ({"do": "extend", "id": "course-00000000-abcdef", "seconds": 10**12}, "NotFoundError"),
    ([[[]]], "UsageError"),
    ("hello\x1b[2J", "UsageError"),
)


def test_hostile_requests_over_ssh_get_an_error_and_nothing_else(bed: CourseBed) -> None:
    """The forced command with shell's characters, another's name and ceilings far exceeded, by a
    client that is not labctl's."""
    file = bed.invited("alice")
    bed.labctl("alice", "join", str(file), "--yes")
    identity = student_key(find_paths({"HOME": str(bed.home("alice"))}))
    lines = [json.dumps(one).encode() for one, _ in HOSTILE] + [b"[" * 20_000, b"\xff\x00\xfe"]
    seats = bed.course.private / "keeper" / "seats"
    before = sorted(seats.glob("*")) if seats.exists() else []
    with keeping(bed):
        done = ssh(bed, identity, "labctl-course", b"\n".join([*lines, b'{"do": "hello"}\n']))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [(one.get("error") or {}).get("kind", "") for one in answers]
    assert kinds == [*(kind for _, kind in HOSTILE), "UsageError", "UsageError", ""]
    assert all(not one.get("server") for one in answers)
    assert answers[-1]["hello"]["student"] == "alice"
    assert "\x1b" not in done.stdout
    assert (sorted(seats.glob("*")) if seats.exists() else []) == before


def test_one_students_connections_leave_the_door_to_the_others(bed: CourseBed) -> None:
    """Each is a process on the keeper's machine."""
    file = bed.invited("bob")
    bed.labctl("bob", "join", str(file), "--yes")
    identity = student_key(find_paths({"HOME": str(bed.home("bob"))}))
    with contextlib.ExitStack() as places:
        for _ in range(MAX_CONNECTIONS):
            places.enter_context(hold_connection(keeper_dir(bed.course) / "doors", "bob"))
        said = json.loads(ssh(bed, identity, "labctl-course", b'{"do": "hello"}\n').stdout)
        assert said["error"]["kind"] == "BusyError"
        assert "has 12 connections" in said["error"]["what"]
        with hold_connection(keeper_dir(bed.course) / "doors", "carol"):
            pass
    with keeping(bed):
        said = json.loads(ssh(bed, identity, "labctl-course", b'{"do": "hello"}\n').stdout)
    assert said["hello"]["student"] == "bob"


@pytest.mark.long
def test_without_a_keeper_handing_in_works_and_servers_are_told_of(bed: CourseBed) -> None:
    file = bed.invited("carol")
    lab = Path(
        json.loads(bed.labctl("carol", "join", str(file), "--yes", "--json")[0])["joined"][
            "directory"
        ]
    )
    _, err = bed.labctl("carol", "up", "--yes", cwd=lab, code=75)
    assert "keeper is not running" in err
    assert "continue without it" in err
    # The same key, the same line: the receiver answers without a keeper.
    words = ("submit", "--receipts", "--assignment", "assignments/hw3.yaml")
    assert (
        "not signed a receipt for you yet"
        in "".join(bed.labctl("carol", *words, cwd=lab, code=0)).lower()
    )
    with keeping(bed):
        assert "container" in bed.labctl("carol", "offers", cwd=lab)[0]


def run_as_staff(bed: CourseBed, *words: str) -> str:
    argv, environ = bed.command(*words)
    done = subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_marks_an_answer_and_saved_results_reach_their_student(bed: CourseBed) -> None:
    file = bed.course.path / "course.yaml"
    text = file.read_text()
    file.write_text(text.replace("late: 48h", "late: 48h, points: 10, rubric: {text: 10}"))
    join = ("join", str(bed.invited("alice")), "--yes", "--json")
    lab = Path(json.loads(bed.labctl("alice", *join)[0])["joined"]["directory"])
    words = ("submit", "--assignment", "assignments/hw3.yaml")
    run_as_staff(bed, "mark", "hw3", "alice", "text", "7", "--note", "short")
    refused = bed.labctl("alice", *words, "--ask-regrade", "why 7?", cwd=lab, code=3)[1]
    assert "has not been released yet" in refused
    run_as_staff(bed, "grades", "hw3", "--release")
    bed.labctl("alice", *words, "--ask-regrade", "why 7?", cwd=lab)
    assert "  | why 7?" in run_as_staff(bed, "regrades", "hw3")
    run_as_staff(bed, "regrades", "hw3", "alice", "--answer", "see the note")
    shown = bed.labctl("alice", *words, "--grade", cwd=lab)[0]
    assert "hw3: 7 of 10 points" in shown
    assert "short" in shown
    assert "declined: see the note" in shown
    bed.labctl("alice", *words, "--ask-regrade", "why 7, once more?", cwd=lab)
    accept = ("--answer", "you are right", "--accept", "--mark", "text", "9")
    run_as_staff(bed, "regrades", "hw3", "alice", *accept)
    shown = bed.labctl("alice", *words, "--grade", cwd=lab)[0]
    assert "hw3: 7 of 10 points" in shown
    assert "  accepted: you are right\n  staff releases the new grade separately" in shown

    log = bed.course.path / SEATS / "alice" / "runs" / "r1" / "logs" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(os.urandom(SAVED_PART_BYTES + 1))
    with keeping(bed):
        said = bed.labctl("alice", "pull", "--from-course", cwd=lab)[0]
    assert "from-course/: downloaded 1 file" in said
    assert (lab / "from-course" / "r1" / "logs" / "train.log").read_bytes() == log.read_bytes()
