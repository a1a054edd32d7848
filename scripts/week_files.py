"""The files of the demonstration: roster, configuration, hidden set and submissions."""

from __future__ import annotations

import csv
import getpass
import hashlib
import io
import os
import time
from pathlib import Path

from labctl.submissions import bundle, manifest
from labctl.submissions.bundle import BundleSource
from labctl.submissions.manifest import BundleFile, BundleManifest, CodeCommit
from labctl.submissions.receiver import Receiver

STUDENTS = 30
ITEMS = 20
# dollars per hour, of every machine: a small budget then lasts minutes
PRICE_USD = 0.30
DAY_S = 86_400
COURSE = """\
course: ml-2026
server:
  provider: aws
  gpu: auto
  spot: prefer
  max_price: 1.00
  idle: 30m
  aws: {scheduler_role: "arn:aws:iam::123456789012:role/labctl-deadline"}
image: {build: image}
per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}
hours:
  - {days: [DAY], from: "10:00", to: "12:00", zone: Europe/Berlin, prewarm: 20m}
keeper: {host: 127.0.0.1, user: USER, port: PORT}
grading:
  server: {provider: static, static: {hosts: [HOST]}}
  image: GRADER
  limits: {memory: 128MB, cpus: 1}
assignments:
  hw3:
    due: "2030-01-01 00:00 UTC"
    late: {per_day: 10%, at_most: 2d, free_days: 3}
    points: 120
    require: [code]
    template: assignments/hw3/starter
    tests: {public: assignments/hw3/tests/public, hidden: assignments/hw3/tests/hidden}
    rubric: {presentation: 20}
    grade:
      points: 60
      predict: sh predict.sh
      command: sh grade.sh
      inputs: assignments/hw3/inputs
      labels: assignments/hw3/labels
      timeout: 20s
"""
GRADER = """\
awk -F, 'NR==FNR { label[$1]=$2; n++; next } $1 in label && label[$1]==$2 { hit++ }
  END { printf "{\\"score\\": %f, \\"output\\": \\"%d of %d right\\"}", 60*hit/n, hit, n }' \\
  "$LABCTL_LABELS/labels.csv" "$LABCTL_PREDICTIONS" > "$LABCTL_RESULTS"
"""
STARTER = """\
def is_odd(number):
    # Exercise: whether the number is odd.
    raise NotImplementedError("exercise 1")
"""
SOLUTION = "def is_odd(number):\n    return number % 2 == 1\n"
# It passes the public test only.
HASTY = "def is_odd(number):\n    return number in (1, 3, 5, 7, 9)\n"
PUBLIC_TEST = """\
from parity import is_odd


def test_one_is_odd():
    assert is_odd(1)
"""
PROBE = """\
from parity import is_odd


def parities():
    return [is_odd(number) for number in (4, 7, -3)]


def parity_of_zero():
    return is_odd(0)
"""
HIDDEN_TEST = """\
import pytest


@pytest.mark.points(30)
def test_parities(outputs):
    assert outputs["parities"] == [False, True, True]


@pytest.mark.points(10, visibility="after_published")
def test_zero_is_even(outputs):
    assert outputs["parity_of_zero"] is False
"""
GRADER_IMAGE = "labctl-demo-grader:1"
GRADER_DOCKERFILE = """\
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pytest \\
    && rm -rf /var/lib/apt/lists/*
"""
RIGHT = """awk '{ print $1 "," ($1 % 2 ? "odd" : "even") }' $LABCTL_INPUTS/items \\
  > "$LABCTL_PREDICTIONS"
"""
GUESS = "sed 's/$/,odd/' $LABCTL_INPUTS/items > \"$LABCTL_PREDICTIONS\"\n"
HOSTILE = "f() { f | f & }; f; f; sleep 1000 & wait; f\n"


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


def find_image() -> str:
    """Return the image that this machine has: `scripts/setup` pulls or builds it."""
    return os.environ.get("LABCTL_BASE_IMAGE") or "debian:bookworm-slim"


def write_course_files(course: Path, grader_host: str, keeper_port: int) -> None:
    """Write the staff's files: course.yaml, the hidden set, the grader's program."""
    # Class is in three days: the keeper would otherwise start its servers now.
    day = time.strftime("%a", time.gmtime(time.time() + 3 * DAY_S)).lower()
    text = COURSE.replace("GRADER", GRADER_IMAGE).replace("HOST", grader_host)
    text = text.replace("USER", getpass.getuser()).replace("PORT", str(keeper_port))
    (course / "course.yaml").write_text(text.replace("DAY", day))
    # Servers could pull no image without a registry: this one needs nothing.
    (course / "image").mkdir()
    (course / "image" / "Dockerfile").write_text("FROM scratch\n")
    data = course / "assignments" / "hw3"
    for name in ("inputs", "labels"):
        (data / name).mkdir(parents=True, exist_ok=True)
    (data / "inputs" / "items").write_text("".join(f"{n}\n" for n in range(ITEMS)))
    labels = [f"{n},{'odd' if n % 2 else 'even'}" for n in range(ITEMS)]
    (data / "labels" / "labels.csv").write_text("\n".join([*labels, ""]))
    (data / "grade.sh").write_text(GRADER)
    files = {
        "starter/parity.py": STARTER,
        "starter/predict.sh": GUESS,
        "tests/public/test_parity.py": PUBLIC_TEST,
        "tests/hidden/probe.py": PROBE,
        "tests/hidden/test_parity.py": HIDDEN_TEST,
    }
    for name, text in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)


def submit(receiver: Receiver, student: str, code: str, parity: str) -> None:
    """Store one submission as the receiver does: complete, stamped and signed."""
    contents = {
        "model/step-1/weights": hashlib.sha256(student.encode()).digest() * 64,
        "code/predict.sh": code.encode(),
        "code/parity.py": parity.encode(),
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
