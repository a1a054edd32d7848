"""Results, claims, evidence and feedback, as values; and labctl's own two grading programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.sandbox import grading_accuracy, grading_images
from labctl.courses.grading import record as records
from labctl.courses.grading.claims import AccuracyComparison, compare_evaluation
from labctl.courses.grading.feedback import render_page
from labctl.courses.grading.flags import SubmissionFacts, SubmittedRun, find_flags, find_mentions
from labctl.courses.grading.record import GradeRecord, build_results, describe_outcome
from labctl.courses.grading.results import (
    GradeResults,
    GraderTest,
    parse_results,
    select_shown,
    subtract_penalty,
    without_lateness_note,
)
from labctl.model import FileEntry
from labctl.runs.evaluation import Evaluation

SHA = "ab" * 32


def evaluation(accuracy: float) -> Evaluation:
    right = round(accuracy * 100)
    return Evaluation(
        checkpoint="step-1",
        classes=("a", "b"),
        confusion=((right, 100 - right), (0, 0)),
        accuracy=accuracy,
        items=100,
    )


def record(**other: Any) -> GradeRecord:
    fields: dict[str, Any] = {
        "assignment": "hw3",
        "seat": "alice",
        "students": ("alice",),
        "student": "alice",
        "number": 2,
        "received": "2026-11-28T10:00:00Z",
        "bundle_sha256": SHA,
        "key": "k",
        "outcome": "graded",
        "points": 100.0,
    }
    return GradeRecord(**{**fields, **other})


def test_a_graders_results_are_read_with_care() -> None:
    text = '{"tests": [{"name": "a", "score": 30}, {"name": "b\\u001b[2J", "score": "x"}]}'
    found = parse_results(text, 100)
    assert found.score == 30
    assert found.tests[1] == GraderTest(name="b\N{REPLACEMENT CHARACTER}[2J")
    assert found.visibility == "after_published"
    huge = parse_results(f'{{"score": 1, "tests": [{{"score": {10**400}}}]}}', 100)
    assert huge.tests == (GraderTest(),)
    forged = parse_results('{"score": 1, "extra_data": {"labctl": {"counts": 100}}}', 100)
    assert forged.extra_data == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"score": NaN}', "cannot be read"),
        ('{"score": 1e999}', "cannot be read|has the score inf"),
        ('{"score": -1}', "has the score -1"),
        ('{"score": 201}', "out of 100"),
        ('{"output": "well done"}', "neither a score"),
        ('{"score": 1, "tests": [' + "{}," * 600 + "{}]}", "at most 500"),
        ("[" * 100_000, "cannot be read"),
        ("x" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_what_is_no_results_file_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_results(text, 100)


def test_lateness_stands_beside_the_score_and_is_taken_off_once() -> None:
    assert subtract_penalty(50, 100, 20) == 30
    assert subtract_penalty(5, 100, 20) == 0
    found = build_results(record(raw=GradeResults(score=50), penalty=20, late_s=90_000))
    assert found.score == 50
    assert "25 h late, -20%: final score 30" in found.output
    stamp = found.extra_data["labctl"]
    assert (stamp["counts"], stamp["submission"]) == (30, 2)
    assert list(stamp) == [
        *("points", "penalty", "late_s", "counts", "submission", "received", "bundle_sha256"),
        "claim",
    ]


@pytest.mark.parametrize(
    "note",
    [
        "25 h 2 min late, -20%: final score 30",
        "1 d 1 h late, -20%: final score 30",
        "20% of the points off, handed in 1 d 1 h late: 30 count",
    ],
)
def test_a_stored_lateness_note_of_any_version_is_recognized(note: str) -> None:
    output = without_lateness_note(
        f"well done\n{note}", score=50, points=100, penalty=20, late_s=90_120
    )
    assert output == "well done"


@pytest.mark.parametrize(
    ("claimed", "measured", "agrees"),
    [(0.92, 0.90, True), (0.921, 0.90, False), (0.80, 0.90, False), (0.9, None, None)],
)
def test_a_claim_is_held_against_the_measurement(
    claimed: float, measured: float | None, agrees: bool | None
) -> None:
    extra = {} if measured is None else {"accuracy": measured, "items": 100}
    right = round(claimed * 1000)
    said = Evaluation(
        checkpoint="s",
        classes=("a", "b"),
        confusion=((right, 1000 - right), (0, 0)),
        accuracy=claimed,
        items=1000,
    )
    found = compare_evaluation(said, GradeResults(score=1, extra_data=extra), 0.02)
    assert found.agrees is agrees
    if measured is not None:
        assert found.low is not None
        assert found.high is not None
        assert found.low < measured < found.high


def test_who_claims_nothing_or_measures_nonsense_is_not_compared() -> None:
    measured = GradeResults(score=1, extra_data={"accuracy": 0.9})
    assert compare_evaluation(None, measured, 0.02).agrees is None
    for odd in (True, "0.9", 7, -1, float("nan")):
        nonsense = GradeResults(score=1, extra_data={"accuracy": odd})
        assert compare_evaluation(evaluation(0.9), nonsense, 0.02).measured is None
    huge = GradeResults(score=1, extra_data={"accuracy": 0.9, "items": 10**400})
    assert compare_evaluation(evaluation(0.9), huge, 0.02).low is None


def file(path: str, sha: str, size: int = 5000) -> FileEntry:
    return FileEntry(path=path, size=size, sha256=sha * 64)


def facts(seat: str, pseudonym: str, *files: FileEntry, **other: Any) -> SubmissionFacts:
    server = other.pop("server", f"course-{pseudonym}-abcdef")
    run = SubmittedRun(id="r1", state="exited", exit_code=0, server_id=server)
    fields: dict[str, Any] = {"run": "r1", "record": run, "commit": "1", "run_commit": "1"}
    return SubmissionFacts(seat=seat, pseudonym=pseudonym, files=files, **{**fields, **other})


def kinds(found: dict[str, Any]) -> dict[str, list[str]]:
    return {seat: [flag.kind for flag in own] for seat, own in found.items()}


def test_files_of_two_are_evidence_and_handouts_are_not() -> None:
    handout = file("code/loader.py", "a")
    alice = facts("alice", "1" * 8, handout, file("model/w", "b"), file("code/x.py", "c"))
    bob = facts("bob", "2" * 8, handout, file("model/w", "b"), file("code/y.py", "c"))
    rest = [facts(f"s{n}", f"{n}" * 8, handout, file("model/w", f"{n}")) for n in range(3, 9)]
    found = find_flags([alice, bob, *rest])
    assert kinds(found)["alice"] == ["same-code", "same-model"]
    assert found["alice"][0].what == "a code file is identical to bob's"
    assert found["bob"][0].evidence == "code/y.py"
    assert kinds(found)["s3"] == []


def test_the_state_of_a_seeded_generator_is_no_evidence() -> None:
    names = ("model/random.safetensors", "model/rng_state_0.pth", "code/uv.lock")
    files = [file(name, f"{n}") for n, name in enumerate(names)]
    found = find_flags([facts("alice", "1" * 8, *files), facts("bob", "2" * 8, *files)])
    assert kinds(found) == {"alice": [], "bob": []}
    work = file("model/random_forest_of_alice/weights.pt", "d")
    found = find_flags([facts("alice", "1" * 8, work), facts("bob", "2" * 8, work)])
    assert kinds(found) == {"alice": ["same-model"], "bob": ["same-model"]}


def test_where_a_run_was_is_evidence() -> None:
    own = facts("alice", "1" * 8)
    other = facts("bob", "2" * 8, server=f"course-{'1' * 8}-abcdef")
    home = facts("carol", "3" * 8, server="local-abc")
    found = find_flags([own, other, home])
    assert kinds(found) == {"alice": [], "bob": ["other-seat"], "carol": ["elsewhere"]}
    assert found["bob"][0].what.endswith("the server of alice")
    assert kinds(find_flags([home])) == {"carol": []}, "nobody used the course's servers"


def test_a_record_that_does_not_fit_is_evidence() -> None:
    none = facts("a", "1" * 8, record=None)
    other = facts("b", "2" * 8, run="r2")
    died = facts("c", "3" * 8, record=SubmittedRun(id="r1", state="exited", exit_code=1))
    moved = facts("d", "4" * 8, commit="2" * 40, run_commit="1" * 40)
    claim = facts(
        "e", "5" * 8, comparison=AccuracyComparison(claimed=0.9, measured=0.5, agrees=False)
    )
    naming = facts("f", "6" * 8, mentions=tuple(f"code/x.py:{n}" for n in range(9)))
    found = find_flags([none, other, died, moved, claim, naming])
    assert [own[0] for own in kinds(found).values()] == [
        *("no-record", "other-run", "run-not-ended", "other-commit", "claim", "names-labels")
    ]
    assert found["f"][0].evidence.endswith("and 4 more")


def test_code_alone_needs_no_run_but_a_model_does() -> None:
    used = facts("alice", "1" * 8)
    empty = SubmittedRun(id="", state="")
    code = facts("bob", "2" * 8, file("code/x.py", "c"), run="", record=empty)
    model = facts("carol", "3" * 8, file("model/w", "b"), run="", record=empty)
    found = kinds(find_flags([used, code, model]))
    assert found == {"alice": [], "bob": [], "carol": ["no-record", "elsewhere"]}


def test_code_that_names_the_labels_place_is_found_by_its_line() -> None:
    text = b"import os\nopen('/lab/labels/labels.csv')\nos.environ['LABCTL_RESULTS']\n"
    assert find_mentions("code/x.py", text) == ["code/x.py:2", "code/x.py:3"]
    assert find_mentions("code/x.py", b"labels = load('train')\n") == []


def test_a_record_is_read_as_written_and_another_is_made_anew() -> None:
    made = record(raw=GradeResults(score=80), score=60.0, penalty=20)
    assert records.decode(records.encode(made)) == made
    assert records.decode(b"{}") is None
    assert records.decode(records.encode(made).replace(b'"version": 1', b'"version": 2')) is None
    assert build_results(made).extra_data["labctl"]["bundle_sha256"] == SHA
    assert describe_outcome("exit", 3) == "its program ended with 3"


def test_feedback_is_text_whatever_is_in_it() -> None:
    evil = "<img src=x onerror=alert(1)>\x1b[2J\u202e&"
    raw = GradeResults(
        score=1,
        output=evil,
        tests=(GraderTest(name=evil, output=evil), GraderTest(visibility="hidden")),
    )
    shown = select_shown(raw, is_closed=True)
    text = render_page(record(raw=raw, score=0.5), shown, evil * 10_000)
    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count("<tr><td>") == 1
    assert "<strong>0.5</strong> of 100 points" in text
    assert "default-src 'none'" in text
    assert len(text) < 200_000


@pytest.mark.parametrize(
    ("said", "accuracy", "output"),
    [
        ("item,label\n1,a\n2,b\n3,a\n4,b\n", 1.0, "4 of 4"),
        ("1,a\n2,a\n9,a\n", 0.25, "2 have no prediction"),
        ("", 0.0, "4 have no prediction"),
        ("1,a\n1,b\n", 0.0, "repeats an item"),
        ("1,a,b\n", 0.0, "3 columns"),
        ("\xff\xfe", 0.0, "not a CSV file in UTF-8"),
    ],
)
def test_labctls_own_grader(tmp_path: Path, said: str, accuracy: float, output: str) -> None:
    (tmp_path / "labels.csv").write_text("item,label\n1,a\n2,b\n3,a\n4,b\n")
    (tmp_path / "predictions").write_bytes(said.encode("latin-1"))
    env = {
        "LABCTL_POINTS": "50",
        "LABCTL_LABELS": str(tmp_path),
        "LABCTL_PREDICTIONS": str(tmp_path / "predictions"),
        "LABCTL_RESULTS": str(tmp_path / "results.json"),
    }
    subprocess.run([sys.executable, str(grading_accuracy.__file__)], env=env, check=True)
    found = parse_results((tmp_path / "results.json").read_text(), 50)
    assert found.score == 50 * accuracy
    assert found.extra_data["accuracy"] == accuracy
    assert output in found.output


def test_labctls_own_predictions_go_through_the_students_predict(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "inputs" / "deep").mkdir(parents=True)
    for name, colour in (("a.png", 255), ("deep/b.png", 0)):
        image.new("L", (4, 4), colour).save(tmp_path / "inputs" / name)
    (tmp_path / "inputs" / "notes.txt").write_text("not a picture")
    (tmp_path / "predict.py").write_text(
        "class P:\n    classes = ['dark', 'light']\n"
        "    def predict(self, pictures):\n"
        "        light = [p.getpixel((0, 0))[0] / 255 for p in pictures]\n"
        "        return [[1 - x, x] for x in light]\n"
        "def load(path):\n    assert path.name == 'model'\n    return P()\n"
    )
    env = {
        "LABCTL_INPUTS": str(tmp_path / "inputs"),
        "LABCTL_MODEL": str(tmp_path / "model"),
        "LABCTL_PREDICTIONS": str(tmp_path / "predictions"),
    }
    words = [sys.executable, str(grading_images.__file__)]
    subprocess.run(words, env=env, cwd=tmp_path, check=True)
    lines = (tmp_path / "predictions").read_text().splitlines()
    assert lines == ["item,label", "a.png,light", "deep/b.png,dark"]
