"""`labctl init` in a directory with code looks at it, and asks nothing that it can see."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.config import check_files, load_lab
from labctl.lifecycle.project_scan import _is_allowed, scan_project

TRAIN = (
    "import argparse\nimport torch\nfrom PIL import Image\nfrom models import net\nimport wandb\n"
)


@pytest.fixture
def project(home: Path) -> Path:
    """A directory with code, which is the working directory."""
    root = home / "Bird Songs"
    (root / "models").mkdir(parents=True)
    (root / "models" / "net.py").write_text("import torch.nn as nn\nimport numpy\n")
    (root / "train.py").write_text(TRAIN)
    (root / "main.py").write_text("import models\n")
    (root / "broken.py").write_text("def (\n")
    (root / "data").mkdir()
    os.chdir(root)
    return root


def test_code_becomes_a_lab_without_a_question(labctl: Any, home: Path, project: Path) -> None:
    said = labctl("init")
    assert said.code == 0, said.err
    lab = load_lab(project, environ={"HOME": str(home)})
    check_files(lab)
    assert (lab.name, lab.run) == ("bird-songs", ("python", "train.py"))
    assert (lab.image.requirements, lab.image.python) == ("requirements.txt", "3.12")
    packages = (project / "requirements.txt").read_text().splitlines()[1:]
    assert packages == ["numpy", "pillow", "torch", "wandb"]
    text = (project / "lab.yaml").read_text()
    assert "# The likeliest program; also found: main.py." in text
    assert "# data: {data: ./data}" in text
    assert "labctl secret set WANDB_API_KEY" in text
    assert "labctl up" in said.out
    assert 'run: [python, "train.py"]' in said.out
    assert labctl("status").out.startswith("bird-songs: no server")


@pytest.mark.parametrize(
    ("file", "text", "image"),
    [
        ("requirements.txt", "torch\n", ("requirements.txt", "3.12", "", "")),
        ("environment.yml", "dependencies: [python=3.11]\n", ("", "", "environment.yml", "")),
        (
            "pyproject.toml",
            '[project]\nrequires-python = ">=3.9,<3.12"\ndependencies = ["torch"]\n',
            ("pyproject.toml", "3.11", "", ""),
        ),
        ("Dockerfile", "FROM scratch\n", ("", "", "", ".")),
    ],
)
def test_what_lists_the_packages_is_used(
    labctl: Any, home: Path, project: Path, file: str, text: str, image: tuple[str, ...]
) -> None:
    (project / file).write_text(text)
    assert labctl("init").code == 0
    made = load_lab(project, environ={"HOME": str(home)}).image
    assert (made.requirements, made.python, made.conda, made.build) == image
    assert (project / "requirements.txt").exists() == (file == "requirements.txt")
    assert (project / file).read_text() == text


def test_a_provider_of_the_users_own_is_not_written(labctl: Any, home: Path, project: Path) -> None:
    (home / ".config" / "labctl").mkdir(parents=True)
    (home / ".config" / "labctl" / "config.yaml").write_text("server: {provider: aws}\n")
    assert labctl("init").code == 0
    assert "provider:" not in (project / "lab.yaml").read_text()
    assert load_lab(project, environ={"HOME": str(home)}).server.provider == "aws"


def test_an_existing_lab_and_an_empty_directory_are_left_alone(labctl: Any, home: Path) -> None:
    before = (home / "digits" / "lab.yaml").read_text()
    refused = labctl("init")
    assert (refused.code, "is already a lab" in refused.err) == (3, True)
    assert (home / "digits" / "lab.yaml").read_text() == before
    (home / "empty").mkdir()
    os.chdir(home / "empty")
    missing = labctl("init")
    assert (missing.code, "next: labctl init digits" in missing.err) == (4, True)
    assert not list((home / "empty").iterdir())


def test_notebooks_alone_name_no_program(labctl: Any, home: Path) -> None:
    root = home / "notes"
    root.mkdir()
    (root / "a.ipynb").write_text("{}")
    assert labctl("init", str(root)).code == 0
    assert "labctl forward jupyter" in (root / "lab.yaml").read_text()
    assert load_lab(root, environ={"HOME": str(home)}).run == ()


def test_hidden_and_installed_code_does_not_count(tmp_path: Path) -> None:
    for name in (".venv/a.py", "tests/b.py", "data/c.py", "runs/x/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import pandas\n")
    assert not scan_project(tmp_path).has_code


@pytest.mark.parametrize(
    ("version", "wanted", "allowed"),
    [
        ("3.12", ">=3.9", True),
        ("3.12", ">=3.9,<3.12", False),
        ("3.11", "==3.11.*", True),
        ("3.12", "~=3.10", True),
        ("3.12", "!=3.12", False),
        ("3.12", ">3.12", False),
        ("3.12", "", True),
    ],
)
def test_requires_python(version: str, wanted: str, allowed: bool) -> None:
    assert _is_allowed(version, wanted) == allowed


class Terminal(io.StringIO):
    """Standard input that is a terminal on which nobody answers."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["Bad_Name"], 2, "is not a valid lab name"),
        (["notes.txt"], 2, "is not a valid lab name"),
        (["notes"], 3, "notes is a file"),
        (["notes/digits"], 3, "notes is a file"),
        (["digits"], 3, "is already a lab"),
        (["papers"], 4, "there is no code in"),
        (["locked"], 3, "you may not create files in"),
        (["code"], 3, "you may not create files in"),
    ],
)
def test_every_check_comes_before_the_question(
    home: Path, words: list[str], code: int, what: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (home / "notes").touch()
    (home / "papers").mkdir()
    (home / "papers" / "paper.tex").touch()
    (home / "code").mkdir()
    (home / "code" / "train.py").touch()
    denied = {home / "code"}
    if words == ["locked"]:
        denied.add(home)
    # Root may write everywhere, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) not in denied)
    os.chdir(home)
    monkeypatch.setattr(sys, "argv", ["labctl", "init", *words])
    monkeypatch.setattr(sys, "stdin", Terminal())
    before = sorted(home.rglob("*"))
    assert run_and_exit(cli) == code
    error = capsys.readouterr().err
    assert what in error
    assert "\n  next: " in error
    assert "Where should labctl get servers?" not in error
    assert sorted(home.rglob("*")) == before
