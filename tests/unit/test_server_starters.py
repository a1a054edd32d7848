"""Writing a starter into a lab on a server: the script itself, in this machine's shell."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.courses.server_starters import write_starter
from labctl.errors import TransferError
from labctl.sync.starter import Starter, StarterFile
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


def write(home: Path) -> tuple[str, ...]:
    def run(line: str, *, stdin: bytes, **_: object) -> Result:
        return run_here(home, line, stdin)

    connection = SimpleNamespace(run=run)
    connections = SimpleNamespace(reopen=lambda server: connection)
    config = SimpleNamespace(name="ml")
    lab: Any = SimpleNamespace(config=config, lab_id=LAB_ID, connections=connections)
    server: Any = None
    return write_starter(lab, server, STARTER)


@pytest.mark.parametrize("directory", ["ml", "ml-012345"])
def test_it_writes_what_is_missing_into_the_lab_of_this_id(tmp_path: Path, directory: str) -> None:
    other = make_lab(tmp_path, "ml", "f" * 12) if directory != "ml" else None
    lab = make_lab(tmp_path, directory)
    assert write(tmp_path) == ()
    for file in STARTER.files:
        assert (lab / "code" / file.path).read_bytes() == file.content
        assert bool((lab / "code" / file.path).stat().st_mode & 0o100) == file.executable
        assert time.time() - (lab / "code" / file.path).stat().st_mtime < 60, "Jupyter shows it"
    assert sorted(path.name for path in (lab / "code").iterdir()) == [
        ".labignore", "run.sh", "tests", "train.py",
    ]  # fmt: skip
    assert [path.name for path in (lab / ".labctl").iterdir()] == ["id"], "a copy is left"
    assert other is None or not (other / "code").exists()
    assert write(tmp_path) == (), "the same files a second time need nothing"


def test_own_files_links_and_directories_stay(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, "ml")
    code = lab / "code"
    code.mkdir()
    (code / "train.py").write_text("mine\n")
    (code / "run.sh").symlink_to("/nonexistent")
    (code / "tests").write_text("a file in the way\n")
    own = write(tmp_path)
    assert own == ("train.py", "run.sh", "tests/a b$(touch x).py")
    assert (code / "train.py").read_text() == "mine\n"
    assert (code / "run.sh").is_symlink()
    assert (code / "tests").read_text() == "a file in the way\n"
    assert (code / ".labignore").exists()


def test_without_the_lab_nothing_is_written(tmp_path: Path) -> None:
    other = make_lab(tmp_path, "ml", "f" * 12)
    with pytest.raises(TransferError, match="the files of hw1 could not be written"):
        write(tmp_path)
    assert not (other / "code").exists()
