"""The README's first run, typed into a terminal on a machine that has never seen labctl."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from terminal import open_terminal
from transcripts import Step, list_steps, make_program, matches

README = Path(__file__).parents[2] / "README.md"
COLUMNS = 80
# seconds for one command; the first `run` installs PyTorch in an image
COMMAND_S = 900.0
COMMENT = re.compile(r" {2,}# .*")
ANSWER = re.compile(r"\]: ?(.*)$", re.MULTILINE)
pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.long]


@pytest.fixture
def newcomer(tmp_path: Path, base_image: str, server_image: str) -> Iterator[LabDirectory]:
    """An empty home. The directory `digits` in it is the lab that the first command creates."""
    made = make_lab(tmp_path, "unused", base_image)
    home = Path(made.environ["HOME"])
    made.environ["PATH"] = f"{make_program(tmp_path)}:{made.environ['PATH']}"
    if wheels := os.environ.get("LABCTL_WHEELHOUSE", ""):
        made.environ["LABCTL_WHEELHOUSE"] = wheels
    yield LabDirectory(home / "digits", "digits", made.environ)
    if (home / "digits").exists():
        LabDirectory(home / "digits", "digits", made.environ).labctl("down", "--yes", "--discard")


def test_the_first_run_of_the_readme_prints_what_it_shows(newcomer: LabDirectory) -> None:
    steps = list_steps(README, "terminal")
    assert len(steps) == 8
    home = Path(newcomer.environ["HOME"])
    with open_terminal(home, newcomer.environ, COLUMNS) as terminal:
        for step in steps:
            printed = terminal.run(*read_input(step), COMMAND_S)
            assert matches(step.output, printed, figures_vary=True), f"{step.shown}{printed}"


def read_input(step: Step) -> tuple[str, list[str]]:
    """Return the command without its comment, and the answers to its questions."""
    return COMMENT.sub("", step.command.rstrip("\n")), ANSWER.findall(step.output)
