"""What `doctor` says of this machine's disk for images."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from labctl.model import GIB, Check
from labctl.providers.local import checks
from labctl.providers.local.engine import EngineInfo


def disk(root: Path) -> Check:
    info = EngineInfo(version="28.2.2", os="linux", root=str(root))
    every = checks.list_engine_checks(info, built=True, base_problem="", owner="anna")
    [found] = [one for one in every if one.name == "disk for images"]
    return found


def test_a_disk_with_room_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=40 * GIB))
    assert disk(tmp_path).ok
    assert disk(tmp_path).detail == f"40.0 GiB free in {tmp_path}"


def test_a_full_disk_fails_with_what_makes_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * GIB))
    assert not disk(tmp_path).ok
    assert "label=labctl.cache=anna" in disk(tmp_path).next
