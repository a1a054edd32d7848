"""Code that submissions have in common: what counts, and what staff can see of it."""

from __future__ import annotations

import hashlib
import json
import signal
import stat
from pathlib import Path

import pytest
from submission_bed import DUE_AT, FILES, make_receiver, packed

from labctl.config import find_paths
from labctl.courses import similarity, similarity_worker
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.similarity import SimilarityResult, find_similar_code
from labctl.courses.similarity_worker import compare_documents
from labctl.courses.starters import publish_starters
from labctl.errors import LabError
from labctl.submissions.receiver import Receiver

COURSE = """\
course: ml
assignments: {hw3: {template: start, due: "2026-11-28 23:59 Europe/Berlin"}}
"""
TEMPLATES = find_paths().data_dir / "templates"
STARTER = """\
import torch

def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
"""
OWN = """\
def search_rates(model, data, low=1e-5, high=1.0, tries=8):
    best, scores = None, []
    for number in range(tries):
        rate = low * (high / low) ** (number / (tries - 1))
        score = sum(abs(value - rate) for value in data if value) / (1 + len(scores))
        scores.append((score, rate))
        if best is None or score < best[0]:
            best = (score, rate)
    while best[0] > 3 and len(scores) > 2:
        scores.pop()
        best = min(scores)
    return best[1], sorted(scores)
"""
OTHER = """\
class Window:
    def __init__(self, size):
        self.size, self.items = size, {}

    def push(self, key, item):
        if key not in self.items:
            self.items[key] = [item]
        else:
            self.items[key].insert(0, item)
            del self.items[key][self.size:]
        return {name: max(values, default=0) for name, values in self.items.items()}
"""
RENAMED = (
    OWN.replace("best", "winner").replace("rate", "lr").replace("scores", "all_results")
    + "\n\n# mine, really\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    course = tmp_path / "ml"
    (course / "start").mkdir(parents=True)
    (course / "start" / "train.py").write_text(STARTER)
    (course / "course.yaml").write_text(COURSE)
    names = [f"s{number},S{number}\n" for number in range(1, 9)]
    (course / "roster.csv").write_text("id,name\n" + "".join(names))
    make_private(course)
    made = CourseFolder(course)
    make_receiver(course / ".course")
    publish_starters(made, find_paths())
    return made


def submit(folder: CourseFolder, student: str, files: dict[str, str | bytes]) -> None:
    code = {
        f"code/{path}": text.encode() if isinstance(text, str) else text
        for path, text in files.items()
    }
    kept = {path: content for path, content in FILES.items() if not path.startswith("code/")}
    data = packed({**kept, **code}, student=student)
    receiver = Receiver(folder.drop, lambda: DUE_AT - 100)
    submission = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*submission)
    receiver.write(*submission, 0, data)
    receiver.finish(*submission)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare in this process, which has loaded copydetect once."""
    monkeypatch.setattr(similarity, "_run_worker", compare_documents)


def find(folder: CourseFolder, previous: Path | None = None) -> SimilarityResult:
    return find_similar_code(folder, "hw3", TEMPLATES, previous)


def list_pairs(result: SimilarityResult) -> list[tuple[str, str]]:
    return [(pair.name, pair.other) for pair in result.pairs]


def test_renamed_code_is_shown_side_by_side_and_the_starter_is_not_counted(
    folder: CourseFolder,
) -> None:
    submit(folder, "s1", {"train.py": STARTER + OWN})
    submit(folder, "s2", {"train.py": RENAMED + "\n" + STARTER})
    submit(folder, "s3", {"train.py": STARTER + OTHER})
    result = find(folder)
    assert list_pairs(result) == [("s1", "s2")]
    [pair] = result.pairs
    assert min(pair.share, pair.other_share) > 0.8
    page = (result.page.parent / "1.html").read_text()
    assert "<mark>" in page
    assert "winner" in page
    index = result.page.read_text()
    assert "not proof of misconduct" in index
    assert "more than five submissions and more than a quarter of them" in " ".join(index.split())
    assert 'href="1.html"' in index
    again = find(folder)
    assert again.pairs == result.pairs, "the shares of the same code are the same each time"


@pytest.mark.usefixtures("in_process")
def test_only_staff_can_read_the_pages_and_they_are_below_the_private_directory(
    folder: CourseFolder,
) -> None:
    submit(folder, "s1", {"a.py": OWN})
    submit(folder, "s2", {"a.py": OWN + "# <script>alert(1)</script>\n"})
    result = find(folder)
    assert result.page == folder.private / "similarity" / "hw3" / "index.html"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in result.page.parent.iterdir()}
    assert modes == {0o600}
    text = (result.page.parent / "1.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


@pytest.mark.long
@pytest.mark.usefixtures("in_process")
def test_what_most_have_and_what_programs_write_is_no_evidence(folder: CourseFolder) -> None:
    for number in range(1, 9):
        files = {"taught.py": OWN, "uv.lock": "x", "state.py": OTHER * (number in (7, 8))}
        submit(folder, f"s{number}", {path: text for path, text in files.items() if text})
    assert list_pairs(find(folder)) == [("s7", "s8")]


@pytest.mark.usefixtures("in_process")
def test_earlier_years_are_compared_with_this_year_only(
    folder: CourseFolder, tmp_path: Path
) -> None:
    for name, text in (("zoe-1", OWN), ("yann-2", OWN)):
        (tmp_path / "2025" / name).mkdir(parents=True)
        (tmp_path / "2025" / name / "old.py").write_text(text)
    (tmp_path / "2025" / "zoe-1.diff").write_text("")
    submit(folder, "s1", {"new.py": OTHER})
    submit(folder, "s2", {"new.py": RENAMED})
    result = find(folder, tmp_path / "2025")
    assert (result.submissions, result.previous) == (2, 2)
    assert list_pairs(result) == [("previous:yann-2", "s2"), ("previous:zoe-1", "s2")]


@pytest.mark.usefixtures("in_process")
def test_notebooks_count_by_their_code_and_what_is_not_code_is_named(folder: CourseFolder) -> None:
    cells = [
        {"cell_type": "markdown", "source": [OTHER]},
        {"cell_type": "code", "source": OWN.splitlines(keepends=True), "outputs": ["x" * 99]},
    ]
    submit(folder, "s1", {"lab.ipynb": json.dumps({"cells": cells})})
    submit(folder, "s2", {"lab.py": RENAMED, "blob.py": b"\0\xff", "huge.py": "x = 1\n" * 60_000})
    submit(folder, "s3", {"lab.py": OTHER})
    result = find(folder)
    assert list_pairs(result) == [("s1", "s2")]
    assert {(one.path, one.why) for one in result.skipped} == {
        ("blob.py", "it is not text"),
        ("huge.py", "too large, or too many"),
    }


def test_a_file_that_takes_too_long_is_left_out_and_the_rest_is_compared(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(folder, "s1", {"a.py": OWN, "slow.py": OTHER})
    submit(folder, "s2", {"a.py": OWN})
    fingerprint = similarity_worker.copydetect.CodeFingerprint

    def read_slowly(path: str, *words: object, **more: object) -> object:
        while path == "slow.py":
            pass
        return fingerprint(path, *words, **more)

    monkeypatch.setattr(similarity, "_run_worker", compare_documents)
    monkeypatch.setattr(similarity_worker.copydetect, "CodeFingerprint", read_slowly)
    monkeypatch.setattr(similarity_worker, "FILE_S", 1.0)
    before = signal.signal(signal.SIGPROF, similarity_worker._stop_file)
    try:
        result = find(folder)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert list_pairs(result) == [("s1", "s2")]
    assert [one.path for one in result.skipped] == ["slow.py"]


def test_a_comparison_that_exceeds_its_limits_is_an_error_and_leaves_no_pages(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(folder, "s1", {"a.py": OWN})
    monkeypatch.setattr(similarity, "MOST_MEMORY_BYTES", 64 * 1024**2)
    with pytest.raises(LabError, match="could not be compared"):
        find(folder)
    assert not (folder.private / "similarity").exists()


def test_without_the_extra_the_error_names_it(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "find_spec", lambda name: None)
    with pytest.raises(LabError, match="similarity extra") as caught:
        find(folder)
    assert "similarity" in caught.value.hint
