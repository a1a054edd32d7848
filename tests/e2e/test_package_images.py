"""Repositories as they are: `labctl init`, a server, the image of their packages, and a run.

The packages come from the wheelhouse, and one from a git repository on the server. micromamba and
conda's packages are stand-ins: the Dockerfile is ours, and what it calls is a script of this file.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd_container
from lab_directory import LabDirectory, make_lab

from labctl.config import load_lab

pytestmark = [pytest.mark.engine, pytest.mark.long]

GIT_PORT = 8451
SETUP = "from setuptools import setup\nsetup(name={!r}, version='1', py_modules=[{!r}])\n"
# Like the real one, it gives pip the `pip:` section in a file beside environment.yml.
MICROMAMBA = """\
#!/usr/bin/env python3
import os, subprocess, sys, tempfile
if sys.argv[1] == "clean":
    sys.exit()
prefix, file = (sys.argv[sys.argv.index(name) + 1] for name in ("--prefix", "--file"))
lines = open(file).read().partition("- pip:\\n")[2].splitlines()
subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
folder = os.path.dirname(file)
with tempfile.NamedTemporaryFile("w", dir=folder, prefix="mambaf") as specs:
    specs.write("".join(line.strip().removeprefix("- ") + "\\n" for line in lines))
    specs.flush()
    pip = [prefix + "/bin/python", "-m", "pip", "install", "-r", specs.name]
    subprocess.run(pip, cwd=folder, check=True)
"""
CONDA_BASE = f"""
ARG BASE
FROM ${{BASE}}
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
    python3 python3-venv
RUN echo '{MICROMAMBA.encode().hex()}' \\
    | python3 -c 'print(bytes.fromhex(input()).decode())' > /usr/bin/micromamba \\
    && chmod 755 /usr/bin/micromamba
"""

FLAT = {
    ".python-version": "3.11\n",
    "requirements.txt": (
        "--index-url https://index.example/simple\n"
        "-r requirements/base.txt\n"
        "-e ./birdlib\n"
        f"-e git+http://127.0.0.1:{GIT_PORT}/repo.git#egg=songs\n"
    ),
    "requirements/base.txt": "PyYAML\n",
    "birdlib/setup.py": SETUP.format("birdlib", "birds"),
    "birdlib/birds.py": "NAME = 'first'\n",
    "train.py": "import birds, songs, yaml\nprint(birds.NAME, songs.NAME, yaml.safe_load('[1]'))\n",
}
PACKAGE = {
    "pyproject.toml": (
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "birdnet"\ndynamic = ["version"]\nreadme = "README.md"\n'
        'requires-python = ">=3.9,<3.12"\ndependencies = ["click"]\n'
        '[project.optional-dependencies]\ntrain = ["PyYAML"]\ndev = ["pytest"]\n'
        '[project.scripts]\nbirdnet-train = "birdnet.train:main"\n'
        '[tool.setuptools.dynamic]\nversion = {attr = "birdnet.__version__"}\n'
    ),
    "README.md": "# Birds\n",
    "src/birdnet/__init__.py": '__version__ = "4.2"\n',
    "src/birdnet/train.py": (
        "from importlib.metadata import version\nimport click\nimport yaml\nfrom .net import NAME\n"
        "def main():\n    print(NAME, version('birdnet'), yaml.safe_load('[1]'))\n"
    ),
    "src/birdnet/net.py": "NAME = 'first'\n",
}
CONDA = {
    "environment.yml": (
        "name: vision\nchannels: [conda-forge]\ndependencies:\n  - python=3.11\n  - pip:\n"
        "    - -r requirements.txt\n    - -e .\n"
    ),
    "requirements.txt": "PyYAML\n",
    "setup.py": SETUP.format("vision", "birds"),
    "birds.py": "NAME = 'first'\n",
    "scripts/train.py": "import birds, yaml\nprint(birds.NAME, yaml.safe_load('[1]'))\n",
}


@pytest.fixture
def lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    """An empty directory for a repository, which has no server afterwards."""
    made = make_lab(tmp_path_factory.mktemp("packages"), "e2e-packages", base_image)
    made.environ["LABCTL_WHEELHOUSE"] = os.environ.get("LABCTL_WHEELHOUSE", "")
    if not made.environ["LABCTL_WHEELHOUSE"]:
        pytest.skip("LABCTL_WHEELHOUSE is not set")
    for file in made.root.iterdir():
        file.unlink()
    yield made
    made.labctl("down", "--yes", "--discard", code=None)


def adopt(lab: LabDirectory, files: dict[str, str]) -> None:
    """Write a repository, make it a lab, and start a server."""
    for name, text in files.items():
        (lab.root / name).parent.mkdir(parents=True, exist_ok=True)
        (lab.root / name).write_text(text)
    lab.labctl("init")
    # An earlier test session may have left its image in the cache of layers.
    image = load_lab(lab.root, environ=lab.environ).image
    with (lab.root / image.environment_file).open("a") as stream:
        stream.write(f"# {secrets.token_hex(8)}\n")
    text = (lab.root / "lab.yaml").read_text().replace("gpu: auto", "gpu: none")
    (lab.root / "lab.yaml").write_text(text)
    lab.server_id = lab.json("up", "--yes")["server"]["id"]


def train_twice(lab: LabDirectory, module: str, expected: str) -> None:
    """Run the lab's program; change a module and run it again, with the same image."""
    first = lab.labctl("run", "--yes")
    assert first.stdout.splitlines()[-1] == f"first {expected}"
    assert "building the image" in first.stderr
    (lab.root / module).write_text("NAME = 'second'\n")
    second = lab.labctl("run", "--yes")
    assert second.stdout.splitlines()[-1] == f"second {expected}"
    assert "building the image" not in second.stderr


def serve_repository(lab: LabDirectory, folder: Path) -> None:
    """Serve a git repository with a package on the server's own loopback."""
    work, bare = folder / "songs", lab.root / "repo.git"
    work.mkdir()
    (work / "setup.py").write_text(SETUP.format("songs", "songs"))
    (work / "songs.py").write_text("NAME = 'songs'\n")
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "songs"]
    for words in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["git", *words], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, bare], check=True)
    subprocess.run(["git", "update-server-info"], cwd=bare, check=True)
    lab.labctl("push")
    shutil.rmtree(bare)
    lab.student(
        f"cd ~/labctl/{lab.name}/code && cp -r repo.git /tmp/ && "
        f"cd /tmp && (setsid python3 -m http.server --bind 127.0.0.1 {GIT_PORT} "
        ">/dev/null 2>&1 </dev/null &)"
    )


def test_a_list_with_other_lists_own_code_and_a_repository(
    lab: LabDirectory, tmp_path: Path
) -> None:
    adopt(lab, FLAT)
    serve_repository(lab, tmp_path)
    train_twice(lab, "birdlib/birds.py", "songs [1]")


def test_a_package_with_an_extra_and_a_program(lab: LabDirectory) -> None:
    adopt(lab, PACKAGE)
    train_twice(lab, "src/birdnet/net.py", "4.2 [1]")


def test_an_environment_of_conda_with_pip(lab: LabDirectory) -> None:
    adopt(lab, CONDA)
    lab.environ["LABCTL_BASE_IMAGE"] = sshd_container.build("labctl-test-conda:1", CONDA_BASE)
    train_twice(lab, "birds.py", "[1]")
