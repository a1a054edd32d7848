"""Join files and what each line of the keeper's authorized_keys lets in."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from labctl.config import find_paths
from labctl.courses import join
from labctl.courses.invitation import (
    derive_enrollment_key,
    enroll,
    invite,
    read_join,
    withdraw_expired,
)
from labctl.courses.join import fetch_join_file
from labctl.courses.keys import CHECKER, JOIN_REQUEST, MOST_DEVICES, AuthorizedKeys
from labctl.courses.publish import invite_all, publish_assignments
from labctl.courses.records.folder import CourseFolder
from labctl.courses.requests import RequestHandler
from labctl.courses.rpc import answer_enrollment
from labctl.errors import (
    AuthenticationError,
    ConfigError,
    LabError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.events import SilentReporter
from labctl.model import Endpoint
from labctl.servers.host_keys import ensure_key_pair
from labctl.submissions.assignment import load_assignment
from labctl.submissions.receipt import make_signing_key
from labctl.submissions.receiver import Receiver, check_name

sys.path.append(str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import KEY, Pretended, course_folder

HOST_KEY = "ssh-ed25519 " + "A" * 68
OTHER_KEY = KEY[:-4] + "BBBB"
FOREIGN = "ssh-rsa " + "C" * 300 + " staff@example.edu"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    assignments = "assignments: {hw3: {due: 2099-01-01 12:00 UTC, late: 48h, penalty: 10}}\n"
    return course_folder(tmp_path / "ml", assignments)


@pytest.fixture
def keys(folder: CourseFolder, tmp_path: Path) -> AuthorizedKeys:
    file = tmp_path / "home" / "authorized_keys"
    file.parent.mkdir()
    file.write_text(FOREIGN + "\n")
    return AuthorizedKeys(folder, file)


def written(
    folder: CourseFolder, keys: AuthorizedKeys, student: str = "alice", valid_s: int = 60
) -> Path:
    return invite(folder, student, folder.path / "join", keys, HOST_KEY, valid_s).path


def test_a_join_file_says_where_and_holds_no_private_key(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    path = written(folder, keys)
    join = read_join(path.read_bytes())
    assert (join.course, join.student, join.keeper) == (
        "ml",
        "alice",
        "ssh://labctl@keeper.example.edu:22",
    )
    assert (join.host_key, join.seat) == (HOST_KEY, folder.find_seat("alice").lab_id)
    assert "PRIVATE" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    # The keeper itself keeps no code.
    record = (folder.private / "keeper" / "invitations" / "alice.json").read_text()
    assert join.code not in record + keys.file.read_text()


def test_the_question_names_the_course_and_the_directory(
    folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path
) -> None:
    said = join_as_student(written(folder, keys), tmp_path)
    question = "join the course ml as alice, in the directory ml? no (not a terminal"
    assert question in " ".join(said.split())


def join_as_student(file: Path, home: Path, **environ: str) -> str:
    """What `labctl join FILE` prints without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "labctl", "join", str(file)],
        cwd=home,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


@pytest.mark.parametrize(("zone", "name"), [("Europe/Berlin", "CES?T"), ("UTC", "UTC")])
def test_a_join_file_says_until_when_in_the_time_zone_of_the_machine(
    folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path, zone: str, name: str
) -> None:
    said = join_as_student(written(folder, keys, valid_s=86_400), tmp_path, TZ=zone)
    assert re.search(rf"valid to +\w{{3}} \d\d \w{{3}} \d{{4}} \d\d:\d\d {name}\n", said)
    said = join_as_student(written(folder, keys, valid_s=-1), tmp_path, TZ=zone)
    assert re.search(rf"expired on \w{{3}} .* \d\d:\d\d {name}\n", said)


