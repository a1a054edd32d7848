"""The local provider's list of containers, while the engine removes one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound

from labctl import retry
from labctl.providers.local import container
from labctl.providers.local.container import list_labeled


class Engine:
    """Fails to inspect a container that it removes, as long as `failures` last."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.containers = SimpleNamespace(list=self.list)

    def list(self, **_: Any) -> list[str]:
        if self.failures:
            self.failures -= 1
            raise APIError("RWLayer of container 0a is unexpectedly nil")
        return ["kept"]


class LabContainer:
    """A server's container; with `is_leaving`, the engine has begun to remove it."""

    status = "running"

    def __init__(self, name: str, *, is_leaving: bool = False) -> None:
        self.name = name
        self.is_leaving = is_leaving
        self.labels = {
            container.SERVER_LABEL: name,
            container.LAB_LABEL: "digits",
            container.LAB_ID_LABEL: "0a",
            container.IDENTITY_LABEL: "/home/me/key",
            container.CREATED_AT_LABEL: "7.5",
        }
        self.attrs = {"NetworkSettings": {"Ports": {"22/tcp": [{"HostPort": "4022"}]}}}

    def get_archive(self, path: str) -> tuple[list[bytes], dict[str, Any]]:
        if self.is_leaving:
            raise APIError("RWLayer of container 0a is unexpectedly nil")
        raise NotFound("no key yet")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenacity import wait_none

    monkeypatch.setattr(retry, "_build_wait", lambda *_: wait_none())


def test_a_container_that_is_being_removed_does_not_fail_the_list() -> None:
    assert list_labeled(Engine(failures=3), "labctl.server") == ["kept"]  # type: ignore[arg-type]


def test_a_server_that_is_being_removed_does_not_hide_the_others() -> None:
    kept, leaving = LabContainer("kept"), LabContainer("leaving", is_leaving=True)
    lists = [[kept, leaving], [kept, leaving], [kept]]
    docker: Any = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: lists.pop(0)))
    (server,) = container.list_servers(docker, container.SERVER_LABEL)
    assert (server.id, server.endpoint.port) == ("kept", 4022)


def test_a_container_with_one_of_our_labels_is_not_a_server() -> None:
    stranger = LabContainer("stranger")
    del stranger.labels[container.LAB_LABEL]
    docker: Any = SimpleNamespace(
        containers=SimpleNamespace(list=lambda **_: [stranger, LabContainer("kept")])
    )
    assert [one.id for one in container.list_servers(docker, container.SERVER_LABEL)] == ["kept"]


def test_an_engine_that_goes_on_failing_is_reported() -> None:
    with pytest.raises(APIError):
        list_labeled(Engine(failures=99), "labctl.server")  # type: ignore[arg-type]
