"""An image of packages: its tag follows the file, and the build gets the lists, not the code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from labctl.agent.reply import Failure
from labctl.agent.runs.images import _write_context
from labctl.config import ImageConfig
from labctl.runs.environment import (
    describe_install,
    hash_environment,
    list_args,
    read_dockerfile,
    read_list,
    suggest_repair,
)
from labctl.wire.images import BuildImageRequest

PIP = ImageConfig(requirements="deps/requirements.txt", python="3.11")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps" / "requirements.txt").write_text("torch\n")
    (tmp_path / "train.py").write_text("x\n")
    return tmp_path


def hash_of(lab: Path, image: ImageConfig, **changes: str) -> str:
    packages = read_list(lab, image)
    return hash_environment(
        read_dockerfile(image), packages, {**list_args(image, packages), **changes}
    )


def test_the_tag_follows_the_packages_and_not_the_code(lab: Path) -> None:
    first = hash_of(lab, PIP)
    (lab / "train.py").write_text("y\n")
    assert hash_of(lab, PIP) == first
    others = {hash_of(lab, PIP, BASE="mine:1"), hash_of(lab, PIP, PYTHON="3.12")}
    (lab / "deps" / "requirements.txt").write_text("torch\n-r base.txt\n-e .\n")
    (lab / "deps" / "base.txt").write_text("numpy\n")
    (lab / "setup.py").write_text("setup()\n")
    others.add(hash_of(lab, PIP))
    (lab / "deps" / "base.txt").write_text("scipy\n")
    others.add(hash_of(lab, PIP))
    (lab / "setup.py").write_text("setup(name='a')\n")
    others.add(hash_of(lab, PIP))
    assert len(others - {first}) == 5


def test_each_kind_has_its_dockerfile_and_arguments(lab: Path) -> None:
    conda = ImageConfig(conda="environment.yml")
    (lab / "environment.yml").write_text("- pip:\n  - git+https://x.org/a\n")
    assert "micromamba create" in read_dockerfile(conda)
    assert "uv pip install" in read_dockerfile(PIP)
    assert list_args(conda, read_list(lab, conda)) == {"FILE": "environment.yml", "GIT": "git"}
    assert list_args(PIP, read_list(lab, PIP)) == {
        "FILE": "deps/requirements.txt",
        "PYTHON": "3.11",
        "BASE": "python:3.11-slim",
    }
    of_base = msgspec.structs.replace(PIP, python="")
    args = {"FILE": "deps/requirements.txt", "PYTHON": ""}
    assert list_args(of_base, read_list(lab, of_base)) == args
    for image in (PIP, conda):
        for name in list_args(image, read_list(lab, image)):
            assert f"ARG {name}" in read_dockerfile(image)


def test_a_base_image_without_micromamba_is_replaced_for_one_command(lab: Path) -> None:
    conda = ImageConfig(conda="environment.yml")
    output = ["The base image has no micromamba, which image.conda needs."]
    # The Dockerfile prints this line, and names the image that has it.
    assert output[0] in read_dockerfile(conda)
    repair = suggest_repair(conda, output)
    assert repair == "LABCTL_BASE_IMAGE=mambaorg/micromamba:2.0.5 labctl run"
    assert suggest_repair(conda, ["no space left on device"]) == ""
    assert suggest_repair(PIP, output) == ""


def list_context(request: BuildImageRequest, lab: Path, target: Path) -> list[str]:
    _write_context(request, lab, target)
    return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())


def test_the_build_gets_the_lists_and_no_other_code(lab: Path, tmp_path: Path) -> None:
    request = BuildImageRequest(
        "digits", "0" * 12, "", "labctl/built:1", {}, dockerfile="FROM x\n",
        files={"deps/requirements.txt": "torch\n"},
    )  # fmt: skip
    target = tmp_path / "context"
    (target / "code").mkdir(parents=True)
    (target / "code" / "before.txt").touch()
    assert list_context(request, lab, target) == ["Dockerfile", "code/deps/requirements.txt"]
    with pytest.raises(Failure):
        _write_context(request._replace(files={"../x": ""}), lab, target)


def test_a_project_that_is_installed_comes_with_its_modules_and_texts(
    lab: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("context")
    for name in ("pyproject.toml", "README.md", "LICENSE", "Dockerfile", "src/a/b.py", "src/a.csv"):
        (lab / name).parent.mkdir(parents=True, exist_ok=True)
        (lab / name).write_text("x")
    for name in ("data/labels.txt", ".git/hook.py"):
        (lab / name).parent.mkdir(parents=True, exist_ok=True)
        (lab / name).write_text("x")
    (lab / "link.py").symlink_to("train.py")
    request = BuildImageRequest(
        "digits", "0" * 12, "", "labctl/built:1", {}, dockerfile="FROM x\n",
        files={"labctl-requirements.txt": "-e .\n"}, has_code=True,
    )  # fmt: skip
    names = list_context(request, lab, target)
    assert [name.removeprefix("code/") for name in names] == [
        "Dockerfile",
        "Dockerfile",
        "LICENSE",
        "README.md",
        "labctl-requirements.txt",
        "pyproject.toml",
        "src/a/b.py",
        "train.py",
    ]
    assert (target / "Dockerfile").read_text() == "FROM x\n"


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
        assert describe_install(command, None, "env.yml").endswith("list them in env.yml")


def test_a_long_chain_of_lists_is_refused(lab: Path) -> None:
    for number in range(1000):
        (lab / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    problems = read_list(lab, ImageConfig(requirements="0.txt")).problems
    assert "use fewer lists" in problems[0].message
