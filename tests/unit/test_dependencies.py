"""What an installed labctl can do without extras, and how much of others' it brings along."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_PACKAGES = 45
NEEDED = {"ansible-core", "boto3", "docker", "fabric", "paramiko", "pyyaml", "rich"}


def find_packages(wanted: list[str]) -> set[str]:
    """Every package that these requirements bring, themselves included, by normalized name."""
    found: set[str] = set()
    left = [Requirement(text) for text in wanted]
    while left:
        one = left.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            left += [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
    return found


def test_a_server_can_be_rented_without_extras() -> None:
    own = {Requirement(text).name.lower() for text in PROJECT["dependencies"]}
    assert own >= NEEDED
    assert len(find_packages(PROJECT["dependencies"])) + 1 <= MOST_PACKAGES


def test_nobody_is_told_to_install_an_extra_that_is_not_there() -> None:
    extras = "|".join(PROJECT["optional-dependencies"])
    named = re.compile(rf"labctl\[(?!(?:{extras})\])[a-z-]+\]")
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "labctl").rglob("*.py")]
    told = [(str(path), *named.findall(path.read_text())) for path in files]
    assert [one for one in told if len(one) > 1] == []
