"""labctl course grade, killed in the middle, and twice at once, with real containers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grading_bed import hand_in, make_operator, make_receiver
from lab_servers import ROOT, LabServer
from test_grading_live import COURSE, GRADER, ITEMS, RIGHT, list_files

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

STUDENTS = [f"s{number}" for number in range(6)]
GRADE = """\
import sys
from pathlib import Path
sys.path.insert(0, "tests/e2e")
from grading_bed import make_operator
from labctl.courses.grading_run import grade_assignment
from labctl.errors import LockHeldError
try:
    grading = grade_assignment(make_operator(*map(Path, sys.argv[1:])), "hw3", at_once=2)
except LockHeldError:
    sys.exit(75)
sys.exit(0 if grading.is_complete else 1)
"""


@pytest.fixture
def course(tmp_path: Path, lab_server: LabServer, small_image: str) -> Path:
    """A course in which every submission takes a second."""
    lab_server.load(small_image)
    there = lab_server.endpoint
    folder = tmp_path / "ml"
    data = folder / "assignments" / "hw3"
    for name in ("inputs", "labels"):
        (data / name).mkdir(parents=True)
    login = {"port": there.port, "user": there.user, "identity": there.identity}
    (folder / "course.yaml").write_text(COURSE.format(image=small_image, **login))
    (folder / "roster.csv").write_text("\n".join(["id,name", *(f"{s},{s}" for s in STUDENTS), ""]))
    (data / "inputs" / "items").write_text("".join(f"{n}\n" for n in range(ITEMS)))
    labels = [f"{n},{'odd' if n % 2 else 'even'}" for n in range(ITEMS)]
    (data / "labels" / "labels.csv").write_text("\n".join([*labels, ""]))
    (data / "grade.sh").write_text(GRADER)
    receiver = make_receiver(folder, ["hw3"])
    for student in STUDENTS:
        hand_in(receiver, student, list_files(student, f"sleep 1\n{RIGHT}"))
    return folder


def start_grading(course: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", GRADE, str(course.parent), str(course)]
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True)


def test_each_submission_is_graded_once_although_a_grading_was_killed(
    course: Path, lab_server: LabServer
) -> None:
    staff = make_operator(course.parent, course)

    def list_graded() -> list[str]:
        return [entry.seat for entry in staff.folder.ledger.list_entries(kind="graded")]

    killed = start_grading(course)
    wait_until(lambda: bool(list_graded()))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert len(list_graded()) < len(STUDENTS)
    both = [start_grading(course) for _ in range(2)]
    # One of them grades, and the other says that it runs.
    assert sorted(process.wait(120) for process in both) == [0, 75]
    assert sorted(list_graded()) == STUDENTS
    left = lab_server.ssh(
        "ls -d ~/labctl/*/grading 2>/dev/null; docker ps -aq --filter label=labctl.courses.grading"
    )
    assert left.stdout == ""
    staff.state.close()
    shutil.rmtree(course / ".course" / "drop")
