"""Runs an instructor's week: each command as a person would type it.

The machines of the simulated AWS only accept SSH; one real lab server on this machine grades. The
last line of output is a JSON object with the results. Everything, including HOME, is in a temporary
directory that is removed at the end, except the grades, which stay in ./demo-course.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.courses.records.folder import CourseFolder
from labctl.courses.regrades import RegradeDesk
from labctl.servers.host_keys import ensure_key_pair
from labctl.submissions import bundle, manifest
from labctl.submissions.bundle import BundleSource
from labctl.submissions.manifest import BundleFile, BundleManifest, CodeCommit
from labctl.submissions.receiver import Receiver

LABCTL = str(Path(sys.executable).with_name("labctl"))
RESULTS = Path("demo-course").absolute()
STUDENTS, SUBMISSIONS = 30, 12
ITEMS = 20
COURSE = """\
course: ml-2026
server:
  provider: aws
  gpu: any
  spot: prefer
  max_price: 1.00
  idle: 30m
  aws: {scheduler_role: "arn:aws:iam::123456789012:role/labctl-deadline"}
per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}
hours:
  - {days: [mon, wed], from: "10:00", to: "12:00", zone: Europe/Berlin, prewarm: 20m}
keeper: {host: 127.0.0.1, user: nobody}
grading:
  server: {provider: static, static: {hosts: [HOST]}}
  image: IMAGE
  limits: {memory: 128MB, cpus: 1}
assignments:
  hw3:
    due: "2030-01-01 00:00 UTC"
    late: {per_day: 10%, at_most: 2d, free_days: 3}
    points: 120
    rubric: {presentation: 20}
    grade:
      predict: sh predict.sh
      command: sh grade.sh
      inputs: assignments/hw3/inputs
      labels: assignments/hw3/labels
      timeout: 20s
"""
GRADER = """\
awk -F, 'NR==FNR { label[$1]=$2; n++; next } $1 in label && label[$1]==$2 { hit++ }
  END { printf "{\\"score\\": %f, \\"output\\": \\"%d of %d right\\"}", 100*hit/n, hit, n }' \\
  "$LABCTL_LABELS/labels.csv" "$LABCTL_PREDICTIONS" > "$LABCTL_RESULTS"
"""
RIGHT = """awk '{ print $1 "," ($1 % 2 ? "odd" : "even") }' $LABCTL_INPUTS/items \\
  > "$LABCTL_PREDICTIONS"
