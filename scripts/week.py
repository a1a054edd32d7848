"""Runs an instructor's week: each command as a person would type it.

The machines of the simulated AWS boot for students who join; those of the class only accept SSH.
One real lab server on this machine grades. The last line of output is a JSON object with the
results. Everything, including HOME, is in a temporary directory that is removed at the end, except
the grades and a picture of the dashboard, which stay in ./demo-course.

To add a step, write a function that takes the Week and returns figures, and add it to STEPS and its
figures to EXPECTED.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from week_files import (
    GRADER_DOCKERFILE,
    GRADER_IMAGE,
    GUESS,
    HASTY,
    HOSTILE,
    RIGHT,
    SOLUTION,
    STARTER,
    STUDENTS,
    find_image,
    submit,
    write_canvas_export,
    write_course_files,
)
from week_stage import (
    LABCTL,
    Figures,
    Week,
    announce,
    build_image,
    change_cloud,
    labctl,
    rehearse_aws,
    run_json,
    start_grader,
    start_keeper_machine,
    take_picture,
    wait_for,
)
from week_students import BROWSING, JOINING, join_students, kill_keeper, read_page, use_page

from labctl.courses.regrades import RegradeDesk
from labctl.submissions.receiver import Receiver

RESULTS = Path("demo-course").absolute()
SUBMISSIONS = 8
# dollars that the first student to join has left: two minutes, in which the run stops at once
LEFT_USD = 0.01


def create_course(week: Week) -> Figures:
    """Create a course from a roster, and check it before any server is created."""
    announce(f"Monday: a course of {STUDENTS} students, from a Canvas export")
    write_canvas_export(week.home / "canvas.csv")
    labctl("course", "init", "ml-2026", "--roster", "canvas.csv", cwd=week.home)
    write_course_files(week.course, week.grader_host, week.keeper.port)
    week.labctl("course", "plan")
    week.labctl("course", "invite", "--all", "--host-key", week.keeper.host_key)
    week.labctl("course", "check", code=1)  # reports that nobody has joined yet
    return {}


def hold_class(week: Week) -> Figures:
    """Run a class: servers for all students, staff's commands, and the servers' end."""
    announce("Wednesday: a class. These machines only accept SSH, so labctl does not prepare them")
    change_cloud("boot=sshd")
    started_s = time.monotonic()
    week.labctl("course", "up", "--login-only", "--yes")
    up_s = time.monotonic() - started_s
    week.labctl("course", "up", "--login-only", "--yes", "--only", "lea05")
    seats = run_json("course", "status", cwd=week.course)["seats"]
    assert isinstance(seats, list)
    week.labctl("course", "status")
    show_dashboard(week)
    week.labctl("course", "message", "lab starts at 10")
    slides = week.home / "slides.txt"
    slides.write_text("gradient descent\n")
    week.labctl("course", "push", str(slides))
    words = ("course", "ssh", "--all", "--json", "--", "hostname")
    answers = run_json(*words, cwd=week.course)["servers"]
    assert isinstance(answers, list)
    week.labctl("course", "extend", "lea05", "2h", "--why", "a long training")
    week.labctl("course", "budget", "lea05", "+5")
    week.labctl("course", "due", "hw3", "lea02", "+3d")
    week.labctl("course", "status", "--refresh", "--group", "lab-1")
    week.labctl("course", "down", "--group", "lab-2", "--yes")
    return {
        "made": len({entry["server_id"] for entry in seats if entry["state"] == "running"}),
        "distinct_hosts": len({entry["stdout"] for entry in answers}),
        "up_seconds": round(up_s, 1),
    }


def show_dashboard(week: Week) -> None:
    """Keep a picture of the dashboard, if there is a browser to make it."""
    file = week.folder.private / "keeper" / "dashboard-url"
    picture = RESULTS / "dashboard.png"
    if file.exists() and take_picture(file.read_text().strip(), picture):
        announce(f"the dashboard: {picture}")


def limit_budget(week: Week) -> Figures:
    """Leave little money for the run: it ends while submissions are graded."""
    announce("The student's budget is cut: the server will stop the run in time to save it")
    student = JOINING[0]
    costs = run_json("course", "cost", cwd=week.course)["costs"]
    assert isinstance(costs, dict)
    spent = next(seat["usd"] for seat in costs["seats"] if seat["seat"] == student)
    amount = f"{math.ceil(100 * (spent + LEFT_USD)) / 100:.2f}"
    week.labctl("course", "budget", student, amount, "--why", "to see how a budget ends")
    return {}


def grade_submissions(week: Week) -> Figures:
    """Grade the submissions on a server without credentials."""
    announce("Friday: submissions and grades")
    submit_all(week)
    week.await_grading_image()
    week.labctl("course", "collect", "hw3")
    week.labctl("course", "grade", "hw3", "--at-once", "2", "--yes")
    week.labctl("course", "grades", "hw3", "--tests")
    return {}


def mark_submissions(week: Week) -> Figures:
    """Mark the presentations, release the grades, and answer a student's regrade request."""
    announce("Two graders mark the presentations")
    week.labctl("course", "mark", "hw3", "--list")
    students = [student.id for student in week.folder.list_students()][:SUBMISSIONS]
    for number, student in enumerate(students):
        points = "15" if student == BROWSING else "20"
        words = ("mark", "hw3", student, "presentation", points, "--note", "on time")
        week.labctl("course", "--as", ("ann", "ben")[number % 2], *words)
    week.labctl("course", "grades", "hw3", "--release")
    announce(f"{BROWSING} asks for a regrade on the page")
    text = "Slide 4 has the confusion matrix."
    if week.browser is not None:
        week.browser.send("/submissions/hw3/regrade", text=text)
    else:
        RegradeDesk(week.folder).record_request("hw3", BROWSING, text)
    week.labctl("course", "regrades")
    answer = ("--answer", "You are right", "--accept", "--mark", "presentation", "20")
    week.labctl("course", "--as", "ann", "regrades", "hw3", BROWSING, *answer)
    regrades = run_json("course", "regrades", "hw3", "--all", cwd=week.course)["regrades"]
    assert isinstance(regrades, list)
    return {"regrades_accepted": [request["accepted"] for request in regrades]}


