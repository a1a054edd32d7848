"""The local provider's list of containers, while the engine removes one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from labctl import retry
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


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenacity import wait_none

    monkeypatch.setattr(retry, "_pauses", lambda *_: wait_none())


def test_a_container_that_is_being_removed_does_not_fail_the_list() -> None:
    assert list_labeled(Engine(failures=3), "labctl.server") == ["kept"]  # type: ignore[arg-type]


def test_an_engine_that_goes_on_failing_is_reported() -> None:
    with pytest.raises(APIError):
        list_labeled(Engine(failures=99), "labctl.server")  # type: ignore[arg-type]
