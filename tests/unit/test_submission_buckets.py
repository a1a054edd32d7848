"""Handing in through a bucket: what a ticket allows, what the receiver makes of it. moto's S3,
behind S3's own rules."""

from __future__ import annotations

import http.client
import io
import json
import os
import stat
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from post_guard import ACCESS, REGION, SECRET, Guard, guarded_s3
from requests_toolbelt import MultipartEncoder
from submission_bed import DUE, DUE_AT, FILES, Clock, packed, sha256

from labctl.errors import DeniedError, LabError, PolicyError, UsageError
from labctl.submissions import posting, receipt
from labctl.submissions.assignment import Assignment, Ticket, load_assignment
from labctl.submissions.buckets import LONGEST_S, Bucket
from labctl.submissions.receive import collect_posts, write_assignment, write_tickets
from labctl.submissions.receiver import Receiver

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")

pytestmark = pytest.mark.filterwarnings(
    # moto leaves the file of a form to the collector.
    "ignore:Exception ignored in. .function Spooled:pytest.PytestUnraisableExceptionWarning",
    "ignore:Unclosed file .tempfile.SpooledTemporaryFile:ResourceWarning",
)
PLACE = "s3://course/drop"


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Guard, str]]:
    with guarded_s3() as found:
        yield found


@pytest.fixture
def guard(running: tuple[Guard, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """The instructor's environment; the bucket `course` keeps versions."""
    guard, url = running
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
    }.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="course")
    s3.put_bucket_versioning(Bucket="course", VersioningConfiguration={"Status": "Enabled"})
    guard.ahead_s, guard.broken, guard.posts = 0.0, [], []
    yield guard
    boto3.resource("s3").Bucket("course").object_versions.delete()
    s3.delete_bucket(Bucket="course")


@pytest.fixture
def receiver(tmp_path: Path, guard: Guard) -> Receiver:
    return with_rules(tmp_path)


def with_rules(tmp_path: Path, **given: str) -> Receiver:
    made = Receiver(tmp_path / "drop", Clock(DUE_AT - 86400))
    made.init()
    asked = {"course": "ml", "max_size": "1MB", **given}
    write_assignment(made, "hw3", PLACE, asked)
    return made


def ticket_of(receiver: Receiver, tmp_path: Path, student: str = "alice") -> Assignment:
    (path,) = write_tickets(receiver, "hw3", [student], "7d", tmp_path / "tickets")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = load_assignment(path)
    assert found.student == student
    return found


def small(found: Assignment, part_bytes: int = 4000) -> Ticket:
    """The student's ticket, as one with small parts."""
    assert found.ticket is not None
    parts = tuple(found.ticket.parts) * 12
    return msgspec.structs.replace(found.ticket, part_bytes=part_bytes, parts=parts)


def post(ticket: Ticket | None, data: bytes, tmp_path: Path) -> list[int]:
    assert ticket is not None
    told: list[int] = []
    where = tmp_path / "posted.json"
    posting.post_bundle(ticket, io.BytesIO(data), sha256(data), len(data), where, told.append)
    return told


def raw(url: str, method: str = "GET", body: bytes = b"", **headers: str) -> int:
    parts = urllib.parse.urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port)
    link.request(method, f"{parts.path}?{parts.query}", body or None, headers)
    status = link.getresponse().status
    link.close()
    return status


def test_a_student_posts_and_the_receiver_signs(
    receiver: Receiver, guard: Guard, tmp_path: Path
) -> None:
    rules, data = ticket_of(receiver, tmp_path), packed()
    assert rules.ticket is not None
    assert posting.fetch_answers(rules.ticket).receipts == ()
    assert post(rules.ticket, data, tmp_path)[-1] == len(data)
    (one,) = collect_posts(receiver, "hw3")
    assert (one.student, one.why) == ("alice", "")
    (signed,) = posting.fetch_answers(rules.ticket).receipts
    found = receipt.verify(signed, rules.receiver)
    assert (found.student, found.number, found.bundle_sha256) == ("alice", 1, sha256(data))
    assert receiver.find_bundle("hw3", "alice").read_bytes() == data
    # Looked at once; again it is nothing new.
    assert collect_posts(receiver, "hw3") == []


