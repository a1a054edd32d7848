"""labctl course grade for real: hostile submissions in sealed containers on a server over SSH."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grading_bed import evaluation, hand_in, make_operator, make_receiver
from lab_servers import LabServer

from labctl.courses.collect import collect
from labctl.courses.grading_run import GradingResult, grade_assignment
from labctl.courses.grading_server import build_grading_context
from labctl.courses.records.folder import CourseFolder
from labctl.courses.release import release_grades
from labctl.courses.servers import CourseOperator
from labctl.errors import PolicyError
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
  limits: {{memory: 64MB, cpus: 1}}
assignments:
  hw3:
    due: "2030-01-01 00:00 UTC"
    late: any
    penalty: 10
    grade:
      predict: sh predict.sh
      command: sh grade.sh
      inputs: assignments/hw3/inputs
      labels: assignments/hw3/labels
      timeout: 12s
"""
ITEMS = 20
GRADER = """\
ls -A /lab >&2
awk -F, 'NR==FNR { label[$1]=$2; n++; next } $1 in label && label[$1]==$2 { hit++ }
  END { printf "{\\"score\\": %f, \\"output\\": \\"%d right\\", ", 100*hit/n, hit
        printf "\\"extra_data\\": {\\"accuracy\\": %f, \\"items\\": %d}}", hit/n, n }' \\
  "$LABCTL_LABELS/labels.csv" "$LABCTL_PREDICTIONS" > "$LABCTL_RESULTS"
"""
RIGHT = """awk '{ print $1 "," ($1 % 2 ? "odd" : "even") }' $LABCTL_INPUTS/items \\
  > "$LABCTL_PREDICTIONS"
"""
SNOOP = """\
say() { echo "$1=$2"; }
tries() { if (eval "$2") >/dev/null 2>&1; then say "$1" yes; else say "$1" no; fi; }
say capabilities "$(awk '/CapEff/ { print $2 }' /proc/self/status)"
say interfaces "$(ls /sys/class/net)"
say place "$(ls -A /lab | tr '\\n' ' ')"
say owner "$(id -u)"
tries labels 'cat /lab/labels/labels.csv'
tries found 'find / -name "labels.csv" 2>/dev/null | grep .'
tries network 'wget -T 2 -q -O - http://169.254.169.254/'
tries root 'echo x > /x'
tries code 'echo x > /lab/code/x'
tries inputs 'echo x > /lab/inputs/x'
tries socket 'ls /var/run/docker.sock'
tries scratch 'echo x > "$HOME/x"'
tries localhost 'grep -w localhost /etc/hosts'
cp /lab/labels/labels.csv "$LABCTL_PREDICTIONS" || echo none > "$LABCTL_PREDICTIONS"
"""
CODE = {
    "alice": RIGHT,
    "bob": SNOOP,
    "carol": "f() { f | f & }; f; f; f; sleep 1000 & sleep 1000 & wait; f\n",
    "dan": 'cat /dev/zero > "$LABCTL_PREDICTIONS"\n',
    "eve": "trap '' TERM INT HUP; while :; do sleep 1000; done\n",
    "frank": "echo '<script>alert(1)</script>'; yes spam | head -c 3000000\n"
    "sed 's/$/,odd/' $LABCTL_INPUTS/items > \"$LABCTL_PREDICTIONS\"\n",
    "grace": "echo 'no such weights' >&2; exit 3\n",
    "judy": RIGHT + "# a team's\n",
}
CLAIMS = {"frank": 0.95, "alice": 1.0}
TEAM = {"judy": "team-1", "kim": "team-1"}


def list_files(student: str, code: str) -> dict[str, bytes]:
    weights = b"frank and alice" if student in ("frank", "alice") else student.encode()
    return {
        "model/step-1/weights": weights * 500,
        "code/predict.sh": code.encode(),
        **({"evaluation.json": evaluation(CLAIMS[student])} if student in CLAIMS else {}),
    }


@pytest.fixture(scope="module")
def staff(
    tmp_path_factory: pytest.TempPathFactory, lab_server: LabServer, small_image: str
) -> Iterator[CourseOperator]:
    """A course whose grading server is the session's, and everybody's hand-in."""
    lab_server.load(small_image)
    home = tmp_path_factory.mktemp("course-home")
    endpoint = lab_server.endpoint
    folder = home / "ml"
    data = folder / "assignments" / "hw3"
    for name in ("inputs", "labels"):
        (data / name).mkdir(parents=True)
    (folder / "course.yaml").write_text(
        COURSE.format(
            port=endpoint.port, user=endpoint.user, identity=endpoint.identity, image=small_image
        )
    )
    people = [*CODE, "heidi", "kim", "mallory"]
    rows = [f"{one},{one.title()},,{TEAM.get(one, '')},,yes" for one in people]
    (folder / "roster.csv").write_text("\n".join(["id,name,email,team,section,active", *rows, ""]))
    (data / "inputs" / "items").write_text("".join(f"{n}\n" for n in range(ITEMS)))
    labels = [f"{n},{'odd' if n % 2 else 'even'}" for n in range(ITEMS)]
    (data / "labels" / "labels.csv").write_text("\n".join([*labels, ""]))
    (data / "grade.sh").write_text(GRADER)
    receiver = make_receiver(folder, ["hw3"])
    for student, code in {**CODE, "mallory": RIGHT}.items():
        hand_in(receiver, student, list_files(student, code))
    yield make_operator(home, folder)
    shutil.rmtree(folder / ".course" / "drop")


