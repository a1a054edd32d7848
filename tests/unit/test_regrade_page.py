"""Regrade requests in the browser: staff sees them, and answers alone or with a changed mark."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dashboard_bed import NAMES, Bed, Visitor, wait_until
from marking_bed import EVIL, FILES, hand_in_files, make_marking
from test_marking_page import enter, marks_of, page_of, read_fields

from labctl.courses.marking import give_mark
from labctl.courses.records.regrade_requests import RegradeRequest, draft_request_line
from labctl.courses.regrades import answer_regrade, list_regrades
from labctl.web import factory


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(factory, "EVERY_S", 0.1)
    made = make_marking(tmp_path)
    for student in ("lovelace", "turing", "hoare"):
        hand_in_files(made, student, FILES)
    for item, points in (("code", "15"), ("presentation", "25")):
        give_mark(made.folder, "hw3", "lovelace", item, points, by="ben", note="as agreed")
    stop = threading.Event()
    made.start(stop)
    yield made
    stop.set()
    made.state.close()


@pytest.fixture
def ann(bed: Bed) -> Visitor:
    return enter(bed, "ann")


def ask(bed: Bed, student: str = "lovelace", text: str = "why 15?", number: int = 1) -> None:
    bed.folder.ledger.append_all([draft_request_line("hw3", student, number, text)])


def read_answer_fields(page: str) -> dict[str, str]:
    """The fields that the answer's form sends, and with it those of the rubric."""
    form = page.partition('<form class="answer"')[2].partition("</form>")[0]
    names = ("csrf", "bundle", "file", "student", "number")
    fields = {name: re.findall(rf'name="{name}" value="([^"]*)"', form)[0] for name in names}
    return {**read_fields(page), **fields}


def answer(
    bed: Bed, visitor: Visitor, page: str, text: str, decision: str, **changes: str
) -> tuple[int, str]:
    fields = read_answer_fields(page)
    field = f"answer-{fields['student']}-{fields['number']}"
    typed = {**fields, field: text, "decision": decision, **changes}
    status, _, body = visitor.form(f"{page_of(bed)}/regrades", **typed)
    return status, body


def find_request(bed: Bed, student: str = "lovelace") -> RegradeRequest:
    return list_regrades(bed.folder, "hw3", student)[-1]


def test_open_requests_are_listed_with_their_count(bed: Bed, ann: Visitor) -> None:
    assert "No regrade request is open." in ann.ask("/regrades")[2]
    assert 'id="open-regrades"' not in ann.ask("/")[2]
    ask(bed, "turing", f"turing: {EVIL}")
    ask(bed)
    wait_until(lambda: "why 15?" in ann.ask("/regrades")[2])
    page = ann.ask("/regrades")[2]
    assert page.index("&lt;script&gt;alert(1)") < page.index("why 15?"), "the oldest first"
    assert EVIL not in page
    assert ">Regrades <small>2</small></a>" in page
    assert '<a id="open-regrades" href="/regrades">2</a>' in ann.ask("/")[2]
    (address,) = re.findall(rf'href="([^"#]*)#regrades"><bdi>{NAMES[0]}<', page)
    assert "why 15?" in ann.ask(address)[2]
    ann.post("/names", hidden="yes", back="/")
    hidden = ann.ask("/regrades")[2]
    assert not [word for word in ("turing", "lovelace", NAMES[0], "why 15?") if word in hidden]
    answer_regrade(bed.folder, "hw3", "turing", "no", by="ben")
    wait_until(lambda: ">Regrades <small>1</small></a>" in ann.ask("/regrades")[2])


def test_a_request_is_shown_as_text_beside_the_rubric(bed: Bed, ann: Visitor) -> None:
    ask(bed, text=f"why 3? {EVIL}")
    page = ann.ask(page_of(bed))[2]
    assert "why 3? &lt;script&gt;" in page
    assert EVIL not in page
    assert "why 3?" not in ann.ask(page_of(bed, 1))[2]
    ann.post("/names", hidden="yes", back="/")
    page = ann.ask(page_of(bed))[2]
    assert "why 3?" not in page
    assert '<form class="answer"' not in page


