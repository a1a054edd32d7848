"""The receiver: what it takes in, when, from whom; what it signs; and what one student may ask."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from submission_bed import (
    DUE_AT,
    FILES,
    Clock,
    Tar,
    bomb,
    handed_in,
    make_receiver,
    packed,
    sha256,
)

from labctl.errors import (
    BusyError,
    DiskFullError,
    LabError,
    LinkLostError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.submissions import receipt, receiver_host, service
from labctl.submissions import receiver as receiver_module
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import MOST_SUBMISSIONS, Receiver
from labctl.submissions.receiver_host import ReceiverHost
from labctl.wire.receiver import FINISH_UPLOAD, BeginUploadReply, FinishUploadReply

GIB = 1024**3


@pytest.fixture
def made(tmp_path: Path) -> tuple[Receiver, Clock]:
    return make_receiver(tmp_path)


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_bundle_is_taken_in_stamped_and_signed_for(made: tuple[Receiver, Clock]) -> None:
    receiver, clock = made
    data = packed()
    signed = handed_in(receiver, data)
    found = receipt.verify(signed, receiver.read_public_key())
    assert (found.student, found.assignment, found.course) == ("alice", "hw3", "ml")
    assert (found.number, found.late_s, found.penalty) == (1, 0, 0)
    assert found.received == receipt.utc_text(clock.at)
    assert (found.bundle_sha256, found.bundle_bytes) == (sha256(data), len(data))
    assert receiver.find_bundle("hw3", "alice").read_bytes() == data
    assert receiver.receipts("hw3", "alice") == [signed]
    assert [wrong for _, wrong in receiver.check("hw3")] == [""]
    (line,) = (receiver.directory / "receipts.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=Signed) == signed


def test_nothing_of_it_is_open_to_others(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    before = os.umask(0o022)
    try:
        handed_in(receiver, packed())
    finally:
        os.umask(before)
    assert stat.S_IMODE(receiver.key.stat().st_mode) == 0o600
    tops = [receiver.directory, *(p for p in receiver.directory.iterdir() if p.is_dir())]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in tops)


def test_a_broken_hand_in_goes_on_where_it_was(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    data = packed()
    about = ("hw3", "alice", sha256(data), len(data))
    assert receiver.begin(*about) == 0
    assert receiver.write(*about, 0, data[:2000]) == 2000
    again = Receiver(receiver.directory, receiver.now)
    assert again.begin(*about) == 2000
    with pytest.raises(TransferError, match="start of this bundle"):
        again.write(*about, 2001, data[2001:])
    with pytest.raises(TransferError, match="not all"):
        again.finish(*about)
    again.write(*about, 1000, data[1000:])  # what is sent twice is no harm
    assert again.finish(*about).receipt.bundle_sha256 == sha256(data)


def test_the_same_bundle_again_gives_the_same_receipt(made: tuple[Receiver, Clock]) -> None:
    receiver, clock = made
    first = handed_in(receiver, packed())
    clock.at = DUE_AT + 9 * 86400  # also long after the deadline: it is no new one
    assert handed_in(receiver, packed()) == first
    about = ("hw3", "alice", sha256(packed()), len(packed()))
    assert receiver.finish(*about) == first
    assert len(receiver.receipts("hw3", "alice")) == 1


def test_going_back_to_an_earlier_bundle_is_a_new_submission(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    other = packed({**FILES, "code/train.py": b"print('other')\n"})
    numbers = [handed_in(receiver, data).receipt.number for data in (packed(), other, packed())]
    assert numbers == [1, 2, 3]
    assert receiver.find_bundle("hw3", "alice").read_bytes() == packed()
    assert receiver.find_bundle("hw3", "alice", 2).read_bytes() == other


def test_after_the_deadline_nothing_is_taken_and_what_was_stays(
    made: tuple[Receiver, Clock],
) -> None:
    receiver, clock = made
    first = handed_in(receiver, packed())
    clock.at = DUE_AT + 1
    other = packed({**FILES, "code/train.py": b"print('late')\n"})
    with pytest.raises(PolicyError, match=r"closed on Sat 28 Nov 2026 23:59 UTC\+01:00"):
        handed_in(receiver, other)
    assert receiver.receipts("hw3", "alice") == [first]
    assert bytes_below(receiver.directory / "incoming") == 0


def test_it_counts_when_all_of_it_is_there(made: tuple[Receiver, Clock]) -> None:
    receiver, clock = made
    data = packed()
    about = ("hw3", "alice", sha256(data), len(data))
    clock.at = DUE_AT - 5
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    clock.at = DUE_AT + 3600  # the link broke before the receipt: asked for later
    assert receiver.finish(*about).receipt.late_s == 0
    other = packed({**FILES, "code/train.py": b"print('slow')\n"})
    about = ("hw3", "bob", sha256(other), len(other))
    clock.at = DUE_AT - 5
    receiver.begin(*about)
    receiver.write(*about, 0, other[:-1])
    clock.at = DUE_AT + 1
    receiver.write(*about, len(other) - 1, other[-1:])
    with pytest.raises(PolicyError, match="closed"):
        receiver.finish(*about)


def test_late_ones_are_stamped_with_the_rules(tmp_path: Path) -> None:
    receiver, clock = make_receiver(tmp_path, late="48h", penalty="10%")
    clock.at = DUE_AT + 86400 + 1
    found = handed_in(receiver, packed()).receipt
    assert (found.late_s, found.penalty) == (86401, 20)
    clock.at = DUE_AT + 2 * 86400 + 1
    with pytest.raises(PolicyError, match="closed"):
        handed_in(receiver, packed(student="bob"), "bob")


def test_an_extension_is_one_students_own(made: tuple[Receiver, Clock]) -> None:
    receiver, clock = made
    receiver.extend("hw3", "alice", 3 * 86400)
    clock.at = DUE_AT + 86400
    assert receiver.hello("hw3", "alice").rules.due_at == DUE_AT + 3 * 86400
    assert handed_in(receiver, packed()).receipt.late_s == 0
    with pytest.raises(PolicyError, match="closed"):
        handed_in(receiver, packed(student="bob"), "bob")
    receiver.extend("hw3", "alice", 0)
    assert receiver.extensions("hw3") == {}


def test_ten_gigabytes_are_refused_before_a_byte_travels(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    about = ("hw3", "alice", "a" * 64, 10 * GIB)
    with pytest.raises(PolicyError, match="too large: 10,737,418,240 bytes"):
        receiver.begin(*about)
    # Nor can they be sent by who does not ask.
    with pytest.raises(TransferError, match="not announced"):
        receiver.write(*about, 0, b"x" * 1000)
    with pytest.raises(TransferError):
        receiver.finish(*about)
    assert bytes_below(receiver.directory / "incoming") == 0


def test_no_more_is_kept_than_was_announced(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    about = ("hw3", "alice", "a" * 64, 1000)
    receiver.begin(*about)
    for offset, length in ((0, 1001), (900, 101), (-1, 10)):
        with pytest.raises(TransferError, match="more arrived"):
            receiver.write(*about, offset, bytes(length))
    # Another bundle takes the place of what never became whole.
    receiver.write(*about, 0, bytes(900))
    receiver.begin("hw3", "alice", "b" * 64, 500)
    assert bytes_below(receiver.directory / "incoming") == 0
    with pytest.raises(TransferError, match="not announced"):
        receiver.write(*about, 900, bytes(100))


def test_a_full_disk_is_told_before(
    made: tuple[Receiver, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, _ = made
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200 * 1024**2))
    with pytest.raises(DiskFullError):
        receiver.begin("hw3", "alice", "a" * 64, 1000)


def test_one_student_leaves_room_for_the_others(
    made: tuple[Receiver, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, _ = made
    data = packed()
    handed_in(receiver, data)
    free = 0
    monkeypatch.setattr(receiver_module, "RESERVE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    for left, fits in ((2 * len(data), True), (2 * len(data) - 1, False)):
        free = left
        if fits:
            assert receiver.begin("hw3", "alice", "0" * 64, len(data)) == 0
            continue
        with pytest.raises(DiskFullError, match="no more space for alice"):
            receiver.begin("hw3", "alice", "0" * 64, len(data))
        assert receiver.begin("hw3", "bob", "0" * 64, len(data)) == 0


def test_nobody_hands_in_without_end(
    made: tuple[Receiver, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, _ = made
    one = handed_in(receiver, packed())
    monkeypatch.setattr(Receiver, "receipts", lambda *_: [one] * MOST_SUBMISSIONS)
    with pytest.raises(PolicyError, match="100 times"):
        receiver.begin("hw3", "alice", "a" * 64, 1000)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"student": "bob"}, "it belongs to 'bob', but alice submitted it"),
        ({"student": ""}, "alice submitted it"),
        ({"assignment": "hw2"}, "made for 'hw2'"),
        ({"course": "other"}, "made for"),
    ],
)
def test_a_bundle_made_for_something_else_is_refused(
    made: tuple[Receiver, Clock], other: dict[str, str], said: str
) -> None:
    receiver, _ = made
    with pytest.raises(TransferError) as caught:
        handed_in(receiver, packed(**other))
    assert said in caught.value.why
    assert receiver.students("hw3") == []
    assert bytes_below(receiver.directory / "incoming") == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Tar(FILES).add("../../.ssh/authorized_keys", b"ssh-ed25519 AAAA").end().getvalue(),
         "does not match manifest.json"),
        (Tar({"code/l": b""}).add("code/l", type=b"2", linkname="/etc/passwd").end().getvalue(),
         "is a link"),
        (packed({**FILES, "logs/a.zip": bomb()}), "logs/a.zip: it would unpack to 3.0 GiB"),
        (packed({**FILES, "model/m.pt": b"\x80\x04cposix\nsystem\n\x8c\x02id\x85R."}),
         "model/m.pt: loading it would run 'posix.system'"),
        (b"hello", "is truncated"),
    ],
)  # fmt: skip
def test_hostile_bundles_are_refused_and_not_kept(
    made: tuple[Receiver, Clock], data: bytes, said: str
) -> None:
    receiver, _ = made
    with pytest.raises(TransferError) as caught:
        handed_in(receiver, data)
    assert said in caught.value.why
    assert receiver.students("hw3") == []
    assert bytes_below(receiver.directory / "incoming") == 0


def test_bytes_that_are_not_those_that_were_announced(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    data = packed()
    about = ("hw3", "alice", sha256(data), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data[:-1] + b"\1")
    with pytest.raises(TransferError, match="intact"):
        receiver.finish(*about)
    assert receiver.begin(*about) == 0


def test_what_is_changed_after_it_was_signed_for_is_found(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    for student in ("alice", "bob", "carol"):
        handed_in(receiver, packed(student=student), student)
    path = receiver.find_bundle("hw3", "bob")
    path.chmod(0o600)
    path.write_bytes(packed(student="bob", run="r2"))
    shutil.copy(path.with_name("receipt.json"), receiver.find_bundle("hw3", "carol").parent)
    wrong = {
        one.student if isinstance(one, Receipt) else one: said
        for one, said in list(receiver.check("hw3"))[:2]
    }
    assert wrong == {"alice": "", "bob": "the bundle was changed after it was signed for"}
    assert all(said for _, said in list(receiver.check("hw3"))[2:])


def test_names_of_students_and_assignments_are_names(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    for name in ("../alice", "a/b", "", ".", "Alice", "a b", "-rf"):
        with pytest.raises(UsageError):
            receiver.begin("hw3", name, "a" * 64, 10)
        with pytest.raises(UsageError):
            receiver.load_rules(name)
    with pytest.raises(NotFoundError, match="no assignment hw9"):
        receiver.hello("hw9", "alice")
    for digest in ("a" * 63, "A" * 64, "../" + "a" * 61):
        with pytest.raises(UsageError):
            receiver.begin("hw3", "alice", digest, 10)


FIELDS: dict[str, Any] = {
    "student": "bob",
    "assignment": "hw4",
    "course": "x",
    "number": 2,
    "received": "2026-11-01T00:00:00Z",
    "due": "",
    "late_s": -1,
    "penalty": 1,
    "run": "r9",
    "bundle_bytes": 1,
    "bundle_sha256": "0" * 64,
    "manifest_sha256": "0" * 64,
}


def test_every_field_of_a_receipt_is_tried() -> None:
    assert set(FIELDS) | {"kind", "version"} == set(Receipt.__struct_fields__)


@pytest.mark.parametrize("field", FIELDS)
def test_an_edited_receipt_is_found_out(made: tuple[Receiver, Clock], field: str) -> None:
    receiver, _ = made
    body = json.loads(receipt.encode(handed_in(receiver, packed())))
    assert body["receipt"][field] != FIELDS[field]
    body["receipt"][field] = FIELDS[field]
    edited = receipt.decode(json.dumps(body).encode())
    with pytest.raises(PolicyError, match="not valid") as caught:
        receipt.verify(edited, receiver.read_public_key())
    assert "changed after it was signed" in caught.value.why


def test_a_receipt_that_somebody_else_signed_is_none(
    made: tuple[Receiver, Clock], tmp_path: Path
) -> None:
    receiver, _ = made
    signed = handed_in(receiver, packed())
    other = tmp_path / "other-key"
    receipt.make_signing_key(other)
    forged = receipt.sign(msgspec.structs.replace(signed.receipt, late_s=0), other)
    with pytest.raises(PolicyError) as caught:
        receipt.verify(forged, receiver.read_public_key())
    assert "not signed by the key" in caught.value.why
    dressed = msgspec.structs.replace(forged, key=receiver.read_public_key())
    with pytest.raises(PolicyError):
        receipt.verify(dressed, receiver.read_public_key())
    for signature in ("", "AAAA", "not base64!", signed.signature[:-4] + "AAAA"):
        with pytest.raises(PolicyError):
            receipt.verify(
                msgspec.structs.replace(signed, signature=signature), receiver.read_public_key()
            )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"receipt": {}}',
        b" " * 100_000,
    ],
)
def test_what_is_no_receipt_says_so(data: bytes) -> None:
    with pytest.raises(PolicyError, match="not valid"):
        receipt.decode(data)


def test_a_receipt_with_more_in_it_than_was_signed_is_none(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    body = json.loads(receipt.encode(handed_in(receiver, packed())))
    body["receipt"]["grade"] = 100
    with pytest.raises(PolicyError):
        receipt.decode(json.dumps(body).encode())


def test_the_signing_key_stays_and_a_missing_one_says_what_makes_it(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "drop")
    assert receiver.init() == receiver.init() == receiver.read_public_key()
    receiver.key.unlink()
    with pytest.raises(NotFoundError) as caught:
        receiver.read_public_key()
    assert caught.value.hint == "labctl receive init DIR"


def asked(receiver: Receiver, *requests: Any, student: str = "alice") -> list[dict[str, Any]]:
    """What one connection answers; a request is an object, or bytes as they are."""
    stream = b"".join(
        one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in requests
    )
    out = io.BytesIO()
    service.serve(receiver, student, io.BytesIO(stream), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_one_connection_does_all_of_it(made: tuple[Receiver, Clock]) -> None:
    receiver, clock = made
    data = packed()
    about = {"assignment": "hw3", "sha256": sha256(data), "size": len(data)}
    hello, begin, part, finish, receipts = asked(
        receiver,
        {"do": "hello", "assignment": "hw3"},
        {"do": "begin", **about},
        {"do": "part", **about, "offset": 0, "length": len(data)},
        data,
        {"do": "finish", **about, "student": "alice"},
        {"do": "receipts", "assignment": "hw3"},
    )
    assert hello["hello"]["student"] == "alice"
    assert (hello["hello"]["now"], hello["hello"]["number"]) == (clock.at, 0)
    assert (begin["offset"], part["offset"]) == (0, len(data))
    signed = msgspec.convert(finish["signed"], Signed)
    assert receipt.verify(signed, receiver.read_public_key()).number == 1
    assert receipts["receipts"] == [finish["signed"]]


def test_nobody_speaks_for_another_student(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    handed_in(receiver, packed(student="bob"), "bob")
    (said,) = asked(receiver, {"do": "receipts", "assignment": "hw3", "student": "bob"})
    assert said["error"]["kind"] == "PolicyError"
    assert "belongs to alice, not to 'bob'" in said["error"]["what"]
    assert asked(receiver, {"do": "receipts", "assignment": "hw3"}) == [{"receipts": []}]


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "get", "assignment": "hw3"},
        {"do": "list", "assignment": "hw3"},
        {"do": "remove", "assignment": "hw3"},
        {"do": "hello"},
        {"do": "hello", "assignment": ["hw3"]},
        {"do": "hello", "assignment": "hw3", "path": "/etc"},
        {"do": "hello", "assignment": "../hw3"},
        {"do": "begin", "assignment": "hw3", "sha256": "a" * 64, "size": "10"},
        {"do": "begin", "assignment": "hw3", "sha256": "a" * 64, "size": -1},
        {"do": "begin", "assignment": "hw3", "sha256": "a" * 64, "size": True},
        {"do": "begin", "assignment": "hw3", "sha256": "../../x", "size": 10},
        {"do": "part", "assignment": "hw3", "sha256": "a" * 64, "size": 9, "offset": 0,
         "length": 10**10},
        {"do": ["hello"]},
        ["hello"],
        b"GET / HTTP/1.1\r\n",
        b"{" * 5000 + b"\n",
        b"\xff\xfe\n",
    ],
)  # fmt: skip
def test_whatever_else_is_asked_is_refused(made: tuple[Receiver, Clock], request_: Any) -> None:
    receiver, _ = made
    before = sorted(receiver.directory.rglob("*"))
    said = asked(receiver, request_)
    assert said
    assert all(one["error"]["kind"] in ("UsageError", "NotFoundError") for one in said)
    assert sorted(receiver.directory.rglob("*")) == before


def test_a_link_that_dies_in_a_part_leaves_the_parts_before(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made
    data = packed()
    about = {"assignment": "hw3", "sha256": sha256(data), "size": len(data)}
    first = {"do": "part", **about, "offset": 0, "length": 1000}
    then = {"do": "part", **about, "offset": 1000, "length": 1000}
    said = asked(receiver, {"do": "begin", **about}, first, data[:1000], then, data[1000:1500])
    assert [one.get("offset") for one in said] == [0, 1000]
    assert asked(receiver, {"do": "begin", **about}) == [{"offset": 1000}]


@pytest.mark.parametrize(
    "original",
    [
        "sh",
        "cat /etc/passwd",
        "labctl-submit; id",
        "labctl-submit && id",
        "labctl-submit $(id)",
        "labctl-submit\nid",
        "`id`",
        "labctl receive serve /drop bob",
        "/usr/lib/openssh/sftp-server",
        "scp -t .",
        "rsync --server . .",
        " labctl-submit",
    ],
)
def test_a_forced_command_takes_no_orders(
    made: tuple[Receiver, Clock], original: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError):
        service.check_request(original)


def test_the_program_itself_refuses_them(made: tuple[Receiver, Clock]) -> None:
    receiver, _ = made

    def served(original: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "labctl", "receive", "serve", *words],
            env={"PATH": os.environ["PATH"], "SSH_ORIGINAL_COMMAND": original},
            input=b'{"do":"hello","assignment":"hw3"}\n',
            capture_output=True,
            check=False,
        )

    place = str(receiver.directory)
    good = served("labctl-submit", place, "alice")
    assert json.loads(good.stdout)["hello"]["student"] == "alice"
    bad = served("labctl-submit; touch /tmp/x", place, "alice")
    assert (bad.returncode, bad.stdout) == (3, b"")
    assert b"cannot be run here" in bad.stderr
    assert served("labctl-submit", place, "../alice").returncode == 2


class FullError(BusyError):
    """An error that is defined where it is raised."""


def test_an_error_is_named_as_the_one_that_a_student_knows() -> None:
    sink = io.BytesIO()
    service.refuse(sink, FullError("full", hint="wait"))
    sent = json.loads(sink.getvalue())["error"]
    assert sent == {**sent, "kind": "BusyError", "what": "full", "why": "", "hint": "wait"}


class StrangeReceiver(ReceiverHost):
    """A connection to a receiver that replies whatever it likes."""

    def __init__(self, reply: object) -> None:
        rules = SimpleNamespace(name="hw3", hand_in="ssh://labctl@receiver.example")
        super().__init__(SimpleNamespace(), rules)  # type: ignore[arg-type]
        line = json.dumps(reply).encode() + b"\n"
        self._channel = SimpleNamespace(exchange=lambda request: line)  # type: ignore[assignment]


GREETING = {
    "student": "ada", "now": 5, "rules": {"due_at": None, "closes_at": None, "accepted": True},
    "due": "", "late": 0, "penalty": 0, "max_bytes": 1, "receiver": "ed25519:00", "number": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [
        {}, {"error": "no"}, {"hello": 5}, {"hello": {**GREETING, "now": "5"}},
        {"hello": {**GREETING, "rules": None}}, {"receipts": 5}, {"receipts": [{}]},
    ],
)  # fmt: skip
def test_a_reply_of_another_shape_is_the_receivers_error(reply: object) -> None:
    host = StrangeReceiver(reply)
    for request in (host.hello, host.receipts):
        with pytest.raises(LabError, match="does not answer like a receiver"):
            request()


@pytest.mark.parametrize(
    "reply", [{}, {"offset": "1"}, {"signed": {}}, {"offset": None}, {"offset": -1}]
)
def test_an_upload_without_an_offset_or_a_receipt_ends(reply: object) -> None:
    with pytest.raises(LabError, match="does not answer like a receiver"):
        StrangeReceiver(reply).send(io.BytesIO(b"x"), "0" * 64, 1, lambda count: None)


class BrokenReceiver(ReceiverHost):
    """A connection that breaks: before each request that `breaks` names by its number."""

    def __init__(self, breaks: set[int]) -> None:
        rules = SimpleNamespace(name="hw3", hand_in="ssh://labctl@receiver.example")
        super().__init__(SimpleNamespace(), rules)  # type: ignore[arg-type]
        self.breaks, self.requests, self.arrived = breaks, 0, b""

    def send_request(self, verb: Any, request: Any, body: bytes = b"") -> Any:
        self.requests += 1
        self.arrived += body
        if self.requests in self.breaks:
            raise LinkLostError("the connection to the receiver ended")
        if verb is FINISH_UPLOAD:
            return FinishUploadReply({"receipt": {}, "key": "", "signature": ""})
        return BeginUploadReply(len(self.arrived))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_host, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(receiver_host, "PART_BYTES", 10)


@pytest.mark.usefixtures("quick")
def test_an_upload_continues_after_broken_connections_and_sends_nothing_twice() -> None:
    # Four failures in a row, twice, with bytes that arrived between them.
    host = BrokenReceiver({*range(1, 5), *range(7, 11)})
    data = bytes(range(95))
    seen: list[int] = []
    with pytest.raises(LabError, match="does not answer like a receiver"):  # of this receipt
        host.send(io.BytesIO(data), "0" * 64, len(data), seen.append)
    assert host.arrived == data
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 95)


@pytest.mark.usefixtures("quick")
def test_an_upload_without_progress_ends() -> None:
    host = BrokenReceiver(set(range(3, 1000)))
    with pytest.raises(LinkLostError):
        host.send(io.BytesIO(bytes(95)), "0" * 64, 95, lambda count: None)
    # It began and sent a part, then broke off five times in a row.
    assert host.requests == 2 + receiver_host.TRIES
