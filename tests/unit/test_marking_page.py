"""The page for marking over HTTP: what it shows, saves and refuses; nobody's mark is lost."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from dashboard_bed import NAMES, Bed, Visitor, fill
from marking_bed import (
    EVIL,
    EVIL_NAME,
    FILES,
    grade_automatically,
    hand_in_files,
    make_marking,
    make_notebook,
)

from labctl.courses.commenting import add_comment, list_comments, save_comment
from labctl.courses.marking import give_mark
from labctl.courses.records.marks import read_marks
from labctl.courses.records.regrade_requests import draft_request_line
from labctl.courses.release import release_grades
from labctl.web import factory
from labctl.web.http_server import URL_FILE
from labctl.web.mutations import CourseActions

REPORT, LOG, TRAIN, NOTEBOOK = range(4)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(factory, "EVERY_S", 0.1)
    made = make_marking(tmp_path)
    hand_in_files(made, "lovelace", FILES)
    hand_in_files(made, "turing", FILES)
    hand_in_files(made, "hopper", FILES)
    yield made
    made.state.close()


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def served(bed: Bed, stop: threading.Event) -> Bed:
    bed.start(stop)
    return bed


def enter(bed: Bed, name: str) -> Visitor:
    """Another browser, of a person with this name."""
    visitor = Visitor((bed.folder.private / "keeper" / URL_FILE).read_text().strip())
    visitor.enter()
    if name:
        assert visitor.post("/person", person=name, back="/")[0] == 303
    return visitor


@pytest.fixture
def ann(served: Bed) -> Visitor:
    return enter(served, "ann")


def page_of(bed: Bed, number: int = 0) -> str:
    return f"/assignments/hw3/marking/{bed.seat(number).pseudonym}"


def read_fields(page: str) -> dict[str, str]:
    """The fields of the rubric's form as a browser would send them; no box is checked."""
    form = page.partition('<form id="rubric"')[2].partition("</form>")[0]
    fields = {}
    for tag in re.findall(r"<input[^>]*>", form):
        name, value = (re.search(f' {word}="([^"]*)"', tag) for word in ("name", "value"))
        if name and 'type="checkbox"' not in tag:
            fields[name[1]] = html.unescape(value[1] if value else "")
    for name, value in re.findall(r'<textarea[^>]*name="([^"]*)"[^>]*>([^<]*)</textarea>', form):
        fields[name] = html.unescape(value)
    return fields


def marks_of(bed: Bed, student: str) -> dict[str, tuple[float, str, str]]:
    marks = read_marks(bed.folder.ledger.list_entries(), "hw3").get(student, {})
    return {item: (mark.points, mark.note, mark.by) for item, mark in marks.items()}


def test_the_page_has_files_rubric_tests_and_the_total(bed: Bed, ann: Visitor) -> None:
    grade_automatically(bed, "lovelace", 25)
    give_mark(bed.folder, "hw3", "lovelace", "code", "20", by="ben", note="clear names")
    page = ann.ask(page_of(bed))[2]
    for text in (NAMES[0], "My report", ">test_shape<", "10 of 10", "clear names", "1 of 3; 3 to"):
        assert text in page or text == "My report"
    assert f'src="{page_of(bed)}/report"' in page
    assert "<strong data-total>45</strong>" in page
    assert "so far: not marked yet: presentation" in page
    shown = [ann.ask(f"{page_of(bed)}?file={number}")[2] for number in (LOG, TRAIN, NOTEBOOK)]
    assert "epoch 2" in shown[0]
    assert "for step in range(10):" in shown[1]
    assert "train(epochs=2)" in shown[2]
    assert 'src="data:image/png;base64,' in shown[2]
    assert "[not shown here: application/javascript]" in shown[2]


def test_the_page_says_why_the_automatic_grading_failed(bed: Bed, ann: Visitor) -> None:
    grade_automatically(bed, "lovelace", 10, message="its program ended with 1: KeyError: <b>")
    page = ann.ask(page_of(bed))[2]
    assert "its program ended with 1: KeyError: &lt;b&gt;" in page


