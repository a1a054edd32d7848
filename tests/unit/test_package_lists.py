"""An image of packages: its tag follows the file, and the build gets this file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.agent.reply import Failure
from labctl.agent.runs.images import _write_context
from labctl.config import ImageConfig
from labctl.runs.environment import (
    describe_install,
    hash_environment,
    list_args,
    read_dockerfile,
)
from labctl.wire.images import BuildImageRequest

PIP = ImageConfig(requirements="deps/requirements.txt", python="3.11")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps" / "requirements.txt").write_text("torch\n")
    (tmp_path / "train.py").write_text("x\n")
    return tmp_path


def test_the_tag_follows_the_packages_and_not_the_code(lab: Path) -> None:
    args = list_args(PIP)
    first = hash_environment(lab, PIP, args)
    (lab / "train.py").write_text("y\n")
    assert hash_environment(lab, PIP, args) == first
    others = {hash_environment(lab, PIP, {**args, "BASE": "mine:1"})}
    others.add(hash_environment(lab, PIP, {**args, "PYTHON": "3.12"}))
    (lab / "deps" / "requirements.txt").write_text("torch\nnumpy\n")
    others.add(hash_environment(lab, PIP, args))
    assert len(others - {first}) == 3


def test_each_kind_has_its_dockerfile_and_arguments() -> None:
    conda = ImageConfig(conda="environment.yml")
    assert "micromamba create" in read_dockerfile(conda)
    assert "uv pip install" in read_dockerfile(PIP)
    assert list_args(conda) == {"FILE": "environment.yml"}
    assert list_args(PIP)["BASE"] == "python:3.11-slim"
    for image in (PIP, conda):
        for name in list_args(image):
            assert f"ARG {name}" in read_dockerfile(image)


def test_the_build_gets_one_file_of_the_code(lab: Path, tmp_path: Path) -> None:
    request = BuildImageRequest(
        "digits", "0" * 12, "", "labctl/built:1", {}, dockerfile="FROM x\n", file=PIP.requirements
    )
    context = _write_context(request, lab, tmp_path / "context")
    files = sorted(str(p.relative_to(context)) for p in context.rglob("*") if p.is_file())
    assert files == ["Dockerfile", "deps/requirements.txt"]
    with pytest.raises(Failure, match=r"gone\.txt is not in the lab's code"):
        _write_context(request._replace(file="gone.txt"), lab, tmp_path / "context")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("sh", "-c", "pip install -r requirements.txt && python train.py"), "`pip install`"),
        (("python", "-m", "pip", "install", "torch"), "`pip install`"),
        (("python", "train.py", "--installer", "pip"), ""),
    ],
)
def test_a_run_that_installs_packages_is_told_what_it_costs(
    command: tuple[str, ...], told: str
) -> None:
    assert told in describe_install(command, 0.5)
    assert bool(describe_install(command, 0.5)) == bool(told)
    if told:
        assert "pays for it again at $0.50/h" in describe_install(command, 0.5)
        assert "waits for it again" in describe_install(command, None)
