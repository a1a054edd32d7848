"""What one account, or an engine that fails, can do to the others through the broker: little."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from broker_bed import ALICE, BOB, CAROL, GPU, SETTINGS, Bed, make_bed
from engine_socket import engine_socket

from labctl.agent.broker import calls, claims, housekeeping, image_disk, image_pulls, rules
from labctl.agent.broker.calls import MOST_UPLOADS
from labctl.agent.broker.gpu_queue import GpuQueue
from labctl.agent.broker.request_fields import RequestFields
from labctl.agent.broker.rules import ENDS, GPUS, OWNER


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with engine_socket() as served:
        yield make_bed(served, tmp_path, monkeypatch)


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def row(name: str, **more: Any) -> dict[str, Any]:
    labels = {OWNER: "71001", **more.pop("Labels", {})}
    about = {
        "Id": name,
        "Names": [f"/u71001.{name}"],
        "Name": f"/u71001.{name}",
        "State": "running",
    }
    return {**about, "Created": 1.0, **more, "Labels": labels}


LEASE_OVER = {GPUS: "GPU-a", ENDS: "0", "labctl.run": "r"}


# An engine that fails


@pytest.mark.parametrize(
    "rows",
    [
        [row("unnamed", Names=[]), row("also", Names=None)],
        [None, 7, {}, {"Id": "x", "Labels": None}, row("bad", Labels={OWNER: "abc"})],
        [row("port", Labels={"labctl.service-socket": "/run/x", "labctl.service-port": "?"})],
        [row("when", Created="yesterday", State=None)],
    ],
)
def test_no_container_keeps_leases_of_others_from_ending(bed: Bed, rows: list[Any]) -> None:
    bed.engine.said["/containers/json"] = (200, [*rows, row("over", Labels=LEASE_OVER)])
    bed.engine.said["/containers/over/exec"] = (201, [])
    for _ in range(2):
        bed.keeping.run_round()
    wait_for(lambda: bed.engine.asked("POST", "/containers/over/stop"))


@pytest.mark.parametrize(
    "answer",
    [(200, b"<html>"), (200, {"a": 1}), (200, b""), (500, {"message": "no"}), (200, b"[" * 99_999)],
)
def test_a_round_with_a_broken_engine_is_not_the_last(bed: Bed, answer: Any) -> None:
    bed.engine.said["/containers/json"] = answer
    bed.keeping.run_round()
    bed.keeping.run_round()
    assert len(bed.reported) == 1, "told once while it lasts"
    assert bed.reported[0].startswith("checking the containers failed")
    bed.engine.said["/containers/json"] = (200, [row("over", Labels=LEASE_OVER)])
    bed.keeping.run_round()
    wait_for(lambda: bed.engine.asked("POST", "/containers/over/stop"))


def test_a_lease_that_could_not_be_ended_is_ended_later(bed: Bed) -> None:
    bed.engine.said["/containers/json"] = (200, [row("over", Labels=LEASE_OVER)])
    bed.engine.said["/containers/over/stop"] = (500, {"message": "busy"})
    bed.keeping.run_round()
    wait_for(lambda: (bed.keeping.run_round(), bed.reported)[1])
    assert bed.reported == [
        "ending the lease of u71001.over failed: EngineRequestError: "
        "the Docker Engine on the server refused the request: busy"
    ]
    asked = len(bed.engine.asked("POST", "/containers/over/stop"))
    bed.engine.said["/containers/over/stop"] = (204, b"")
    wait_for(
        lambda: (bed.keeping.run_round(), len(bed.engine.asked("POST", "/over/stop")) > asked)[1]
    )


def test_an_answer_that_cannot_be_read_is_an_error_to_the_account(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.engine.said["/containers/json"] = (200, [{"Id": "x"}, 7])
    assert bed.ask(ALICE, "GET", "/containers/json")[0] == 500
    assert "GET '/containers/json' failed" in capsys.readouterr().err


def test_nobody_waits_for_a_container_that_the_engine_does_not_make(bed: Bed) -> None:
    """While one is being made the engine may hang: others' are made, and leases end."""
    bed.engine.hold["name=u71001.stuck"] = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(bed.create, ALICE, "stuck", None)
        try:
            wait_for(lambda: bed.engine.asked("POST", "name=u71001.stuck"))
            assert bed.create(BOB, "beside")[0] == 201
            assert bed.ask(BOB, "POST", "/containers/beside/start")[0] == 200
            assert bed.ask(BOB, "DELETE", "/containers/beside")[0] == 200
            bed.engine.containers["over"] = row("over", Labels=LEASE_OVER)
            bed.keeping.run_round()
            wait_for(lambda: bed.engine.asked("POST", "/containers/over/stop"))
            status, reply = bed.create(ALICE, "stuck")
            assert (status, "being created" in reply["message"]) == (409, True)
        finally:
            bed.engine.hold.popitem()[1].set()
        assert stuck.result()[0] == 201


