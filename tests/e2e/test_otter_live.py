"""An assignment of otter-grader: its zip, made by its own program, grades notebooks as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from grading_bed import hand_in, make_operator, make_receiver
from lab_servers import LabServer

from labctl.courses.grading_run import grade_assignment
from labctl.courses.release import release_grades
from labctl.courses.servers import CourseOperator

pytestmark = [pytest.mark.engine, pytest.mark.long]

IMAGE = "labctl-test-otter:1"
DOCKERFILE = """\
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv
COPY wheels /wheels
RUN python3 -m venv /opt/otter \\
    && /opt/otter/bin/pip install --no-index --find-links /wheels otter-grader ipykernel
ENV PATH=/opt/otter/bin:$PATH
"""
COURSE = """\
course: ml
server: {{provider: static, static: {{hosts: [unused.example]}}}}
grading:
  server:
    provider: static
    static: {{hosts: [{{host: 127.0.0.1, port: {port}, user: {user}, identity: {identity}}}]}}
  image: {image}
  limits: {{memory: 1GB, cpus: 1}}
assignments:
  squares:
    due: "2030-01-01 00:00 UTC"
    points: 10
    grade: {{autograder: assignments/squares/autograder.zip, timeout: 3m}}
"""
CASES = [
    {"code": ">>> square(3)\n9", "hidden": False, "locked": False},
    {"code": ">>> square(-2)\n4", "hidden": True, "locked": False},
]
SUITE = {"cases": CASES, "scored": True, "setup": "", "teardown": "", "type": "doctest"}
QUESTION = {"name": "q1", "points": 10, "suites": [SUITE]}
TEST = f"OK_FORMAT = True\ntest = {QUESTION!r}\n"


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def otter_image(tmp_path_factory: pytest.TempPathFactory, image_with_pytest: str) -> str:
    """An image with otter-grader; its packages come through pip of this machine."""
    root = tmp_path_factory.mktemp("otter")
    python = docker(
        *("run", "--rm", image_with_pytest, "python3", "-c"),
        "import platform; print(platform.python_version())",
    )
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    download += ["--python-version", python, "--dest", str(root / "wheels")]
    subprocess.run([*download, "otter-grader", "ipykernel"], check=True, timeout=300)
    (root / "Dockerfile").write_text(DOCKERFILE)
    base = f"BASE={image_with_pytest}"
    docker("build", "--quiet", "--tag", IMAGE, "--build-arg", base, str(root))
    return IMAGE


@pytest.fixture(scope="module")
def staff(
    tmp_path_factory: pytest.TempPathFactory, lab_server: LabServer, otter_image: str
) -> Iterator[CourseOperator]:
    home = tmp_path_factory.mktemp("course-home")
    folder = home / "ml"
    place = folder / "assignments" / "squares"
    (place / "tests").mkdir(parents=True)
    (place / "tests" / "q1.py").write_text(TEST)
    mount = f"{place}:/assignment"
    docker("run", "--rm", "--volume", mount, "--workdir", "/assignment", IMAGE, "otter", "generate")
    endpoint = lab_server.endpoint
    fields = {"port": endpoint.port, "user": endpoint.user, "identity": endpoint.identity}
    (folder / "course.yaml").write_text(COURSE.format(**fields, image=otter_image))
    (folder / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    yield make_operator(home, folder)
    shutil.rmtree(folder / ".course" / "drop")


def make_notebook(code: str) -> bytes:
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "a",
        "metadata": {},
        "outputs": [],
        "source": code,
    }
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps({**notebook, "nbformat_minor": 5}).encode()


def test_a_zip_of_otter_grades_notebooks_as_it_is(staff: CourseOperator) -> None:
    receiver = make_receiver(staff.folder.path, ["squares"])
    for student, body in (("alice", "return x * x"), ("bob", "return 3 * x")):
        notebook = make_notebook(f"def square(x):\n    {body}\n")
        hand_in(receiver, student, {"code/squares.ipynb": notebook}, "squares")
    graded = {one.seat: one for one in grade_assignment(staff, "squares").seats}
    assert {seat: one.state for seat, one in graded.items()} == {
        "alice": "graded",
        "bob": "graded",
    }, [one.why for one in graded.values()]
    scores = {seat: one.record and one.record.score for seat, one in graded.items()}
    # otter shares the points of a question among its cases; bob's fails the hidden one.
    assert scores == {"alice": 10.0, "bob": 5.0}
    release_grades(staff.folder, "squares", by="staff")
    feedback = receiver.feedback("squares", "bob")
    assert feedback is not None
    # Students read the public case, and nothing of the hidden one.
    assert "q1 results: All test cases passed!" in feedback.page
    assert "square(-2)" not in feedback.page
