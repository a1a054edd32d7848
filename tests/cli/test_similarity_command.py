"""course similarity on the command line: a table for review, and the page's path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.courses import similarity
from labctl.courses.similarity import SimilarityResult
from labctl.courses.similarity_worker import SimilarPair, UncomparedFile

Labctl = Callable[..., Any]


@pytest.fixture
def course(home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    monkeypatch.chdir(home)
    assert labctl("course", "init", "ml", "--roster", "roster.csv").code == 0
    (home / "ml" / "course.yaml").write_text("course: ml\nassignments: {hw3: {}}\n")
    return home / "ml"


def test_similar_code_is_for_review_and_names_the_page(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = course / ".course" / "similarity" / "hw3" / "index.html"
    pair = SimilarPair(
        name="alice", other="previous:zoe-1", share=0.621, other_share=0.5, matched=400, files=()
    )
    skipped = (UncomparedFile(document="bob", path="a\x1b[2J.py", why="it is not text"),)
    result = SimilarityResult(
        assignment="hw3", submissions=2, previous=1, pairs=(pair,), skipped=skipped, page=page
    )
    monkeypatch.setattr(similarity, "find_similar_code", lambda *_, **__: result)
    said = labctl("-C", "ml", "course", "similarity", "hw3")
    assert said.code == 0
    assert "Please review (not proof of misconduct)" in said.out
    row = next(line for line in said.out.splitlines() if line.startswith("alice"))
    assert row.split() == ["alice", "Alice", "62%", "previous:zoe-1", "-", "50%"]
    assert f"for staff only: {page}" in said.err.replace("\n  ", " ")
    assert "\x1b[2J" not in said.err
    body = json.loads(labctl("-C", "ml", "course", "similarity", "hw3", "--json").out)
    assert (body["pairs"][0]["share"], body["page"]) == (0.621, str(page))
    nothing = msgspec.structs.replace(result, pairs=())
    monkeypatch.setattr(similarity, "find_similar_code", lambda *_, **__: nothing)
    said = labctl("-C", "ml", "course", "similarity", "hw3")
    text = "No two of 2 submissions and 1 of an earlier year have much code in common.\n"
    assert said.out == text
    alone = msgspec.structs.replace(nothing, submissions=1, previous=0)
    monkeypatch.setattr(similarity, "find_similar_code", lambda *_, **__: alone)
    said = labctl("-C", "ml", "course", "similarity", "hw3")
    assert said.out == "Only 1 submission: nothing to compare.\n"
    nobody = msgspec.structs.replace(nothing, submissions=0, previous=0)
    monkeypatch.setattr(similarity, "find_similar_code", lambda *_, **__: nobody)
    said = labctl("-C", "ml", "course", "similarity", "hw3")
    assert said.out == "Nobody has submitted anything: nothing to compare.\n"