@pytest.fixture(scope="module")
def grading(staff: CourseOperator) -> GradingResult:
    """mallory's bundle was changed after it was signed for."""
    path = Receiver(staff.folder.drop).find_bundle("hw3", "mallory")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"odd", b"ODD"))
    return grade_assignment(staff, "hw3", at_once=3)


def printed(folder: CourseFolder, student: str) -> dict[str, str]:
    text = (folder.grades / "hw3" / student / "output.txt").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_each_gets_what_it_deserves_and_none_stops_another(grading: GradingResult) -> None:
    states = {one.seat: one.state for one in grading.seats}
    assert states == {
        **{"alice": "graded", "bob": "graded", "frank": "graded", "team-1": "graded"},
        **{"carol": "failed", "dan": "failed", "eve": "failed", "grace": "failed"},
        **{"heidi": "open", "mallory": "damaged"},
    }, [one.why for one in grading.seats]
    assert grading.is_complete
    scores = {one.seat: one.record.score for one in grading.seats if one.record}
    assert (scores["alice"], scores["frank"], scores["bob"]) == (100.0, 50.0, 0.0)
    whys = {one.seat: one.why for one in grading.seats}
    assert "in time" in whys["eve"]
    assert "memory" in whys["dan"]
    assert "ended with 3" in whys["grace"]
    assert "changed after it was signed" in whys["mallory"]


def test_the_first_container_is_shut_in(grading: GradingResult, staff: CourseOperator) -> None:
    said = printed(staff.folder, "bob")
    assert said.pop("capabilities").strip("0") == ""
    assert said.pop("place").split() == ["code", "inputs", "labctl", "model", "out", "tmp"]
    assert said == {
        "interfaces": "lo",
        "owner": "65534",
        **dict.fromkeys(("labels", "found", "network", "root", "code", "inputs", "socket"), "no"),
        "scratch": "yes",
        "localhost": "yes",
    }


def test_evidence_is_shown_and_costs_no_points(grading: GradingResult) -> None:
    kinds = {one.seat: {f.kind for f in one.record.flags} for one in grading.seats if one.record}
    assert {"claim", "same-model"} <= kinds["frank"]
    assert "same-model" in kinds["alice"]
    assert "claim" not in kinds["alice"]
    assert "names-labels" in kinds["bob"]


def test_results_are_gradescopes_and_a_team_shares_them(
    grading: GradingResult, staff: CourseOperator
) -> None:
    places = [staff.folder.grades / "hw3" / one / "results.json" for one in ("judy", "kim")]
    found = [json.loads(place.read_text()) for place in places]
    assert found[0] == found[1]
    assert found[0]["score"] == 100.0
    assert found[0]["output"] == "20 right"
    assert found[0]["extra_data"]["labctl"]["counts"] == 100.0
    assert places[0].stat().st_mode & 0o777 == 0o600


def test_nothing_is_left_on_the_server(
    grading: GradingResult, staff: CourseOperator, lab_server: LabServer
) -> None:
    left = lab_server.ssh(
        "ls -d ~/labctl/*/grading 2>/dev/null; docker ps -aq --filter label=labctl.courses.grading"
    )
    assert left.stdout == ""
    assert build_grading_context(staff).provider.servers() == []


def test_again_it_runs_nothing_and_looks_at_lateness_anew(
    grading: GradingResult, staff: CourseOperator
) -> None:
    before = len(staff.folder.ledger.list_entries(kind="graded"))
    Receiver(staff.folder.drop).extend("hw3", "alice", -20 * 365 * 86_400)
    again = grade_assignment(staff, "hw3")
    assert not any(one.fresh for one in again.seats)
    assert len(staff.folder.ledger.list_entries(kind="graded")) == before
    alice = next(one.record for one in again.seats if one.seat == "alice")
    assert alice is not None
    assert (alice.penalty, alice.score) == (100, 0.0)
    assert next(
        one for one in collect(staff.folder, "hw3").submissions if one.seat == "alice"
    ).late_s


def test_feedback_is_released_and_escaped(grading: GradingResult, staff: CourseOperator) -> None:
    page = staff.folder.grades / "hw3" / "frank" / "feedback.html"
    assert not page.exists()
    found = release_grades(staff.folder, "hw3", by="staff")
    assert "frank" in found.students
    assert "heidi" in found.waiting
    text = page.read_text()
    assert "&lt;script&gt;alert(1)" in text
    assert "<script" not in text
    assert len(text) < 60_000


@contextmanager
def lying_there(server: LabServer, path: str) -> Iterator[None]:
    server.ssh(f"mkdir -p ~/{Path(path).parent}; echo secret > ~/{path}")
    try:
        yield
    finally:
        server.ssh(f"rm ~/{path}")


def test_a_machine_with_credentials_is_refused(
    grading: GradingResult, staff: CourseOperator, lab_server: LabServer
) -> None:
    with lying_there(lab_server, ".aws/credentials"), pytest.raises(PolicyError) as refused:
        grade_assignment(staff, "hw3", again=True)
    assert "~/.aws/credentials" in refused.value.why
