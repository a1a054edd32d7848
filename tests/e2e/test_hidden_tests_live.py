"""Hidden tests for real: submissions that try to read them, to pass them, and to forge results."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from grading_bed import hand_in, make_operator, make_receiver
from guide_session import use_machine
from lab_servers import ROOT, LabServer
from transcripts import make_session, replay

from labctl.courses.grading_run import GradingResult, grade_assignment
from labctl.courses.records.folder import make_private
from labctl.courses.release import release_grades
from labctl.courses.servers import CourseOperator
from labctl.submissions.receiver import Receiver

pytestmark = pytest.mark.engine

COURSE = """\
course: ml
server: {{provider: static, static: {{hosts: [unused.example]}}}}
grading:
  server:
    provider: static
    static: {{hosts: [{{host: 127.0.0.1, port: {port}, user: {user}, identity: {identity}}}]}}
  image: {image}
  limits: {{memory: 128MB, cpus: 1}}
assignments:
  sums:
    due: "2030-01-01 00:00 UTC"
    points: 10
    tests: {{hidden: assignments/sums/hidden}}
    grade: {{timeout: 60s}}
  upload:
    due: "2030-01-01 00:00 UTC"
    points: 10
    grade: {{autograder: assignments/upload/autograder, timeout: 60s}}
  open:
    due: "2030-01-01 00:00 UTC"
    points: 4
    tests: {{public: assignments/open/public}}
    grade: {{timeout: 60s}}
"""
GUIDE = ROOT / "docs" / "grading.md"
COURSE_OF_GUIDE = ROOT / "tests" / "guide" / "ml"
CANARY = "canary-5d1f"
PROBE = """\
import model

def sums():
    return [model.add(a, b) for a, b in ((1, 2), (5, 7))]

def shouted():
    return model.shout("hello")

def greeting():
    return getattr(model, "GREETING", "")
"""
TESTS = f"""\
import time
import pytest

SECRET = "{CANARY}"

@pytest.mark.points(5)
def test_sums_are_right(outputs):
    assert outputs["sums"] == [3, 12], SECRET

@pytest.mark.points(3, visibility="visible")
@pytest.mark.parametrize("position", [0, 4])
def test_shouts(outputs, position):
    assert outputs["shouted"][position] == "HELLO"[position]

@pytest.mark.points(2, visibility="after_due_date")
def test_greets(outputs):
    assert outputs["greeting"] == "hi", f"{{SECRET}} at {{time.time()}}"
"""
RIGHT = "def add(a, b):\n    return a + b\n\ndef shout(text):\n    return text.upper()\n"
WRONG = "def add(a, b):\n    return 0\n\ndef shout(text):\n    return 'HXXXX'\n"
# It prints all that it can read of staff's files, its environment and its callers' code.
SNOOP = (
    WRONG
    + """
import inspect, os, subprocess, sys, traceback
for frame in inspect.stack():
    print(frame.filename, frame.code_context)
print(dict(os.environ), sys.argv, sys.path, list(sys.modules))
try:
    raise ValueError
except ValueError:
    traceback.print_stack(file=sys.stdout)
commands = (
    "cat /lab/labctl/*",
    "cat /lab/staff/*; ls -lR /lab",
    "cat /proc/*/cmdline /proc/*/environ",
    "find / -name 'test_s*' -not -path '/proc/*'",
    "grep -rs canary /lab /tmp /home /root /run /etc",
)
for command in commands:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace")
    print(done.stdout[-3000:])