def test_containers_that_are_being_made_count(bed: Bed) -> None:
    """Many at once are not more than one after the other."""
    bed.settings = SETTINGS._replace(containers=3)
    bed.start_broker()
    bed.engine.hold["/containers/create"] = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(bed.create, ALICE, f"c{n}") for n in range(6)]
        wait_for(lambda: sum(one.done() for one in asked) == 3)
        bed.engine.hold.popitem()[1].set()
        assert sorted(one.result()[0] for one in asked) == [201, 201, 201, 409, 409, 409]
    assert bed.create(BOB, "other")[0] == 201


def test_mounts_of_what_is_being_made_are_not_let_go(bed: Bed) -> None:
    """The engine listed its containers before; the mounts are held since."""
    (bed.folder / "mounts" / "u71001.left-behind").mkdir()
    bed.engine.hold["name=u71001.new"] = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        new = thread.submit(bed.create, ALICE, "new")
        wait_for(lambda: bed.engine.asked("POST", "name=u71001.new"))
        bed.keeping.run_round()
        left = [one.name for one in (bed.folder / "mounts").iterdir()]
        bed.engine.hold.popitem()[1].set()
        assert new.result()[0] == 201
    assert left == ["u71001.new"]


# What one spoils for itself


def service(bed: Bed, name: str, socket_at: Path) -> None:
    labels = {OWNER: str(os.getuid()), "labctl.service-port": "1", rules.SOCKET: str(socket_at)}
    bed.engine.containers[name] = row(name, Labels=labels)


def test_what_one_spoils_for_itself_is_spoilt_for_nobody_else(bed: Bed) -> None:
    """A directory where the socket was to be: leases end, others' sockets come, nothing is left."""
    accounts = bed.folder / "accounts"
    mine = accounts / str(os.getuid())
    outside = bed.folder / "outside" / "x.sock"
    service(bed, "bad", mine / "a.sock")
    service(bed, "good", mine / "b.sock")
    service(bed, "elsewhere", outside)
    bed.engine.containers["over"] = row("over", Labels=LEASE_OVER)
    (mine / "a.sock").mkdir(parents=True)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        bed.keeping.run_round()
    assert [line[:32] for line in bed.reported] == ["the socket of u71001.bad failed:"]
    assert (mine / "b.sock").is_socket()
    assert not outside.parent.exists(), "a label says no place of root's"
    assert sorted(one.name for one in accounts.iterdir()) == [mine.name]
    wait_for(lambda: not bed.is_running("u71001.over"))
    wait_for(lambda: sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 1)
    bed.engine.containers.clear()
    bed.keeping.run_round()
    assert not (mine / "b.sock").exists()


def test_containers_that_have_ended_are_not_kept_for_ever(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "ENDED_KEPT", 2)
    for number in range(4):
        name = f"c{number}"
        bed.engine.containers[name] = row(name, State="exited", Created=float(number))
    bed.engine.containers["others"] = row("others", State="exited", Labels={OWNER: "7"})
    bed.keeping.run_round()
    assert sorted(bed.engine.containers) == ["c2", "c3", "others"]


# What an account may have the engine keep


