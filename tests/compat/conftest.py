"""The frozen homes, put back for each test that asks for one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen import (
    EngineSocket,
    Frozen,
    FrozenCloud,
    FrozenMachine,
    Inspected,
    Student,
    engine_socket,
)


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    for name in list(os.environ):
        if name.startswith(("AWS_", "XDG_", "LABCTL_", "DOCKER_")):
            monkeypatch.delenv(name)
    nobody = tmp_path / "nobody"
    nobody.mkdir()
    monkeypatch.setenv("HOME", str(nobody))
    return Frozen(tmp_path)


@pytest.fixture
def engine(frozen: Frozen) -> Iterator[EngineSocket]:
    """The server's Docker Engine as it was: one container lives."""
    with engine_socket() as made:
        made.answers = Inspected(frozen.value("server.containers.json"))
        yield made


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every server has today's program, installed and compiled once."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def student(frozen: Frozen, engine: EngineSocket, programs: Path) -> Student:
    frozen.unpack("student")
    server = frozen.unpack("server")
    (server / ".cache").symlink_to(programs)
    made = Student(frozen, FrozenMachine(server, engine.host), FrozenCloud())
    frozen.restore_database("state.sql", made.places.database)
    made.cloud.machines = {made.server().id: made.server()}
    return made


@pytest.fixture
def then(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> float:
    """The clock stands as it did when the set was frozen, and goes on from there."""
    at = float(frozen.value("json/status.json")["now"])
    ahead_s, real = at - time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    return at
