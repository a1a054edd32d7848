"""Handing in over a real sshd, through a forced command: what a student's key can do and cannot."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from sshd_container import wait_for
from submit_bed import COMMAND_S, SSHD, Machine, receiving_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from submission_bed import FILES, Tar, bomb, packed, sha256

from labctl.config.times import local_time_text
from labctl.model import Run
from labctl.servers.host_keys import ensure_key_pair
from labctl.submissions.bundle import inspect
from labctl.submissions.feedback import Feedback

pytestmark = pytest.mark.skipif(
    not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd on this machine"
)

MIB = 1024**2
SIZE = 24 * MIB
RUN = "r1"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with receiving_machine(tmp_path_factory.mktemp("receiver")) as made:
        yield made


class Student:
    """A person with a home, a lab and a pulled run of SIZE bytes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.home, self.lab, self.name = folder / f"{name}-home", folder / f"{name}-lab", name
        self.home.mkdir()
        run = self.lab / "runs" / RUN
        (run / "checkpoints").mkdir(parents=True)
        (self.lab / "lab.yaml").write_text("lab: digits\n")
        (run / "checkpoints" / "model.safetensors").write_bytes(os.urandom(SIZE))
        record = Run(id=RUN, lab_id="l", server_id="s", state="exited", exit_code=0)
        (run / "run.json").write_bytes(msgspec.json.encode(record))

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8"}

    @property
    def key(self) -> Path:
        return self.home / ".local/share/labctl/keys/submit/id_ed25519"

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "labctl", "submit", *words],
            cwd=self.lab,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def submit(self, *words: str, code: int = 0) -> tuple[str, str]:
        """(standard output, standard error)."""
        process = self.start(*words)
        out, err = process.communicate(timeout=COMMAND_S)
        assert process.returncode == code, (process.returncode, out, err)
        return out, err

    def json(self, *words: str) -> Any:
        return json.loads(self.submit("--json", *words)[0])


