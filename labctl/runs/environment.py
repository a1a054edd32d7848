"""An image that is only a list of packages: its Dockerfile is labctl's own, its content the lists.

A list goes to uv (requirements.txt, pyproject.toml) or micromamba (environment.yml) in the build.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from labctl.config import ImageConfig, LabConfig, find_data_dir
from labctl.config.packages import PackageList, read_packages
from labctl.text import price_text

# What labctl's own Dockerfile or script prints where uv finds no Python of the version. A build has
# no field for it, and one exit code for all failures.
_BASE_PYTHON = re.compile(r"This (?:base image|server) has Python (\d+\.\d+)\.\d+, and Python .*")
# What it prints if the base image that this machine sets has no micromamba.
_LACKS_MICROMAMBA = "The base image has no micromamba"
_INSTALL = re.compile(r"\b(?:pip3?|conda|mamba)\s+install\b")


def read_dockerfile(image: ImageConfig) -> str:
    """Return labctl's Dockerfile for the environment."""
    name = "conda" if image.conda else "pip"
    path = find_data_dir() / "images" / "environment" / f"{name}.Dockerfile"
    return path.read_text(encoding="utf-8")


def read_script(image: ImageConfig) -> str:
    """Return labctl's script that builds the environment on a server without Docker."""
    name = "conda" if image.conda else "pip"
    path = find_data_dir() / "images" / "environment" / f"{name}.sh"
    return path.read_text(encoding="utf-8")


def read_list(root: Path, image: ImageConfig) -> PackageList:
    """Read the packages of the environment from the lab's files."""
    return read_packages(root, image.environment_file, image.extras)


def list_args(image: ImageConfig, packages: PackageList) -> dict[str, str]:
    """Return that Dockerfile's arguments, which lab.yaml and this machine may override."""
    args = {"FILE": packages.entry}
    if packages.needs_git:
        args["GIT"] = "git"
    if image.requirements:
        args["PYTHON"] = image.python
        if image.python:
            args["BASE"] = f"python:{image.python}-slim"
    return args


def hash_environment(recipe: str, packages: PackageList, args: Mapping[str, str]) -> str:
    """Hash what builds an environment and the lists, but no code: each run has its own.

    `recipe` is the text of the Dockerfile or the script, `args` are its arguments.
    """
    digest = hashlib.sha256(repr(sorted(args.items())).encode())
    digest.update(recipe.encode())
    digest.update(repr(sorted(packages.files.items())).encode())
    return digest.hexdigest()


def suggest_repair(image: ImageConfig, output: Sequence[str]) -> str:
    """Return what to type if the base image lacks Python or micromamba; "" after other errors."""
    if image.conda and any(_LACKS_MICROMAMBA in line for line in output):
        # Only for this command: a local server would be built on this image, too.
        return f"LABCTL_BASE_IMAGE={_find_base(image)} labctl run"
    versions = [match[1] for line in output if (match := _BASE_PYTHON.search(line))]
    if not (image.requirements and versions):
        return ""
    extras = f", extras: [{', '.join(image.extras)}]" if image.extras else ""
    setting = f'image: {{python: "{versions[0]}", requirements: {image.requirements}{extras}}}'
    return f"write this line in lab.yaml:\n{setting}\nthen:\nlabctl run"


def _find_base(image: ImageConfig) -> str:
    """Return the image that labctl's Dockerfile uses without a setting of this machine."""
    match = re.search(r"^ARG BASE=(\S+)$", read_dockerfile(image), re.MULTILINE)
    return match[1] if match else ""


def describe_unused_dockerfile(config: LabConfig) -> str:
    """Say that runs without an image of their own ignore the lab's Dockerfile; "" without one."""
    if config.uses_containers or not config.image.build:
        return ""
    return (
        "the Dockerfile is not used: runs here build no image, and have the programs of their "
        "machine. To add packages, write in lab.yaml: image: {requirements: requirements.txt}"
    )


def describe_install(
    command: Sequence[str], price_usd_per_hour: float | None, package_file: str = ""
) -> str:
    """Say what it costs that a command installs packages; "" if it installs none.

    `package_file` lists the packages of the image, if labctl builds it from a list.
    """
    match = _INSTALL.search(" ".join(command))
    if match is None:
        return ""
    rate = f" at {price_text(price_usd_per_hour)}" if price_usd_per_hour else ""
    cost = f"pays for it again{rate}" if rate else "waits for it again"
    setting = 'image: {python: "3.12", requirements: requirements.txt}'
    return (
        f"the run's command has `{match[0]}`, and every run {cost}. To install the packages once, "
        f"list them in {package_file or f'requirements.txt and write in lab.yaml: {setting}'}"
    )