def test_the_page_says_what_students_see_until_the_next_release(bed: Bed, ann: Visitor) -> None:
    grade_automatically(bed, "lovelace", 25)
    for item, points in (("code", "20"), ("presentation", "10")):
        give_mark(bed.folder, "hw3", "lovelace", item, points, by="ben")
    release_grades(bed.folder, "hw3")
    assert "<small>released</small>" in ann.ask(page_of(bed))[2]
    give_mark(bed.folder, "hw3", "lovelace", "code", "22", by="ben")
    page = ann.ask(page_of(bed))[2]
    assert "<strong data-total>57</strong>" in page
    assert "students see 55 until the next release" in page


def test_marks_that_are_older_than_the_submission_are_named(bed: Bed, ann: Visitor) -> None:
    give_mark(bed.folder, "hw3", "lovelace", "code", "20", by="ben")
    assert "marked before" not in ann.ask(page_of(bed))[2]
    hand_in_files(bed, "lovelace", FILES, number=7, at=time.time() + 60)
    assert "marked for submission 1 instead of 7: code" in ann.ask(page_of(bed))[2]
    output = run_grades(bed)
    assert "marked for submission 1 instead of 7: code" in output


def test_an_older_mark_is_to_be_marked_until_a_grader_confirms_it(bed: Bed, ann: Visitor) -> None:
    for item, points in (("code", "20"), ("presentation", "10")):
        give_mark(bed.folder, "hw3", "lovelace", item, points, by="ben", note="good")
    assert "; 2 to mark" in ann.ask(page_of(bed))[2]
    # A submission that arrived between these marks and now.
    hand_in_files(bed, "lovelace", FILES, number=7, at=time.time() + 1)
    time.sleep(1.1)
    page = ann.ask(page_of(bed))[2]
    assert "; 3 to mark" in page
    assert page.count("The mark is right for submission 7 too") == 2
    confirmed = {**read_fields(page), "confirm-code": "yes"}
    page = ann.form(f"{page_of(bed)}/marks", **confirmed)[2]
    assert "Saved: code." in page
    assert "marked for submission 1 instead of 7: presentation" in page
    page = ann.form(
        f"{page_of(bed)}/marks", **{**read_fields(page), "confirm-presentation": "yes"}
    )[2]
    assert "marked before" not in page
    assert "; 2 to mark" in page
    assert marks_of(bed, "lovelace") == {
        "code": (20.0, "good", "ann"),
        "presentation": (10.0, "good", "ann"),
    }


def test_an_upgrade_does_not_change_the_pages_of_a_running_process(
    bed: Bed, stop: threading.Event, tmp_path: Path
) -> None:
    """Its older code does not have the values that a newer template shows."""
    data_dir = tmp_path / "installed"
    templates = data_dir / "templates" / "dashboard"
    shutil.copytree(bed.paths.data_dir / "templates" / "dashboard", templates)
    bed.paths = msgspec.structs.replace(bed.paths, data_dir=data_dir)
    bed.start(stop)
    for template in templates.glob("*.j2"):
        template.write_text("{{ value_of_a_newer_version }}")
    assert 'id="rubric"' in enter(bed, "ann").ask(page_of(bed))[2]