@pytest.fixture
def student(machine: Machine, tmp_path: Path, request: pytest.FixtureRequest) -> Student:
    """One who was let in, with a name of their own."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[-38:]
    name = name.strip("-")
    made = Student(tmp_path, name)
    machine.admit(name, ensure_key_pair(made.key))
    (made.lab / "assignment.yaml").write_text(machine.assignment())
    machine.wire.cut_after = None
    return made


def test_a_bundle_is_handed_in_and_proved(machine: Machine, student: Student) -> None:
    body = student.json("--yes")
    signed = body["handed_in"]["signed"]["receipt"]
    assert (signed["student"], signed["number"], signed["late_s"]) == (student.name, 1, 0)
    with machine.receiver.find_bundle("hw3", student.name).open("rb") as file:
        manifest, _ = inspect(file)
    assert (manifest.student, manifest.run, manifest.lab) == (student.name, RUN, "digits")
    assert "signature: valid" in student.submit("--verify")[0]
    # Again: the same receipt, and hardly a byte.
    before = machine.wire.passed
    assert student.json("--yes")["handed_in"]["signed"]["receipt"] == signed
    assert machine.wire.passed - before < MIB
    # On another machine of the student's, the receipt can be had again.
    shutil.rmtree(student.lab / ".labctl" / "submissions")
    out, _ = student.submit("--receipts")
    assert "receipt-0001.json" in out
    assert student.name in machine.receiver.students("hw3")


def test_received_is_written_in_the_time_zone_of_the_course(
    machine: Machine, student: Student
) -> None:
    text = machine.assignment(due="2099-01-01 12:00 Europe/Berlin")
    (student.lab / "assignment.yaml").write_text(text)
    out, _ = student.submit("--yes")
    assert "Thu 01 Jan 2099 12:00 Europe/Berlin" in out
    [signed] = machine.receiver.receipts("hw3", student.name)
    received = local_time_text(signed.receipt.received_at, ZoneInfo("Europe/Berlin"))
    assert f"received  {received} (on time)" in out
    assert f"received  {received} (on time)" in student.submit("--verify")[0]
    moment = datetime.fromtimestamp(signed.receipt.received_at, ZoneInfo("Europe/Berlin"))
    listed, _ = student.submit("--receipts")
    assert f"{moment:%d %b %Y %H:%M:%S}" in listed
    assert "Times are in Europe/Berlin." in listed


def test_an_extension_counts_for_a_submission_that_arrived_before(
    machine: Machine, student: Student
) -> None:
    due = datetime.now(ZoneInfo("UTC")) - timedelta(hours=11)
    text = machine.assignment(due=f"{due:%Y-%m-%d %H:%M} UTC", late="any", penalty="10")
    (student.lab / "assignment.yaml").write_text(text)

    def list_rows() -> str:
        words = ["receive", "list", str(machine.receiver.directory), "hw3"]
        argv = [sys.executable, "-m", "labctl", *words]
        listed = subprocess.run(
            argv, env=student.environ, capture_output=True, text=True, check=True
        )
        [row] = [line for line in listed.stdout.splitlines() if student.name in line]
        return row

    try:
        assert "late, 10% off)" in student.submit("--yes")[0]
        assert "late  10%" in list_rows()
        machine.receiver.extend("hw3", student.name, 3 * 86400)
        assert "on time" in list_rows()
        assert "on time" in student.submit("--receipts")[0]
        again, _ = student.submit("--yes")
        words = " ".join(again.split())
        assert "already submitted: same bundle" in words
        counts = r"counts as on time, with your extension; 11 h( \d min)? late, 10% off when it was"
        assert re.search(counts, words), words
        [signed] = machine.receiver.receipts("hw3", student.name)
        assert signed.receipt.penalty == 10
        machine.receiver.extend("hw3", student.name, 0)
        assert "late  10%" in list_rows()
    finally:
        machine.assignment()


def test_a_student_of_a_course_whose_key_was_revoked_is_led_to_a_join_file(
    machine: Machine, student: Student
) -> None:
    machine.expel(student.name)
    _, elsewhere = student.submit("--grade", code=1)
    assert "next: labctl submit --key" in elsewhere
    keeper = f"keeper: ssh://course@127.0.0.1:{machine.wire.port}"
    section = f"{{{keeper}, host_key: '{machine.host_key}', course: ml, student: alice}}"
    text = f"lab: digits\nserver: {{provider: course, course: {section}}}\n"
    (student.lab / "lab.yaml").write_text(text)
    _, said = student.submit("--grade", code=3)
    assert "your instructor has revoked the key" in said
    assert "labctl join FILE" in said
    assert "--key" not in said


def test_a_grade_comes_back_once_it_was_released(machine: Machine, student: Student) -> None:
    _, said = student.submit("--grade", code=4)
    assert "has not been released yet" in said
    page = "<!doctype html><p>well done"
    found = Feedback(
        assignment="hw3", number=1, score=87.5, points=100.0, text="ok \x1b[2J", page=page
    )
    machine.receiver.release_feedback("hw3", student.name, found)
    out, _ = student.submit("--grade")
    assert "hw3: 87.5 of 100 points" in out
    assert "\x1b" not in out
    kept = student.lab / ".labctl" / "submissions" / "hw3" / "feedback.html"
    assert kept.read_text() == page


def test_a_cut_link_costs_a_part_and_not_the_whole(machine: Machine, student: Student) -> None:
    before, cuts = machine.wire.passed, machine.wire.cuts
    machine.wire.cut_after = 14 * MIB
    body = student.json("--yes")
    assert machine.wire.cuts == cuts + 1
    assert body["handed_in"]["signed"]["receipt"]["bundle_bytes"] > SIZE
    assert machine.wire.passed - before < SIZE + 9 * MIB


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_ended_in_the_middle_it_goes_on_there(
    machine: Machine, student: Student, number: signal.Signals
) -> None:
    wire = machine.wire
    wire.held.clear()
    wire.let_go.clear()
    wire.hold_after = 14 * MIB
    process = student.start("--yes")
    assert wire.held.wait(COMMAND_S)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=COMMAND_S)
    wire.let_go.set()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "next: labctl submit\n" in err
        assert "(continues where this stopped)" in err
    wait_for(wire.settled)  # what stood in the wire's buffers has gone on as well
    passed = wire.passed
    assert student.json("--yes")["handed_in"]["signed"]["receipt"]["number"] == 1
    assert wire.passed - passed < SIZE - 7 * MIB


def test_a_larger_one_than_allowed_does_not_travel(machine: Machine, student: Student) -> None:
    """Not even for a student who has edited the assignment's file."""
    text = machine.assignment(max_size="1MB")
    (student.lab / "assignment.yaml").write_text(text.replace("max_size: 1MB", "max_size: 1GB"))
    try:
        before = machine.wire.passed
        _, err = student.submit("--yes", code=3)
        assert "accepts at most 1,000,000" in err
        assert machine.wire.passed - before < MIB
    finally:
        machine.assignment()


def ssh(machine: Machine, student: Student, *words: str, stdin: str = "") -> Any:
    hosts = student.home / "known"
    hosts.write_text(f"[127.0.0.1]:{machine.wire.port} {machine.host_key}\n")
    return subprocess.run(
        ["ssh", "-F", "none", "-i", str(student.key), "-o", "IdentitiesOnly=yes",
         "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={hosts}", "-o", "LogLevel=ERROR",
         "-p", str(machine.wire.port), "-l", getpass.getuser(), *words],
        input=stdin, capture_output=True, encoding="latin-1", timeout=COMMAND_S, check=False,
    )  # fmt: skip