def test_the_stamp_is_s3s_clock_not_the_collectors(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    now = time.time()
    receiver = with_rules(tmp_path, due=receipt.utc_text(now + 3600))
    rules = ticket_of(receiver, tmp_path)
    post(rules.ticket, packed(), tmp_path)
    assert isinstance(receiver.now, Clock)
    receiver.now.at = now + 9 * 86400  # collected long after the deadline
    (one,) = collect_posts(receiver, "hw3")
    assert one.signed is not None
    assert one.signed.receipt.late_s == 0
    assert abs(receipt_at(one.signed.receipt.received) - now) < 600


def receipt_at(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def test_what_comes_after_the_deadline_is_refused_and_told(guard: Guard, tmp_path: Path) -> None:
    receiver = with_rules(tmp_path, due="2020-01-01T00:00:00Z")
    rules = ticket_of(receiver, tmp_path)
    post(rules.ticket, packed(), tmp_path)
    (one,) = collect_posts(receiver, "hw3")
    assert one.signed is None
    assert "closed on Wed 01 Jan 2020 00:00 UTC" in one.why
    assert rules.ticket is not None
    answers = posting.fetch_answers(rules.ticket)
    assert answers.receipts == ()
    assert [refused.sha256 for refused in answers.refused] == [sha256(packed())]


def test_a_broken_upload_goes_on_after_the_last_part(
    receiver: Receiver, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE_S", 0.0)
    rules = ticket_of(receiver, tmp_path)
    assert rules.ticket is not None
    forms = Bucket(PLACE).create_ticket(
        msgspec.structs.replace(rules, max_size=12 * 64 * 2**20), "alice", 3600
    )
    ticket = msgspec.structs.replace(forms, part_bytes=4000)
    data = packed()
    assert len(data) > 2 * 4000
    guard.broken = ["part-03"] * posting.TRIES
    with pytest.raises(LabError):
        post(ticket, data, tmp_path)
    guard.posts.clear()
    post(ticket, data, tmp_path)
    assert guard.posts[0].endswith("/part-03")
    (one,) = collect_posts(receiver, "hw3")
    assert one.signed is not None
    assert one.signed.receipt.bundle_sha256 == sha256(data)


def test_a_later_post_takes_nothing_away(receiver: Receiver, tmp_path: Path) -> None:
    rules = ticket_of(receiver, tmp_path)
    other = packed({**FILES, "code/train.py": b"print('other')\n"})
    for data in (packed(), other):
        post(rules.ticket, data, tmp_path)
    found = collect_posts(receiver, "hw3")
    assert [one.signed.receipt.number if one.signed else 0 for one in found] == [1, 2]
    assert receiver.find_bundle("hw3", "alice", 1).read_bytes() == packed()
    assert receiver.find_bundle("hw3", "alice", 2).read_bytes() == other


def form_of(fields: dict[str, str], content: bytes) -> tuple[bytes, dict[str, str]]:
    form = MultipartEncoder({**fields, "file": ("part", content)})
    return form.read(), {"Content-Type": form.content_type}


def test_a_ticket_is_for_its_own_keys_and_sizes_alone(
    receiver: Receiver, guard: Guard, tmp_path: Path
) -> None:
    ticket = ticket_of(receiver, tmp_path).ticket
    assert ticket is not None
    own = ticket.parts[0]
    assert own["key"] == "drop/hw3/alice/part-01"

    def status(fields: dict[str, str], content: bytes = b"x") -> int:
        body, headers = form_of(fields, content)
        return raw(ticket.url, "POST", body, **headers)

    assert status(own) == 201
    for key in ("drop/hw3/bob/part-01", "drop/hw3/alice/part-02", "drop/hw3/alice/receipts.json"):
        assert status({**own, "key": key}) == 403
    assert status({**own, "acl": "public-read"}) == 403
    assert status({**own, "policy": own["policy"][:-8] + "AAAAAAA="}) == 403
    assert status({"key": own["key"], "success_action_status": "201"}) == 403
    # The index is small, whatever is called so.
    assert status(ticket.index, b"x" * 64 * 1024) == 201
    assert status(ticket.index, b"x" * (64 * 1024 + 1)) == 400


def test_who_posts_can_neither_read_nor_list_nor_remove(receiver: Receiver, tmp_path: Path) -> None:
    rules = ticket_of(receiver, tmp_path)
    post(rules.ticket, packed(), tmp_path)
    assert rules.ticket is not None
    top = rules.ticket.url.rstrip("/")
    for key in ("drop/hw3/alice/part-01", "drop/hw3/alice/index.json", "drop/hw3/bob/index.json"):
        assert raw(f"{top}/{key}") == 403
        assert raw(f"{top}/{key}", "DELETE") == 403
        assert raw(f"{top}/{key}", "PUT", b"x") == 403
    assert raw(f"{top}/?versions") == 403
    # The address of the receipts is that of these receipts, and of nothing else.
    assert raw(rules.ticket.receipts) == 404
    assert raw(rules.ticket.receipts.replace("alice", "bob")) == 403


def test_a_ticket_that_is_over_says_so(receiver: Receiver, guard: Guard, tmp_path: Path) -> None:
    ticket = ticket_of(receiver, tmp_path).ticket
    assert ticket is not None
    guard.ahead_s = LONGEST_S + 60
    with pytest.raises(PolicyError, match="expired on") as caught:
        post(ticket, packed(), tmp_path)
    assert "labctl receive ticket" in caught.value.hint
    old = msgspec.structs.replace(ticket.expires, at=1)
    with pytest.raises(PolicyError, match="expired on"):
        post(msgspec.structs.replace(ticket, expires=old), packed(), tmp_path)
    guard.ahead_s = 0.0
    forged = {**ticket.parts[0], "x-amz-signature": "0" * 64}
    with pytest.raises(DeniedError):
        post(msgspec.structs.replace(ticket, parts=(forged,)), packed(), tmp_path)


def test_a_bundle_larger_than_the_tickets_parts_stays_here(
    receiver: Receiver, guard: Guard, tmp_path: Path
) -> None:
    ticket = ticket_of(receiver, tmp_path).ticket
    assert ticket is not None
    size = ticket.part_bytes * len(ticket.parts) + 1
    with pytest.raises(PolicyError, match="larger than the ticket"):
        posting.post_bundle(ticket, io.BytesIO(), "a" * 64, size, tmp_path / "p", lambda at: None)
    assert guard.posts == []


INDEX = {"version": 1, "sha256": "a" * 64, "size": 3, "parts": [{"sha256": "b" * 64, "size": 3}]}
HUGE = [{"sha256": "b" * 64, "size": 10 * 1024**3}]
HOSTILE: list[tuple[Any, str]] = [
    (b"hello", "cannot be read"),
    (b"\xff", "cannot be read"),
    ({**INDEX, "size": 10 * 1024**3}, "is inconsistent"),
    ({**INDEX, "size": 10 * 1024**3, "parts": HUGE}, "too large"),
    ({**INDEX, "parts": []}, "is inconsistent"),
    ({**INDEX, "parts": [{"sha256": "b" * 64, "size": 1}] * 13, "size": 13}, "inconsistent"),
    ({**INDEX, "size": 3, "parts": [{"sha256": "b", "size": 4}, {"sha256": "b", "size": -1}]},
     "is inconsistent"),
    (INDEX, "part 1 does not match its index"),
    ({**INDEX, "sha256": "../x"}, "announced with its size"),
    ({**INDEX, "student": "zoe"}, "cannot be read"),
]  # fmt: skip


def test_hostile_indexes_are_answered_and_stop_nobody(receiver: Receiver, tmp_path: Path) -> None:
    for number, (index, _) in enumerate(HOSTILE):
        mallory = ticket_of(receiver, tmp_path, f"mallory{number:02}").ticket
        assert mallory is not None
        content = index if isinstance(index, bytes) else json.dumps(index).encode()
        body, headers = form_of(mallory.index, content)
        assert raw(mallory.url, "POST", body, **headers) == 201
    honest = ticket_of(receiver, tmp_path, "zoe")
    post(honest.ticket, packed(student="zoe"), tmp_path)
    *refused, taken = collect_posts(receiver, "hw3")
    for (index, said), one in zip(HOSTILE, refused, strict=True):
        assert one.signed is None, index
        assert said in one.why, index
    assert taken.signed is not None
    assert receiver.students("hw3") == ["zoe"]


def test_another_students_bundle_is_refused(receiver: Receiver, tmp_path: Path) -> None:
    mallory = ticket_of(receiver, tmp_path, "mallory")
    post(mallory.ticket, packed(student="alice"), tmp_path)
    (one,) = collect_posts(receiver, "hw3")
    assert "it belongs to 'alice', but mallory submitted it" in one.why
    assert receiver.students("hw3") == []


def test_a_bucket_without_versions_gives_no_tickets(
    receiver: Receiver, guard: Guard, tmp_path: Path
) -> None:
    s3 = boto3.client("s3")
    s3.put_bucket_versioning(Bucket="course", VersioningConfiguration={"Status": "Suspended"})
    with pytest.raises(PolicyError, match="keeps no versions") as caught:
        write_tickets(receiver, "hw3", ["alice"], "7d", tmp_path)
    assert "put-bucket-versioning" in caught.value.hint
    assert list(tmp_path.glob("*.yaml")) == []


def test_tickets_last_no_longer_than_s3_believes_them(receiver: Receiver, tmp_path: Path) -> None:
    for valid in ("8d", "soon"):
        with pytest.raises(UsageError):
            write_tickets(receiver, "hw3", ["alice"], valid, tmp_path)
    with pytest.raises(UsageError):
        write_tickets(receiver, "hw3", ["../alice"], "1d", tmp_path)


def test_an_assignment_over_ssh_has_no_tickets(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "drop")
    receiver.init()
    given = {"due": DUE, "host_key": "ssh-ed25519 AAAA"}
    write_assignment(receiver, "hw3", "ssh://drop@host", given)
    with pytest.raises(UsageError, match="not submitted through a bucket"):
        write_tickets(receiver, "hw3", ["alice"], "1d", tmp_path)
