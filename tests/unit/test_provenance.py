"""Where a run's code came from: real git repositories, and ones that would start programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from labctl.model import Gpu, ServerFacts
from labctl.runs.provenance import (
    GitQuery,
    GitState,
    MachineGpu,
    describe_machine,
    parse_git_status,
)

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.email=a@example.org", "-c", "user.name=a"]
    done = subprocess.run(
        ["git", "-C", str(root), *own, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "lab"
    root.mkdir()
    git(root, "init", "-q", "-b", "work")
    (root / "train.py").write_text("print()\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def looked(root: Path) -> GitState:
    with GitQuery(root) as looking:
        return looking.read_code()


@needs_git
def test_a_clean_tree(repository: Path) -> None:
    code = looked(repository)
    assert code == GitState(commit=git(repository, "rev-parse", "HEAD"), branch="work", dirty=False)


@needs_git
def test_changes_new_files_and_renames_make_it_dirty(repository: Path) -> None:
    (repository / "with space").write_text("")
    git(repository, "mv", "train.py", "learn.py")
    code = looked(repository)
    assert code.dirty is True
    assert set(code.changed) == {"learn.py", "with space"}


@needs_git
def test_results_are_no_change_of_the_code(repository: Path) -> None:
    for folder in ("runs/first", ".labctl", "server-edits"):
        (repository / folder).mkdir(parents=True)
        (repository / folder / "file").write_text("x")
    assert looked(repository).dirty is False


@needs_git
def test_a_lab_deeper_in_a_repository(repository: Path) -> None:
    (repository / "labs" / "one").mkdir(parents=True)
    (repository / "train.py").write_text("changed elsewhere\n")
    code = looked(repository / "labs" / "one")
    assert code.commit
    assert code.dirty is False


@needs_git
def test_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert looked(tmp_path) == GitState(
        branch=git(tmp_path, "symbolic-ref", "--short", "HEAD"), why="nothing is committed yet"
    )


def test_outside_of_a_repository(tmp_path: Path) -> None:
    assert looked(tmp_path).why == "the lab is not in a git repository"


@needs_git
@pytest.mark.parametrize(
    "settings",
    [
        "[core]\n\tfsmonitor = touch {mark}; false\n",
        "[core]\n\tFSMonitor = touch {mark}; false\n",
        '[filter "x"]\n\tclean = touch {mark}; cat\n[core]\n\tattributesFile = attributes\n',
        "[include]\n\tpath = elsewhere\n",
    ],
)
def test_no_program_of_a_strangers_repository_is_started(repository: Path, settings: str) -> None:
    mark = repository.parent / "started"
    (repository / "elsewhere").write_text(f"[core]\n\tfsmonitor = touch {mark}; false\n")
    (repository / ".gitattributes").write_text("*.py filter=x\n")
    (repository / "train.py").write_text("other\n")
    with (repository / ".git" / "config").open("a") as file:
        file.write(settings.format(mark=mark))
    code = looked(repository)
    assert (code.commit, code.dirty) == ("", None)
    assert "programs" in code.why
    assert not mark.exists()


@needs_git
def test_a_git_file_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /somewhere/else\n")
    assert looked(tmp_path).dirty is None


@needs_git
def test_an_answer_that_nobody_waits_for(repository: Path) -> None:
    with GitQuery(repository) as looking:
        process = looking.process
    assert process is not None
    assert process.returncode is not None


def test_conflicts_and_odd_answers() -> None:
    out = b"# branch.oid abc\0# branch.head (detached)\0u UU N... 1 1 1 1 a b c both.py\0"
    assert parse_git_status(out) == GitState(commit="abc", dirty=True, changed=("both.py",))
    assert parse_git_status(b"").why == "nothing is committed yet"
    assert parse_git_status(b"\xff\0\0x y").dirty is None


def test_what_the_ledger_keeps_of_a_machine() -> None:
    gpu = Gpu(name="NVIDIA T4", uuid="GPU-1", memory_bytes=16, driver="550.1")
    kept = describe_machine(ServerFacts(os="Debian", cpus=8, memory_bytes=32, gpus=(gpu,)))
    assert kept.gpus == (MachineGpu(name="NVIDIA T4", memory_bytes=16, driver="550.1"),)
    assert (kept.os, kept.cpus, kept.memory_bytes) == ("Debian", 8, 32)
