"""Notices of a provider that takes a server back: what they say, where they come from, what then.

The metadata service is the rehearsal's own, with its tokens.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from terminal import attach_tmux

from labctl.agent.host import engine
from labctl.agent.host.imds import Imds
from labctl.agent.runs.executor import LiveAttempt
from labctl.agent.watchdog import imds_notices as watch_imds
from labctl.agent.watchdog.imds_notices import has_reclaim_notices, read_notices
from labctl.agent.watchdog.notify import _notify_tmux, split_sentences
from labctl.agent.watchdog.provider_notice import (
    MARGIN_S,
    PASSED_S,
    REBALANCE,
    SEND_S,
    USUAL_S,
    HandledNotices,
    ReclaimNotice,
    convert_client_notice,
    decide_reclaim_action,
    limit_stop_s,
    parse_interruption,
    parse_rebalance,
)
from labctl.agent.watchdog.reclaim_record import ReclaimedRun, find_newest_complete
from labctl.wire.watchdog import CheckpointRecord, ClientNoticeRecord, NoticeRecord

NOW = 1_700_000_000.0
LEAVES = ReclaimNotice("interruption", "a", 120.0, "terminate")
AGAIN = ReclaimNotice("interruption", "b", 30.0, "terminate")
RISK = ReclaimNotice(REBALANCE, "r")


def action(at: float, what: str = "terminate") -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return json.dumps({"action": what, "time": stamp})


# What it says


def test_the_time_left_counts_by_the_answers_own_date() -> None:
    notice = parse_interruption(action(NOW + 118, "stop"), NOW)
    assert (notice.kind, notice.action, notice.left_s) == ("interruption", "stop", 118.0)
    assert parse_interruption(action(NOW - 5), NOW).left_s == 0.0


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"action": "terminate", "time": "soon"}'])
def test_a_notice_that_cannot_be_read_is_one_all_the_same(body: str) -> None:
    assert parse_interruption(body, NOW)[2:4] == (USUAL_S, "terminate")


def test_a_notice_handed_over_is_for_this_boot_and_ends() -> None:
    given = ClientNoticeRecord("x", 500.0, "interruption", "terminate", "labctl", "s")
    assert convert_client_notice(given, "x", 400.0) == ReclaimNotice(
        "interruption", "s", 100.0, "terminate", "labctl"
    )
    assert convert_client_notice(given, "another boot", 400.0) is None
    late = convert_client_notice(given, "x", 500.0 + PASSED_S)
    assert late is not None
    assert late.left_s == 0
    assert convert_client_notice(given, "x", 501.0 + PASSED_S) is None


# What follows


def test_each_sentence_of_a_notice_has_a_line() -> None:
    """A terminal of 80 columns broke the command at the end."""
    text = "this server ends in 1.5 h: $5.00 is spent. To save the results: labctl pull."
    assert split_sentences(text) == [
        "this server ends in 1.5 h: $5.00 is spent.",
        "To save the results: labctl pull.",
    ]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tmux_shows_the_fact_and_where_the_whole_notice_is(tmp_path: Path, columns: int) -> None:
    fact = "this server ends in 15 min"
    text = f"{fact}: nobody has worked on it (limit 50% #1). For more time: labctl extend 30m."
    path = tmp_path / "socket"
    with attach_tmux(path, columns) as screen:
        _notify_tmux(["tmux", "-S", str(path)], text)
        shown = screen.wait_for("labctl: ")[-1]
        assert len(shown) <= columns
        if columns == 200:
            assert shown == f"labctl: {text}"
            return
        assert shown.endswith(" … (Ctrl-b ~: all)")
        assert shown.startswith("labctl: this server" if columns == 40 else f"labctl: {fact}: ")
        screen.press("C-b", "~")
        log = "".join(screen.wait_for("[0/0]"))
        assert text.replace(" ", "") in log.replace(" ", "")


def test_each_notice_is_acted_on_once() -> None:
    acted, do = decide_reclaim_action(HandledNotices(), [], 0.0)
    assert do == ""
    acted, do = decide_reclaim_action(acted, [RISK], 1.0)
    assert (do, acted.under_way) == ("mirror", None)
    acted, do = decide_reclaim_action(acted, [RISK], 2.0)
    assert do == ""
    acted, do = decide_reclaim_action(acted, [RISK, LEAVES], 10.0)
    assert (do, acted.under_way, acted.ends_s) == ("wind down", LEAVES, 130.0)
    assert decide_reclaim_action(acted, [RISK, LEAVES], 15.0) == (acted, "")
    assert decide_reclaim_action(acted, [], 130.0 + PASSED_S) == (acted, "")


def test_a_recommendation_together_with_a_notice_is_none() -> None:
    acted, do = decide_reclaim_action(HandledNotices(), [RISK, LEAVES], 0.0)
    assert do == "wind down"
    assert (
        decide_reclaim_action(acted, [RISK, LEAVES, ReclaimNotice(REBALANCE, "r2")], 1.0)[1] == ""
    )


def test_a_second_notice_only_brings_the_end_forward() -> None:
    acted, _ = decide_reclaim_action(HandledNotices(), [LEAVES], 0.0)
    acted, do = decide_reclaim_action(acted, [LEAVES, AGAIN], 10.0)
    assert (do, acted.ends_s, acted.under_way) == ("", 40.0, LEAVES)
    acted, do = decide_reclaim_action(acted, [ReclaimNotice("interruption", "c", 500.0)], 11.0)
    assert (do, acted.ends_s) == ("", 40.0)


def test_a_server_that_was_not_taken_goes_on_and_can_be_taken_later() -> None:
    acted, _ = decide_reclaim_action(HandledNotices(), [LEAVES], 0.0)
    acted, do = decide_reclaim_action(acted, [LEAVES], 120.1 + PASSED_S)
    assert (do, acted.under_way) == ("passed", None)
    assert decide_reclaim_action(acted, [LEAVES], 200.0)[1] == ""
    assert decide_reclaim_action(acted, [LEAVES, AGAIN], 200.0)[1] == "wind down"


def test_runs_have_the_notice_less_what_sending_takes() -> None:
    assert limit_stop_s(120.0, 0, 1e6, False) == 120.0 - MARGIN_S
    assert limit_stop_s(120.0, 30e6, 1e6, True) == 120.0 - MARGIN_S - SEND_S - 30.0
    assert limit_stop_s(120.0, 1e12, 1e6, True) == (120.0 - MARGIN_S) / 2
    assert limit_stop_s(1.0, 0, 1e6, True) == 0.0


# Where it comes from


class Service:
    """The rehearsal's metadata service on a port of the loopback; `known` is what it tells."""

    def __init__(self) -> None:
        from werkzeug.serving import make_server

        from labctl.rehearsal.core.listener import QuietHandler

        self.known: dict[str, str] = {"meta-data/instance-life-cycle": "spot"}
        self.server = make_server("127.0.0.1", 0, None, request_handler=QuietHandler, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.forget_tokens()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def forget_tokens(self) -> None:
        from labctl.rehearsal.aws.imds import MetadataApp

        self.server.app = MetadataApp(self.known.get)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    pytest.importorskip("moto")  # the rehearsal is an extra
    made = Service()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_imds, "PROBE_PAUSES_S", (0.0, 0.0))