"""
GUESS = "sed 's/$/,odd/' $LABCTL_INPUTS/items > \"$LABCTL_PREDICTIONS\"\n"
HOSTILE = "f() { f | f & }; f; f; sleep 1000 & wait; f\n"


def labctl(*words: str, cwd: Path, code: int = 0, capture: bool = False) -> str:
    """Run a command in this terminal; return its standard output if captured."""
    print(f"\n$ labctl {shlex.join(words)}", flush=True)
    out = subprocess.PIPE if capture else None
    done = subprocess.run([LABCTL, *words], cwd=cwd, text=True, stdout=out)
    if done.returncode != code:
        message = f"exited with code {done.returncode}, not {code}"
        raise SystemExit(f"labctl {shlex.join(words)} {message}")
    return done.stdout or ""


def run_json(*words: str, cwd: Path, code: int = 0) -> dict[str, object]:
    """Return the output of a command with --json, without showing it."""
    words = words if "--json" in words else (*words, "--json")
    body: dict[str, object] = json.loads(labctl(*words, cwd=cwd, code=code, capture=True))
    return body


def announce(text: str) -> None:
    print(f"\n# {text}", flush=True)


@contextmanager
def rehearse_aws(home: Path) -> Iterator[None]:
    """Run a simulated AWS in its own process, and export its variables to this process."""
    words = [LABCTL, "rehearse", "aws", "--set", "boot=sshd"]
    print(f"\n$ labctl {shlex.join(words[1:])} &", flush=True)
    with subprocess.Popen(
        words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as cloud:
        try:
            assert cloud.stdout is not None
            for line in cloud.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "unset":
                    for name in rest.split():
                        os.environ.pop(name, None)
                name, equals, value = rest.partition("=")
                if word == "export" and equals:
                    os.environ[name] = shlex.split(value)[0]
                if "LABCTL_SERVER_AWS_ADDRESS_FROM" in os.environ:
                    break
            else:
                raise SystemExit("the rehearsal did not start")
            yield
        finally:
            cloud.terminate()


def write_canvas_export(file: Path) -> None:
    """Write a roster as Canvas exports it.

    It has a row of points, a test student, reversed names and a BOM.
    """
    rows = [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "hw3 (4711)"],
        ["    Points Possible", "", "", "", "", "120.00"],
        *(
            [f"Learner{n:02}, Lea", str(900 + n), f"U{n:04}", f"lea{n:02}", f"lab-{n % 2 + 1}", ""]
            for n in range(1, STUDENTS + 1)
        ),
        ["Student, Test", "999", "", "7f3a9c", "lab-1", ""],
    ]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    file.write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode())


def write_course_files(course: Path, grader_host: str) -> None:
    """Write the staff's files: course.yaml, the hidden set, the grader's program."""
    image = os.environ.get("LABCTL_BASE_IMAGE") or "debian:bookworm-slim"
    text = COURSE.replace("IMAGE", image).replace("HOST", grader_host)
    (course / "course.yaml").write_text(text)
    data = course / "assignments" / "hw3"
    for name in ("inputs", "labels"):
        (data / name).mkdir(parents=True, exist_ok=True)
    (data / "inputs" / "items").write_text("".join(f"{n}\n" for n in range(ITEMS)))
    labels = [f"{n},{'odd' if n % 2 else 'even'}" for n in range(ITEMS)]
    (data / "labels" / "labels.csv").write_text("\n".join([*labels, ""]))
    (data / "grade.sh").write_text(GRADER)


def submit(receiver: Receiver, student: str, code: str) -> None:
    """Store one submission as the receiver does: complete, stamped and signed."""
    contents = {
        "model/step-1/weights": hashlib.sha256(student.encode()).digest() * 64,
        "code/predict.sh": code.encode(),
    }
    sources = [
        BundleSource(
            file=BundleFile(
                path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest()
            ),
            content=content,
        )
        for path, content in contents.items()
    ]
    bundle_manifest = BundleManifest(
        kind=manifest.KIND,
        version=1,
        assignment="hw3",
        course="ml-2026",
        student=student,
        lab="digits",
        run="night",
        checkpoint="step-1",
        record={"id": "night", "state": "exited", "exit_code": 0},
        code=CodeCommit(),
        files=tuple(source.file for source in sources),
    )
    packed = io.BytesIO()
    bundle.write_bundle(bundle_manifest, sources, packed)
    data = packed.getvalue()
    submission = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*submission)
    receiver.write(*submission, 0, data)
    receiver.finish(*submission)


def submit_all(course: Path) -> None:
    folder = CourseFolder(course)
    receiver = Receiver(folder.drop)
    names = [student.id for student in folder.list_students()][:SUBMISSIONS]
    codes = [HOSTILE, GUESS, *[RIGHT] * (SUBMISSIONS - 2)]
    announce(f"{SUBMISSIONS} students submit; one submission is a fork bomb, one a guess")
    for name, code in zip(names, codes, strict=True):
        submit(receiver, name, code)


def create_course(home: Path, grader_host: str) -> Path:
    """Create a course from a roster, and check it before any server is created."""
    announce(f"Monday: a course of {STUDENTS} students, from a Canvas export")
    write_canvas_export(home / "canvas.csv")
    labctl("course", "init", "ml-2026", "--roster", "canvas.csv", cwd=home)
    course = home / "ml-2026"
    write_course_files(course, grader_host)
    labctl("course", "plan", cwd=course)
    key = ensure_key_pair(home / "keeper_host_key").rpartition(" ")[0]
    labctl("course", "invite", "--all", "--host-key", key, cwd=course)
    labctl("course", "check", cwd=course, code=1)  # reports that nobody has joined yet
    return course


def run_class(course: Path) -> dict[str, object]:
    """Run a class: servers for all students, staff's commands, and the servers' end."""
    announce("Wednesday: a class. These machines only accept SSH, so labctl does not prepare them")
    started_s = time.monotonic()
    labctl("course", "up", "--login-only", "--yes", cwd=course)
    up_s = time.monotonic() - started_s
    labctl("course", "up", "--login-only", "--yes", "--only", "lea01", cwd=course)
    seats = run_json("course", "status", cwd=course)["seats"]
    assert isinstance(seats, list)
    labctl("course", "status", cwd=course)
    labctl("course", "message", "lab starts at 10", cwd=course)
    slides = course.parent / "slides.txt"
    slides.write_text("gradient descent\n")
    labctl("course", "push", str(slides), cwd=course)
    answers = run_json("course", "ssh", "--all", "--json", "--", "hostname", cwd=course)["servers"]
    assert isinstance(answers, list)
    labctl("course", "extend", "lea01", "2h", "--why", "a long training", cwd=course)
    labctl("course", "budget", "lea01", "+5", cwd=course)
    labctl("course", "due", "hw3", "lea02", "+3d", cwd=course)
    labctl("course", "status", "--refresh", "--group", "lab-1", cwd=course)
    labctl("course", "down", "--group", "lab-2", "--yes", cwd=course)
    return {
        "made": len({entry["server_id"] for entry in seats if entry["state"] == "running"}),
        "distinct_hosts": len({entry["stdout"] for entry in answers}),
        "up_seconds": round(up_s, 1),
    }


def grade_submissions(course: Path) -> dict[str, object]:
    """Grade the submissions on a server without credentials, and export the grades to Canvas."""
    announce("Friday: submissions and grades")
    submit_all(course)
    labctl("course", "collect", "hw3", cwd=course)
    labctl("course", "grade", "hw3", "--yes", cwd=course)
    answered = mark_submissions(course)
    labctl("course", "grades", "hw3", "--rubric", cwd=course)
    out = course.parent / "canvas-grades.csv"
    words = ["--format", "canvas", "--out", str(out), "--release", "--yes"]
    labctl("course", "grades", "hw3", *words, cwd=course)
    rows = list(csv.reader(out.read_text(encoding="utf-8-sig").splitlines()))
    column = next(n for n, name in enumerate(rows[0]) if name.startswith("hw3"))
    grades = [row[column] for row in rows[1:] if row[column] and "Points" not in row[0]]
    labctl("course", "cost", cwd=course)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copy2(out, RESULTS / out.name)
    labctl("course", "statistics", "hw3", cwd=course)
    full = sum(float(grade) == 120.0 for grade in grades)
    return {"graded": len(grades), "full_marks": full, "regrade_accepted": answered}


def mark_submissions(course: Path) -> bool:
    """Mark the presentations, release the grades, and answer a student's regrade request."""
    announce("Two graders mark the presentations")
    labctl("course", "mark", "hw3", "--list", cwd=course)
    folder = CourseFolder(course)
    students = [student.id for student in folder.list_students()][:SUBMISSIONS]
    for number, student in enumerate(students):
        points = "15" if student == "lea03" else "20"
        words = ("mark", "hw3", student, "presentation", points, "--note", "on time")
        labctl("course", "--as", ("ann", "ben")[number % 2], *words, cwd=course)
    labctl("course", "grades", "hw3", "--release", cwd=course)
    announce("lea03 asks for a regrade, as labctl submit --ask-regrade does")
    RegradeDesk(folder).record_request("hw3", "lea03", "Slide 4 has the confusion matrix.")
    labctl("course", "regrades", cwd=course)
    answer = ("--answer", "You are right: 20 instead of 15", "--accept")
    labctl("course", "--as", "ann", "regrades", "hw3", "lea03", *answer, cwd=course)
    mark = ("mark", "hw3", "lea03", "presentation", "20", "--replace")
    labctl("course", "--as", "ann", *mark, cwd=course)
    regrades = run_json("course", "regrades", "hw3", "--all", cwd=course)["regrades"]
    assert isinstance(regrades, list)
    return [request["accepted"] for request in regrades] == [True]


