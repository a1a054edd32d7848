"""How labctl finds the commit of a clone, as git itself writes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from labctl.config.installation import find_commit

ROOT = Path(__file__).parents[2]


def git(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with one commit."""
    clone = tmp_path / "clone"
    clone.mkdir()
    git("init", "--quiet", "--initial-branch", "main", cwd=clone)
    (clone / "pyproject.toml").write_text("")
    git("add", ".", cwd=clone)
    git("commit", "--quiet", "--message", "first", cwd=clone)
    return clone


def head(clone: Path) -> str:
    return git("rev-parse", "HEAD", cwd=clone)[:7]


def test_a_branch_has_its_commit_in_a_file(clone: Path) -> None:
    assert find_commit(clone) == head(clone)


def test_packed_branches_are_found(clone: Path) -> None:
    git("pack-refs", "--all", cwd=clone)
    assert not (clone / ".git" / "refs" / "heads" / "main").exists()
    assert find_commit(clone) == head(clone)


def test_a_commit_without_a_branch_is_found(clone: Path) -> None:
    git("checkout", "--quiet", "--detach", cwd=clone)
    assert find_commit(clone) == head(clone)


@pytest.mark.parametrize("packed", [False, True])
def test_a_worktree_has_a_commit_of_its_own(clone: Path, tmp_path: Path, packed: bool) -> None:
    tree = tmp_path / "tree"
    git("worktree", "add", "--quiet", "-b", "topic/one", str(tree), cwd=clone)
    git("commit", "--quiet", "--allow-empty", "--message", "second", cwd=tree)
    if packed:
        git("pack-refs", "--all", cwd=clone)
    assert find_commit(tree) == head(tree) != find_commit(clone)


def test_a_relative_path_to_the_worktrees_files_is_followed(clone: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    git("worktree", "add", "--quiet", "-b", "topic", str(tree), cwd=clone)
    (tree / ".git").write_text("gitdir: ../clone/.git/worktrees/tree\n")
    assert find_commit(tree) == head(clone)


def test_what_is_no_clone_has_no_commit(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "wheel").mkdir()
    assert find_commit(tmp_path / "wheel") == ""
    (tmp_path / "wheel" / "pyproject.toml").write_text("")
    assert find_commit(tmp_path / "wheel") == ""
    (tmp_path / "wheel" / ".git").write_text("gitdir: /nowhere\n")
    assert find_commit(tmp_path / "wheel") == ""
    (clone / ".git" / "HEAD").write_text("ref: refs/heads/unborn\n")
    assert find_commit(clone) == ""
    (clone / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert find_commit(clone) == ""


@pytest.fixture(scope="module")
def hatchling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that builds labctl, in a directory of its own."""
    directory = tmp_path_factory.mktemp("hatchling")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory)]
    subprocess.run([*pip, "hatchling>=1.27"], check=True)
    return directory


def read_built_version(hatchling: Path, source: Path, directory: Path) -> str:
    """Build a wheel from `source`, unpack it in `directory`, and return its `--version`."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(hatchling)},
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory)
    done = subprocess.run(
        [sys.executable, "-c", "from labctl.cli import main; main()", "--version"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.long
def test_a_wheel_names_the_commit_of_the_clone_that_it_was_built_in(
    hatchling: Path, tmp_path: Path
) -> None:
    from labctl import __version__

    clone = tmp_path / "clone"
    git("clone", "--quiet", str(ROOT), str(clone), cwd=tmp_path)
    commit = head(clone)
    built = read_built_version(hatchling, clone, tmp_path / "clean")
    assert built == f"labctl {__version__} (commit {commit})\n"
    (clone / "labctl" / "added.py").write_text("")
    built = read_built_version(hatchling, clone, tmp_path / "changed")
    assert built == f"labctl {__version__} (commit {commit} with changes)\n"
    # without its own .git, in another repository
    git("init", "--quiet", cwd=tmp_path)
    git("commit", "--quiet", "--allow-empty", "--message", "other", cwd=tmp_path)
    shutil.rmtree(clone / ".git")
    built = read_built_version(hatchling, clone, tmp_path / "outer")
    assert built == f"labctl {__version__}\n"


def test_the_version_names_the_commit_of_this_clone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "labctl", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    from labctl import __version__

    commit = find_commit()
    assert done.stdout == f"labctl {__version__}{f' (commit {commit})' if commit else ''}\n"