"""
)
HIJACK = "import os, sys\nprint('hijacked', __name__)\n"
PASS_ALL = (
    HIJACK
    + """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
)
HIJACKED = {
    "model.py": WRONG,
    **dict.fromkeys(("conftest.py", "tests/conftest.py", "cheat.py"), PASS_ALL),
    **dict.fromkeys(("sitecustomize.py", "usercustomize.py", "pytest.py", "json.py"), HIJACK),
    "pytest.ini": "[pytest]\naddopts = -p cheat\npython_functions = nothing\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p cheat\n",
    "tox.ini": "[pytest]\naddopts = -p cheat\n",
    "cheat-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cheat\nVersion: 1.0\n",
    "cheat-1.0.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n",
}
# It writes what would be full marks everywhere, and ends the program that called it.
FORGER = """
import json, os, pathlib, signal
tests = [{"name": "all", "score": 10, "max_score": 10}]
full = json.dumps({"score": 10, "tests": tests, "sums": {"value": "x"}})
for place in ("/lab/out/results.json", "/lab/out/predictions", "results.json", "/lab/results.json"):
    try:
        pathlib.Path(place).write_text(full)
    except OSError:
        pass
"""
ESCAPES = (
    "GREETING = '\\x1b]0;owned\\x07\\x9b2J\\u202e<script>alert(1)</script>\\ud800'\n"
    "print(GREETING.encode('utf-8', 'replace'))\n"
    "def add(a, b):\n    return GREETING\n\ndef shout(text):\n    return [GREETING] * 9\n"
)
# It goes on after its functions have returned, and prints the time until it is ended.
WATCHER = (
    WRONG
    + """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        print(f"at {time.time()}", flush=True)
        time.sleep(0.02)
"""
)
CODE: dict[str, Mapping[str, str]] = {
    "alice": {"model.py": RIGHT + "GREETING = 'hi'\n"},
    "bob": {"model.py": SNOOP},
    "carol": HIJACKED,
    "dan": {"model.py": FORGER + "os.kill(os.getppid(), signal.SIGKILL)\n"},
    "eve": {"model.py": FORGER + "os._exit(0)\n"},
    "frank": {"model.py": ESCAPES},
    "grace": {"model.py": RIGHT.replace("return a + b", "os._exit(7)") + "import os\n"},
    "ivan": {"model.py": WATCHER},
    "judy": {"model.py": RIGHT.replace("return a + b", "return 'x' * 5_000_000")},
}
# An autograder as Gradescope's documentation has it: bash, its own tests, results.json.
RUN_AUTOGRADER = """\
#!/usr/bin/env bash
set -e
cp /autograder/submission/model.py /autograder/source/model.py
cd /autograder/source
python3 run_tests.py
"""
RUN_TESTS = """\
import json, socket
# As otter's do, for the log of a notebook.
socket.create_server(("localhost", 0)).close()
try:
    import model
    score = 6.0 if model.add(1, 2) == 3 else 0.0
except Exception:
    score = 0.0
tests = [
    {"name": "sum", "score": score, "max_score": 6, "output": "\\x1b[2J<script>alert(1)</script>"},
    {"name": "canary-5d1f", "score": 4, "max_score": 4, "visibility": "hidden"},
]
with open("/autograder/results/results.json", "w") as file:
    json.dump({"tests": tests, "stdout_visibility": "hidden"}, file)
print("canary-5d1f")
"""
PUBLIC_TESTS = """\
import pytest
from model import add

@pytest.mark.points(4)
def test_add():
    assert add(1, 2) == 3
"""


@pytest.fixture(scope="module")
def staff(
    tmp_path_factory: pytest.TempPathFactory, lab_server: LabServer, image_with_pytest: str
) -> Iterator[CourseOperator]:
    lab_server.load(image_with_pytest)
    home = tmp_path_factory.mktemp("hidden-home")
    folder = home / "ml"
    files = {
        "sums/hidden/probe.py": PROBE,
        "sums/hidden/test_sums.py": TESTS,
        "upload/autograder/run_autograder": RUN_AUTOGRADER,
        "upload/autograder/run_tests.py": RUN_TESTS,
        "open/public/test_add.py": PUBLIC_TESTS,
    }
    for name, text in files.items():
        file = folder / "assignments" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    endpoint = lab_server.endpoint
    text = COURSE.format(
        port=endpoint.port, user=endpoint.user, identity=endpoint.identity, image=image_with_pytest
    )
    (folder / "course.yaml").write_text(text)
    rows = [f"{one},{one.title()},,,,yes" for one in CODE]
    (folder / "roster.csv").write_text("\n".join(["id,name,email,team,section,active", *rows, ""]))
    receiver = make_receiver(folder, ["sums", "upload", "open"])
    for student, code in CODE.items():
        hand_in_code(receiver, "sums", student, code)
    yield make_operator(home, folder)
    shutil.rmtree(folder / ".course" / "drop")


def hand_in_code(
    receiver: Receiver, assignment: str, student: str, code: Mapping[str, str]
) -> None:
    files = {f"code/{name}": text.encode() for name, text in code.items()}
    weights = {"model/step-1/weights": student.encode() * 500}
    hand_in(receiver, student, {**weights, **files}, assignment)


@pytest.fixture(scope="module")
def grading(staff: CourseOperator) -> GradingResult:
    return grade_assignment(staff, "sums", at_once=3)


