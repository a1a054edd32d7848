"""`labctl init DIRECTORY --template NAME` writes a sample project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.config import check_files, find_data_dir, load_lab
from labctl.lifecycle.project_templates import DEFAULT_TEMPLATE, PROJECT_TEMPLATES

FOR_SEVERAL_GPUS = ("ddp", "fsdp", "zero", "accelerate")
FOR_ONE_GPU = [
    name for name in PROJECT_TEMPLATES if name not in (*FOR_SEVERAL_GPUS, DEFAULT_TEMPLATE)
]


@pytest.mark.parametrize("template", FOR_SEVERAL_GPUS)
@pytest.mark.parametrize(("provider", "processes"), [("local", 2), ("aws", 0)])
def test_each_becomes_a_lab(
    labctl: Any, home: Path, template: str, provider: str, processes: int
) -> None:
    said = labctl("init", str(home / "several"), "--template", template, "--provider", provider)
    assert said.code == 0, said.err
    assert "several is ready" in said.out
    lab = load_lab(home / "several", environ={"HOME": str(home)})
    check_files(lab)
    assert (lab.name, lab.server.provider, lab.run) == ("several", provider, ("python", "train.py"))
    assert (lab.launch.launcher, lab.launch.processes) == ("torchrun", processes)
    assert lab.image.requirements == "requirements.txt"
    names = {path.name for path in (home / "several").iterdir()}
    assert {"README.md", "train.py", "requirements.txt", ".labignore"} <= names
    assert not names & {"lab.yaml.j2", "ruff.toml", "dataset"}


@pytest.mark.parametrize("template", FOR_ONE_GPU)
@pytest.mark.parametrize("provider", ["local", "aws"])
def test_each_runs_as_one_process_and_keeps_the_contract(
    labctl: Any, home: Path, template: str, provider: str
) -> None:
    said = labctl("init", str(home / "one"), "--template", template, "--provider", provider)
    assert said.code == 0, said.err
    lab = load_lab(home / "one", environ={"HOME": str(home)})
    check_files(lab)
    # A measurement of kernels trains no model.
    programs = ["measure.py"] if template == "cuda-kernel" else ["train.py", "predict.py"]
    assert (lab.run, lab.launch.launcher) == (("python", programs[0]), "")
    assert lab.outputs == ("checkpoints", "logs")
    names = {path.name for path in (home / "one").iterdir()}
    assert {*programs, "evaluate.py", "README.md", ".labignore", ".gitignore"} <= names
    # Nothing is written before the first run, so nothing of a trial here is sent to a user.
    assert not names & {"checkpoints", "logs", "__pycache__", "lab.yaml.j2", "ruff.toml"}


@pytest.mark.parametrize("template", ["tabular", "tensorflow", "jax"])
@pytest.mark.parametrize("provider", ["local", "aws"])
def test_one_of_another_framework_installs_what_its_server_can_use(
    home: Path, labctl: Any, template: str, provider: str
) -> None:
    said = labctl("init", str(home / "other"), "--template", template, "--provider", provider)
    assert said.code == 0, said.err
    lab = load_lab(home / "other", environ={"HOME": str(home)})
    is_table = template == "tabular"
    assert lab.server.need.gpu.kind == ("none" if is_table else "auto")
    on_cpu = provider == "local" and not is_table
    assert lab.image.requirements == f"requirements{'-cpu' if on_cpu else ''}.txt"
    assert (home / "other" / "checkpoints.py").is_file()


def test_every_template_teaches_in_a_readme() -> None:
    for template in PROJECT_TEMPLATES:
        directory = find_data_dir() / "templates" / template
        missing = [
            name
            for name in ("README.md", "lab.yaml.j2", "requirements.txt")
            if not (directory / name).is_file()
        ]
        assert missing == [], template


@pytest.mark.parametrize(
    ("typed", "near", "command"),
    [
        ("dpp", "; did you mean ddp?", "labctl init several --template ddp --provider local"),
        (
            "theano",
            "",
            "labctl init several --template image-classifier --provider local",
        ),
    ],
)
def test_an_unknown_template_is_a_usage_error_that_names_the_nearest(
    labctl: Any, home: Path, typed: str, near: str, command: str
) -> None:
    said = labctl("init", "several", "--provider", "local", "--template", typed)
    assert said.code == 2
    text = " ".join(said.err.split())
    assert f"there is no template '{typed}'{near}" in text
    assert f"the templates are {', '.join(PROJECT_TEMPLATES)}" in text
    assert command in text
    assert not Path("several").exists()


def test_a_template_is_only_written_into_a_new_directory(labctl: Any, home: Path) -> None:
    said = labctl("init", "--template", "ddp")  # here is a lab
    assert said.code == 3
    assert "is not empty" in said.err
    assert "next: labctl init digits-2 --template ddp" in said.err
    assert [path.name for path in (home / "digits").iterdir()] == ["lab.yaml"]


def test_an_empty_working_directory_becomes_the_project(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "empty").mkdir()
    monkeypatch.chdir(home / "empty")
    assert labctl("init", "--template", "zero").code == 0
    assert (home / "empty" / "train.py").exists()


def test_the_templates_are_listed_with_what_each_teaches(labctl: Any, home: Path) -> None:
    said = labctl("init", "--templates")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].split() == ["TEMPLATE", "TEACHES"]
    listed = dict(line.split(maxsplit=1) for line in lines[1:])
    assert listed == PROJECT_TEMPLATES
    assert "labctl init --templates" in " ".join(labctl("init", "x", "--template", "y").err.split())
    assert max(map(len, lines)) <= 80


def test_the_help_says_where_the_templates_are_listed(labctl: Any) -> None:
    text = " ".join(labctl("init", "--help").out.split())
    assert "Create this sample project; --templates lists them." in text
