"""The page of a profile: its service on the server ends with the last command that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from lab_world import Machine, World, world

from labctl.insight.explain.profile import Profile
from labctl.insight.profile import ProfileResult, open_page
from labctl.lifecycle import up
from labctl.model import Service
from labctl.services import lab_services
from labctl.transports import Result

FIGURES = Profile(
    steps=1, step_us=1500.0, phases={}, operations=(), kernels=(), kernel_count=0.0,
    kernel_us=0.0, gpu_busy=None, copies_us=0.0, syncs=0.0,
)  # fmt: skip
PROFILED = ProfileResult(run="night", directory="", there=True, profile=FIGURES, findings=())


class Listener(Machine):
    """A server that notes which verbs its agent is called with."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.verbs: list[str] = []

    def _answer(self, line: str, stdin: bytes) -> Result:
        self.verbs.append(line.split()[-1])
        return super()._answer(line, stdin)

    def count_stops(self) -> int:
        return self.verbs.count("service-stop")


@pytest.fixture
def server(tmp_path: Path) -> Listener:
    return Listener(tmp_path / "machine")


@pytest.fixture
def lab(tmp_path: Path, server: Listener, monkeypatch: pytest.MonkeyPatch) -> World:
    """A lab whose server starts services at once; nothing is forwarded."""

    @contextmanager
    def forward(*_: object) -> Iterator[None]:
        yield

    service = Service(name="profile", port=8765)
    monkeypatch.setattr("labctl.services.services.ensure_service", lambda *_, **__: service)
    monkeypatch.setattr(lab_services, "open_forward", forward)
    lab = replace(world(tmp_path), machine=server)
    up.up(lab.context())
    return lab


def test_ctrl_c_ends_the_service(lab: World, server: Listener) -> None:
    with suppress(KeyboardInterrupt), open_page(lab.context(), PROFILED):
        assert server.count_stops() == 0
        raise KeyboardInterrupt
    assert server.count_stops() == 1


def test_a_service_that_another_command_uses_stays(lab: World, server: Listener) -> None:
    with open_page(lab.context(), PROFILED):
        with open_page(lab.context(), PROFILED):
            pass
        assert server.count_stops() == 0
    assert server.count_stops() == 1
