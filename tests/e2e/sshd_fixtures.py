"""Fixtures around the small sshd container."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sshd_container import Sshd, build_image, docker, start

from labctl.commands import rsync
from labctl.servers.connections import Connections


@pytest.fixture(scope="session")
def sshd_image() -> str:
    return build_image()


@pytest.fixture(scope="session")
def start_sshd(
    sshd_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Sshd]]:
    """Starts a container of its own; words go to `docker run`. All end with the tests."""
    key = tmp_path_factory.mktemp("keys") / "id_ed25519"
    started: list[Sshd] = []

    def one(*words: str) -> Sshd:
        started.append(start(sshd_image, key, *words))
        return started[-1]

    yield one
    if started:
        docker("rm", "-f", "-v", *(box.name for box in started))


@pytest.fixture(scope="module")
def sshd(start_sshd: Callable[..., Sshd]) -> Sshd:
    """One container for a whole module; who breaks it mends it."""
    return start_sshd()


@pytest.fixture
def connections(tmp_path: Path) -> Connections:
    return Connections(tmp_path / "ssh", tmp_path / "home" / ".ssh" / "config")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync at 16 MiB/s: it tells of its progress once a second, and goes on meanwhile."""
    argv = rsync.transfer_argv

    def slowed(program: rsync.RsyncProgram, transfer: rsync.Transfer) -> list[str]:
        first, *rest = argv(program, transfer)
        return [first, "--bwlimit=16384", *rest]

    monkeypatch.setattr(rsync, "transfer_argv", slowed)
