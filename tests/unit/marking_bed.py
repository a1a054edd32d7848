"""A course with a rubric and real bundles, for the page on which staff marks."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from dashboard_bed import Bed, make
from submission_bed import packed, sha256

from labctl.courses.grading import record as records
from labctl.courses.grading.record import GradeRecord, build_results
from labctl.courses.grading.results import GradeResults, GraderTest, encode
from labctl.submissions.receipt import Signed, utc_text
from labctl.submissions.receiver import BUNDLE, RECEIPT

RUBRIC = "points: 100, grade: {command: python grade.py}, rubric: {code: 30, presentation: 30}}"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
EVIL_NAME = "code/<img src=x onerror=alert(3)>.py"


def make_marking(root: Path) -> Bed:
    """The course of `dashboard_bed`, whose hw3 has a rubric worth 60 of 100 points."""
    bed = make(root)
    file = bed.folder.path / "course.yaml"
    file.write_text(file.read_text().replace("points: 100}", RUBRIC))
    bed.folder.refresh()
    return bed


def hand_in_files(
    bed: Bed,
    student: str,
    files: Mapping[str, bytes],
    number: int = 1,
    late_s: int = 0,
    at: float = 0.0,
) -> str:
    """Hand in a bundle of these files; return its SHA-256."""
    content = packed(files, student=student)
    receipt = msgspec.structs.replace(
        bed.hand_in(student, "hw3", number, late_s),
        bundle_sha256=sha256(content),
        bundle_bytes=len(content),
        **({"received": utc_text(at)} if at else {}),
    )
    place = bed.folder.drop / "submissions" / "hw3" / student / f"{number:04}"
    place.mkdir(parents=True)
    (place / BUNDLE).write_bytes(content)
    signed = Signed(receipt=receipt, key="", signature="")
    (place / RECEIPT).write_bytes(msgspec.json.encode(signed))
    return sha256(content)


def grade_automatically(
    bed: Bed, student: str, score: float, penalty: int = 0, message: str = ""
) -> None:
    """Store what the automatic grading gave: `score` of 40 points, and two tests."""
    tests = (
        GraderTest(name="test_shape", score=10, max_score=10),
        GraderTest(name="test_accuracy", score=score - 10, max_score=30, status="failed",
                   output=f"accuracy 0.91\n{EVIL}", visibility="hidden"),
    )  # fmt: skip
    record = GradeRecord(
        assignment="hw3", seat=student, students=(student,), student=student, number=1,
        received="", bundle_sha256="", key="k", outcome="graded", points=40, penalty=penalty,
        late_s=7200 if penalty else 0, score=score, message=message,
        raw=GradeResults(score=score, output="accuracy 0.91", tests=tests),
    )  # fmt: skip
    place = bed.folder.grades / "hw3" / student
    place.mkdir(parents=True, exist_ok=True)
    (place / records.FILE).write_bytes(records.encode(record))
    (place / records.RESULTS).write_bytes(encode(build_results(record)))


def make_png(width: int, height: int) -> bytes:
    """A gradient."""
    rows = b"".join(
        b"\0" + bytes(c for x in range(width) for c in (x * 255 // width, y * 255 // height, 160))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows))
            + chunk(b"IEND", b""))  # fmt: skip


def make_notebook(*evil: str) -> bytes:
    """A notebook with each kind of output, and these texts everywhere."""
    words = "".join(evil)
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["epoch 1\n", f"epoch 2 {words}\n"]},
        {"output_type": "display_data", "metadata": {}, "data": {
            "image/png": base64.b64encode(make_png(320, 180)).decode(),
            "text/plain": ["<Figure size 320x180>"], "text/html": [f"<b>{words}</b>"]}},
        {"output_type": "execute_result", "metadata": {}, "execution_count": 2, "data": {
            "text/html": f"<table>{words}</table>", "text/plain": "   x  y\n0  1  2"}},
        {"output_type": "display_data", "metadata": {},
         "data": {"application/javascript": "alert(4)"}},
        {"output_type": "display_data", "metadata": {},
         "data": {"image/png": base64.b64encode(f"<svg>{words}".encode()).decode()}},
        {"output_type": "error", "ename": "ValueError", "evalue": words,
         "traceback": ["\x1b[0;31mValueError\x1b[0m: bad"]},
    ]  # fmt: skip
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": [f"# Results {words}\n", "Some text."]},
        {"cell_type": "code", "metadata": {}, "execution_count": 2, "source": "train(epochs=2)",
         "outputs": outputs},
        {"cell_type": "code", "metadata": {}, "execution_count": None, "source": [], "outputs": []},
    ]  # fmt: skip
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}).encode()


FILES = {
    "report.html": b"<!doctype html><title>digits</title><h1>My report</h1>",
    "logs/run.log": b"epoch 1\nepoch 2\n",
    "code/train.py": b"import torch\n\nfor step in range(10):\n    print(step)\n",
    "code/intro.ipynb": make_notebook(),
}
