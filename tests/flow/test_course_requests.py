"""Requests to the keeper: what students may ask for, who holds a seat, and when its server goes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from course_keeper_context import KEY, OFFER, Pretended, asked, course_folder, create

from labctl.courses.requests import RequestHandler
from labctl.courses.seat_ends import ENDED_BY_STAFF, FOUND_GONE
from labctl.errors import CapacityError, PolicyError, ProviderError

OTHER = "bb" * 8


@pytest.fixture
def work(tmp_path: Path) -> Pretended:
    return Pretended(course_folder(tmp_path / "ml"))


@pytest.fixture
def request_handler(work: Pretended) -> RequestHandler:
    return RequestHandler(work.folder, work)


def found(request_handler: RequestHandler, student: str, made: dict[str, Any]) -> Any:
    assert request_handler.wait(120)
    return asked(request_handler, student, "find", id=made["server"]["id"], wait_s=0)["server"]


def kind(reply: dict[str, Any]) -> str:
    return str(reply.get("error", {}).get("kind", ""))


def test_a_server_is_made_once_and_told_as_the_students_own(
    request_handler: RequestHandler, work: Pretended
) -> None:
    made = create(request_handler, "alice")
    assert made["server"]["state"] in ("starting", "running")
    assert create(request_handler, "alice")["server"]["id"] == made["server"]["id"]
    server = found(request_handler, "alice", made)
    assert (server["state"], server["lab"], server["lab_id"]) == (
        "running",
        "lab-alice",
        "0f1e2d3c4b5a",
    )
    assert server["provider"] == server["offer"]["provider"] == "course"
    # Nothing that would be the keeper's own goes along, and nothing that a student would run.
    assert (server["endpoint"]["identity"], server["endpoint"]["proxy_command"]) == ("", "")
    assert work.calls == ["make"]


def test_labs_share_the_seat_and_the_last_one_ends_it(
    request_handler: RequestHandler, work: Pretended
) -> None:
    one = create(request_handler, "alice")
    two = create(request_handler, "alice", OTHER, lab="second", lab_id="a" * 12)
    first, second = found(request_handler, "alice", one), found(request_handler, "alice", two)
    assert first["endpoint"] == second["endpoint"]
    assert len(asked(request_handler, "alice", "servers")["servers"]) == 2
    asked(request_handler, "alice", "terminate", id=first["id"])
    assert found(request_handler, "alice", one) is None
    assert found(request_handler, "alice", two)["state"] == "running"
    assert "end" not in work.calls
    asked(request_handler, "alice", "terminate", id=second["id"])
    assert found(request_handler, "alice", two) is None
    assert work.calls[-1] == "end"
    assert asked(request_handler, "alice", "terminate", id=second["id"]) == {"version": 1}


def test_a_team_shares_a_server_but_not_each_others_claims(
    request_handler: RequestHandler, work: Pretended
) -> None:
    bob, carol = create(request_handler, "bob"), create(request_handler, "carol", OTHER)
    assert (
        found(request_handler, "bob", bob)["endpoint"]
        == found(request_handler, "carol", carol)["endpoint"]
    )
    assert work.keys[-1] == ("bob", "carol")
    # Neither sees nor ends what the other holds, nor alice what is the team's.
    assert found(request_handler, "carol", bob) is None
    asked(request_handler, "carol", "terminate", id=bob["server"]["id"])
    asked(request_handler, "alice", "terminate", id=bob["server"]["id"])
    assert found(request_handler, "bob", bob)["state"] == "running"
    assert asked(request_handler, "alice", "servers")["servers"] == []
    assert asked(request_handler, "alice", "servers")["seat_server"] is None
    assert asked(request_handler, "bob", "servers")["seat_server"]["lab"] == "owls"
    assert kind(create(request_handler, "carol")) == "PolicyError"  # bob's attempt
    asked(request_handler, "bob", "terminate", id=bob["server"]["id"])
    assert found(request_handler, "carol", carol)["state"] == "running"
    assert work.keys[-1] == ("carol",)


def test_what_kept_it_from_being_made_is_told_once(
    request_handler: RequestHandler, work: Pretended
) -> None:
    work.error = CapacityError("no machine left", why="zone a")
    made = create(request_handler, "alice")
    assert request_handler.wait(120)
    reply = asked(request_handler, "alice", "find", id=made["server"]["id"], wait_s=5)
    assert (kind(reply), reply["error"]["why"]) == ("CapacityError", "zone a")
    assert found(request_handler, "alice", made) is None
    work.error = None
    assert found(request_handler, "alice", create(request_handler, "alice"))["state"] == "running"


def test_what_nobody_expected_is_logged_told_and_stops_nothing(work: Pretended) -> None:
    """A file that staff took away beneath it, a full disk, a bug."""
    log: list[tuple[str, str]] = []
    request_handler = RequestHandler(
        work.folder, work, notify=lambda name, text: log.append((name, text))
    )
    work.error = FileNotFoundError(2, "No such file or directory", "/keeper/ssh/i-1/prepare.log")
    made = create(request_handler, "alice")
    assert request_handler.wait(120)
    reply = asked(request_handler, "alice", "find", id=made["server"]["id"], wait_s=5)
    assert kind(reply) == "ProviderError"
    assert "FileNotFoundError" in reply["error"]["why"]
    assert "/keeper" not in json.dumps(reply), "the student reads no path of the keeper's"
    (traceback,) = [text for name, text in log if name == "alice" and "Traceback" in text]
    assert "/keeper/ssh/i-1/prepare.log" in traceback
    work.error, work.refusal = None, OSError(28, "No space left on device")
    assert kind(create(request_handler, "alice", OTHER)) == "LabError"
    work.refusal = None
    assert (
        found(request_handler, "alice", create(request_handler, "alice", OTHER))["state"]
        == "running"
    )
    # The end, too: the seat stays, and the next sweep tries it again.
    work.error = OSError("gone")
    asked(
        request_handler, "alice", "terminate", id=f"course-{work.folder.pseudonym('alice')}-{OTHER}"
    )
    assert request_handler.wait(120)
    assert work.server is not None
    work.error = None
    request_handler.get_seat_server(work.folder.find_seat("alice")).resume()
    assert request_handler.wait(120)
    assert work.server is None


def test_a_disk_that_is_full_leaves_no_seat_busy(
    work: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_handler = RequestHandler(work.folder, work)
    work.gate.clear()
    made = create(request_handler, "alice")
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("labctl.courses.claims.write_private", full)
        work.gate.set()
        assert request_handler.wait(120), "whoever waits for this seat would wait for ever"
    request_handler.get_seat_server(work.folder.find_seat("alice")).resume()
    assert found(request_handler, "alice", made)["state"] == "running"


def test_a_log_that_cannot_be_written_leaves_no_seat_busy(
    work: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    request_handler = RequestHandler(work.folder, work, notify=full)
    work.error = OSError("gone")
    made = create(request_handler, "alice")
    assert request_handler.wait(60)
    # The seat is idle before its thread fails once more, at the log.
    for thread in threading.enumerate():
        if thread.name.startswith("seat"):
            thread.join(60)
    work.error = None
    request_handler.get_seat_server(work.folder.find_seat("alice")).resume()
    assert found(request_handler, "alice", made)["state"] == "running"


def test_an_answer_waits_for_the_server_and_not_for_ever(
    request_handler: RequestHandler, work: Pretended
) -> None:
    work.gate.clear()
    made = create(request_handler, "alice")
    about = {"id": made["server"]["id"], "wait_s": 0}
    assert asked(request_handler, "alice", "find", **about)["server"]["state"] == "starting"
    said: list[Any] = []
    waiting = threading.Thread(
        target=lambda: said.append(
            asked(request_handler, "alice", "find", **{**about, "wait_s": 9})
        )
    )
    waiting.start()
    work.gate.set()
    waiting.join(120)
    assert said[0]["server"]["state"] == "running"


def test_let_go_while_it_is_being_made_it_ends(
    request_handler: RequestHandler, work: Pretended
) -> None:
    work.gate.clear()
    made = create(request_handler, "alice")
    assert work.making.wait(120)
    asked(request_handler, "alice", "terminate", id=made["server"]["id"])
    assert (
        asked(request_handler, "alice", "find", id=made["server"]["id"], wait_s=0)["server"][
            "state"
        ]
        == "ending"
    )
    work.gate.set()
    assert found(request_handler, "alice", made) is None
    assert work.calls == ["make", "end"]
    assert work.server is None


def test_what_could_not_be_ended_stays_ending_and_is_tried_again(
    request_handler: RequestHandler, work: Pretended
) -> None:
    made = create(request_handler, "alice")
    found(request_handler, "alice", made)
    work.error = ProviderError("the provider is silent")
    asked(request_handler, "alice", "terminate", id=made["server"]["id"])
    assert found(request_handler, "alice", made)["state"] == "ending"
    assert kind(create(request_handler, "alice", OTHER)) == "BusyError"
    request_handler.wait(10)
    restarted = RequestHandler(work.folder, work)
    restarted.list_seat_servers()  # as the keeper does first
    for keeper in (request_handler, restarted):
        failure = keeper.find_end_failure("alice")
        assert failure is not None
        assert failure.what == "the provider is silent"
    work.error = None
    for seat in restarted.list_seat_servers():
        seat.resume()
    assert found(restarted, "alice", made) is None
    assert restarted.find_end_failure("alice") is None
    assert RequestHandler(work.folder, work).find_end_failure("alice") is None


def test_a_new_keeper_goes_on_where_the_old_one_was(work: Pretended) -> None:
    begun: list[Callable[[], None]] = []
    killed = RequestHandler(work.folder, work)
    killed._begin = begun.append
    made = create(killed, "alice")
    assert len(begun) == 1  # and nothing of it was done
    request_handler = RequestHandler(work.folder, work)
    assert (
        asked(request_handler, "alice", "find", id=made["server"]["id"], wait_s=0)["server"]
        is not None
    )
    for seat in request_handler.list_seat_servers():
        seat.resume()
    assert found(request_handler, "alice", made)["state"] == "running"
    again = RequestHandler(work.folder, work)
    assert found(again, "alice", made)["state"] == "running"
    assert work.calls == ["make"]


def test_a_server_that_went_by_itself_is_nobodys(
    request_handler: RequestHandler, work: Pretended
) -> None:
    made = create(request_handler, "alice")
    found(request_handler, "alice", made)
    server = request_handler.get_seat_server(work.folder.find_seat("alice")).server
    assert server is not None
    request_handler.get_seat_server(work.folder.find_seat("alice")).update_server(server, None)
    assert found(request_handler, "alice", made) is None
    assert (
        found(request_handler, "alice", create(request_handler, "alice", OTHER))["state"]
        == "running"
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"why": "its budget is used up", "saved": "home"}, "its budget is used up"),
        ({"why": "ended unseen: its hours count until that was noticed"}, FOUND_GONE),
        ({"why": "whatever it says", "unseen": True}, FOUND_GONE),
        ({"why": "", "by": "prof"}, ENDED_BY_STAFF),
        ({"why": "ended unseen: its hours", "reason": "its time was over"}, "its time was over"),
    ],
)
def test_a_student_may_ask_why_the_server_ended(
    request_handler: RequestHandler, work: Pretended, line: dict[str, Any], why: str
) -> None:
    made = create(request_handler, "alice")
    found(request_handler, "alice", made)
    work.folder.ledger.append("up", seat="alice", server_id="i-1")
    assert asked(request_handler, "alice", "ended", id=made["server"]["id"]) == {
        "version": 1,
        "ended": None,
    }
    work.folder.ledger.append("down", seat="alice", server_id="i-1", **line)
    said = asked(request_handler, "alice", "ended", id=made["server"]["id"])["ended"]
    assert (said["why"], said["saved"]) == (why, line.get("saved", ""))
    assert asked(request_handler, "bob", "ended", id=made["server"]["id"])["ended"] is None


def test_a_used_up_budget_is_refused_and_written_down_once(
    request_handler: RequestHandler, work: Pretended
) -> None:
    work.refusal = PolicyError("your budget is used up")
    for _ in range(5):
        assert kind(create(request_handler, "alice")) == "PolicyError"
    assert work.calls == []
    (line,) = work.folder.ledger.list_entries(kind="refused")
    assert (line.student, line.why) == ("alice", "your budget is used up")


def test_who_has_left_or_never_was_gets_nothing(
    request_handler: RequestHandler, work: Pretended
) -> None:
    assert kind(create(request_handler, "dave")) == "PolicyError"
    assert kind(create(request_handler, "nobody")) == "NotFoundError"
    assert work.calls == []


def test_offers_are_the_courses_and_only_those_that_fit(request_handler: RequestHandler) -> None:
    def offers(**need: object) -> list[Any]:
        said: Any = asked(request_handler, "alice", "offers", need=need)["offers"]
        return list(said)

    assert [(one["type"], one["provider"]) for one in offers()] == [("small", "course")]
    assert offers(max_price_usd_per_hour=0.5) == []
    assert offers(gpu={"kind": "any", "count": 1}) == []


def test_a_dearer_offer_makes_the_courses_own_server(
    request_handler: RequestHandler, work: Pretended
) -> None:
    """What a student sends is no price, no type and no need of the server that is made."""
    dear = {"provider": "aws", "type": "p5.48xlarge", "price_usd_per_hour": 98.0}
    made = create(request_handler, "alice", offer=dear)
    assert made["server"]["offer"]["type"] == OFFER.type
    assert found(request_handler, "alice", made)["offer"]["price_usd_per_hour"] == 1.0


def test_extend_is_asked_for_as_the_student(
    request_handler: RequestHandler, work: Pretended
) -> None:
    made = create(request_handler, "alice")
    found(request_handler, "alice", made)
    assert asked(request_handler, "alice", "extend", id=made["server"]["id"], seconds=3600)[
        "server"
    ]
    assert work.calls[-1] == "extend 3600 alice"
    assert (
        kind(asked(request_handler, "alice", "extend", id=made["server"]["id"], seconds=-5))
        == "UsageError"
    )
    assert kind(asked(request_handler, "carol", "extend", id=made["server"]["id"], seconds=60)) == (
        "NotFoundError"
    )


GOOD = {
    "do": "create",
    "lab": "lab",
    "lab_id": "0f1e2d3c4b5a",
    "token": "aa" * 8,
    "public_key": KEY,
    "offer": {"provider": "x", "type": "y"},
}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'"create"',
        b"{" * 5000,
        b'{"do": ["create"]}',
        json.dumps({"do": "exec", "command": "id"}).encode(),
        json.dumps({**GOOD, "student": "bob"}).encode(),
        json.dumps({**GOOD, "budget_usd": 1000}).encode(),
        json.dumps({key: value for key, value in GOOD.items() if key != "token"}).encode(),
        json.dumps({**GOOD, "lab": "a; rm -rf ~"}).encode(),
        json.dumps({**GOOD, "lab": "../../x"}).encode(),
        json.dumps({**GOOD, "lab": "-oProxyCommand=id"}).encode(),
        json.dumps({**GOOD, "lab_id": "../x"}).encode(),
        json.dumps({**GOOD, "token": "a" * 500}).encode(),
        json.dumps({**GOOD, "public_key": f'command="id" {KEY}'}).encode(),
        json.dumps({**GOOD, "public_key": f"{KEY} x\n{KEY} y"}).encode(),
        json.dumps({**GOOD, "offer": {"type": 5}}).encode(),
        json.dumps({**GOOD, "offer": []}).encode(),
        b'{"do": "offers", "need": {"spot": "often"}}',
        b'{"do": "offers", "need": {"gpu": 5}}',
        b'{"do": "offers", "need": {"gpu": {"count": "1"}}}',
    ],
)
def test_a_hostile_request_makes_nothing(
    line: bytes, request_handler: RequestHandler, work: Pretended
) -> None:
    assert kind(json.loads(request_handler.answer("alice", line))) in ("UsageError", "PolicyError")
    assert request_handler.wait(120)
    assert work.calls == []
    assert request_handler.list_seat_servers() == []


@pytest.mark.parametrize(
    "server_id", ["", "../x", "course-00000000-aaaaaaaa", "i-1", "course-x-" + "a" * 9000]
)
def test_ids_of_nothing_are_nothing(server_id: str, request_handler: RequestHandler) -> None:
    assert asked(request_handler, "alice", "find", id=server_id, wait_s=0)["server"] is None
    assert asked(request_handler, "alice", "terminate", id=server_id) == {"version": 1}
