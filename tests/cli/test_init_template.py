"""`labctl init DIRECTORY --template NAME` writes a sample project for several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.config import check_files, find_data_dir, load_lab
from labctl.lifecycle.project_templates import DEFAULT_TEMPLATE, PROJECT_TEMPLATES

FOR_SEVERAL_GPUS = [name for name in PROJECT_TEMPLATES if name != DEFAULT_TEMPLATE]


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
            "tensorflow",
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


def test_the_help_names_the_templates(labctl: Any) -> None:
    text = " ".join(labctl("init", "--help").out.split())
    assert f"Create this sample project: {', '.join(PROJECT_TEMPLATES)}." in text