def export_grades(week: Week) -> Figures:
    """Export the grades to Canvas, and show how they are distributed."""
    week.labctl("course", "grades", "hw3", "--rubric")
    out = week.home / "canvas-grades.csv"
    words = ("--format", "canvas", "--out", str(out), "--release", "--yes")
    week.labctl("course", "grades", "hw3", *words)
    week.labctl("course", "statistics", "hw3")
    rows = list(csv.reader(out.read_text(encoding="utf-8-sig").splitlines()))
    column = next(n for n, name in enumerate(rows[0]) if name.startswith("hw3"))
    grades = [row[column] for row in rows[1:] if row[column] and "Points" not in row[0]]
    shutil.copy2(out, RESULTS / out.name)
    return {"graded": len(grades), "full_marks": sum(float(grade) == 120.0 for grade in grades)}


def submit_all(week: Week) -> None:
    receiver = Receiver(week.folder.drop)
    names = [student.id for student in week.folder.list_students()][:SUBMISSIONS]
    codes = [HOSTILE, GUESS, *[RIGHT] * (SUBMISSIONS - 2)]
    parities = [STARTER, HASTY, *[SOLUTION] * (SUBMISSIONS - 2)]
    announce(f"{SUBMISSIONS} students submit; one submission is a fork bomb, one a guess")
    for name, code, parity in zip(names, codes, parities, strict=True):
        if not receiver.receipts("hw3", name):  # one has submitted on the page
            submit(receiver, name, code, parity)


def await_budget_end(week: Week) -> Figures:
    """Wait for the end of the student's server: the keeper has its results."""
    announce(f"The budget of {JOINING[0]} ends: the keeper saves the run, then ends the server")
    ledger, student = week.folder.ledger, JOINING[0]
    wait_for("the budget's end", lambda: bool(ledger.list_entries(seat=student, kind="down")))
    week.labctl("course", "cost")
    print(week.run_as(student, "status", "--refresh"), end="", flush=True)
    seats = week.folder.private / "seats" / student
    saved = list(seats.glob("labs/*/runs/night/checkpoints/model"))
    [end] = ledger.list_entries(seat=student, kind="down")
    return {"budget_end": end.why, "saved": [file.read_text() for file in saved]}


def end_term(week: Week) -> Figures:
    """End the term; the provider confirms that nothing is left that bills."""
    announce("The term ends")
    week.keeper.stop()
    week.labctl("course", "down", "--end-of-term", "--yes")
    # The second call has the same result.
    proof = run_json("course", "down", "--end-of-term", "--yes", cwd=week.course)
    week.labctl("orphans", "--provider", "aws")
    return {"clean": proof["clean"]}


# The second value: whether students must be able to log in here.
STEPS: tuple[tuple[Callable[[Week], Figures], bool], ...] = (
    (create_course, False),
    (join_students, True),
    (kill_keeper, True),
    (use_page, True),
    (hold_class, False),
    (limit_budget, True),
    (grade_submissions, False),
    (mark_submissions, False),
    (export_grades, False),
    (read_page, True),
    (await_budget_end, True),
    (end_term, False),
)
EXPECTED: Figures = {
    "joined": len(JOINING),
    "went_on_without_keeper": True,
    "browser": ["down", "extend"],
    "made": STUDENTS,
    "distinct_hosts": STUDENTS,
    "regrades_accepted": [True],
    "graded": SUBMISSIONS,
    "full_marks": SUBMISSIONS - 2,
    "browser_receipt": True,
    "budget_end": "its budget is used up",
    "saved": ["last\n"],
    "clean": True,
}


def run_week(home: Path) -> Figures:
    figures: Figures = {}
    with (
        build_image(GRADER_IMAGE, GRADER_DOCKERFILE, find_image()) as await_image,
        rehearse_aws(home),
        start_grader(home) as host,
        start_keeper_machine(home) as keeper,
    ):
        week = Week(home, home / "ml-2026", host, keeper, await_image)
        try:
            for step, needs_sshd in STEPS:
                if needs_sshd and keeper.sshd is None:
                    announce(f"{step.__name__} is left out: install openssh-server to see it")
                    continue
                figures.update(step(week))
        except BaseException:
            words = ["course", "down", "--end-of-term", "--discard", "--yes"]
            keeper.stop()
            subprocess.run([LABCTL, *words], cwd=week.course, check=False)
            raise
    return figures


def main() -> int:
    # Whoever ends it leaves no server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="labctl-course-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    RESULTS.mkdir(parents=True, exist_ok=True)
    try:
        figures = run_week(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    figures["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(figures), flush=True)
    wrong = [name for name in EXPECTED if name in figures and figures[name] != EXPECTED[name]]
    if wrong:
        print(f"not as expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
