"""The README's first run, typed into a terminal on a machine that has never seen labctl."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from terminal import open_terminal
from transcripts import Step, list_steps, make_program, matches

README = Path(__file__).parents[2] / "README.md"
# seconds that the screen may stay as it is while a command works
STILL_S = 3.0
# the last lines of the training's own output, which may be silent while it computes
TRAINING = re.compile(r"on cpu, |epoch \d")
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


class StillScreen:
    """Notices how long the screen of a command stays as it is: no bar, spinner or output moves.

    Seconds are those of a machine with nothing else to do: with a load of two programs for each
    processor, everything may take twice as long.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.changed_at = 0.0
        self.longest: dict[str, float] = {}

    def see(self, lines: list[str]) -> None:
        now = time.monotonic()
        if lines != self.lines:
            self.lines, self.changed_at = lines, now
        if not TRAINING.match(lines[-1]):
            screen = "\n".join(lines[-3:])
            load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            still_s = (now - self.changed_at) / load
            self.longest[screen] = max(self.longest.get(screen, 0.0), still_s)

    def list_waits(self, limit_s: float) -> list[str]:
        """Return the screens, with seconds, that stayed longer than the limit."""
        return [f"{s:.1f} s: {screen}" for screen, s in self.longest.items() if s > limit_s]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_first_run_of_the_readme_prints_what_it_shows(
    newcomer: LabDirectory, columns: int
) -> None:
    steps = list_steps(README, "terminal")
    assert len(steps) == 8
    home = Path(newcomer.environ["HOME"])
    screen = StillScreen()
    with open_terminal(home, newcomer.environ, columns) as terminal:
        for step in steps:
            printed = terminal.run(*read_input(step), COMMAND_S, on_screen=screen.see)
            assert matches(step.output, printed, figures_vary=True), f"{step.shown}{printed}"
    waits = screen.list_waits(STILL_S)
    assert waits == [], "\n\n".join(waits)


def read_input(step: Step) -> tuple[str, list[str]]:
    """Return the command without its comment, and the answers to its questions."""
    return COMMENT.sub("", step.command.rstrip("\n")), ANSWER.findall(step.output)