@pytest.fixture(scope="module")
def released(staff: CourseOperator, grading: GradingResult) -> dict[str, str]:
    """Everything that a student gets to see, by student."""
    release_grades(staff.folder, "sums", by="staff")
    receiver = Receiver(staff.folder.drop)
    shown = {}
    for student in CODE:
        feedback = receiver.feedback("sums", student)
        assert feedback is not None
        shown[student] = feedback.text + feedback.page
    return shown


def list_scores(grading: GradingResult) -> dict[str, float | None]:
    return {one.seat: one.record.score for one in grading.seats if one.record}


def read_results(staff: CourseOperator, student: str, assignment: str = "sums") -> dict[str, Any]:
    file = staff.folder.grades / assignment / student / "results.json"
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def read_private(staff: CourseOperator, student: str) -> str:
    return (staff.folder.grades / "sums" / student / "tests.txt").read_text()


def test_each_test_gives_its_points(grading: GradingResult, staff: CourseOperator) -> None:
    results = read_results(staff, "alice")
    tests = {test["name"]: (test["score"], test["visibility"]) for test in results["tests"]}
    assert tests == {
        "test_sums.py::test_sums_are_right": (5.0, "hidden"),
        "test_sums.py::test_shouts[0]": (1.5, "visible"),
        "test_sums.py::test_shouts[4]": (1.5, "visible"),
        "test_sums.py::test_greets": (2.0, "after_due_date"),
    }
    assert results["score"] == 10.0
    assert grading.is_complete


def test_no_attack_gives_more_than_the_code_earns(grading: GradingResult) -> None:
    scores = list_scores(grading)
    assert scores.pop("alice") == 10.0
    # The code of these is wrong, but one letter that it shouts is right, as it is for ivan.
    assert {scores.pop(name) for name in ("bob", "carol", "ivan")} == {1.5}
    # One function ends its process: the others count.
    assert scores.pop("grace") == 3.0
    assert scores == {"dan": 0.0, "eve": 0.0, "frank": 0.0, "judy": 0.0}


def test_students_code_finds_no_hidden_test(grading: GradingResult, staff: CourseOperator) -> None:
    seen = read_private(staff, "bob").partition("hidden tests:")[2]
    assert "def sums" in seen, "it could read the probe, which has no expected value"
    assert "/lab/labctl/probe.py" in seen
    for secret in (CANARY, "test_sums", "'LABCTL_RESULTS'", "'LABCTL_LABELS'"):
        assert secret not in seen.partition("= FAILURES =")[0]


def test_nothing_that_a_student_brings_runs_beside_the_tests(
    grading: GradingResult, staff: CourseOperator
) -> None:
    assert "hijacked" not in read_private(staff, "carol")
    names = [test["name"] for test in read_results(staff, "carol")["tests"]]
    assert len(names) == 4


def test_the_students_program_has_ended_before_a_test_runs(
    grading: GradingResult, staff: CourseOperator
) -> None:
    last = max(float(text) for text in re.findall(r"^at ([\d.]+)$", read_private(staff, "ivan"),
                                                  re.MULTILINE))  # fmt: skip
    tests = {test["name"]: test["output"] for test in read_results(staff, "ivan")["tests"]}
    match = re.search(rf"{CANARY} at ([\d.]+)", tests["test_sums.py::test_greets"])
    assert match is not None
    assert last < float(match[1])


def test_a_forged_result_is_no_result(grading: GradingResult, staff: CourseOperator) -> None:
    states = {one.seat: (one.state, one.why) for one in grading.seats}
    assert states["dan"][0] == states["eve"][0] == "failed"
    assert "the process ended with 0" in states["eve"][1]
    assert "more output than is allowed" in states["judy"][1]
    assert read_results(staff, "dan")["tests"] == []


def test_students_see_neither_names_nor_output_of_hidden_tests(released: dict[str, str]) -> None:
    for student, shown in released.items():
        for secret in (CANARY, "test_sums_are_right", "test_greets", "canary"):
            assert secret not in shown, student
    assert "test_shouts[4]: 1.5/1.5" in released["alice"]
    assert "test_shouts[4]: 0/1.5" in released["bob"]


