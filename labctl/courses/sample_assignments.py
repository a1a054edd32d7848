"""The assignments that ship with labctl, which `labctl course init --assignment` adds."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from labctl.config import COURSE_FILE
from labctl.config.identity import replace_file
from labctl.config.installation import install_command
from labctl.errors import LabError
from labctl.events import Note, Reporter, Step
from labctl.model import Value
from labctl.shell import command

SAMPLES = ("hands-on",)
SECTION, HIDDEN_DATA = "assignment.yaml", "make_hidden_data.py"
SKIPPED = shutil.ignore_patterns(SECTION, "__pycache__")


class SampleAssignment(Value, frozen=True):
    """An assignment that was added. `section` is what to add to course.yaml; "" if it is there."""

    name: str
    directory: str
    section: str = ""


def add_assignment(
    templates: Path, course: Path, name: str, reporter: Reporter, *, is_new: bool
) -> SampleAssignment:
    """Write one of SAMPLES into a course's folder; repeating it changes no existing file.

    In a new course, its section is added to course.yaml. The file of another course is its
    instructor's: the section is returned instead.
    """
    source = templates / "course" / name
    directory = course / "assignments" / name
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{name}-") as draft:
            shutil.copytree(source, Path(draft) / name, ignore=SKIPPED)
            (Path(draft) / name).replace(directory)
    _make_hidden_data(directory, reporter)
    section = (source / SECTION).read_text(encoding="utf-8")
    file = course / COURSE_FILE
    text = file.read_text(encoding="utf-8")
    if is_new:
        replace_file(file, f"{text.rstrip()}\n\n{section}".encode(), mode=0o644)
        section = ""
    elif f"assignments/{name}/" in text:
        section = ""
    return SampleAssignment(name=name, directory=str(directory), section=section)


def _make_hidden_data(directory: Path, reporter: Reporter) -> None:
    """Make the hidden data with the assignment's own program, if its libraries are here."""
    if (directory / "hidden").exists() or not (directory / HIDDEN_DATA).is_file():
        return
    program = command("python", str(directory / HIDDEN_DATA)).render()
    if not all(importlib.util.find_spec(name) for name in ("sklearn", "PIL", "numpy")):
        text = f"scikit-learn is not installed here: there is no hidden data yet. {program} makes "
        reporter.emit(Note(text=f"{text}it, after {install_command('train')}", level="warning"))
        return
    step = Step(name="creating the hidden data")
    reporter.emit(step)
    done = subprocess.run(
        [sys.executable, str(directory / HIDDEN_DATA)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LabError(
            f"{HIDDEN_DATA} failed", why=done.stderr.strip()[-800:], hint=f"fix it, then: {program}"
        )
    reporter.emit(Step(name=step.name, done=True))