def test_commands_in_a_container_are_bounded(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps what was never started in its memory for as long as the container lives."""
    monkeypatch.setattr(calls, "MOST_EXECS", 3)
    bed.create(ALICE, "here")
    path = "/containers/here/exec"
    statuses = [bed.ask(ALICE, "POST", path, {"Cmd": ["id"]})[0] for _ in range(4)]
    assert statuses == [201, 201, 201, 409]
    long = {"Cmd": ["id"], "Env": ["A=" + "x" * calls.MOST_EXEC_BYTES]}
    assert bed.ask(ALICE, "POST", path, long)[0] == 413


def test_what_every_list_repeats_is_bounded(bed: Bed) -> None:
    """Else one account's containers would make lists so long that no lease ends in time."""
    many = {f"labctl.{number}": "x" * 200 for number in range(100)}
    assert bed.create(ALICE, "labels", Labels=many)[0] == 413
    assert bed.create(ALICE, "command", Cmd=["sh", "-c", "x" * 20_000])[0] == 413
    assert bed.create(ALICE, "entry", Entrypoint="x" * 20_000)[0] == 413
    mount = {"Type": "bind", "Source": "/home", "Target": "/lab/" + "x" * 300}
    assert bed.create(ALICE, "mount", {"Mounts": [mount]})[0] == 403
    assert bed.create(ALICE, "fits", Labels=dict(list(many.items())[:20]))[0] == 201


def test_one_account_sends_few_images_at_once(bed: Bed) -> None:
    """Each upload holds memory of the broker for as long as its sender likes."""
    head = b"POST /images/load HTTP/1.1\r\nHost: docker\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ExitStack() as stack:
        links = [stack.enter_context(bed.connect(ALICE)).sock for _ in range(MOST_UPLOADS + 1)]
        for link in links:
            link.sendall(head + b"1\r\nx\r\n")
        answered = select.select(links, [], [], 120)[0]
        assert [link.recv(12) for link in answered] == [b"HTTP/1.1 429"]
        assert bed.ask(BOB, "POST", "/images/load", {})[0] == 400


def test_logs_of_containers_are_bounded() -> None:
    """They are on the server's disk, outside of every quota."""
    share = rules.AccountShare(8 << 30, 2.0, 4096)
    about: dict[str, Any] = {"image": "x", "mounts": [], "gpus": [], "gpu_groups": [], "labels": {}}
    request = rules.parse_container_request(ALICE, RequestFields({}))
    container = rules.build_container(
        ALICE, request, **about, share=share, network="n", parent="/p"
    )
    logs = container.HostConfig.LogConfig
    assert logs
    assert logs.Type == "json-file"
    size, unit = int(logs.Config["max-size"][:-1]), logs.Config["max-size"][-1]
    assert unit == "m"
    most = SETTINGS.containers + 2 * claims.ENDED_KEPT
    assert size * int(logs.Config["max-file"]) * most < 2048, "MiB of one account, at the worst"


def test_ended_containers_are_bounded_though_none_can_be_removed(bed: Bed) -> None:
    most = 2 * claims.ENDED_KEPT
    for number in range(most):
        bed.engine.containers[f"c{number}"] = row(f"c{number}", State="exited")
    assert bed.create(ALICE, "more")[0] == 409
    assert bed.create(BOB, "other")[0] == 201


# Pulls


def progress(*layers: tuple[str, int]) -> bytes:
    lines = [
        {"id": layer, "status": "Downloading", "progressDetail": {"current": 1, "total": size}}
        for layer, size in layers
    ]
    return b"\r\n".join(json.dumps(one).encode() for one in lines) + b"\r\n"


PULL = "/images/create?fromImage=registry.example/big&tag=1"


def pull(bed: Bed, account: rules.BrokerAccount = ALICE) -> tuple[int, list[dict[str, Any]]]:
    """(status, the lines of progress)."""
    with bed.connect(account) as link:
        link.request("POST", PULL)
        reply = link.getresponse()
        return reply.status, [json.loads(line) for line in reply.read().splitlines()]


@pytest.fixture
def pulls(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    """With room on the disk, and no such image yet."""
    monkeypatch.setattr(image_disk, "measure_disk", lambda path: (1 << 50, 1 << 51))
    bed.engine.said["big:1/json"] = (404, {"message": "No such image"})
    return bed


def test_a_pull_tells_how_far_it_is(pulls: Bed) -> None:
    pulls.engine.said["/images/create"] = (200, progress(("a", 5), ("b", 6)))
    status, lines = pull(pulls)
    assert status == 200
    assert [one["id"] for one in lines] == ["a", "b"]
    pulls.engine.said["/images/create"] = (404, {"message": "no such manifest"})
    assert pull(pulls) == (404, [{"message": "no such manifest"}])


def test_a_pull_is_bounded_by_what_its_layers_come_to(pulls: Bed) -> None:
    pulls.settings = SETTINGS._replace(image_bytes=10)
    pulls.start_broker()
    pulls.engine.said["/images/create"] = (200, progress(("a", 5), ("a", 5), ("b", 6)))
    _, lines = pull(pulls)
    assert "larger than the shared server allows" in lines[-1]["error"]


def test_a_pull_ends_when_the_disk_fills_while_it_goes_on(
    pulls: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1 << 50, 0])
    monkeypatch.setattr(image_disk, "measure_disk", lambda path: (next(free), 0))
    pulls.engine.said["/images/create"] = (200, progress(("a", 5)))
    _, lines = pull(pulls)
    assert "no room" in lines[-1]["error"]


def test_one_account_pulls_few_images_at_once(pulls: Bed) -> None:
    pulls.engine.said["/images/create"] = (200, progress(("a", 5)))
    pulls.engine.hold["/images/create"] = threading.Event()
    most = image_pulls.MOST_AT_ONCE
    with ThreadPoolExecutor(most + 1) as threads:
        running = [threads.submit(pull, pulls) for _ in range(most)]
        wait_for(lambda: len(pulls.engine.asked("POST", "/images/create")) == most)
        assert pull(pulls)[0] == 429
        other = threads.submit(pull, pulls, BOB)
        wait_for(lambda: len(pulls.engine.asked("POST", "/images/create")) == most + 1)
        pulls.engine.hold.popitem()[1].set()
        assert [one.result()[0] for one in (*running, other)] == [200] * (most + 1)
    assert pull(pulls)[0] == 200, "and again once they have ended"


# GPUs


def test_a_loop_that_asks_at_the_end_of_its_lease_does_not_keep_the_gpu(bed: Bed) -> None:
    assert bed.create_with_gpu(ALICE, "first") == 201
    assert bed.ask(ALICE, "POST", "/containers/first/start")[0] == 200
    assert bed.create_with_gpu(BOB, "b") == 409
    assert "next" in bed.message
    assert bed.create_with_gpu(CAROL, "c") == 409
    assert "number 2" in bed.message
    bed.now_s += SETTINGS.gpu_lease_s
    # What is being stopped still has it, and is no lease to share.
    assert bed.create_with_gpu(ALICE, "grace") == 409
    bed.keeping.run_round()
    wait_for(lambda: not bed.is_running("u71001.first"))
    for attempt in range(3):
        assert bed.create_with_gpu(ALICE, f"again{attempt}") == 409
    assert "reserved for uid 71003" in bed.message
    bed.start_broker()
    assert bed.create_with_gpu(ALICE, "restarted") == 409, "a restart changes no order"
    assert bed.create_with_gpu(CAROL, "c") == 409
    assert bed.create_with_gpu(BOB, "b") == 201
    assert bed.ask(BOB, "POST", "/containers/b/start")[0] == 200
    bed.end_lease()
    wait_for(lambda: not bed.is_running("u71003.b"))
    assert bed.create_with_gpu(BOB, "again") == 409
    assert bed.create_with_gpu(CAROL, "c") == 201


def test_who_does_not_come_in_time_loses_the_turn(bed: Bed) -> None:
    assert bed.create_with_gpu(ALICE, "a") == 201
    assert bed.create_with_gpu(BOB, "b") == 409
    bed.ask(ALICE, "DELETE", "/containers/a")
    bed.keeping.run_round()  # nobody asks, and yet the turn begins
    bed.now_s += 599
    assert bed.create_with_gpu(ALICE, "a") == 409
    bed.now_s += 2
    assert bed.create_with_gpu(ALICE, "a") == 201
    assert bed.create_with_gpu(BOB, "b") == 409, "and is at the end when it asks again"


def test_no_turn_begins_anew(tmp_path: Path) -> None:
    """Else who asks for another GPU in between, and never comes, keeps the free one for ever."""
    queue = GpuQueue(tmp_path / "queue.json")
    assert [queue.join(uid, []) for uid in (1, 2, 1)] == [1, 2, 1]
    assert queue.advance(["GPU-b"], 100.0)["GPU-b"].uid == 1
    assert queue.join(1, ["GPU-a"]) == 2
    assert queue.join(1, []) == 2
    assert queue.advance(["GPU-b"], 200.0)["GPU-b"].uid == 2


def test_a_driver_that_hangs_keeps_no_lease_from_ending(bed: Bed) -> None:
    assert bed.create_with_gpu(ALICE, "a") == 201
    assert bed.ask(ALICE, "POST", "/containers/a/start")[0] == 200
    assert bed.create_with_gpu(BOB, "b") == 409
    bed.driver_answers.clear()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(bed.create_with_gpu, CAROL, "c")
        bed.end_lease()
        wait_for(lambda: not bed.is_running("u71001.a"))
        bed.driver_answers.set()
        assert asking.result() == 409


def test_a_service_waits_in_no_queue(bed: Bed) -> None:
    assert bed.create_with_gpu(ALICE, "a") == 201
    labels = {"Labels": {"labctl.service": "page"}}
    devices = {"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]], "Driver": ""}]}
    assert bed.create(BOB, "service", devices, **labels)[0] == 201
    bed.ask(ALICE, "DELETE", "/containers/a")
    assert bed.create_with_gpu(CAROL, "c") == 201


def test_a_refusal_says_whether_it_is_for_a_limit(bed: Bed) -> None:
    assert bed.create(ALICE, "first", GPU)[0] == 201
    limit, taken = bed.create(BOB, "b", GPU)[1], bed.create(ALICE, "first")[1]
    assert limit["labctl_limit"] is True
    assert limit["message"].startswith("shared server: no GPU is free: ")
    assert "already in use" in taken["message"]
    assert "labctl_limit" not in taken


def test_a_gpu_is_given_once_however_many_ask_at_once(bed: Bed) -> None:
    """The engine has not listed what is being made."""
    bed.engine.hold["/containers/create"] = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(bed.create_with_gpu, one, "x") for one in (ALICE, BOB, CAROL)]
        wait_for(lambda: sum(one.done() for one in asked) == 2)
        bed.engine.hold.popitem()[1].set()
        assert sorted(one.result() for one in asked) == [201, 409, 409]


def test_a_container_that_is_never_started_loses_its_claim(bed: Bed) -> None:
    assert bed.create_with_gpu(ALICE, "never") == 201
    assert bed.create(ALICE, "plain")[0] == 201
    bed.keeping.run_round()
    assert len(bed.engine.containers) == 2
    bed.settings = SETTINGS._replace(gpu_claim_s=0.0)
    bed.start_broker()
    bed.keeping.run_round()
    bed.keeping.run_round()
    assert [one["Name"] for one in bed.engine.containers.values()] == ["/u71001.plain"]
    assert not any("force" in path for path in bed.engine.asked("DELETE", "/containers/"))
    assert bed.create_with_gpu(BOB, "b") == 201


def test_a_start_that_comes_first_is_not_undone(bed: Bed) -> None:
    """Between the engine's list and the removal it may have started: the engine refuses then."""
    bed.settings = SETTINGS._replace(gpu_claim_s=-1.0)
    bed.start_broker()
    labels = {GPUS: "GPU-a", ENDS: "99999"}
    bed.engine.said["/containers/json"] = (200, [row("a", State="created", Labels=labels)])
    bed.engine.said["/containers/a"] = (409, {"message": "You cannot remove a running container"})
    bed.keeping.run_round()
    assert bed.engine.asked("DELETE", "/containers/a")
    assert bed.reported == []
