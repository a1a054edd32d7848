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
from labctl.lifecycle.sample_project import SKIPPED
from labctl.model import Value
from labctl.shell import command

SAMPLES = ("hands-on",)
SECTION = "assignment.yaml"
IGNORED = shutil.ignore_patterns(SECTION, *SKIPPED)
# The image that grades has the packages of the exercises, by these files of labctl's templates.
IMAGE = ("image-classifier/Dockerfile", "image-classifier-starter/requirements.txt")


class _Generator(Value, frozen=True):
    """A program in the assignment's directory that makes `product`, a part of the assignment.

    `package` is what `modules` come from.
    """

    program: str
    product: str
    title: str
    package: str
    modules: tuple[str, ...]


# how the commented example of assignments begins in the course.yaml of a new course
EXAMPLE = "# assignments:\n"

GENERATORS = (
    _Generator(
        program="make_hidden_data.py",
        product="hidden",
        title="the hidden data",
        package="scikit-learn",
        modules=("sklearn", "PIL", "numpy"),
    ),
    _Generator(
        program="make_reference.py",
        product="reference/model",
        title="the model of the reference solution",
        package="PyTorch",
        modules=("torch", "safetensors", "sklearn", "PIL", "numpy", "tensorboard"),
    ),
)


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
            shutil.copytree(source, Path(draft) / name, ignore=IGNORED)
            _copy_project(templates, Path(draft) / name)
            (Path(draft) / name).replace(directory)
    for generator in GENERATORS:
        _generate(directory, generator, reporter)
    section = (source / SECTION).read_text(encoding="utf-8")
    file = course / COURSE_FILE
    text = file.read_text(encoding="utf-8")
    if is_new:
        # The section replaces the example: a second `assignments:` would be a duplicate key.
        text = text.partition(EXAMPLE)[0]
        replace_file(file, f"{text.rstrip()}\n\n{section}".encode(), mode=0o644)
        section = ""
    elif f"assignments/{name}/" in text:
        section = ""
    return SampleAssignment(name=name, directory=str(directory), section=section)


def _copy_project(templates: Path, directory: Path) -> None:
    """Copy the code of the reference solution, and what the grading image is built from."""
    sample = templates / "image-classifier"
    ignored = shutil.ignore_patterns("*.j2", *SKIPPED)
    code = directory / "reference" / "code"
    shutil.copytree(sample, code, ignore=ignored, dirs_exist_ok=True)
    (directory / "image").mkdir()
    for file in IMAGE:
        shutil.copy(templates / file, directory / "image")


def _generate(directory: Path, generator: _Generator, reporter: Reporter) -> None:
    """Make a part with the assignment's own program, if its libraries are here."""
    file = directory / generator.program
    if (directory / generator.product).exists() or not file.is_file():
        return
    program = command("python", str(file)).render()
    if not all(importlib.util.find_spec(name) for name in generator.modules):
        text = f"{generator.package} is not installed here, so {generator.title} is missing. "
        text += f"{program} makes it, after {install_command('train')}"
        reporter.emit(Note(text=text, level="warning"))
        return
    step = Step(name=f"creating {generator.title}")
    reporter.emit(step)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip()[-800:]
        raise LabError(f"{generator.program} failed", why=why, hint=f"fix it, then:\n{program}")
    reporter.emit(Step(name=step.name, done=True))
