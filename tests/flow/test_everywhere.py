"""One command on many servers: in order, bounded at every door, and one failure stops no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from lab_world import World, unreachable

from labctl.cli.fan_out import exit_code, summary_text
from labctl.errors import NotFoundError
from labctl.model import Endpoint, Offer, Server
from labctl.servers.connections import Connections
from labctl.servers.fan_out import (
    LOGINS_AT_ONCE,
    ServerResult,
    first_hop,
    list_running_servers,
    run_on_all,
)
from labctl.transports import Result, Transport
from labctl.transports.fake import FakeTransport, Reply

PATIENCE_S = 20.0


def server(number: int, **way: str) -> Server:
    return Server(
        id=f"srv-{number}",
        provider="static",
        lab="digits",
        lab_id=f"{number:012x}",
        alias=f"digits-{number:02}",
        endpoint=Endpoint(host=way.pop("host", f"gpu{number}.example"), **way),
        offer=Offer(provider="static", type="machine"),
        created_at=float(number),
        state="running",
    )


class Wires(Connections):
    """Real ssh files; what a server answers is up to the test."""

    def __init__(self, folder: Path, replies: Callable[[str], Reply]) -> None:
        super().__init__(folder / "ssh", None)
        self.replies = replies
        self.lines: list[str] = []

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        reply = self.replies(server_id)
        wire = FakeTransport(endpoint)

        def said(line: str, stdin: bytes) -> Result:
            self.lines.append(line)
            assert callable(reply)
            return reply(line, stdin)

        return wire.reply("", said if callable(reply) else reply)


def test_answers_come_in_order_though_the_first_is_the_last_to_end(tmp_path: Path) -> None:
    others = threading.Semaphore(0)
    servers = [server(number) for number in range(4)]

    def reply(server_id: str) -> Reply:
        def said(line: str, stdin: bytes) -> Result:
            if server_id == "srv-0":
                for _ in range(3):
                    assert others.acquire(timeout=PATIENCE_S)
            else:
                others.release()
            return Result(code=0, stdout=f"{server_id}\n")

        return said

    told: list[ServerResult] = []
    answers = run_on_all(Wires(tmp_path, reply), servers, "hostname", on_result=told.append)
    assert [one.stdout for one in answers] == [f"{one.id}\n" for one in servers]
    assert told == answers


def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    replies: dict[str, Reply] = {
        "srv-0": Result(code=0, stdout="fine\n"),
        "srv-1": unreachable(),
        "srv-2": Result(code=7, stderr="no\n"),
    }
    wires = Wires(tmp_path, lambda server_id: replies[server_id])
    answers = run_on_all(wires, [server(number) for number in range(3)], "true")
    assert [one.code for one in answers] == [0, None, 7]
    assert (answers[1].error, answers[1].why) == ("no answer", "it is silent")
    assert exit_code(answers) == 255
    assert exit_code([answers[0], answers[2]]) == 7
    assert exit_code(answers[:1]) == 0
    assert summary_text(answers).splitlines() == [
        "succeeded on 1 of 3 servers",
        "  digits-01: not reached",
        "    next: labctl doctor",
        "  digits-02: exit code 7",
    ]


class Crowd:
    """Counts who is inside at once; the first `meet` wait for each other."""

    def __init__(self, meet: int) -> None:
        self.inside = self.most = 0
        self.guard = threading.Lock()
        self.meeting = threading.Barrier(meet)
        self.to_meet = meet

    def reply(self, server_id: str) -> Reply:
        def said(line: str, stdin: bytes) -> Result:
            with self.guard:
                self.inside += 1
                self.most = max(self.most, self.inside)
                waits = self.to_meet > 0
                self.to_meet -= 1
            if waits:
                self.meeting.wait(PATIENCE_S)
            with self.guard:
                self.inside -= 1
            return Result(code=0)

        return said


@pytest.mark.parametrize("way", [{"host": "gate.example"}, {"jump": "alice@gate.example,inner"}])
def test_servers_behind_one_door_log_in_a_few_at_a_time(
    tmp_path: Path, way: dict[str, str]
) -> None:
    crowd = Crowd(meet=LOGINS_AT_ONCE)
    servers = [server(number, **way) for number in range(3 * LOGINS_AT_ONCE)]
    answers = run_on_all(Wires(tmp_path, crowd.reply), servers, "true")
    assert [one.code for one in answers] == [0] * len(servers)
    assert crowd.most == LOGINS_AT_ONCE


def test_servers_with_doors_of_their_own_do_not_wait_for_each_other(tmp_path: Path) -> None:
    crowd = Crowd(meet=2 * LOGINS_AT_ONCE)
    servers = [server(number) for number in range(3 * LOGINS_AT_ONCE)]
    run_on_all(Wires(tmp_path, crowd.reply), servers, "true", at_once=2 * LOGINS_AT_ONCE)
    assert crowd.most == 2 * LOGINS_AT_ONCE, "and no more than at_once"


def test_doors() -> None:
    near, far = Endpoint(host="a", port=2222), Endpoint(host="b", jump="gate,inner")
    assert (first_hop(near), first_hop(far)) == ("a:2222", "gate")
    assert first_hop(Endpoint(host="i-1", proxy_command="x %h")) != first_hop(
        Endpoint(host="i-2", proxy_command="x %h")
    )


def test_interrupted_it_begins_on_no_further_server(tmp_path: Path) -> None:
    wires = Wires(tmp_path, lambda server_id: lambda line, stdin: Result(code=0))

    def leave(answer: ServerResult) -> None:
        raise KeyboardInterrupt

    servers = [server(number) for number in range(200)]
    with pytest.raises(KeyboardInterrupt):
        run_on_all(wires, servers, "true", at_once=1, on_result=leave)
    assert 0 < len(wires.lines) < len(servers)


def test_running_servers_are_those_of_every_lab(lab: World) -> None:
    state = lab.context().state
    with pytest.raises(NotFoundError, match="no lab has a server"):
        list_running_servers(state)
    for number in (2, 0, 1):
        state.save_server(server(number))
    state.save_server(msgspec.structs.replace(server(3), state="stopped"))
    assert [one.id for one in list_running_servers(state)] == ["srv-0", "srv-1", "srv-2"]


def test_a_server_written_before_is_not_compared_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires(tmp_path, lambda server_id: Result(code=0))
    looked: list[str] = []
    free = Connections.is_alias_free

    def counted(self: Connections, alias: str, server_id: str = "") -> bool:
        looked.append(alias)
        return free(self, alias, server_id)

    monkeypatch.setattr(Connections, "is_alias_free", counted)
    servers = [server(number) for number in range(3)]
    run_on_all(wires, servers, "true")
    assert len(looked) == 3
    run_on_all(wires, servers, "true")
    assert len(looked) == 3
