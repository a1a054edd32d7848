"""An update of a starter: three versions of each file, in a real directory and with real git."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.errors import ConfigError, PolicyError
from labctl.sync.starter import (
    RECORD,
    Starter,
    StarterFile,
    StarterRecord,
    decode_starter,
    encode_starter,
    read_record,
    write_record,
)
from labctl.sync.starter_update import update_files

LINES = b"".join(b"line %d\n" % number for number in range(20))
TOP = LINES.replace(b"line 1\n", b"the course's line\n")
BOTTOM = LINES.replace(b"line 18\n", b"my line\n")
BOTH = TOP.replace(b"line 18\n", b"my line\n")


def starter(**files: bytes) -> Starter:
    named = {name.replace("_py", ".py").replace("__", "/"): text for name, text in files.items()}
    made = tuple(StarterFile(path=path, content=text) for path, text in named.items())
    return Starter(assignment="hw3", source="here", files=made)


def update(root: Path, base: Starter | None, new: Starter) -> dict[str, str]:
    return {change.path: change.action for change in update_files(root, base, new)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lab = tmp_path / "lab"
    lab.mkdir()
    return lab


def test_files_are_added_and_a_repetition_has_nothing_to_do(root: Path) -> None:
    new = starter(train_py=LINES, src__model_py=b"net\n")
    assert update(root, None, new) == {"src/model.py": "added", "train.py": "added"}
    assert (root / "src" / "model.py").read_bytes() == b"net\n"
    assert update(root, None, new) == {}


def test_an_executable_file_stays_one(root: Path) -> None:
    script = StarterFile(path="go.sh", content=b"#!/bin/sh\n", executable=True)
    update_files(root, None, Starter(assignment="hw3", source="", files=(script,)))
    assert (root / "go.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("mine", "new", "action", "after"),
    [
        (LINES, TOP, "updated", TOP),
        (BOTTOM, LINES, None, BOTTOM),
        (BOTTOM, TOP, "merged", BOTH),
        (TOP, TOP, None, TOP),
        (None, TOP, "kept", None),
        (None, LINES, None, None),
        (LINES, None, "removed", None),
        (BOTTOM, None, "kept", BOTTOM),
        (None, None, None, None),
    ],
)
def test_a_file_that_was_handed_out_is_merged_in_three_ways(
    mine: bytes | None, new: bytes | None, action: str | None, after: bytes | None, root: Path
) -> None:
    file = root / "train.py"
    if mine is not None:
        file.write_bytes(mine)
    wanted = starter(train_py=new) if new is not None else starter()
    expected = {"train.py": action} if action else {}
    assert update(root, starter(train_py=LINES), wanted) == expected
    assert (file.read_bytes() if file.exists() else None) == after
    assert [path.name for path in root.iterdir()] == (["train.py"] if after is not None else [])


def test_the_same_lines_changed_are_a_conflict_beside_the_students_file(root: Path) -> None:
    mine = LINES.replace(b"line 1\n", b"my line\n")
    (root / "train.py").write_bytes(mine)
    (root / "train.py.conflict").write_bytes(b"the student's own file of that name")
    (change,) = update_files(root, starter(train_py=LINES), starter(train_py=TOP))
    assert (change.action, change.beside) == ("conflict", "train.py.conflict-2")
    assert (root / "train.py").read_bytes() == mine
    assert (root / "train.py.conflict").read_bytes().startswith(b"the student's")
    text = (root / change.beside).read_text()
    assert "<<<<<<< your version\nmy line\n" in text
    assert "the course's line\n>>>>>>> the course's version" in text


def test_a_students_file_of_the_same_name_is_never_overwritten(root: Path) -> None:
    (root / "train.py").write_bytes(b"mine\n")
    assert update(root, None, starter(train_py=LINES)) == {"train.py": "conflict"}
    assert (root / "train.py").read_bytes() == b"mine\n"


def test_a_binary_file_that_both_changed_is_a_conflict(root: Path) -> None:
    (root / "train.py").write_bytes(b"\0mine")
    (change,) = update_files(root, starter(train_py=b"\0base"), starter(train_py=b"\0new"))
    assert (change.action, (root / change.beside).read_bytes()) == ("conflict", b"\0new")


def test_without_git_a_file_that_both_changed_is_a_conflict(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (root / "train.py").write_bytes(BOTTOM)
    assert update(root, starter(train_py=LINES), starter(train_py=TOP)) == {"train.py": "conflict"}
    assert (root / "train.py.conflict").read_bytes() == TOP


def test_links_and_directories_in_the_lab_are_not_written_through(
    root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.py").write_bytes(b"elsewhere\n")
    (root / "src").symlink_to(outside)
    (root / "train.py").symlink_to(outside / "model.py")
    (root / "data.py").mkdir()
    (root / "top").write_text("a file")
    new = starter(train_py=b"new\n", src__model_py=b"new\n", data_py=b"new\n", top__in_py=b"new\n")
    changes = update_files(root, None, new)
    assert {change.action for change in changes} == {"blocked"}
    assert len(changes) == 4
    assert {change.blocked_by: change.why for change in changes} == {
        "data.py": "data.py is a directory in your lab",
        "src": "src is a link",
        "top": "top is a file in your lab",
        "train.py": "train.py is a link in your lab",
    }
    assert (outside / "model.py").read_bytes() == b"elsewhere\n"
    assert [path.name for path in outside.iterdir()] == ["model.py"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "../train.py", "a/../../b", "a//b", "", ".", "a\\b", "a\0b", "a\nb",
        ".labctl/lab.json", ".git/hooks/post-checkout", "sub/.git/config", "runs/x", "x" * 256,
        "assignment.yaml", ".Git/hooks/post-checkout", "sub/.GIT/config", ".LABCTL/lab.json",
    ],
)  # fmt: skip
def test_a_document_with_a_path_that_is_not_a_starters_is_refused(path: str) -> None:
    made = Starter(assignment="hw3", source="", files=(StarterFile(path=path, content=b""),))
    with pytest.raises(PolicyError, match="cannot be used"):
        decode_starter(encode_starter(made))


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b"), tuple(str(n) for n in range(501))])
def test_a_document_whose_files_do_not_fit_together_is_refused(paths: tuple[str, ...]) -> None:
    files = tuple(StarterFile(path=path, content=b"") for path in paths)
    with pytest.raises(PolicyError, match="cannot be used"):
        decode_starter(encode_starter(Starter(assignment="hw3", source="", files=files)))


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 100_000, b"{}", b"\xff"])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(PolicyError, match="cannot be used"):
        decode_starter(data)


def test_the_record_is_read_back_and_a_damaged_one_says_what_to_do(
    root: Path, tmp_path: Path
) -> None:
    assert read_record(root) is None
    record = StarterRecord(sha256="0" * 64, starter=starter(train_py=b"\0\xff"))
    write_record(root, record)
    assert read_record(root) == record
    (root / RECORD).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_record(root)
    assert "labctl join" in caught.value.hint
    (root / RECORD).unlink()
    (root / RECORD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PolicyError, match="through a link"):
        read_record(root)


@pytest.mark.parametrize(
    ("path", "tests"), [("../.ssh/config", ()), (".git/config", ()), ("a.py", ("../test_a.py",))]
)
def test_a_record_that_somebody_edited_leads_to_no_other_file(
    path: str, tests: tuple[str, ...], root: Path, tmp_path: Path
) -> None:
    files = (StarterFile(path=path, content=b"x"),)
    edited = Starter(assignment="hw3", source="", files=files, tests=tests)
    write_record(root, StarterRecord(sha256="0" * 64, starter=edited))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(root)


def test_a_record_may_be_larger_than_the_starter_by_the_lab_file(root: Path) -> None:
    files = tuple(StarterFile(path=f"{number}.txt", content=b"") for number in range(501))
    record = StarterRecord(
        sha256="0" * 64, starter=Starter(assignment="hw3", source="", files=files)
    )
    write_record(root, record)
    assert read_record(root) == record