def test_notices_are_there_once_they_were_given(service: Service) -> None:
    imds = Imds(service.url)
    assert has_reclaim_notices(imds)
    assert read_notices(imds) == []
    stamp = "2026-01-02T03:04:05Z"
    service.known[watch_imds.REBALANCE] = json.dumps({"noticeTime": stamp})
    assert read_notices(imds) == [ReclaimNotice(REBALANCE, stamp)]
    service.known[watch_imds.ACTION] = action(time.time() + 100)
    heard = read_notices(imds)
    assert heard[0] == parse_rebalance(json.dumps({"noticeTime": stamp}))
    assert heard[1].action == "terminate"
    assert 60 < heard[1].left_s <= 100


def test_a_token_that_ran_out_is_replaced(service: Service) -> None:
    imds = Imds(service.url)
    assert read_notices(imds) == []
    service.forget_tokens()
    assert read_notices(imds) == []


def test_a_machine_on_demand_is_not_asked_again(service: Service) -> None:
    service.known["meta-data/instance-life-cycle"] = "on-demand"
    assert not has_reclaim_notices(Imds(service.url))


def test_a_machine_without_the_service_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert not has_reclaim_notices(Imds(f"http://127.0.0.1:{port}"))


def answering(reply: bytes) -> Iterator[int]:
    """A port where whoever asks hears `reply`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                with link:
                    link.recv(65536)
                    link.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.0 404 Not Found\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>welcome to our network</html>",
        b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nspot",
    ],
)
def test_what_answers_otherwise_is_no_such_service(reply: bytes) -> None:
    for port in answering(reply):
        assert not has_reclaim_notices(Imds(f"http://127.0.0.1:{port}"))


def test_the_date_of_the_answer_counts() -> None:
    old = formatdate(NOW, usegmt=True)
    for port in answering(f"HTTP/1.0 200 OK\r\nDate: {old}\r\n\r\n{action(NOW + 60)}".encode()):
        (notice,) = [
            n for n in read_notices(Imds(f"http://127.0.0.1:{port}")) if n.kind != REBALANCE
        ]
        assert notice.left_s == 60.0


# What a run has


def checkpoint(run: Path, name: str, step: int, listed: int = 3, at: float = NOW) -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "model").write_bytes(b"abc")
    body = {"step": step, "files": {"model": {"size": listed, "sha256": "-"}}}
    (folder / "manifest.json").write_text(json.dumps(body))
    os.utime(folder / "manifest.json", (at, at))
    return folder


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert find_newest_complete(tmp_path) is None
    checkpoint(tmp_path, "step-1", 1)
    checkpoint(tmp_path, "step-2", 2, at=NOW + 5)
    checkpoint(tmp_path, "step-3", 3, listed=4, at=NOW + 9)
    checkpoint(tmp_path, ".step-4.partial-0", 4, at=NOW + 10)
    checkpoint(tmp_path, "step-5", 5, at=NOW + 11).joinpath("model").unlink()
    wanted = CheckpointRecord("checkpoints/step-2", step=2, at=NOW + 5)
    assert find_newest_complete(tmp_path) == wanted


def test_a_watchdog_that_comes_after_goes_on_with_the_record_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(engine, "call", lambda method, path: asked.append(path))
    for name in (".labctl", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "logs" / "progress.json").write_text('{"step": 200, "total_steps": 900}')
    attempt = LiveAttempt("docker", "digits-night-1", "night", "", tmp_path)
    notice = NoticeRecord("interruption", "terminate", "IMDS", NOW, NOW + 120)
    said: list[str] = []
    run = ReclaimedRun(attempt, notice, lambda what, why: said.append(f"{what}: {why}"))
    run.send_sigterm()
    assert said == ["SIGTERM sent: night at step 200"]
    checkpoint(tmp_path, "step-201", 201, at=time.time() + 1)
    run.update({"digits-night-1"})
    assert (run.is_safe, run.is_ended) == (True, False)
    written = json.loads((tmp_path / ".labctl" / "reclaim.json").read_text())
    assert written.keys() == {
        "version",
        "container",
        "notice",
        "step",
        "sigterm_at",
        "whole",
        "ended_at",
        "mirrored_at",
    }
    assert written["notice"].keys() == {"kind", "action", "source", "heard_at", "ends_at"}
    assert written["whole"].keys() == {"checkpoint", "step", "at"}
    assert (written["version"], written["step"], written["whole"]["step"]) == (1, 200, 201)
    later = ReclaimedRun(attempt, notice._replace(source="labctl"), lambda what, why: None)
    assert later.record == run.record
    later.update(set())
    later.record_mirrored([])
    assert later.is_done(store=True)
    another = ReclaimedRun(attempt._replace(name="digits-night-2"), notice, lambda what, why: None)
    assert not another.is_safe, "an earlier attempt's record"