def end_term(course: Path) -> dict[str, object]:
    """End the term; the provider confirms that nothing is left that bills."""
    announce("The term ends")
    labctl("course", "down", "--end-of-term", "--yes", cwd=course)
    # The second call has the same result.
    proof = run_json("course", "down", "--end-of-term", "--yes", cwd=course)
    labctl("orphans", "--provider", "aws", cwd=course)
    return {"clean": proof["clean"]}


@contextmanager
def start_grader(home: Path) -> Iterator[str]:
    """Run a lab server on this machine; yield it as an entry of `static.hosts`.

    To the course it is a host like any other.
    """
    lab = home / "grader"
    lab.mkdir()
    (lab / "lab.yaml").write_text("lab: grader\nserver: {provider: local, gpu: none}\n")
    announce("Start a lab server on this machine for grading")
    server = run_json("up", "--yes", cwd=lab)["server"]
    assert isinstance(server, dict)
    entry = {name: server["endpoint"][name] for name in ("host", "port", "user", "identity")}
    try:
        yield json.dumps(entry)
    finally:
        labctl("down", "--yes", "--discard", cwd=lab)


def run_week(home: Path) -> dict[str, object]:
    with rehearse_aws(home), start_grader(home) as host:
        course = create_course(home, host)
        try:
            results = {**run_class(course), **grade_submissions(course), **end_term(course)}
        except BaseException:
            words = ["course", "down", "--end-of-term", "--discard", "--yes"]
            subprocess.run([LABCTL, *words], cwd=course, check=False)
            raise
        return results


def main() -> int:
    started_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="labctl-course-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    try:
        results = run_week(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    results["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(results), flush=True)
    is_passed = (
        (results["made"], results["distinct_hosts"], results["clean"]) == (STUDENTS, STUDENTS, True)
        and results["graded"] == SUBMISSIONS
        and results["full_marks"] == SUBMISSIONS - 2
        and results["regrade_accepted"] is True
    )
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
