"""Writing a starter into a lab on a server: the script itself, in this machine's shell."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.courses.server_starters import parse_changes, write_starter
from labctl.errors import TransferError
from labctl.sync.starter import Starter, StarterFile
from labctl.sync.starter_update import FileChange
from labctl.transports import Result

LAB_ID = "0123456789ab"
STARTER = Starter(
    assignment="hw1",
    source="x",
    files=(
        StarterFile(path="train.py", content=b"print(1)\n"),
        StarterFile(path="run.sh", content=b"#!/bin/sh\n", executable=True),
        StarterFile(path="tests/a b$(touch x).py", content=b"pass\n"),
        StarterFile(path=".labignore", content=b"data/\n"),
    ),
)


def run_here(home: Path, line: str, stdin: bytes) -> Result:
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(
        ["sh", "-c", line], input=stdin, env=environment, capture_output=True, check=False
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def make_lab(home: Path, directory: str, lab_id: str = LAB_ID) -> Path:
    lab = home / "labctl" / directory
    (lab / ".labctl").mkdir(parents=True)
    (lab / ".labctl" / "id").write_text(lab_id + "\n")
    return lab


def write(
    home: Path, starter: Starter = STARTER, *, restore: bool = False
) -> tuple[FileChange, ...]:
    def run(line: str, *, stdin: bytes, **_: object) -> Result:
        return run_here(home, line, stdin)

    connection = SimpleNamespace(run=run)
    connections = SimpleNamespace(reopen=lambda server: connection)
    config = SimpleNamespace(name="ml")
    lab: Any = SimpleNamespace(config=config, lab_id=LAB_ID, connections=connections)
    server: Any = None
    return write_starter(lab, server, starter, restore=restore)


def make_starter(assignment: str = "hw1", **files: str) -> Starter:
    """A starter with these files; the first "_" of a name is its dot."""
    entries = tuple(
        StarterFile(path=name.replace("_", ".", 1), content=text.encode())
        for name, text in files.items()
    )
    return Starter(assignment=assignment, source="x", files=entries)


def actions(changes: tuple[FileChange, ...]) -> list[tuple[str, str]]:
    return [(change.path, change.action) for change in changes]


@pytest.mark.parametrize("directory", ["ml", "ml-012345"])
def test_it_writes_what_is_missing_into_the_lab_of_this_id(tmp_path: Path, directory: str) -> None:
    other = make_lab(tmp_path, "ml", "f" * 12) if directory != "ml" else None
    lab = make_lab(tmp_path, directory)
    added = {"train.py", "run.sh", "tests/a b$(touch x).py", ".labignore"}
    assert set(actions(write(tmp_path))) == {(path, "added") for path in added}
    for file in STARTER.files:
        assert (lab / "code" / file.path).read_bytes() == file.content
        assert bool((lab / "code" / file.path).stat().st_mode & 0o100) == file.executable
        assert time.time() - (lab / "code" / file.path).stat().st_mtime < 60, "Jupyter shows it"
    assert sorted(path.name for path in (lab / "code").iterdir()) == [
        ".labignore", "run.sh", "tests", "train.py",
    ]  # fmt: skip
    assert sorted(path.name for path in (lab / ".labctl").iterdir()) == ["id", "starters"]
    assert other is None or not (other / "code").exists()
    assert write(tmp_path) == (), "the same files a second time need nothing"


def test_own_files_links_and_directories_stay(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, "ml")
    code = lab / "code"
    code.mkdir()
    (code / "train.py").write_text("mine\n")
    (code / "run.sh").symlink_to("/nonexistent")
    (code / "tests").write_text("a file in the way\n")
    changes = write(tmp_path)
    assert set(actions(changes)) == {
        ("train.py", "conflict"), ("run.sh", "blocked"), ("tests/a b$(touch x).py", "blocked"),
        (".labignore", "added"),
    }  # fmt: skip
    assert (code / "train.py").read_text() == "mine\n"
    assert (code / "train.py.conflict").read_text() == "print(1)\n"
    again = write(tmp_path)
    assert {action for _, action in actions(again)} == {"blocked"}, "a conflict is told once"
    assert ("train.py", "kept") in actions(write(tmp_path, restore=True))
    assert (code / "run.sh").is_symlink()
    assert (code / "tests").read_text() == "a file in the way\n"
    assert (code / ".labignore").exists()


def test_without_the_lab_nothing_is_written(tmp_path: Path) -> None:
    other = make_lab(tmp_path, "ml", "f" * 12)
    with pytest.raises(TransferError, match="the files of hw1 could not be written"):
        write(tmp_path)
    assert not (other / "code").exists()


def test_a_newer_version_replaces_only_what_the_student_left_as_it_was(tmp_path: Path) -> None:
    code = make_lab(tmp_path, "ml") / "code"
    write(tmp_path, make_starter(a_py="1", b_py="1", c_py="1", d_py="1", gone_py="1", own_py="1"))
    (code / "b.py").write_text("mine")
    (code / "own.py").write_text("mine")
    (code / "c.py").unlink()
    (code / "d.py").write_text("2")
    newer = make_starter(a_py="2", b_py="2", c_py="2", d_py="2", new_py="2")
    changes = write(tmp_path, newer)
    assert actions(changes) == [
        ("a.py", "updated"), ("b.py", "conflict"), ("c.py", "kept"), ("gone.py", "removed"),
        ("new.py", "added"), ("own.py", "kept"),
    ]  # fmt: skip
    texts = {path.name: path.read_text() for path in code.iterdir()}
    assert texts == {
        "a.py": "2", "b.py": "mine", "b.py.conflict": "2", "d.py": "2", "new.py": "2",
        "own.py": "mine",
    }  # fmt: skip
    assert write(tmp_path, newer) == ()
    assert actions(write(tmp_path, newer, restore=True)) == [("b.py", "kept"), ("c.py", "added")]


def test_a_third_version_does_not_replace_a_file_beside(tmp_path: Path) -> None:
    code = make_lab(tmp_path, "ml") / "code"
    for version in "123":
        write(tmp_path, make_starter(a_py=version))
        (code / "a.py").write_text("mine")
    assert (code / "a.py.conflict").read_text() == "2"
    assert (code / "a.py.conflict-2").read_text() == "3"


def test_a_path_of_two_assignments_belongs_to_the_first(tmp_path: Path) -> None:
    code = make_lab(tmp_path, "ml") / "code"
    write(tmp_path, make_starter("hw1", train_py="1", same_py="x"))
    second = make_starter("hw2", train_py="2", same_py="x", more_py="2")
    changes = write(tmp_path, second)
    assert actions(changes) == [("more.py", "added"), ("train.py", "kept")]
    assert changes[1].why == "hw1 has a file of this path"
    assert actions(write(tmp_path, make_starter("hw1", train_py="3", same_py="x"))) == [
        ("train.py", "updated")
    ]
    assert actions(write(tmp_path, second)) == [("train.py", "kept")], "each push names it"
    assert {path.name for path in code.iterdir()} == {"train.py", "same.py", "more.py"}


def test_what_a_server_says_is_not_trusted() -> None:
    lines = (
        "added\t\t../x", "added\t\ta\x1b[31m", "wiped\t\ta", "other\t../../x\ta", "a",
        "conflict\t/etc/passwd\ta", "added\t\tok.py",
    )  # fmt: skip
    assert actions(tuple(parse_changes("\n".join(lines)))) == [("ok.py", "added")]
