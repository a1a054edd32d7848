"""`labctl cp` with a lab that has a server, as it is typed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from lab_world import Labctl, World

from labctl.transports.fake import FakeTransport


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The server has no file and refuses /root; the list gets the paths that are looked for."""
    asked: list[str] = []

    def stat(path: str) -> Any:
        asked.append(path)
        if path.startswith("/root/"):
            raise PermissionError(13, "Permission denied")
        raise FileNotFoundError(2, "No such file")

    @contextmanager
    def open_sftp(transport: FakeTransport) -> Iterator[Any]:
        yield SimpleNamespace(stat=stat)

    monkeypatch.setattr(FakeTransport, "open_sftp", open_sftp)
    return asked


@pytest.mark.parametrize("typed", ["digits:result.csv", "digits:~/result.csv"])
def test_a_file_that_is_missing_on_the_server_is_named_with_the_servers_name(
    run_lab: World, labctl: Labctl, paths: list[str], typed: str
) -> None:
    output = labctl(run_lab, "cp", typed, ".")
    assert output.code == 4
    assert output.err == (
        "labctl: there is no result.csv on digits\n"
        "  next: labctl ssh -- ls\n"
        "        (lists your home there)\n"
    )
    assert paths == ["result.csv"]


def test_a_refused_path_is_named_with_a_command_that_shows_its_owner(
    run_lab: World, labctl: Labctl, paths: list[str]
) -> None:
    output = labctl(run_lab, "cp", "digits:/root/notes.txt", ".")
    assert output.code == 1
    assert "your account on the server may not use this path" in output.err
    assert "next: labctl ssh -- ls -la /root\n" in output.err
    assert "df -h" not in output.err
