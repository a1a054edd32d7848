"""`labctl init` in a directory with code looks at it, and asks nothing that it can see."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.config import ImageConfig, LabConfig, check_files, load_lab
from labctl.config.schema import LaunchConfig
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
    assert max(map(len, text.splitlines())) <= 80
    assert "# data: {data: ./data}" in text
    assert "labctl secret set WANDB_API_KEY" in text
    assert "labctl up" in said.out
    assert 'run: [python, "train.py"]' in said.out
    assert labctl("status").out.startswith("bird-songs: no server")


def test_init_names_the_rule_that_leaves_out_the_data(labctl: Any, project: Path) -> None:
    (project / ".gitignore").write_text("*.bin\ndata/\n")
    assert labctl("init").code == 0
    text = (project / "lab.yaml").read_text()
    assert "# data/ is not sent with the code (data/ in .gitignore).\n" in text
    assert "# If runs need it, add the line !/data/ to .labignore.\n" in text
    assert "# data: {data: ./data}" in text


@pytest.mark.parametrize(
    ("file", "rules", "rule"),
    [(".gitignore", "*.npy\n", "*.npy in .gitignore"), ("data/.gitignore", "*\n", "* in data/")],
)
def test_init_names_the_rule_that_leaves_out_the_files_of_the_data(
    labctl: Any, project: Path, file: str, rules: str, rule: str
) -> None:
    (project / "data" / "birds.npy").write_text("x")
    (project / file).write_text(rules)
    assert labctl("init").code == 0
    text = (project / "lab.yaml").read_text()
    assert f"# Files of data/ are not sent with the code ({rule}" in text
    assert "# If runs need them, add the line !/" in text
    assert "is sent as a part of the code" not in text


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


@pytest.mark.parametrize(
    ("files", "setting", "comment"),
    [
        (
            {"requirements.txt": "torch\n"},
            "image: {requirements: requirements.txt}",
            "# Python is that of your base image, debian:12.\n",
        ),
        (
            {"pyproject.toml": '[project]\nrequires-python = ">=3.9"\ndependencies = ["torch"]\n'},
            "image: {requirements: pyproject.toml}",
            "# Python is that of your base image, debian:12; requires-python >=3.9.\n",
        ),
        (
            {"requirements.txt": "torch\n", ".python-version": "3.10.4\n"},
            'image: {python: "3.10", requirements: requirements.txt}',
            "# Python 3.10: .python-version.\n",
        ),
    ],
)
def test_without_an_exact_version_the_base_image_of_this_machine_has_the_python(
    labctl: Any,
    home: Path,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    setting: str,
    comment: str,
) -> None:
    monkeypatch.setenv("LABCTL_BASE_IMAGE", "debian:12")
    for name, text in files.items():
        (project / name).write_text(text)
    assert labctl("init").code == 0
    written = (project / "lab.yaml").read_text()
    assert f"{setting}\n" in written
    assert comment in written
    assert labctl("config").code == 0


def test_code_without_packages_is_built_on_the_base_image_of_this_machine(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adopt(labctl, home, {"train.py": "import json\n"}).image.reference == "python:3.12-slim"
    shutil.rmtree(home / "repository")
    monkeypatch.setenv("LABCTL_BASE_IMAGE", "debian:12")
    lab = adopt(labctl, home, {"train.py": "import json\n"})
    assert (lab.image.requirements, lab.image.reference) == ("requirements.txt", "")
    assert (lab.root / "requirements.txt").read_text().startswith("# Written by labctl init")


def test_a_dockerfile_gets_a_note_on_its_command(labctl: Any, home: Path) -> None:
    adopt(labctl, home, {"Dockerfile": 'FROM scratch\nCMD ["python", "-m", "birds"]\n'})
    text = (home / "repository" / "lab.yaml").read_text()
    assert "Their command is\n# `run:` below, not its CMD.\nimage: {build: .}\n" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("dockerfile", "command"),
    [
        ('FROM a\nCMD ["python", "fit.py", "--steps", "20"]\n', "python fit.py --steps 20"),
        ("FROM a\nCMD python3 fit.py --steps 20\n", "python3 fit.py --steps 20"),
        ('FROM a\nCMD ["python", "-m", "fit"]\n', "python -m fit"),
        ('FROM a\nCMD ["python", "fit.py"]\nFROM b\n', "python train.py"),
        ('FROM a\nENTRYPOINT ["x"]\nCMD ["python", "fit.py"]\n', "python train.py"),
        ("FROM a\nCMD python fit.py --to $HOME\n", "python train.py"),
        ("FROM a\nCMD python 'fit.py\n", "python train.py"),
        ('FROM a\nCMD ["python", 1]\n', "python train.py"),
        ('FROM a\nCMD ["jupyter", "lab"]\n', "python train.py"),
        ("FROM a\nCMD python /app/other.py\n", "python train.py"),
    ],
)
def test_the_command_of_a_dockerfile_is_used_if_it_is_plain(
    labctl: Any, home: Path, dockerfile: str, command: str
) -> None:
    files = {"Dockerfile": dockerfile, "fit.py": "print()\n", "train.py": "print()\n"}
    assert list(adopt(labctl, home, files).run) == command.split()


def adopt(labctl: Any, home: Path, files: dict[str, str]) -> LabConfig:
    """Make a lab of these files, and check it as the next command does."""
    root = home / "repository"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    said = labctl("init", str(root))
    assert said.code == 0, said.err
    lab = load_lab(root, environ={"HOME": str(home)})
    check_files(lab)
    assert ("labctl run" in said.out) == bool(lab.run)
    assert ("No program was found" in said.out) == (not lab.run)
    return lab


SETUP = "from setuptools import setup\nsetup()\n"
PYPROJECT = """\
[build-system]
requires = ["setuptools"]
[project]
name = "birds"
dynamic = ["version"]
dependencies = ["torch>=2", "hydra_core"]
[project.optional-dependencies]
train = ["WandB>=0.1", "torchmetrics"]
dev = ["pytest"]
[project.scripts]
birds-export = "birds.export:main"
birds-train = "birds.train:main"
"""
POETRY = """\
[tool.poetry]
package-mode = false
[tool.poetry.dependencies]
python = "^3.11"
torch = "^2.1"
numpy = {version = "~1.26", extras = ["blas"]}
timm = {git = "https://github.com/huggingface/timm.git", tag = "v1"}
six = "*"
"""


@pytest.mark.parametrize(
    ("files", "image"),
    [
        pytest.param(
            {"requirements.txt": "-r requirements/base.txt\n-e .\n", "setup.py": SETUP,
             "requirements/base.txt": "torch\n"},
            ImageConfig(requirements="requirements.txt", python="3.12"),
            id="other-list-and-editable",
        ),
        pytest.param(
            {"requirements.txt": "-e git+https://github.com/openai/CLIP.git#egg=clip\n"
             "--index-url https://x.org/simple\n--pre\n"},
            ImageConfig(requirements="requirements.txt", python="3.12"),
            id="git-and-index",
        ),
        pytest.param(
            {"pyproject.toml": "[project]\nname='a'\ndynamic=['dependencies']\n",
             "setup.py": SETUP},
            ImageConfig(requirements="pyproject.toml", python="3.12"),
            id="dynamic-dependencies",
        ),
        pytest.param(
            {"pyproject.toml": "[tool.black]\n", "setup.py": SETUP},
            ImageConfig(requirements="setup.py", python="3.12"),
            id="setup.py",
        ),
        pytest.param(
            {"pyproject.toml": "[build-system]\n[tool.poetry.dependencies]\ntorch = '^2'\n"},
            ImageConfig(requirements="pyproject.toml", python="3.12"),
            id="poetry",
        ),
        pytest.param(
            {"requirements/train.txt": "torch\n", "requirements/dev.txt": "pytest\n"},
            ImageConfig(requirements="requirements/train.txt", python="3.12"),
            id="directory-of-lists",
        ),
        pytest.param(
            {"environment.yml": "dependencies:\n- pip:\n  - -r requirements.txt\n  - -e .\n",
             "requirements.txt": "timm\n", "setup.py": SETUP},
            ImageConfig(conda="environment.yml"),
            id="conda-with-pip",
        ),
    ],
)  # fmt: skip
def test_lists_of_public_repositories_are_accepted(
    labctl: Any, home: Path, files: dict[str, str], image: ImageConfig
) -> None:
    assert adopt(labctl, home, files | {"train.py": "import torch\n"}).image == image


def test_files_of_settings_are_no_programs(labctl: Any, home: Path) -> None:
    files = {
        "train.py": "import torch\n",
        "config/train_gpt2.py": "batch_size = 12\n",
        "scripts/train_all.py": "import torch\n",
    }
    text = (adopt(labctl, home, files).root / "lab.yaml").read_text()
    assert "# The likeliest program; also found: scripts/train_all.py." in text


def test_a_package_with_extras_and_programs(labctl: Any, home: Path) -> None:
    files = {
        "pyproject.toml": PYPROJECT,
        "src/birds/__init__.py": "",
        "src/birds/train.py": "import torch, hydra, wandb\nfrom . import net\n",
    }
    lab = adopt(labctl, home, files)
    assert (lab.image.requirements, lab.image.extras) == ("pyproject.toml", ("train",))
    assert (lab.run, lab.env) == (("birds-train",), {})
    text = (lab.root / "lab.yaml").read_text()
    assert "# The code imports packages of the extra train." in text
    assert "# Not installed: the extra dev." in text
    assert "also found: src/birds/train.py." in text


def test_a_project_without_a_build_system_is_not_installed(labctl: Any, home: Path) -> None:
    table = '[project]\ndependencies = ["torch"]\n[project.scripts]\nbirds-train = "birds:train"\n'
    files = {
        "pyproject.toml": table,
        "scripts/train.py": "import birds\n",
        "src/birds/__init__.py": "import torch\n",
    }
    lab = adopt(labctl, home, files)
    assert (lab.run, lab.env["PYTHONPATH"]) == (("python", "scripts/train.py"), "/lab/code/src")
    text = (lab.root / "lab.yaml").read_text()
    assert "# The packages of pyproject.toml, installed once.\n" in text


@pytest.mark.parametrize(
    ("files", "run", "path"),
    [
        ({"src/birds/train.py": "from .net import x\n", "src/birds/__init__.py": ""},
         ("python", "-m", "birds.train"), "/lab/code/src"),
        ({"scripts/train.py": "import birds\n", "birds/__init__.py": ""},
         ("python", "scripts/train.py"), "/lab/code"),
        ({"train.py": "import birds\n", "src/birds/__init__.py": ""},
         ("python", "train.py"), "/lab/code/src"),
        ({"src/train.py": "import net\n", "src/net.py": ""}, ("python", "src/train.py"), ""),
        ({"train.sh": "torchrun x\n", "setup.py": SETUP}, ("bash", "train.sh"), ""),
    ],
)  # fmt: skip
def test_the_program_finds_its_own_modules(
    labctl: Any, home: Path, files: dict[str, str], run: tuple[str, ...], path: str
) -> None:
    lab = adopt(labctl, home, files)
    assert (lab.run, lab.env.get("PYTHONPATH", "")) == (run, path)


def test_a_list_that_cannot_be_used_is_replaced_by_another(labctl: Any, home: Path) -> None:
    files = {
        "environment.yml": "dependencies:\n- pip:\n  - -r ../all.txt\n",
        "requirements.txt": "torch==2.8.0\n./wheels/a.whl\n",
        "wheels/a.whl": "",
        "pyproject.toml": "[project\n",
        "train.py": "import torch\n",
    }
    lab = adopt(labctl, home, files)
    assert lab.image.requirements == "requirements-labctl.txt"
    assert (lab.root / "requirements.txt").read_text() == files["requirements.txt"]
    assert (lab.root / "requirements-labctl.txt").read_text().splitlines()[1:] == [
        "torch==2.8.0",
        "# left out: it installs a file of this machine ('./wheels/a.whl'); install the",
        "# package from an index, or write a Dockerfile",
        "# ./wheels/a.whl",
    ]
    text = (lab.root / "lab.yaml").read_text()
    assert "# Not environment.yml: line 3 of 'environment.yml' reads '../all.txt'" in text
    assert "# Not requirements.txt: line 2 of 'requirements.txt' installs a file" in text


def test_a_list_in_another_encoding_is_replaced_by_the_imports(labctl: Any, home: Path) -> None:
    root = home / "repository"
    root.mkdir()
    (root / "requirements.txt").write_bytes("torch\n".encode("utf-16"))
    lab = adopt(labctl, home, {"train.py": "import torch\n"})
    assert lab.image.requirements == "requirements-labctl.txt"
    assert (root / "requirements-labctl.txt").read_text().splitlines()[1:] == ["torch"]


@pytest.mark.parametrize(
    ("file", "text", "lines"),
    [
        (
            "Pipfile",
            '[packages]\ntorch = "==2.8"\nsix = "*"\nlib = {path = "../lib", editable = true}\n'
            '[dev-packages]\npytest = "*"\n',
            [
                "torch==2.8",
                "six",
                "# left out: it installs code outside the lab ('-e ../lib'); copy it there",
                "# -e ../lib",
            ],
        ),
        (
            "pyproject.toml",
            POETRY,
            [
                "torch>=2.1,<3",
                "numpy[blas]>=1.26,<1.27",
                "timm @ git+https://github.com/huggingface/timm.git@v1",
                "six",
            ],
        ),
    ],
)
def test_lists_that_pip_cannot_read_are_converted(
    labctl: Any, home: Path, file: str, text: str, lines: list[str]
) -> None:
    lab = adopt(labctl, home, {file: text, "train.py": ""})
    head, *rest = (lab.root / "requirements.txt").read_text().splitlines()
    assert (head.startswith(f"# Written by labctl init from {file}."), rest) == (True, lines)
    assert lab.image.requirements == "requirements.txt"


def test_imports_are_named_as_the_index_names_them(labctl: Any, home: Path) -> None:
    code = (
        "import bs4, git, hydra, faiss, umap, clip, apex, google.colab\n"
        "from mpl_toolkits.mplot3d import Axes3D\nfrom google.cloud import storage\n"
        "from google.protobuf import text_format\nfrom dateutil import parser\n"
    )
    lab = adopt(labctl, home, {"train.py": code})
    assert (lab.root / "requirements.txt").read_text().splitlines()[1:] == [
        "beautifulsoup4",
        "clip @ git+https://github.com/openai/CLIP.git",
        "faiss-cpu",
        "GitPython",
        "google-cloud-storage",
        "hydra-core",
        "matplotlib",
        "protobuf",
        "python-dateutil",
        "umap-learn",
    ]


def test_code_inside_a_lab_becomes_a_lab_of_its_own(labctl: Any, home: Path) -> None:
    inner = home / "digits" / "birds"
    inner.mkdir()
    (inner / "train.py").touch()
    said = labctl("init", str(inner))
    assert said.code == 0
    assert f"{inner} is inside the lab {home / 'digits'}." in said.err
    assert load_lab(inner, environ={"HOME": str(home)}).name == "birds"


def test_a_sample_inside_a_lab_says_so_before_it_is_created(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / "digits")
    said = labctl("init", "inner", "--provider", "local")
    assert said.code == 0
    slip = labctl("init", "other", "--provider", "loca").err
    assert slip.startswith("labctl: there is no provider 'loca'; did you mean local?\n")
    inside = f"{home / 'digits' / 'inner'} is inside the lab {home / 'digits'}."
    assert inside in said.err
    monkeypatch.chdir(home)
    assert "is inside the lab" not in labctl("init", "outside", "--provider", "local").err


def test_the_suggested_init_keeps_the_provider(labctl: Any, home: Path) -> None:
    suggested = labctl("init", "A_B", "--provider", "aws").err.partition("next: labctl ")[2]
    assert suggested.split() == ["init", "a-b", "--provider", "aws"]


def test_code_without_a_program_says_so(labctl: Any, home: Path) -> None:
    lab = adopt(labctl, home, {"net.py": "", "data.py": ""})
    assert lab.run == ()


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


def test_a_home_directory_does_not_become_a_lab(labctl: Any, home: Path) -> None:
    (home / "train.py").write_text(TRAIN)
    os.chdir(home)
    refused = labctl("init")
    assert refused.code == 3
    assert "is your home directory" in refused.err
    assert "next: labctl init digits && cd digits\n" in refused.err
    assert not (home / "lab.yaml").exists()


def test_notebooks_alone_name_no_program(labctl: Any, home: Path) -> None:
    root = home / "notes"
    root.mkdir()
    code = ["%matplotlib inline\n", "!pip install torch\n", "import torch, cv2"]
    cells = [{"cell_type": "markdown", "source": "def ("}, {"cell_type": "code", "source": code}]
    (root / "a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    said = labctl("init", str(root))
    assert (said.code, "labctl run" in said.out) == (0, False)
    assert "labctl forward jupyter" in said.out
    packages = (root / "requirements.txt").read_text().splitlines()[1:]
    assert packages == ["opencv-python-headless", "torch"]
    assert "labctl forward jupyter" in (root / "lab.yaml").read_text()
    assert load_lab(root, environ={"HOME": str(home)}).run == ()


def test_hidden_and_installed_code_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "myenv").mkdir()
    (tmp_path / "myenv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    for name in (".venv/a.py", "myenv/bin/jp.py", "tests/b.py", "data/c.py", "runs/x/d.py"):
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


@pytest.mark.parametrize(
    ("file", "text", "python"),
    [
        ("Pipfile", "[requires]\npython_version = '3.10'\n[packages]\nsix = '*'\n", "3.10"),
        ("pyproject.toml", POETRY.replace("^3.11", "~3.11"), "3.11"),
        ("setup.py", "setup(name='a', python_requires='>=3.7,<3.12')\n", "3.11"),
        ("setup.cfg", "[options]\npython_requires = <3.11\ninstall_requires = six\n", "3.10"),
    ],
)
def test_every_kind_of_project_may_name_its_python(
    labctl: Any, home: Path, file: str, text: str, python: str
) -> None:
    assert adopt(labctl, home, {file: text, "train.py": ""}).image.python == python


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


HOSTILE = """\
[build-system]
requires = ["setuptools"]
[project]
name = "birds"
requires-python = ">=3.9\\nstore: s3://another/one"
dependencies = ["torch"]
[project.optional-dependencies]
"a]}\\nstore: s3://another/two" = ["wandb"]
"b\\nstore: s3://another/three" = ["zarr"]
[project.scripts]
"train]\\nstore: s3://another/four\\n#" = "birds:main"
"train\\nstore: s3://another/five" = "birds:main"
"""


def test_names_in_a_project_cannot_become_settings(labctl: Any, home: Path) -> None:
    """A line break in a name would start a new line of lab.yaml."""
    lab = adopt(labctl, home, {"pyproject.toml": HOSTILE, "birds.py": "import wandb\n"})
    assert lab.store == ""
    assert lab.image == ImageConfig(requirements="pyproject.toml", python="3.12")
    assert lab.run == ("train]\nstore: s3://another/four\n#",)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        pytest.param("pyproject.toml", "a = " + "[" * 100_000, id="nested"),
        pytest.param("Pipfile", "[packages]\nsix = '^" + "9" * 5000 + "'\n", id="long-number"),
        pytest.param("requirements.txt", "a" + " " * 500_000 + "b\n", id="many-spaces"),
    ],
)
def test_files_that_nobody_would_write_end_neither_init_nor_the_wait(
    labctl: Any, project: Path, file: str, text: str
) -> None:
    (project / file).write_text(text)
    assert labctl("init").code == 0


@pytest.mark.parametrize(
    ("place", "words", "enter"),
    [
        (".", ["init", "birds"], "  cd birds\n"),
        pytest.param(
            ".", ["-C", "new", "init", "birds"], "  cd new/birds\n", marks=pytest.mark.long
        ),
        (".", ["-C", "code", "init"], "  cd code\n"),
        (".", ["init", "code/"], "  cd code\n"),
        ("code", ["init", "."], ""),
        ("code", ["init", "../code"], ""),
        pytest.param("new", ["init", "."], "", marks=pytest.mark.long),
    ],
)
def test_the_next_commands_work_where_they_are_typed(
    labctl: Any,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    words: list[str],
    enter: str,
) -> None:
    for name in ("code", "new"):
        (home / name).mkdir()
    (home / "code" / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(home / place)
    said = labctl(*words, "--provider", "local")
    assert said.code == 0, said.err
    assert f"\n\n{enter}  labctl up\n  labctl run\n" in said.out
    with monkeypatch.context() as shell:
        if enter:
            shell.chdir(enter.split()[1])
        assert "no server" in labctl("status").out
        assert labctl("init").err.endswith("next: labctl config\n        (shows its settings)\n")
    again = labctl(*words)
    assert (again.code, "is already a lab" in again.err) == (3, True)
    commands = [line.strip() for line in again.err.split("next:")[1].splitlines()]
    assert commands == [*enter.strip().splitlines(), "labctl config", "(shows its settings)"]


@pytest.mark.parametrize("is_sample", [False, True], ids=["own code", "sample"])
def test_init_writes_an_example_of_the_settings_that_the_provider_requires(
    labctl: Any, home: Path, project: Path, is_sample: bool
) -> None:
    said = labctl("init", *(["digits"] if is_sample else []), "--provider", "static")
    assert said.code == 0, said.err
    assert "write server.static" in said.out.lower()
    root = project / "digits" if is_sample else project
    lab_file = root / "lab.yaml"
    text = lab_file.read_text()
    assert max(map(len, text.splitlines())) <= 80

    os.chdir(root)
    refused = labctl("up")
    assert refused.code == 2
    assert refused.err == (
        "labctl: server.static.hosts in lab.yaml names no machine\n"
        "  next: write your machines in lab.yaml, for example:\n"
        "        server: {provider: static, static: {hosts: [alice@gpu1.lab.example]}}\n"
    )

    lines = text.splitlines(keepends=True)
    start = lines.index("  # static:\n")
    example = [line.replace("  # ", "  ", 1) for line in lines[start : start + 4]]
    lab_file.write_text("".join([*lines[:start], *example, *lines[start + 4 :]]))
    settings = json.loads(labctl("config", "--json").out)["settings"]
    values = {setting["key"]: setting["value"] for setting in settings}
    assert values["server.static.hosts"] == "gpu1.lab.example, alice@gpu2.lab.example:2222"


def test_init_writes_no_example_of_settings_that_config_yaml_has(
    labctl: Any, home: Path, project: Path
) -> None:
    own = home / ".config" / "labctl" / "config.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("server: {provider: static, static: {hosts: [gpu7.lab.example]}}\n")
    said = labctl("init")
    assert said.code == 0, said.err
    assert "server.static" not in said.out
    assert "hosts" not in (project / "lab.yaml").read_text()


def test_a_provider_without_required_settings_gets_no_example(labctl: Any, project: Path) -> None:
    assert labctl("init", "--provider", "local").code == 0
    assert "labctl needs these settings" not in (project / "lab.yaml").read_text()


def test_up_names_the_missing_join_file_before_it_asks(labctl: Any, project: Path) -> None:
    assert labctl("init", "--provider", "course").code == 0
    refused = labctl("up")
    assert refused.err.startswith("labctl: lab.yaml names no keeper\n")
    assert "approve" not in refused.err


TRAINER = "import os\n\n\nclass Trainer:\n    rank = int(os.environ['LOCAL_RANK'])\n"
START = "from {package}trainer import Trainer\n\nif __name__ == '__main__':\n    Trainer()\n"


@pytest.mark.parametrize("package", ["", "gpt."])
def test_code_that_reads_its_rank_is_started_by_torchrun(
    labctl: Any, home: Path, package: str
) -> None:
    main = "import os\n" + START.format(package=package)
    lab = adopt(labctl, home, {"gpt/trainer.py": TRAINER, "gpt/main.py": main})
    assert lab.run[-1] in ("gpt/main.py", "gpt.main")
    assert lab.launch.launcher == "torchrun"


@pytest.mark.parametrize(
    "condition",
    [
        "if 'RANK' in os.environ",
        "if int(os.environ.get('RANK', -1)) != -1",
        "os.environ['RANK'] = '0'\nif True",
    ],
)
def test_code_that_can_do_without_ranks_decides_nothing(
    labctl: Any, home: Path, condition: str
) -> None:
    code = f"import os, torch.distributed as dist\n{condition}:\n    os.environ['RANK']\n"
    files = {
        "train.py": f"{code}    dist.init_process_group('nccl')\n",
        # another module than torch.distributed
        "distributed.py": TRAINER,
        # another program of the project
        "ranks.py": TRAINER,
    }
    lab = adopt(labctl, home, files)
    assert lab.launch == LaunchConfig()
    assert "\n# launch: {with: torchrun}\n" in (lab.root / "lab.yaml").read_text()
