"""The steps of the demonstration that students take: in a terminal, and in the browser alone."""

from __future__ import annotations

import os
import subprocess

from week_files import RIGHT, SOLUTION, find_image
from week_page import StudentBrowser
from week_stage import LABCTL, Figures, Week, announce, wait_for

# Those who join in their own homes. The first one's budget ends during a run.
JOINING = ("lea02", "lea04", "lea06")
# Uses the browser alone.
BROWSING = "lea08"
REGRADED = "<strong>120</strong> of 120 points"
REFUSED = "Nothing can be submitted"
LAB, DRAFT = 'value="lab:', 'name="draft" value="'
TERMINAL = 'href="/terminal/'
# A checkpoint every second, and a last one when the run is stopped.
TRAIN = """\
cd "$LABCTL_CHECKPOINT_DIR"
trap 'echo last > model; exit 3' TERM
n=0; while :; do n=$((n+1)); echo "step $n"; echo "$n" > model; sleep 1; done
"""


def join_students(week: Week) -> Figures:
    """Let students join over SSH. One starts a server and a run."""
    announce("Tuesday: the keeper runs, and students join with their join files")
    week.keeper.start(week.course)
    for student in JOINING:
        (week.home / student).mkdir()
        file = week.course / "join" / f"ml-2026-{student}.join"
        print(week.run_as(student, "join", str(file), "--yes"), end="", flush=True)
    open_page(week)
    student = JOINING[0]
    lab = week.home / student / "ml-2026"
    with (lab / "lab.yaml").open("a") as file:
        file.write(f"image: {find_image()}\nrun: sh train.sh\n")
    (lab / "train.sh").write_text(TRAIN)
    week.run_as(student, "trust", "--yes")
    print(week.run_as(student, "up", "--yes"), end="", flush=True)
    load_image(week, student)
    week.run_as(student, "run", "--detach", "--id", "night")
    work_on_exercise(week, JOINING[1])
    joined = {entry.student for entry in week.folder.ledger.list_entries(kind="joined")}
    return {"joined": len(joined)}


def open_page(week: Week) -> None:
    """Let a student who uses the browser alone sign in, and start a server."""
    announce(f"{BROWSING} opens {week.keeper.page_url} in a browser, and starts a server")
    week.browser = StudentBrowser(week.keeper.page_url)
    week.browser.sign_in(week.course / "join" / f"ml-2026-{BROWSING}.join")
    week.browser.send("/server/start")


def work_on_exercise(week: Week, student: str) -> None:
    """Let a student solve the exercise of the starter, and run its public test."""
    announce(f"{student} got the files of hw3, and solves the exercise")
    file = week.home / student / "ml-2026" / "hw3" / "parity.py"
    print(week.run_as(student, "check", code=1, lab_name="hw3"), end="", flush=True)
    file.write_text(SOLUTION)
    print(week.run_as(student, "check", lab_name="hw3"), end="", flush=True)


def use_page(week: Week) -> Figures:
    """Let the student in the browser extend the server, submit from it, and end it."""
    browser = week.browser
    assert browser is not None
    browser.url = week.keeper.page_url  # the next keeper's; the session is still valid
    wait_for("the server on the page", lambda: TERMINAL in browser.open())
    announce(f"{BROWSING} gets the files of hw3, and writes code in the page's terminal")
    browser.send("/assignments/hw3/files")
    lab_id = browser.find_value(browser.open(), TERMINAL)
    for name, text in (("parity.py", SOLUTION), ("predict.sh", RIGHT)):
        browser.type_in_terminal(lab_id, f"cat > {name} <<'END'\n{text}END")
    announce(f"{BROWSING} submits from the server, extends it by an hour, and ends it, on the page")
    submit_on_page(browser)
    browser.send("/server/extend?by=1h", by="1h")
    browser.send("/server/end")
    wait_for("the server's end on the page", lambda: "/server/start" in browser.open())
    entries = week.folder.ledger.list_entries(seat=BROWSING)
    return {"browser": sorted({one.kind for one in entries} & {"extend", "down"})}


def submit_on_page(browser: StudentBrowser) -> None:
    """Choose the code, wait until the keeper has collected it, and submit it."""
    page = browser.open("/submissions/hw3/new")
    browser.send("/submissions/hw3/new", source=f"lab:{browser.find_value(page, LAB)}")
    drafts: list[str] = []

    def is_collected() -> bool:
        page = browser.open("/submissions/hw3/new")
        if REFUSED in page:
            raise SystemExit(f"{REFUSED}{page.partition(REFUSED)[2][:400]}")
        drafts.append(browser.find_value(page, DRAFT))
        return bool(drafts[-1])

    wait_for("the collected files", is_collected)
    page = browser.send("/submissions/hw3/submit", page="/submissions/hw3/new", draft=drafts[-1])
    print(page.partition("hw3 is submitted")[1] or "nothing was submitted", flush=True)


def read_page(week: Week) -> Figures:
    """Let the student in the browser read their receipt and their grade."""
    browser = week.browser
    assert browser is not None
    announce(f"{BROWSING} reads the receipt, and the grade after the regrade, on the page")
    # The page shows a release some seconds later.
    wait_for("the grade on the page", lambda: REGRADED in browser.open())
    print("120 of 120 points", flush=True)
    return {"browser_receipt": "/receipt" in browser.open()}


def load_image(week: Week, student: str) -> None:
    """Load the image on the student's server, which may have no registry that it could ask."""
    announce("The server gets this machine's image, since there may be no registry here")
    environ = {"PATH": os.environ["PATH"], "HOME": str(week.home / student)}
    lab = week.home / student / "ml-2026"
    with subprocess.Popen(["docker", "save", find_image()], stdout=subprocess.PIPE) as save:
        words = [LABCTL, "ssh", "--", "sudo docker load"]
        subprocess.run(words, cwd=lab, env=environ, stdin=save.stdout, check=True)


def kill_keeper(week: Week) -> Figures:
    """Kill the keeper during a run: the run goes on, and the next keeper resumes."""
    announce("The keeper is killed: the run continues, and the next keeper takes over")
    student = JOINING[0]
    week.keeper.kill()
    week.run_as(student, "extend", "30m", code=75)  # the keeper does not answer
    before = len(week.run_as(student, "logs", "night").splitlines())
    week.keeper.start(week.course)
    week.run_as(student, "extend", "30m")
    after = len(week.run_as(student, "logs", "night").splitlines())
    return {"went_on_without_keeper": after > before > 0}
