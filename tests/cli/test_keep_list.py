"""`labctl keep --list`: the labs of a keeper on a terminal of 80 columns."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.config import find_paths
from labctl.lifecycle.kept_labs import CHECKS_FILE, RECORD, KeeperCheck, KeptLab
from labctl.model import Endpoint, Offer, Server
from labctl.state import State

LAB_ID = "04e153578898"
ERROR = "gpu1.lab.example does not answer: it is switched off, or a firewall is in between"


def test_the_list_fits_and_an_error_follows_with_its_command(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    paths = find_paths({"HOME": str(home)})
    runs = ("1127-164025-939c",)
    kept = KeptLab(lab="digits", lab_id=LAB_ID, by="alice@laptop", at=time.time(), runs=runs)
    directory = paths.keep_dir / kept.name
    directory.mkdir(parents=True)
    (directory / RECORD).write_bytes(msgspec.json.encode(kept))
    check = KeeperCheck(at=time.time(), state="trouble", error=ERROR, hint="labctl up")
    (paths.keep_dir / CHECKS_FILE).write_bytes(msgspec.json.encode({kept.name: check}))
    state = State(paths.database)
    state.save_server(
        Server(
            id="labctl-digits-04e153-aa73", provider="local", lab="digits", lab_id=LAB_ID,
            alias="digits", endpoint=Endpoint(host="127.0.0.1"), created_at=0.0, state="running",
            offer=Offer(provider="local", type="container"),
        )
    )  # fmt: skip
    state.close()
    lines = labctl("keep", "--list").out.splitlines()
    assert lines[2].split() == ["LAB", "RUNS", "CHECKED", "RESULT", "SERVER"]
    assert "trouble" in lines[3]
    assert lines[4:] == [f"{kept.name}: {ERROR}", "  next: labctl up"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert len(labctl("keep", "--list").out.splitlines()[3]) <= 80