def test_a_checks_key_is_nobodys_and_goes_with_the_check(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    before = keys.file.read_text()
    with keys.admit_check(KEY):
        assert keys.list_students() == []
        assert not keys.is_open(), "a check does not make this the keeper's machine"
        (line,) = [one for one in keys.file.read_text().splitlines() if CHECKER in one]
        assert line.startswith("restrict,command=")
    assert keys.file.read_text() == before
    with pytest.raises(UsageError):
        check_name(CHECKER)  # no student bears this name, and nothing is handed in under it
    written(folder, keys)
    assert keys.is_open()


def test_an_invitation_is_used_once(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    written(folder, keys)
    enroll(folder, "alice", KEY, keys, time.time())
    lines = keys.file.read_text().splitlines()
    assert lines[0] == FOREIGN
    assert len(lines) == 2
    assert lines[1].startswith('restrict,command="')
    assert "--joining" not in lines[1]
    with pytest.raises(PolicyError, match="already used"):
        enroll(folder, "alice", OTHER_KEY, keys, time.time())
    assert keys.file.read_text().splitlines() == lines


def test_of_many_at_once_one_gets_in(
    folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path
) -> None:
    written(folder, keys)
    publics = [ensure_key_pair(tmp_path / f"key-{number}") for number in range(8)]

    def attempt(public: str) -> bool:
        try:
            enroll(folder, "alice", public, keys, time.time())
        except PolicyError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, publics)) == 1
    assert keys.list_students() == ["alice"]
    assert len(folder.ledger.list_entries(kind="joined")) == 1


