"""Comments in the files that labctl writes for people fit a terminal of 80 columns."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.config import find_data_dir
from labctl.lifecycle.project_templates import PROJECT_TEMPLATES, list_layers

COLUMNS = 80
DIRECTORIES = (
    *dict.fromkeys(layer for template in PROJECT_TEMPLATES for layer in list_layers(template)),
    "image-classifier-starter",
    "course",
)
TEMPLATES = sorted(
    path
    for directory in DIRECTORIES
    for path in (find_data_dir() / "templates" / directory).rglob("*")
    if path.is_file() and path.suffix not in (".md", ".pyc") and "cache" not in str(path)
)


def list_comment_lines(name: str, text: str) -> Iterator[str]:
    """List the lines with comments, and those of a program's docstring."""
    lines = text.splitlines()
    if not name.endswith(".py"):
        yield from (line for line in lines if re.search(r"(^|\s)#(\s|$)", line))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield lines[token.start[0] - 1]
    module = ast.parse(text)
    if ast.get_docstring(module):
        yield from lines[: module.body[0].end_lineno]


def list_wide_comments(name: str, text: str) -> list[str]:
    return [line for line in list_comment_lines(name, text) if len(line) > COLUMNS]


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_comments_of_the_sample_and_of_courses_fit(file: Path) -> None:
    assert list_wide_comments(file.name, file.read_text(encoding="utf-8")) == []


def test_the_example_of_evaluate_py_fits(labctl: Any) -> None:
    example = labctl("eval", "--example").out
    assert "# For PyTorch." in example
    assert list_wide_comments("evaluate.py", example) == []


@pytest.mark.parametrize(
    "files",
    [
        {
            "requirements-of-the-experiments-with-birds.txt": "torch @ file:///nowhere\nnumpy\n",
            ".gitignore": "dataset/pictures-of-birds-that-sing-in-the-morning/*.jpeg\ndataset/\n",
        },
        {
            "pyproject.toml": '[project]\nname = "birds"\nversion = "1"\n'
            'requires-python = ">=3.10,!=3.10.1,!=3.10.2,!=3.10.3,!=3.10.4,!=3.10.5,!=3.10.6"\n'
            "[project.optional-dependencies]\n"
            'train-on-many-machines = ["torch"]\n'
            'show-results-in-the-browser = ["dash"]\n'
            'listen-to-the-songs-of-birds = ["librosa"]\n'
            'write-letters-to-the-authors = ["jinja2"]\n',
        },
        {"Dockerfile": "FROM scratch\n"},
        {"environment-of-the-experiments-with-birds-and-others.yml": "dependencies: [pip]\n"},
    ],
    ids=["requirements", "extras", "Dockerfile", "conda"],
)
@pytest.mark.parametrize("base_image", ["", "registry.lab.example/group/python-with-cuda:12.8"])
def test_comments_of_an_own_project_fit(
    labctl: Any,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    base_image: str,
) -> None:
    if base_image:
        monkeypatch.setenv("LABCTL_BASE_IMAGE", base_image)
    root = home / "birds"
    (root / "dataset").mkdir(parents=True)
    programs = [f"train_on_the_songs_of_{name}.py" for name in ("larks", "robins", "wrens")]
    imports = "import jax, tensorflow, torch, wandb\n"
    for name, text in {**files, **dict.fromkeys(programs, imports)}.items():
        (root / name).write_text(text)
    os.chdir(root)
    assert labctl("init").code == 0
    written = [root / "lab.yaml", *root.glob("requirements*.txt")]
    assert [line for file in written for line in list_wide_comments("", file.read_text())] == []
