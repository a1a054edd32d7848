"""One channel of samples, whatever happens to it."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from lab_world import World

from labctl.errors import (
    AuthenticationError,
    CommandError,
    ConnectError,
    HostKeyError,
    LabError,
    LinkLostError,
    NotFoundError,
)
from labctl.insight import top
from labctl.insight.top import ServerMetrics, follow, follow_always, measure_now
from labctl.lifecycle.up import up
from labctl.servers.context import LabContext
from labctl.shell import Command
from labctl.transports import Result
from labctl.transports.fake import FakeTransport

MARK = "\x1elabctl "
HEAD = f'a banner\n{MARK}{{"now":1}}\n'


class Enough(Exception):
    pass


def said(*samples: object, head: str = HEAD) -> Result:
    lines = "".join(json.dumps(one) + "\n" for one in samples)
    return Result(code=0, stdout=head + lines, stderr=f"{MARK}{{}}\n")


class Script(FakeTransport):
    """Says one of these a call; an error comes after what was said before it."""

    def __init__(self, *replies: Result | tuple[str, LabError]) -> None:
        super().__init__()
        self.left = list(replies)
        self.timeouts: list[float | None] = []

    def stream(
        self,
        line: Command | str,
        *,
        stdin: bytes | memoryview = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        assert str(line).endswith(" top")
        self.timeouts.append(timeout_s)
        reply = self.left.pop(0)
        if isinstance(reply, Result):
            assert on_stderr is not None
            on_stderr(reply.stderr.encode())
            on_stdout(reply.stdout.encode())
            return reply.code
        for letter in reply[0]:  # as small as the pieces may be
            on_stdout(letter.encode())
        raise reply[1]


def scripted(lab: World, *replies: Result | tuple[str, LabError]) -> LabContext:
    """A lab with a server whose program says these, one a call."""
    context = lab.context()
    up(context)
    wire = Script(*replies)
    context.connections.__dict__["open"] = lambda server: wire
    return context


def test_one_sample_is_asked_for(lab: World) -> None:
    now = {"at": 5.0, "cores": 2, "cpu_cores": 0.5, "gpus": [{"uuid": "GPU-1", "index": "0"}]}
    found = measure_now(scripted(lab, said(now)))
    assert (found.at, found.cpu_cores, found.gpus[0].index) == (5.0, 0.5, "0")


def test_a_server_that_tells_nothing_is_an_error(lab: World) -> None:
    context = scripted(lab, said(), said({"cores": "many"}, [], 3, None))
    for _ in range(2):
        with pytest.raises(CommandError, match="sent no metrics"):
            measure_now(context)


def test_a_cut_link_is_told_and_taken_up_again(lab: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LinkLostError("the link died")
    first = (HEAD + '{"at": 1.0, "cores": 2}\n{"at": 2.', lost)
    context = scripted(lab, first, ("", lost), said({"at": 3.0, "cores": 2}))
    seen: list[float] = []
    cuts: list[float] = []
    rested: list[float] = []
    monkeypatch.setattr("time.sleep", rested.append)

    def sampled(now: ServerMetrics) -> None:
        seen.append(now.at)
        if now.at == 3.0:
            raise Enough

    def cut(error: ConnectError, pause_s: float) -> None:
        assert error is lost
        cuts.append(pause_s)

    with pytest.raises(Enough):
        follow(context, sampled, on_cut=cut)
    assert seen == [1.0, 3.0]
    assert cuts == rested == [0.5, 1.0]


def test_a_server_that_was_removed_meanwhile_ends_it(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = scripted(lab, (HEAD + '{"at": 1.0, "cores": 2}\n', LinkLostError("gone")))

    def removed(pause_s: float) -> None:
        context.state.drop_server(context.get_server().id)

    monkeypatch.setattr("time.sleep", removed)
    with pytest.raises(NotFoundError):
        follow(context, lambda now: None)


def test_a_link_that_never_was_is_an_error(lab: World) -> None:
    with pytest.raises(ConnectError, match="no route"):
        follow(scripted(lab, ("", ConnectError("no route"))), lambda now: None)


@pytest.mark.parametrize("final", [HostKeyError("another key"), AuthenticationError("refused")])
def test_one_of_several_is_tried_again_but_not_after_a_refused_login_or_a_wrong_key(
    lab: World, monkeypatch: pytest.MonkeyPatch, final: LabError
) -> None:
    lost = LinkLostError("the link died")
    sample = said({"at": 1.0, "cores": 2})
    context = scripted(lab, ("", ConnectError("no route")), sample, ("", lost), ("", final), sample)
    seen: list[float] = []
    cuts: list[str] = []
    monkeypatch.setattr("time.sleep", lambda pause_s: None)
    with pytest.raises(type(final)):
        follow_always(
            context, lambda now: seen.append(now.at), lambda error, _: cuts.append(error.what)
        )
    assert seen == [1.0]
    ended = "the labctl agent on the server ended unexpectedly"
    assert cuts == ["no route", ended, "the link died", final.what]


def test_a_wrong_key_at_an_old_address_is_tried_again_at_the_new_one(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = scripted(lab, ("", HostKeyError("another key")), said({"at": 3.0, "cores": 2}))
    server = context.get_server()
    endpoint = msgspec.structs.replace(server.endpoint, port=server.endpoint.port + 1)
    lab.cloud.change(server.id, endpoint=endpoint)
    monkeypatch.setattr("time.sleep", lambda pause_s: None)

    def end(now: ServerMetrics) -> None:
        raise Enough

    with pytest.raises(Enough):
        follow_always(context, end, lambda error, pause_s: None)


def test_a_sample_has_a_deadline_and_the_live_view_has_none(lab: World) -> None:
    wire = Script(said({"at": 1.0, "cores": 2}), ("", ConnectError("no route")))
    context = lab.context()
    up(context)
    context.connections.__dict__["open"] = lambda server: wire
    measure_now(context)
    with pytest.raises(ConnectError):
        follow(context, lambda now: None)
    assert wire.timeouts == [top.SAMPLE_TIMEOUT_S, None]


def test_the_real_program_tells_of_this_machine(lab: World) -> None:
    """It runs here, without a wire; Docker and a GPU may be there or not."""
    context = lab.context()
    up(context)
    found = measure_now(context)
    assert found.cores >= 1
    assert found.memory_total_bytes
    assert found.cpu_cores is not None
    assert found.disk_free_bytes
