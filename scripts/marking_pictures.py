"""The pictures of the pages on which staff marks; `pictures.py` sets the path for its imports."""

from __future__ import annotations

import threading
from pathlib import Path

from marking_bed import FILES, grade_automatically, hand_in_files, make_marking
from playwright.sync_api import Browser, expect

from labctl.courses.commenting import add_comment
from labctl.courses.marking import give_mark
from labctl.courses.records.regrade_requests import draft_request_line

CODE = Path(__file__).parents[1] / "templates" / "image-classifier" / "train.py"
COMMENTED_LINE = 7


def draw_marking_pages(folder: Path, scratch: Path, browser: Browser) -> None:
    """Draw a submission beside the rubric, with a comment on its code, and a regrade request."""
    scratch.mkdir()
    bed = make_marking(scratch)
    students = [one.id for one in bed.folder.list_students()[:3]]
    for student in students:
        hand_in_files(bed, student, {**FILES, "code/train.py": CODE.read_bytes()})
        grade_automatically(bed, student, 31)
    student = students[0]
    give_mark(bed.folder, "hw3", student, "code", "25", by="ann", note="Clear names.")
    place = ("train.py", COMMENTED_LINE)
    add_comment(bed.folder, "hw3", student, place, "Good: says how to stop it.", by="ann")
    question = "Why 25? My function names follow the course's guide."
    bed.folder.ledger.append_all([draft_request_line("hw3", student, 1, question)])
    stop = threading.Event()
    url = bed.start(stop)
    try:
        with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
            shown = context.new_page()
            base = url.partition("?")[0]
            shown.goto(url)
            shown.wait_for_url(base)
            shown.goto(f"{base}assignments/hw3/marking")
            shown.get_by_label("Your name").fill("ann")
            shown.keyboard.press("Enter")
            shown.locator("#kind-code").click()
            expect(shown.locator(".note")).to_be_visible()
            shown.screenshot(path=folder / "marking.png")
            shown.goto(f"{base}regrades")
            expect(shown.locator("#page")).to_contain_text(question)
            shown.screenshot(path=folder / "regrades.png")
    finally:
        stop.set()
        bed.state.close()