def run_grades(bed: Bed) -> str:
    """What `labctl course grades hw3` prints."""
    words = [sys.executable, "-m", "labctl", "-C", str(bed.folder.path), "course", "grades", "hw3"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_page_opens_with_a_file_that_people_mark(bed: Bed, ann: Visitor) -> None:
    files = {"code/.gitignore": b"/runs/\n", "code/train.py": b"print('marked')\n"}
    hand_in_files(bed, "lovelace", files, number=2, at=bed.now + 60)
    page = ann.ask(page_of(bed))[2]
    assert "print(&#39;marked&#39;)" in page
    assert "/runs/" not in page


def test_a_late_submission_shows_what_it_costs(bed: Bed, ann: Visitor) -> None:
    hand_in_files(bed, "liskov", FILES, late_s=7200)
    grade_automatically(bed, "liskov", 35, penalty=10)
    page = ann.ask(page_of(bed, 4))[2]
    assert "-10 <small>10%</small>" in page
    assert "<strong data-total>25</strong>" in page


def test_marks_are_saved_with_who_gave_them(bed: Bed, ann: Visitor) -> None:
    fields = read_fields(ann.ask(page_of(bed))[2])
    note = "Zwei Zeilen\r\nmit <b>Zeichen</b>"
    typed = {**fields, "points-code": "27,5", "note-code": note}
    status, _, page = ann.form(f"{page_of(bed)}/marks", **typed)
    assert status == 200
    assert "Saved: code." in page
    assert marks_of(bed, "lovelace") == {"code": (27.5, note.replace("\r\n", "\n"), "ann")}
    # What nobody changed is not written again, and an empty field takes the mark back.
    fields = read_fields(page)
    assert "Nothing had changed." in ann.form(f"{page_of(bed)}/marks", **fields)[2]
    ann.form(f"{page_of(bed)}/marks", **{**fields, "points-code": "", "note-code": ""})
    assert marks_of(bed, "lovelace") == {}
    assert len(bed.folder.ledger.list_entries(kind="mark")) == 2


@pytest.mark.parametrize(
    ("points", "note", "says"),
    [("31", "", "is worth 30 points"), ("-1", "", "not a number"), ("", "why?", "needs points")],
)
def test_wrong_points_save_nothing_and_keep_what_was_typed(
    bed: Bed, ann: Visitor, points: str, note: str, says: str
) -> None:
    fields = read_fields(ann.ask(page_of(bed))[2])
    typed = {**fields, "points-code": points, "note-code": note, "points-presentation": "5"}
    give_mark(bed.folder, "hw3", "lovelace", "presentation", "9", by="ben")
    status, _, page = ann.form(f"{page_of(bed)}/marks", **typed)
    assert status == 409
    assert says in page
    again = read_fields(page)
    assert (again["points-code"], again["note-code"]) == (points, note)
    assert again["points-presentation"] == "5"
    assert "ben gave 9 meanwhile." in page  # although another item was refused first
    assert marks_of(bed, "lovelace") == {"presentation": (9, "", "ben")}


def test_a_stale_form_names_the_other_grader_and_keeps_the_text(bed: Bed, ann: Visitor) -> None:
    ben = enter(bed, "ben")
    address = f"{page_of(bed)}/marks"
    first, second = (read_fields(one.ask(page_of(bed))[2]) for one in (ann, ben))
    ben.form(address, **{**second, "points-code": "12", "note-code": "too long"})
    # Another item does not conflict, although the form is older.
    status, _, page = ann.form(address, **{**first, "points-presentation": "30"})
    assert (status, marks_of(bed, "lovelace")["presentation"]) == (200, (30, "", "ann"))
    status, _, page = ann.form(address, **{**first, "points-code": "20", "note-code": "mine"})
    assert status == 409
    assert "ben gave 12: <bdi>too long</bdi> meanwhile." in page
    assert marks_of(bed, "lovelace")["code"] == (12, "too long", "ben")
    # What ann did not touch is as it is now, and stays so.
    assert read_fields(page)["points-presentation"] == "30"
    # Ann has seen it now: saving again replaces it, and the ledger has both.
    fields = read_fields(page)
    assert (fields["points-code"], fields["note-code"]) == ("20", "mine")
    assert ann.form(address, **fields)[0] == 200
    assert marks_of(bed, "lovelace")["code"] == (20, "mine", "ann")
    assert len(bed.folder.ledger.list_entries(kind="mark")) == 3


def test_many_graders_at_once_lose_no_mark(bed: Bed, ann: Visitor) -> None:
    """Eight people save the same item at the same time: one wins, seven learn of it."""
    people = [enter(bed, f"grader-{number}") for number in range(8)]
    forms = [read_fields(one.ask(page_of(bed))[2]) for one in people]
    statuses = [0] * 8

    def save(number: int) -> None:
        typed = {**forms[number], "points-code": str(number + 1)}
        statuses[number] = people[number].form(f"{page_of(bed)}/marks", **typed)[0]

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [409] * 7
    (line,) = bed.folder.ledger.list_entries(kind="mark")
    assert line.by == f"grader-{statuses.index(200)}"


def test_a_submission_that_arrives_meanwhile_is_noticed(bed: Bed, ann: Visitor) -> None:
    fields = read_fields(ann.ask(page_of(bed))[2])
    later = bed.now + 60
    hand_in_files(bed, "lovelace", {"code/train.py": b"pass\n"}, number=2, at=later)
    typed = {**fields, "points-code": "9"}
    status, _, page = ann.form(f"{page_of(bed)}/marks", **typed)
    assert status == 409
    assert "Submission 2 has arrived meanwhile" in page
    assert marks_of(bed, "lovelace") == {}
    comment = {"csrf": fields["csrf"], "bundle": fields["bundle"], "file": "0", "line": "1"}
    status, _, page = ann.form(f"{page_of(bed)}/comments", **comment, text="Close the file")
    assert status == 409
    assert "Close the file</textarea>" in page
    assert list_comments(bed.folder, "hw3") == []
    assert ann.form(f"{page_of(bed)}/marks", **read_fields(page), **{})[0] == 200


def test_a_comment_on_a_file_that_is_gone_names_the_submission_that_arrived(
    bed: Bed, ann: Visitor
) -> None:
    fields = read_fields(ann.ask(page_of(bed))[2])
    hand_in_files(bed, "lovelace", {"code/a.py": b"pass\n"}, number=2, at=bed.now + 60)
    comment = {"csrf": fields["csrf"], "bundle": fields["bundle"], "file": "3", "line": "1"}
    page = ann.form(f"{page_of(bed)}/comments", **comment, text="Close the file")[2]
    assert "Submission 2 has arrived meanwhile" in page


def test_marks_for_nothing_do_not_count_for_a_submission_that_arrives_meanwhile(
    bed: Bed, ann: Visitor
) -> None:
    page = ann.ask(page_of(bed, 3))[2]
    assert "Nothing was submitted." in page
    fields = read_fields(page)
    hand_in_files(bed, "dijkstra", FILES)
    status, _, page = ann.form(f"{page_of(bed, 3)}/marks", **{**fields, "points-code": "0"})
    assert (status, "Submission 1 has arrived meanwhile." in page) == (409, True)
    assert marks_of(bed, "dijkstra") == {}
    # What was typed is still there, and this page is of the submission.
    assert read_fields(page)["points-code"] == "0"
    assert ann.form(f"{page_of(bed, 3)}/marks", **read_fields(page))[0] == 200
    assert marks_of(bed, "dijkstra") == {"code": (0, "", "ann")}


def test_next_goes_round_what_is_unmarked(bed: Bed, ann: Visitor) -> None:
    for item in ("code", "presentation"):
        give_mark(bed.folder, "hw3", "turing", item, "10", by="ben")
    assert ann.ask("/assignments/hw3/marking")[1]["location"] == page_of(bed)
    assert ann.ask(f"{page_of(bed)}/next")[1]["location"] == page_of(bed, 2)
    assert ann.ask(f"{page_of(bed, 2)}/next")[1]["location"] == page_of(bed)
    fields = read_fields(ann.ask(page_of(bed))[2])
    typed = {**fields, "points-code": "1", "points-presentation": "2", "then": "next"}
    status, headers, _ = ann.form(f"{page_of(bed)}/marks", **typed)
    assert (status, headers["location"]) == (303, page_of(bed, 2))
    assert ann.ask(f"{page_of(bed, 2)}/next")[1]["location"] == "/assignments/hw3"
    assert "Every other submission is marked." in ann.ask("/assignments/hw3")[2]


def test_a_comment_stays_with_its_line_and_can_be_removed(bed: Bed, ann: Visitor) -> None:
    page = ann.ask(f"{page_of(bed)}?file={TRAIN}")[2]
    fields = {key: read_fields(page)[key] for key in ("csrf", "bundle")}
    typed = {**fields, "file": str(TRAIN), "line": "3", "text": "Why 10?", "reuse": "yes"}
    status, _, page = ann.form(f"{page_of(bed)}/comments", **typed)
    assert (status, "Commented on train.py:3." in page) == (200, True)
    after = page.partition('id="l3"')[2].partition('id="l4"')[0]
    assert "Why 10?" in after
    assert "Saved comments (1)" in page
    (comment,) = list_comments(bed.folder, "hw3", "lovelace")
    assert (comment.place, comment.number, comment.by) == ("train.py:3", 1, "ann")
    for line, file in (("0", TRAIN), ("5", TRAIN), ("x", TRAIN), ("1", 99)):
        typed = {**typed, "line": line, "file": str(file)}
        assert ann.form(f"{page_of(bed)}/comments", **typed)[0] == 409
    remove = {**fields, "file": str(TRAIN), "id": str(comment.id)}
    assert "Removed the comment" in ann.form(f"{page_of(bed)}/comments/remove", **remove)[2]
    assert list_comments(bed.folder, "hw3") == []
    assert ann.form(f"{page_of(bed)}/comments/remove", **remove)[0] == 409


def test_nobody_marks_without_a_name(bed: Bed, served: Bed) -> None:
    visitor = enter(served, "")
    page = visitor.ask(page_of(bed))[2]
    assert "Start marking" in page
    assert " autofocus" in page
    assert 'id="rubric"' not in page
    status = visitor.post(f"{page_of(bed)}/marks", **{"points-code": "3"})[0]
    assert (status, marks_of(bed, "lovelace")) == (409, {})
    for name in ("", " ", "x" * 65, "a\x1b[2J"):
        assert visitor.post("/person", person=name, back="/")[0] == 400


def test_names_can_be_hidden_while_marking(bed: Bed, ann: Visitor) -> None:
    assert ann.post("/names", hidden="yes", back="/")[0] == 303
    pages = [ann.ask(page_of(bed, number))[2].lower() for number in range(3)]
    people = bed.folder.list_students()
    words = {word.lower() for one in people for word in (one.name, one.id, one.email, one.team)}
    assert not [word for word in words - {""} for page in pages if word in page]
    assert bed.seat(0).pseudonym in pages[0]


def test_hidden_names_are_on_no_page_that_a_link_leads_to(bed: Bed, ann: Visitor) -> None:
    """From the first page on: pages, their addresses and headers, and what an error says."""
    fill(bed)
    bed.folder.ledger.append_all([draft_request_line("hw3", "hopper", 1, "hopper: why?")])
    add_comment(bed.folder, "hw3", "hopper", ("train.py", 1), "x", by="ann")
    give_mark(bed.folder, "hw3", "hoare", "code", "3", by="ben", alone=True)
    (bed.folder.drop / "submissions" / "hw3" / "turing" / "0001" / "bundle.tar").write_bytes(b"x")
    ann.post("/names", hidden="yes", back="/")
    people = bed.folder.list_students()
    words = {part for one in people for part in (*one.name.split(), one.id, one.email, one.team)}
    pattern = "|".join(sorted(re.escape(word) for word in words - {""}))
    names = re.compile(rf"\b({pattern})\b", re.IGNORECASE)
    due, visited = ["/"], set[str]()
    while due:
        address = due.pop()
        visited.add(address)
        status, headers, page = ann.ask(address)
        assert status != 500, address
        content = "" if headers.get("content-type") == "application/x-tar" else page
        for text in (address, *headers.values(), content):
            assert not (found := names.search(text)), (address, found, text[-2000:])
        links = re.findall(r' (?:href|src)="(/[^"]*)"', content)
        links += [headers["location"]] if "location" in headers else []
        links = [html.unescape(link) for link in links if not link.startswith("/static/")]
        due += {link for link in links if link not in visited and link not in due}
    assert sum("/marking/" in address for address in visited) > 10
    assert any(address.endswith("/bundle") for address in visited)
    bundle = next(address for address in visited if address.endswith("/1/bundle"))
    receipt = bundle.replace("/bundle", "/receipt")
    assert ann.ask(receipt)[0] == 403
    shutil.rmtree(bed.folder.drop / "submissions")
    status, _, page = ann.ask(bundle)
    assert (status, names.search(page)) == (404, None)
    pages = [ann.ask(page_of(bed, number))[2] for number in range(3)]
    assert not any(names.search(page) for page in pages)
    for path in ("/seats/none", f"{page_of(bed)}?file=99", "/assignments/none/marking", receipt):
        assert not names.search(ann.ask(path)[2])
    for path in ("marks", "comments", "comments/remove", "comments/forget"):
        for number in range(4):
            fields = {"points-code": "99", "id": "9", "line": "77", "file": "1", "text": "x"}
            assert not names.search(ann.post(f"{page_of(bed, number)}/{path}", **fields)[2])


def test_no_address_names_anybody_or_a_file(bed: Bed, ann: Visitor) -> None:
    files = {**FILES, "code/lovelace.py": b"x = 1\n"}
    hand_in_files(bed, "dijkstra", files)
    page = ann.ask(f"{page_of(bed, 3)}?file=4")[2]
    assert "x = 1" in page
    for address in re.findall(r' (?:href|src|action|hx-post)="([^"]*)"', page):
        assert "lovelace" not in address
        assert "dijkstra" not in address


def test_a_team_is_marked_together(bed: Bed, ann: Visitor) -> None:
    hand_in_files(bed, "hoare", FILES)
    give_mark(bed.folder, "hw3", "hoare", "code", "3", by="ben", alone=True)
    page = ann.ask(page_of(bed, 8))[2]
    assert "Its students have different marks: none, 3." in page
    fields = read_fields(page)
    assert ann.form(f"{page_of(bed, 8)}/marks", **{**fields, "points-code": "7"})[0] == 200
    assert marks_of(bed, "hoare")["code"] == marks_of(bed, "perlman")["code"] == (7, "", "ann")


def test_files_that_are_large_to_draw_are_cut(bed: Bed, ann: Visitor) -> None:
    """A page takes the dashboard's time, and a student chose the size of the files."""
    wide = b"\n".join([b"x" * 5000] * 3000)
    cell = '{"cell_type": "raw", "source": "%s"}' % ("y" * 40_000)
    notebook = f'{{"cells": [{",".join([cell] * 200)}]}}'.encode()
    hand_in_files(bed, "dijkstra", {"code/wide.py": wide, "code/big.ipynb": notebook})
    pages = [ann.ask(f"{page_of(bed, 3)}?file={number}")[2] for number in (0, 1)]
    assert [len(page) < 1_500_000 for page in pages] == [True, True]
    assert "Only the first 498 of 3000 lines are shown." in pages[0]
    assert pages[1].count("[cut]") > 100


def test_hostile_files_and_comments_are_text(bed: Bed, ann: Visitor) -> None:
    evil = EVIL.encode()
    files = {
        "report.html": evil,
        f"logs/{EVIL_NAME.removeprefix('code/')}": evil + b"\x1b[2J\n",
        EVIL_NAME: evil + "\u202e".encode(),
        "code/evil.ipynb": make_notebook(EVIL),
        "code/broken.ipynb": evil,
        "code/deep.ipynb": b'{"cells": ' + b"[" * 50_000,
    }
    hand_in_files(bed, "dijkstra", files)
    grade_automatically(bed, "dijkstra", 20)
    save_comment(bed.folder, f'"{EVIL}', by=EVIL)
    give_mark(bed.folder, "hw3", "dijkstra", "code", "3", by=EVIL, note=f"</textarea>{EVIL}")
    address = page_of(bed, 3)
    page = ann.ask(address)[2]
    fields = {key: read_fields(page)[key] for key in ("csrf", "bundle")}
    ann.form(f"{address}/comments", **fields, file="2", line="1", text=f"</textarea>{EVIL}")
    for number in range(len(files)):
        page = ann.ask(f"{address}?file={number}")[2]
        for word in ("<script>alert", "<img src=x", "\x1b", "\u202e"):
            assert word not in page, number
        assert "&lt;script&gt;" in page


def test_the_report_is_framed_in_a_sandbox_by_this_page_only(bed: Bed, ann: Visitor) -> None:
    status, headers, body = ann.ask(f"{page_of(bed)}/report")
    assert (status, body) == (200, FILES["report.html"].decode())
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none';")
    assert "frame-ancestors 'self'" in policy
    assert "script-src" not in policy
    assert "allow-" not in policy
    page = ann.ask(page_of(bed))
    assert page[1]["content-security-policy"].endswith("frame-src 'self'")
    assert "frame-ancestors 'none'" in page[1]["content-security-policy"]
    assert '<iframe class="sheet" id="report" sandbox src=' in page[2]
    assert "frame-src" not in ann.ask("/")[1]["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    ["?file=99", "?file=-1", "?file=../../course.yaml", "?file=code/train.py", "/report/../../x"],
)
def test_a_file_is_a_number_of_the_bundle(bed: Bed, ann: Visitor, path: str) -> None:
    status, _, page = ann.ask(page_of(bed) + path)
    assert status in (200, 404, 422)
    assert "per_student" not in page


def test_forms_of_another_page_or_session_change_nothing(bed: Bed, ann: Visitor) -> None:
    fields = {**read_fields(ann.ask(page_of(bed))[2]), "points-code": "3"}
    address = f"{page_of(bed)}/marks"
    assert ann.form(address, **{**fields, "csrf": "x" * 27})[0] == 403
    other = read_fields(enter(bed, "ben").ask(page_of(bed))[2])["csrf"]
    assert ann.form(address, **{**fields, "csrf": other})[0] == 403
    body = "&".join(f"{key}={value}" for key, value in fields.items())
    kind = "application/x-www-form-urlencoded"
    evil = {"Origin": "http://evil.example", "Content_Type": kind}
    assert ann.ask(address, "POST", body, **evil)[0] == 403
    assert ann.ask(address, "POST", body, Content_Type=kind)[0] == 403
    assert marks_of(bed, "lovelace") == {}


def test_unknown_seats_and_assignments_are_not_found(bed: Bed, ann: Visitor) -> None:
    for path in ("/assignments/hw9/marking", "/assignments/hw3/marking/00000000"):
        assert ann.ask(path)[0] == 404
    assert ann.ask("/assignments/hw4/marking")[1]["location"] == "/assignments/hw4"
    assert "Nothing was submitted yet." in ann.ask("/assignments/hw4")[2]


def test_a_submission_without_a_rubric_is_shown_and_commented(bed: Bed, ann: Visitor) -> None:
    file = bed.folder.path / "course.yaml"
    file.write_text(re.sub(r", rubric: \{[^}]*\}", "", file.read_text()))
    assert ann.ask("/assignments/hw3/marking")[1]["location"] == page_of(bed)
    page = ann.ask(f"{page_of(bed)}?file={TRAIN}")[2]
    assert "hw3 has no rubric." in page
    bundle = page.partition('name="bundle" value="')[2].partition('"')[0]
    typed = {"bundle": bundle, "file": str(TRAIN), "line": "3", "text": "Why 10?"}
    assert ann.post(f"{page_of(bed)}/comments", **typed)[0] == 200
    assert ann.ask(f"{page_of(bed)}/next")[1]["location"] == "/assignments/hw3"


def test_a_damaged_bundle_can_still_be_marked(bed: Bed, ann: Visitor) -> None:
    bundle = bed.folder.drop / "submissions" / "hw3" / "lovelace" / "0001" / "bundle.tar"
    bundle.write_bytes(b"\0\1" * 700)
    page = ann.ask(page_of(bed))[2]
    assert "The bundle is refused" in page
    fields = read_fields(page)
    assert ann.form(f"{page_of(bed)}/marks", **{**fields, "points-code": "3"})[0] == 200


def test_a_long_log_shows_its_end_and_a_large_form_is_accepted(bed: Bed, ann: Visitor) -> None:
    log = b"".join(b"step %d\n" % number for number in range(6000))
    files = {**FILES, "logs/run.log": log}
    hand_in_files(bed, "dijkstra", files)
    page = ann.ask(f"{page_of(bed, 3)}?file={LOG}")[2]
    assert "Only the last 4000 of 6000 lines are shown." in page
    assert ">step 5999<" in page
    assert ">step 10<" not in page
    add_comment(bed.folder, "hw3", "dijkstra", ("logs/run.log", 10), "early", by="ben")
    page = ann.ask(f"{page_of(bed, 3)}?file={LOG}")[2]
    assert "early" in page.partition("Comments on lines that are not shown")[2]
    fields = read_fields(page)
    note = "\u8a9e" * 2000
    typed = {**fields, "points-code": "3", "note-code": note, "note-presentation": note}
    typed["points-presentation"] = "4"
    assert ann.form(f"{page_of(bed, 3)}/marks", **typed)[0] == 200
    assert marks_of(bed, "dijkstra")["code"] == (3, note, "ann")


def test_the_name_is_that_of_other_actions_too(
    bed: Bed, ann: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.serve_up(0)
    given: list[str] = []
    monkeypatch.setattr(
        CourseActions, "extend", lambda self, seat, span_s, why, by: given.append(by)
    )
    assert ann.post(f"/seats/{bed.seat(0).pseudonym}/extend", by="1h")[0] == 303
    nameless = enter(bed, "")
    assert nameless.post(f"/seats/{bed.seat(0).pseudonym}/extend", by="1h")[0] == 303
    assert given == ["ann", "dashboard"]
