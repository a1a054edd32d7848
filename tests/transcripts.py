"""Transcripts in the docs, replayed against the program so that they stay true.

A transcript is a fenced `console` block below a comment that names where it is replayed:

    <!-- transcript: here -->
    ```console
    $ labctl status
    birds: no server. …
    ```

Lines after `$ ` are commands, and lines after `> ` continue the one before. `cd DIRECTORY` holds
for the commands after it. `…` stands for text that varies, alone on its line for any number of
lines. The blocks of a page with the same name are one session, in the order of the page.

With LABCTL_RECORD_TRANSCRIPTS=1 a test writes what the program printed into the page, instead of
failing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK = re.compile(r"<!-- transcript: (\w+) -->\n```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANYTHING = "…"
FIGURE = re.compile(r"\d+")
# Two or more spaces in an escaped text.
GAP = re.compile(r"(?:\\ ){2,}")
# What a command says about a part that lasts more than ten seconds, as on a busy machine.
WAIT = re.compile(
    r"^  (?:canceling|checking|connecting|extending|finishing|listing|loading|looking for|reading"
    r"|removing|starting the run|stopping|waiting)\b.*\n",
    re.MULTILINE,
)
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Step:
    """A command, the lines that show it, and the output that the page promises."""

    command: str
    shown: str
    output: str


@dataclass(frozen=True)
class Session:
    """Where commands run: a working directory, and the whole environment."""

    directory: Path
    environ: Mapping[str, str]

    def enter(self, directory: str) -> Session:
        return replace(self, directory=(self.directory / directory).resolve())

    def run(self, command: str) -> str:
        """Return what a terminal of 80 columns would show, without trailing spaces."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env={**self.environ, "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def parse_steps(block: str) -> list[Step]:
    steps: list[Step] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append(Step(line[2:], line, ""))
            continue
        last = steps.pop()
        if line.startswith("> ") and not last.output:
            steps.append(Step(last.command + line[2:], last.shown + line, ""))
        else:
            steps.append(Step(last.command, last.shown, last.output + line))
    return steps


def list_steps(page: Path, place: str) -> list[Step]:
    """Return the steps of the page's blocks that are replayed at `place`."""
    blocks = BLOCK.findall(page.read_text())
    return [step for name, block in blocks if name == place for step in parse_steps(block)]


def matches(promised: str, printed: str, *, figures_vary: bool = False) -> bool:
    """Whether `printed` is what the page promises; `…` stands for text that varies.

    With `figures_vary`, any number may stand for a number.
    """
    pattern = "".join(map(_build_pattern, promised.splitlines(keepends=True)))
    if figures_vary:
        pattern = FIGURE.sub(lambda figure: FIGURE.pattern, pattern)
    return re.fullmatch(pattern, printed) is not None


def _build_pattern(line: str) -> str:
    if ANYTHING not in line:
        return re.escape(line)
    if line.strip() == ANYTHING:
        return r"(?:.*\n)*"
    text = ".*".join(map(re.escape, line.split(ANYTHING)))
    # What varies may stand in another row of the table, and then the columns have another width.
    return GAP.sub("  +", text)


def replay(page: Path, place: str, session: Session) -> list[str]:
    """Replay the page's session; return one text for each command that printed something else."""
    is_recording = bool(os.environ.get("LABCTL_RECORD_TRANSCRIPTS"))
    wrong, end = [], 0
    for step in list_steps(page, place):
        text = page.read_text()
        start = text.index(step.shown + step.output, end) + len(step.shown)
        end = start + len(step.output)
        if step.command.startswith("cd "):
            session = session.enter(step.command[3:].split("#")[0].strip())
            continue
        printed = session.run(step.command)
        if matches(step.output, printed) or matches(step.output, WAIT.sub("", printed)):
            continue
        if is_recording:
            page.write_text(text[:start] + printed + text[end:])
            end = start + len(printed)
        else:
            wrong.append(f"{step.shown}expected:\n{step.output}printed:\n{printed}")
    return wrong


def make_session(folder: Path, project: Path, environ: Mapping[str, str]) -> Session:
    """Make a session in a copy of `project`, with a home and a `labctl` of its own in `folder`."""
    home = folder / "home"
    directory = home / project.name
    home.mkdir()
    subprocess.run(["cp", "-r", str(project), str(directory)], check=True)
    programs = make_program(folder)
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
    mine = {"HOME": str(home), "LANG": "C.UTF-8", "PATH": f"{programs}:{os.environ['PATH']}"}
    return Session(directory, {**kept, **mine, **environ})


def make_program(folder: Path) -> Path:
    """Make a program `labctl` in a directory below `folder`; return that directory.

    Its messages speak of `labctl`, and not of `python -m labctl`.
    """
    programs = folder / "bin"
    programs.mkdir()
    start = "import sys; from labctl.cli import main; sys.argv[0] = 'labctl'; sys.exit(main())"
    program = programs / "labctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{start}" "$@"\n')
    program.chmod(0o755)
    return programs