def test_accepting_saves_the_changed_mark_with_the_answer(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    page = ann.ask(page_of(bed))[2]
    status, body = answer(bed, ann, page, "You are right.", "accept", **{"points-code": "18"})
    assert (status, "Accepted. Saved: code." in body) == (200, True)
    assert "why 15?" not in body
    request = find_request(bed)
    assert (request.accepted, request.answer, request.answered_by) == (
        True,
        "You are right.",
        "ann",
    )
    assert marks_of(bed, "lovelace")["code"] == (18, "as agreed", "ann")
    assert marks_of(bed, "lovelace")["presentation"] == (25, "as agreed", "ben")
    kinds = [entry.kind for entry in bed.folder.ledger.list_entries()]
    assert kinds[-2:] == ["mark", "answered"]


def test_declining_keeps_what_was_typed_in_the_rubric(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    page = ann.ask(page_of(bed))[2]
    status, body = answer(bed, ann, page, "As the rubric says.", "decline", **{"points-code": "18"})
    assert (status, "Declined." in body) == (200, True)
    request = find_request(bed)
    assert (request.accepted, request.answer) == (False, "As the rubric says.")
    assert marks_of(bed, "lovelace")["code"][0] == 15
    assert read_fields(body)["points-code"] == "18"


def test_an_assignment_without_a_rubric_is_answered_too(bed: Bed, ann: Visitor) -> None:
    bed.folder.ledger.append_all([draft_request_line("hw4", "turing", 1, "why?")])
    address = f"/assignments/hw4/marking/{bed.seat(1).pseudonym}"
    page = ann.ask(address)[2]
    assert "and save the rubric" not in page
    fields = read_answer_fields(page)
    typed = {**fields, f"answer-{fields['student']}-1": "Yes.", "decision": "accept"}
    assert ann.form(f"{address}/regrades", **typed)[0] == 200
    (request,) = list_regrades(bed.folder, "hw4", "turing")
    assert (request.accepted, request.answer) == (True, "Yes.")


def test_saving_the_rubric_keeps_an_answer_that_was_typed(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    fields = read_answer_fields(ann.ask(page_of(bed))[2])
    typed = {**fields, f"answer-{fields['student']}-1": "half of it", "points-code": "18"}
    body = ann.form(f"{page_of(bed)}/marks", **typed)[2]
    assert "Saved: code." in body
    assert ">half of it</textarea>" in body
    assert find_request(bed).is_open


@pytest.mark.parametrize(
    ("text", "decision", "changes", "says"),
    [
        ("", "accept", {}, "The answer has no text."),
        ("good", "", {}, "Choose Accept or Decline."),
        ("good", "maybe", {}, "Choose Accept or Decline."),
        ("good", "accept", {"points-code": "99"}, "Nothing was saved: see the rubric."),
        ("good", "accept", {"bundle": "0" * 64}, "has arrived meanwhile"),
        ("good", "accept", {"student": "0" * 8}, "does not have this seat"),
    ],
)
def test_a_refused_answer_saves_nothing_and_keeps_the_text(
    bed: Bed, ann: Visitor, text: str, decision: str, changes: dict[str, str], says: str
) -> None:
    ask(bed)
    page = ann.ask(page_of(bed))[2]
    changes = {"points-code": "18", **changes}
    status, body = answer(bed, ann, page, text, decision, **changes)
    assert (status, says in body) == (409, True)
    assert find_request(bed).is_open
    assert marks_of(bed, "lovelace")["code"][0] == 15
    assert f">{text}</textarea>" in body
    assert read_fields(body)["points-code"] == changes["points-code"]


def test_nobody_answers_without_a_name_or_for_another_seat(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    fields = read_answer_fields(ann.ask(page_of(bed))[2])
    typed = {**fields, f"answer-{fields['student']}-1": "yes", "decision": "accept"}
    assert ann.form(f"{page_of(bed, 1)}/regrades", **typed)[0] == 409
    nobody = enter(bed, "")
    assert '<form class="answer"' not in nobody.ask(page_of(bed))[2]
    del typed["csrf"]
    assert nobody.post(f"{page_of(bed)}/regrades", **typed)[0] == 409
    assert find_request(bed).is_open


def test_of_two_answers_one_counts_and_the_other_text_is_kept(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    people = {"ann": (ann, "18"), "ben": (enter(bed, "ben"), "20")}
    pages = {name: visitor.ask(page_of(bed))[2] for name, (visitor, _) in people.items()}

    def send(name: str) -> tuple[int, str]:
        visitor, points = people[name]
        changes = {"points-code": points}
        return answer(bed, visitor, pages[name], f"of {name}", "accept", **changes)

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(people, pool.map(send, people), strict=True))
    assert sorted(status for status, _ in results.values()) == [200, 409]
    winner, loser = sorted(results, key=lambda name: results[name][0])
    body = results[loser][1]
    assert f"{winner} answered request 1" in body
    assert f"Your answer was not sent: <q>of {loser}</q>" in body
    assert find_request(bed).answered_by == winner
    points, _, by = marks_of(bed, "lovelace")["code"]
    assert (points, by) == (float(people[winner][1]), winner)
    answers = [one for one in bed.folder.ledger.list_entries() if one.kind == "answered"]
    assert len(answers) == 1


def test_an_answer_to_an_earlier_request_is_not_one_to_the_next(bed: Bed, ann: Visitor) -> None:
    ask(bed)
    page = ann.ask(page_of(bed))[2]
    answer_regrade(bed.folder, "hw3", "lovelace", "no", by="ben")
    ask(bed, text="and now?", number=2)
    status, body = answer(bed, ann, page, "late", "accept")
    assert (status, "ben answered request 1" in body) == (409, True)
    assert find_request(bed).is_open
