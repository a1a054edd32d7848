"""A command in a subdirectory of a lab finds the lab, and reads typed paths from where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from labctl.insight.model_measurement import parse_target


@pytest.fixture
def inner(home: Path) -> Path:
    """A directory inside the lab, which is the working directory."""
    inner = home / "digits" / "src" / "models"
    inner.mkdir(parents=True)
    os.chdir(inner)
    return inner


def test_a_command_in_a_subdirectory_finds_the_lab(labctl: Any, home: Path, inner: Path) -> None:
    assert labctl("status").out == "digits: no server\n  next: labctl up\n"
    assert "lab.yaml:2" in labctl("config").out
    os.chdir(home)
    assert labctl("-C", "digits/src", "status").out.startswith("digits: no server")
    assert not (inner / ".labctl").exists()


def test_the_nearest_lab_counts(labctl: Any, inner: Path) -> None:
    (inner / "lab.yaml").write_text("lab: inner\n")
    assert labctl("status").out.startswith("inner: no server")


def test_a_lab_of_another_user_above_is_only_named(
    labctl: Any, home: Path, inner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    stranger = 65_534
    os.chown(home / "digits" / "lab.yaml", stranger, stranger)
    refused = labctl("status")
    assert refused.code == 2
    assert f"next: labctl -C {home / 'digits'} ..." in refused.err
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert labctl("status").out.startswith("digits: no server")


def test_a_model_is_named_from_where_the_user_is(home: Path, inner: Path) -> None:
    root = home / "digits"
    for file in (inner / "net.py", root / "net.py", root / "train.py"):
        file.write_text("")
    assert parse_target("net.py:build", root) == (inner / "net.py", "build")
    assert parse_target("train.py:build", root) == (root / "train.py", "build")
    os.chdir(home)
    assert parse_target("net.py:build", root) == (root / "net.py", "build")