def test_a_students_key_opens_no_shell(machine: Machine, student: Student, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for line in (
        f"touch {trace}",
        f"labctl-submit; touch {trace}",
        f"labctl-submit $(touch {trace})",
        f"labctl-submit | touch {trace}",
        f"`touch {trace}`",
        f"labctl receive serve {machine.drop} somebody",
        "scp -f /etc/passwd",
    ):
        done = ssh(machine, student, "127.0.0.1", line)
        assert (done.returncode, done.stdout) == (3, ""), line
        assert "cannot be run here" in done.stderr
    assert not trace.exists()
    # Without a command the service answers, and a terminal is not given.
    done = ssh(machine, student, "-tt", "127.0.0.1", stdin="id\n")
    assert "uid=" not in done.stdout
    sftp = ssh(machine, student, "-s", "127.0.0.1", "sftp", stdin="\0\0\0\5\1\0\0\0\3")
    assert sftp.returncode == 3
    forward = ssh(
        machine, student, "-N", "-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:1", "127.0.0.1"
    )
    assert forward.returncode == 255


def test_nobody_asks_in_anothers_name(machine: Machine, student: Student) -> None:
    other = "somebody-else"
    for request, kind in (
        ({"do": "receipts", "assignment": "hw3", "student": other}, "PolicyError"),
        ({"do": "hello", "assignment": f"../{other}"}, "UsageError"),
        ({"do": "get", "assignment": "hw3"}, "UsageError"),
    ):
        done = ssh(machine, student, "127.0.0.1", "labctl-submit", stdin=json.dumps(request) + "\n")
        assert json.loads(done.stdout)["error"]["kind"] == kind, done.stdout
    hello = {"do": "hello", "assignment": "hw3"}
    done = ssh(machine, student, "127.0.0.1", "labctl-submit", stdin=json.dumps(hello) + "\n")
    assert json.loads(done.stdout)["hello"]["student"] == student.name


def by_hand(machine: Machine, student: Student, data: bytes, *, size: int = 0) -> list[Any]:
    """What the receiver answers to a client of one's own, which sends what it likes."""
    about = {"assignment": "hw3", "sha256": sha256(data), "size": size or len(data)}
    lines = [
        json.dumps({"do": "begin", **about}).encode() + b"\n",
        json.dumps({"do": "part", **about, "offset": 0, "length": len(data)}).encode() + b"\n",
        data,
        json.dumps({"do": "finish", **about}).encode() + b"\n",
    ]
    text = b"".join(lines).decode("latin-1")
    done = ssh(machine, student, "127.0.0.1", "labctl-submit", stdin=text)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hostile_bundles_over_ssh_are_refused_and_not_kept(
    machine: Machine, student: Student
) -> None:
    """By a client that looks at nothing first: a way out, a bomb, a pickle that runs, 10 GB, after
    the deadline."""
    own = {"student": student.name}
    runs = b"\x80\x04cposix\nsystem\n\x8c\x02id\x85R."
    out = Tar({}).add("../../.ssh/authorized_keys", b"ssh-ed25519 AAAA").end().getvalue()
    for data, said in (
        (out, "does not match manifest.json"),
        (packed({**FILES, "logs/a.zip": bomb()}, **own), "logs/a.zip: it would unpack to 3.0 GiB"),
        (packed({**FILES, "model/m.pt": runs}, **own), "loading it would run 'posix.system'"),
        (packed(student="somebody-else"), "it belongs to 'somebody-else'"),
    ):
        answers = by_hand(machine, student, data)
        assert said in answers[-1]["error"]["why"], answers
    huge = by_hand(machine, student, packed(**own), size=10 * 10**9)
    assert "too large" in huge[0]["error"]["what"]
    machine.assignment(due="2020-01-01 12:00 UTC")
    try:
        late = by_hand(machine, student, packed(**own))
        assert "closed on Wed 01 Jan 2020 12:00 UTC" in late[0]["error"]["what"]
    finally:
        machine.assignment()
    assert student.name not in machine.receiver.students("hw3")
    left = [one for one in (machine.drop / "incoming").rglob("*") if one.is_file()]
    assert sum(one.stat().st_size for one in left if student.name in str(one)) == 0
    assert "signed" in by_hand(machine, student, packed(**own))[-1], "the same way, a good one"


def test_who_was_not_let_in_is_told_how(machine: Machine, student: Student) -> None:
    machine.expel(student.name)
    _, err = student.submit("--yes", code=1)
    assert "does not know your key" in err
    assert "labctl submit --key" in err


def test_another_machine_at_that_address_gets_nothing(
    machine: Machine, student: Student, tmp_path: Path
) -> None:
    other = " ".join(ensure_key_pair(tmp_path / "other").split()[:2])
    file = student.lab / "assignment.yaml"
    file.write_text(file.read_text().replace(machine.host_key, other))
    before = machine.wire.passed
    _, err = student.submit("--yes", code=3)
    assert "ask your instructor" in err
    assert machine.wire.passed - before < MIB


def test_a_receiver_with_another_signing_key_gets_nothing(
    machine: Machine, student: Student
) -> None:
    file = student.lab / "assignment.yaml"
    file.write_text(
        file.read_text().replace(machine.receiver.read_public_key(), "ed25519:" + "A" * 43 + "=")
    )
    _, err = student.submit("--yes", code=3)
    assert "not the receiver of the assignment" in err
    assert student.name not in machine.receiver.students("hw3")
