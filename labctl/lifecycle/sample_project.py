"""The sample project that `labctl init` writes into a new directory."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from labctl.config import clean_name, parse_name
from labctl.errors import LabError, PolicyError, UsageError
from labctl.events import Note, Reporter, Step
from labctl.lazy import lazy_imports
from labctl.lifecycle.comments import comment_out_example
from labctl.lifecycle.lab_draft import require_writable
from labctl.lifecycle.project_templates import DEFAULT_TEMPLATE, list_layers
from labctl.servers.provider_traits import read_provider_traits

with lazy_imports(__name__):
    import jinja2

CUDA_BASE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
CPU_BASE = "python:3.11-slim"
SKIPPED = {"__pycache__", "ruff.toml", ".ruff_cache", ".mypy_cache"}


def check_new_directory(target: Path, provider: str = "", template: str = "") -> str:
    """Return the name of the lab that a sample project in `target` would be.

    A suggested command keeps the `provider` and `template` that were typed. UsageError for an
    invalid lab name, PolicyError if `target` is not a new or empty directory, or cannot be created.
    """
    typed = target.resolve().name
    try:
        name = parse_name(typed)
    except ValueError as error:
        near = target.parent / clean_name(typed) if target.name else Path(clean_name(typed))
        raise UsageError(
            f"{typed!r} is not a valid lab name",
            why=str(error),
            hint=_suggest_init(str(near), provider, template),
        ) from None
    if target.exists() and not target.is_dir():
        raise PolicyError(
            f"{target} is a file",
            why="a sample project is only written into a new directory",
            hint=_suggest_init(f"{name}-lab", provider, template),
        )
    if target.exists() and any(target.iterdir()):
        raise PolicyError(
            f"{target} is not empty",
            why="a sample project is only written into a new directory",
            hint=_suggest_init(f"{name}-2", provider, template),
        )
    require_writable(target.resolve().parent)
    return name


def _suggest_init(directory: str, provider: str, template: str) -> str:
    options = ["--template", template] if template else []
    options += ["--provider", provider] if provider else []
    return shlex.join(["labctl", "init", directory, *options])


def create_project(
    templates: Path,
    target: Path,
    provider: str,
    reporter: Reporter,
    provider_example: str = "",
    template: str = DEFAULT_TEMPLATE,
) -> Path:
    """Copy the sample project `template` to `target` and return its lab.yaml.

    Changes no existing file.

    `provider_example` is the section of the provider that the user must fill in. Raises the errors
    of `check_new_directory`. The data set of a project that has one is created here if scikit-learn
    and Pillow are installed; otherwise the first run creates it.
    """
    name = check_new_directory(target, provider, template)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        copy_template(templates, template, staging)
        has_dataset = (staging / "prepare_data.py").exists() and _make_dataset(staging, reporter)
        _render(staging, name, provider, has_dataset, provider_example)
        staging.chmod(0o755)
        if target.exists():  # a shell may be in it, so it stays
            for entry in staging.iterdir():
                entry.replace(target / entry.name)
            staging.rmdir()
        else:
            staging.replace(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target / "lab.yaml"


def copy_template(templates: Path, template: str, target: Path) -> None:
    """Copy the files of a template, with its lab.yaml.j2, to an existing directory."""
    for layer in list_layers(template):
        shutil.copytree(
            templates / layer,
            target,
            dirs_exist_ok=True,
            ignore=lambda _, names: SKIPPED & {*names},
        )


def _render(
    directory: Path, name: str, provider: str, has_dataset: bool, provider_example: str
) -> None:
    source = directory / "lab.yaml.j2"
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    ).from_string(source.read_text())
    # Containers on this machine have no GPU.
    base = CPU_BASE if read_provider_traits(provider).on_this_machine else CUDA_BASE
    text = template.render(
        lab=name,
        provider=provider,
        provider_example=comment_out_example(provider_example),
        base_image=base,
        has_dataset=has_dataset,
        cpu=base == CPU_BASE,
        cuda_base=CUDA_BASE,
    )
    (directory / "lab.yaml").write_text(text)
    source.unlink()


def _make_dataset(directory: Path, reporter: Reporter) -> bool:
    """Create ./dataset with the project's own program; False if its libraries are missing here."""
    if not all(importlib.util.find_spec(name) for name in ("sklearn", "PIL", "numpy")):
        text = "scikit-learn is not installed here: the first run creates the data set"
        reporter.emit(Note(text=text))
        return False
    step = Step(name="creating the data set")
    reporter.emit(step)
    done = subprocess.run(
        [sys.executable, "prepare_data.py", "--out", "dataset"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise LabError(
            "prepare_data.py failed",
            why=done.stderr.strip()[-800:],
            hint="labctl init digits   # again, after you fix the error above",
        )
    reporter.emit(Step(name=step.name, done=True))
    return True