def test_a_new_invitation_replaces_the_old_one_and_no_device(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    written(folder, keys)
    enroll(folder, "alice", KEY, keys, time.time())
    first = derive_enrollment_key(read_join(written(folder, keys).read_bytes()))[1]
    second = derive_enrollment_key(read_join(written(folder, keys).read_bytes()))[1]
    text = keys.file.read_text()
    assert first not in text
    assert second in text
    enroll(folder, "alice", OTHER_KEY, keys, time.time())
    assert keys.read_public_keys() == [("alice", KEY), ("alice", OTHER_KEY)]
    assert keys.list_students() == ["alice"]


def test_a_lost_device_is_locked_out_and_the_number_of_devices_is_limited(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    devices = [KEY[:-4] + f"{number:04}" for number in range(MOST_DEVICES)]
    for device in [*devices, devices[0]]:  # the first one joins again
        keys.admit("alice", device)
    assert len(keys.read_public_keys()) == MOST_DEVICES
    with pytest.raises(PolicyError, match="joined from 5 devices"):
        keys.admit("alice", OTHER_KEY)
    keys.admit("bob", KEY)
    into = folder.path / "join"
    invite_all(folder, ["alice"], into, keys, host_key=HOST_KEY, replace=True)
    assert keys.read_public_keys() == [("bob", KEY)]
    enroll(folder, "alice", OTHER_KEY, keys, time.time())
    assert keys.list_students() == ["alice", "bob"]


def test_a_mail_merge_has_a_row_for_each_join_file(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    into = folder.path / "join"
    invitations = invite_all(folder, ["alice", "bob"], into, keys, host_key=HOST_KEY)
    with (into / "invitations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["student"], Path(row["file"])) for row in rows] == [
        (one.student, one.path) for one in invitations
    ]
    assert (into / "invitations.csv").stat().st_mode & 0o777 == 0o600
    assert all(read_join(Path(row["file"]).read_bytes()).student == row["student"] for row in rows)


def test_time_ends_an_invitation(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    path = written(folder, keys, valid_s=60)
    later = time.time() + 61
    with pytest.raises(PolicyError, match="expired on"):
        read_join(path.read_bytes(), now=later)
    assert withdraw_expired(folder, keys, time.time()) == []
    with pytest.raises(PolicyError, match="already used"):
        enroll(folder, "alice", KEY, keys, later)
    written(folder, keys, "bob", valid_s=60)
    assert withdraw_expired(folder, keys, later) == ["alice", "bob"]
    assert keys.file.read_text() == FOREIGN + "\n"


@pytest.mark.parametrize(
    "change",
    [
        {"student": "bob"},
        {"keeper": "ssh://labctl@evil.example"},
        {"host_key": "ssh-ed25519 " + "B" * 68},
        {"expires": 99999999999},
        {"receiver": "ed25519:" + "A" * 43 + "="},
    ],
)
def test_a_changed_join_file_is_refused(
    change: dict[str, Any], folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    body = json.loads(written(folder, keys).read_text())
    body["join"] |= change
    with pytest.raises(PolicyError, match="changed after it was signed"):
        read_join(json.dumps(body).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"keeper": "ssh://-oProxyCommand=id@x"},
        {"keeper": "https://keeper.example.edu"},
        {"student": "../../x"},
        {"host_key": "ssh-ed25519 AAAA\nssh-rsa BBBB"},
        {"seat": "x; rm -rf ~"},
        {"kind": "labctl-receipt"},
        {"more": 1},
    ],
)
def test_what_a_join_file_cannot_say_is_told(
    change: dict[str, Any], folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    body = json.loads(written(folder, keys).read_text())
    body["join"] |= change
    with pytest.raises(ConfigError, match="is not a join file"):
        read_join(json.dumps(body).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b"[" * 9000, b"x" * 20_000])
def test_what_is_no_join_file_is_told(data: bytes) -> None:
    with pytest.raises(ConfigError, match="is not a join file"):
        read_join(data)


def test_another_courses_file_is_refused_where_the_key_is_known(
    folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path
) -> None:
    other = make_signing_key(tmp_path / "other")
    with pytest.raises(PolicyError, match="does not belong to the course"):
        read_join(written(folder, keys).read_bytes(), key=other)


@pytest.mark.parametrize("place", ["http://example.edu/a.join", "ftp://x/y", "file:///etc/passwd"])
def test_a_file_comes_over_https_alone(place: str) -> None:
    with pytest.raises(UsageError, match="not an https:// address"):
        fetch_join_file(place)


def test_a_key_of_somebody_elses_is_refused(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    keys.admit("alice", KEY)
    with pytest.raises(PolicyError, match="belongs to another student"):
        keys.admit("bob", f"{KEY} bob@laptop")
    assert keys.list_students() == ["alice"]


@pytest.mark.parametrize(
    "public",
    ["", "id", f'command="id" {KEY}', f"{KEY}\n{OTHER_KEY}", "ssh-ed25519 AAAA", KEY + '" x"'],
)
def test_what_is_no_key_is_not_let_in(
    public: str, folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    with pytest.raises(UsageError):
        keys.admit("alice", public)
    assert keys.file.read_text() == FOREIGN + "\n"


def test_expelling_everybody_leaves_other_lines(folder: CourseFolder, keys: AuthorizedKeys) -> None:
    keys.admit("alice", KEY)
    written(folder, keys, "bob")
    assert keys.expel() == ["alice"]
    assert keys.file.read_text() == FOREIGN + "\n"
    assert keys.expel() == []


def test_who_is_not_in_the_course_is_not_invited(
    folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    with pytest.raises(NotFoundError):
        written(folder, keys, "nobody")
    with pytest.raises(PolicyError, match="has left"):
        written(folder, keys, "dave")


def test_a_folder_whose_path_does_not_fit_into_authorized_keys_is_refused(tmp_path: Path) -> None:
    folder = course_folder(tmp_path / 'm"l')
    with pytest.raises(LabError, match="cannot be written into authorized_keys"):
        AuthorizedKeys(folder, tmp_path / "keys").admit("alice", KEY)


def test_a_host_key_is_published_without_the_comment_of_its_file(
    folder: CourseFolder, keys: AuthorizedKeys, tmp_path: Path
) -> None:
    """As `--host-key "$(cat /etc/ssh/ssh_host_ed25519_key.pub)"` gives it."""
    into = tmp_path / "join"
    with pytest.raises(UsageError, match="not a public key"):
        invite_all(folder, ["alice"], into, keys, host_key="keeper.example.edu")
    invite_all(folder, ["alice"], into, keys, host_key=f"{HOST_KEY} root@keeper\n")
    assert load_assignment(folder.drop / "assignments" / "hw3.yaml").host_key == HOST_KEY


def test_assignments_are_published_as_students_need_them(folder: CourseFolder) -> None:
    folder.ledger.append("due", student="alice", assignment="hw3", seconds=3600)
    assert publish_assignments(folder, HOST_KEY) == ["hw3"]
    rules = load_assignment(folder.drop / "assignments" / "hw3.yaml")
    assert (rules.hand_in, rules.host_key) == ("ssh://labctl@keeper.example.edu:22", HOST_KEY)
    assert (rules.late, rules.penalty) == (48 * 3600, 10)
    assert publish_assignments(folder, HOST_KEY) == []
    assert Receiver(folder.drop).hello("hw3", "alice").grace_s == 600
    # Earlier versions of students' labctl refuse a key that they do not know.
    assert "grace" not in (folder.drop / "assignments" / "hw3.yaml").read_text()


class KeeperHere:
    """In place of the connections to a keeper: its answers without ssh."""

    def __init__(self, folder: CourseFolder, keys: AuthorizedKeys) -> None:
        self.folder, self.keys = folder, keys
        self.rejected = ""
        self.line = b""

    def open_line_channel(self, endpoint: Endpoint, request: str) -> KeeperHere:
        self.request = request
        return self

    def exchange(self, line: bytes) -> bytes:
        self.line = line
        if self.request == self.rejected:
            raise AuthenticationError("rejected")
        if self.request == JOIN_REQUEST:
            return answer_enrollment(self.folder, "alice", line, self.keys, time.time()).encode()
        return RequestHandler(self.folder, Pretended(self.folder)).answer("alice", line) + b"\n"

    def close(self) -> None:
        pass


@pytest.fixture
def keeper(
    folder: CourseFolder, keys: AuthorizedKeys, monkeypatch: pytest.MonkeyPatch
) -> KeeperHere:
    here = KeeperHere(folder, keys)
    monkeypatch.setattr(join, "Connections", lambda *_: here)
    publish_assignments(folder, HOST_KEY)
    return here


def test_a_join_file_enrols_a_key_and_writes_a_lab(
    folder: CourseFolder, keys: AuthorizedKeys, keeper: KeeperHere, tmp_path: Path
) -> None:
    data = written(folder, keys).read_bytes()
    paths = find_paths({"HOME": str(tmp_path / "laptop")})
    joined = join.join_course(data, None, paths, SilentReporter(), base=tmp_path)
    assert (joined.course, joined.student, joined.again) == ("ml", "alice", False)
    assert joined.assignments == ("hw3",)
    assert load_assignment(joined.directory / "assignments" / "hw3.yaml").name == "hw3"
    assert keys.list_students() == ["alice"]
    keeper.rejected = JOIN_REQUEST  # the code is used up; the key is known
    again = join.join_course(data, None, paths, SilentReporter(), base=tmp_path)
    assert (again.again, again.assignments, again.section) == (True, ("hw3",), "")
    keeper.exchange = lambda line: b'{"joined": []}\n'  # type: ignore[method-assign]
    with pytest.raises(LabError, match="answers, but is not a keeper"):
        join.join_course(data, None, paths, SilentReporter(), base=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"[" * 20_000,
        b"\xff",
        b'{"do": "enrol"}',
        b'{"do": "hello", "public_key": "x"}',
        b'{"do": "enrol", "public_key": 5}',
        b'{"do": "enrol", "public_key": "x", "student": "alice"}',
        b'{"do": "enrol", "public_key": "x", "more": 1}',
    ],
)
def test_what_is_no_enrolment_is_refused(
    line: bytes, folder: CourseFolder, keys: AuthorizedKeys
) -> None:
    written(folder, keys)
    reply = json.loads(answer_enrollment(folder, "alice", line, keys, time.time()))
    assert (reply["error"]["kind"], reply["error"]["what"]) == (
        "UsageError",
        "this is not a valid request",
    )
    assert keys.list_students() == []
