"""`pull --follow`: rounds until the run has ended, through a server's loss and recovery."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from lab_world import LAB_ID, Recorded, World

from labctl.errors import ConnectError, LabError, NotFoundError
from labctl.model import Run, RunState, Server
from labctl.runs import outputs
from labctl.servers import attempts
from labctl.servers.context import LabContext
from labctl.sync.pull import PulledRun

RUN = "night"


@pytest.fixture
def context(lab: World) -> LabContext:
    made = lab.context(Recorded())
    lab.cloud.price = 0.0
    attempts.create_server(made, made.config.server.need)
    return made


def played(
    context: LabContext, script: Sequence[RunState | LabError], patch: pytest.MonkeyPatch
) -> int:
    """How many rounds of the script were asked for. A state is what the run is in by then."""
    left = list(script)

    def pull(at: LabContext, server: Server, ids: list[str], *, hint: str) -> list[PulledRun]:
        assert hint == f"labctl pull --follow {RUN}"
        now = left.pop(0)
        if isinstance(now, LabError):
            raise now
        at.state.save_run(Run(id=RUN, lab_id=LAB_ID, server_id=server.id, state=now))
        done = now in ("exited", "lost")
        return [PulledRun(run=RUN, directory="runs/night", files=1, bytes=1, complete=done)]

    patch.setattr(outputs, "pull", pull)
    outputs.follow_outputs(context, RUN, every_s=0.0)
    return len(script) - len(left)


GONE = ConnectError("the server is gone")
NONE = NotFoundError("digits has no server")


@pytest.mark.parametrize(
    "script",
    [
        ["running", "running", "exited"],
        ["running", GONE, GONE, "running", "exited"],
        ["running", "lost", NONE, "running", "exited"],
        ["lost"],
        ["exited"],
    ],
)
def test_it_goes_on_until_the_run_has_ended(
    context: LabContext, script: list[RunState | LabError], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert played(context, script, monkeypatch) == len(script)


def test_without_a_server_to_begin_with_it_says_so(
    context: LabContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="has no server"):
        played(context, [NONE], monkeypatch)


def test_nobody_goes_on_with_a_lost_run_for_ever(
    context: LabContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "RECOVERED_WITHIN_S", 0.05)

    def later() -> Iterator[RunState | LabError]:
        yield "running"
        yield from itertools.repeat("lost", 1000)

    assert played(context, [*later()], monkeypatch) < 1001