def test_escapes_and_scripts_of_outputs_are_shown_as_text(
    released: dict[str, str], staff: CourseOperator
) -> None:
    page = (staff.folder.grades / "sums" / "frank" / "feedback.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    results = json.dumps(read_results(staff, "frank"), ensure_ascii=False)
    for text in (page, results, read_private(staff, "frank")):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "<script" not in page


@pytest.mark.long
def test_an_autograder_in_gradescopes_form_runs_as_it_is(staff: CourseOperator) -> None:
    receiver = Receiver(staff.folder.drop)
    hand_in_code(receiver, "upload", "alice", {"model.py": RIGHT})
    hand_in_code(receiver, "upload", "bob", {"model.py": "import os\nos._exit(0)\n"})
    found = grade_assignment(staff, "upload")
    assert list_scores(found)["alice"] == 10.0
    bob = next(one for one in found.seats if one.seat == "bob")
    assert (bob.state, bob.record and bob.record.score) == ("failed", 0.0)
    assert "wrote no results" in bob.why
    release_grades(staff.folder, "upload", by="staff")
    feedback = receiver.feedback("upload", "alice")
    assert feedback is not None
    assert "<td>sum</td><td>6</td>" in feedback.page
    assert CANARY not in feedback.page + feedback.text
    assert not re.search("[\x1b]|<script", feedback.page)


@pytest.mark.long
def test_public_tests_give_points_and_load_nothing_of_the_student(staff: CourseOperator) -> None:
    receiver = Receiver(staff.folder.drop)
    hand_in_code(receiver, "open", "alice", {"model.py": RIGHT})
    hand_in_code(receiver, "open", "carol", {**HIJACKED, "tests/test_add.py": "def test_x(): ..."})
    found = grade_assignment(staff, "open")
    assert list_scores(found) == {"alice": 4.0, "carol": 0.0}
    (test,) = read_results(staff, "carol", "open")["tests"]
    assert (test["name"], test["visibility"]) == ("test_add.py::test_add", "visible")


@pytest.mark.long
def test_the_page_about_grading_shows_what_a_dry_run_prints(
    tmp_path: Path, lab_server: LabServer, image_with_pytest: str
) -> None:
    lab_server.load(image_with_pytest)
    wheels = os.environ.get("LABCTL_WHEELHOUSE", "")
    session = make_session(tmp_path, COURSE_OF_GUIDE, {"LABCTL_WHEELHOUSE": wheels})
    make_private(session.directory)
    file = session.directory / "course.yaml"
    grading = {
        "server": use_machine(session, tmp_path, lab_server.endpoint),
        "image": image_with_pytest,
    }
    text = re.sub(r"grading:\n.*\n", f"grading: {json.dumps(grading)}\n", file.read_text())
    file.write_text(text)
    assert "\n".join(replay(GUIDE, "server", session)) == ""


@pytest.mark.long
def test_staffs_own_solution_is_tried_in_a_container_on_this_machine(
    tmp_path: Path, base_image: str, image_with_pytest: str
) -> None:
    session = make_session(tmp_path, COURSE_OF_GUIDE, {"LABCTL_BASE_IMAGE": base_image})
    make_private(session.directory)
    file = session.directory / "course.yaml"
    grading = json.dumps({"image": image_with_pytest})
    file.write_text(re.sub(r"grading:\n.*\n", f"grading: {grading}\n", file.read_text()))
    output = session.run("labctl course grade hw3 --dry-run --yes")
    assert "assignments/hw3/reference: graded 90/100" in output
    name = re.search(r"local container \((\S+)\)", output)
    assert name is not None
    assert name[1] not in session.run("docker ps --all --format '{{.Names}}'")


@pytest.mark.long
def test_an_image_built_again_under_its_name_reaches_the_grading_server(
    tmp_path: Path, base_image: str, small_image: str, image_with_pytest: str
) -> None:
    name = f"labctl-test-rebuilt:{tmp_path.name}"
    session = make_session(tmp_path, COURSE_OF_GUIDE, {"LABCTL_BASE_IMAGE": base_image})
    make_private(session.directory)
    file = session.directory / "course.yaml"
    grading = json.dumps({"image": name})
    file.write_text(re.sub(r"grading:\n.*\n", f"grading: {grading}\n", file.read_text()))
    try:
        session.run(f"docker tag {image_with_pytest} {name}")
        output = session.run("labctl course grade hw3 --dry-run --keep-server --yes")
        assert "assignments/hw3/reference: graded 90/100" in output
        session.run(f"docker tag {small_image} {name}")
        output = session.run("labctl course grade hw3 --dry-run --yes")
        assert f"sending {name}" in output
        assert "assignments/hw3/reference: failed" in output
    finally:
        session.run(f"docker rmi {name}")
