"""Live logs: read on by offset through cut links, restored runs and floods; one reader for all."""

from __future__ import annotations

import asyncio
import html
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.config import find_paths, load_lab
from labctl.errors import ConnectError
from labctl.events import SilentReporter
from labctl.model import Endpoint, Offer, Run, Server
from labctl.servers.agent import MARK
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.transports import Result, Transport
from labctl.transports.fake import FakeTransport
from labctl.web import log_streams
from labctl.web.log_streams import LogStreams
from labctl.web.mutations import LogReader

RUN = Run(id="r1", lab_id="000000000001", server_id="srv", state="running")


class There:
    """A server with one run: its log, and what the program there answers."""

    def __init__(self) -> None:
        self.log = b""
        self.attempt = "r1-1"
        self.state = "running"
        self.cut = False
        self.asked: list[dict[str, Any]] = []

    def answer(self, line: str, stdin: bytes) -> Result:
        if self.cut:
            raise ConnectError("no route to the server")
        asked = json.loads(stdin)
        self.asked.append(asked)
        offset = int(asked["offset"])
        if asked["attempt"] and asked["attempt"] != self.attempt:
            offset = 0
        if asked["tail"]:
            lines = self.log.splitlines(keepends=True)
            offset = len(self.log) - len(b"".join(lines[-int(asked["tail"]) :]))
        run = {"id": "r1", "lab_id": RUN.lab_id, "state": self.state, "container": self.attempt}
        head = MARK + json.dumps({"run": run, "offset": offset}).encode() + b"\n"
        end = MARK.decode() + json.dumps({"run": run}) + "\n"
        return Result(code=0, stdout=os.fsdecode(head + self.log[offset:]), stderr=end)


class Wire(Connections):
    def __init__(self, folder: Path, there: There) -> None:
        super().__init__(folder, None)
        self.there = there

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        return FakeTransport().reply("", self.there.answer)


@pytest.fixture
def there() -> There:
    return There()


@pytest.fixture
def read(tmp_path: Path, there: There) -> Callable[[], LogReader]:
    """A new reading of the run's log."""
    (tmp_path / "lab.yaml").write_text("lab: digits\nserver: {provider: local}\n")
    places = find_paths({"HOME": str(tmp_path)})
    state = State(places.database, network=False)
    context = LabContext(load_lab(tmp_path), RUN.lab_id, places, state, SilentReporter())
    server = Server(
        id="srv",
        provider="local",
        lab="digits",
        lab_id=RUN.lab_id,
        alias="digits",
        endpoint=Endpoint(host="192.0.2.1", host_key="ssh-ed25519 AAAA"),
        offer=Offer(provider="local", type="container"),
        created_at=1.0,
        state="running",
    )
    state.save_server(server)
    context.__dict__["connections"] = Wire(tmp_path / "ssh", there)
    return lambda: LogReader(context, server, RUN, 3, 1000)


def taken(reading: LogReader) -> bytes:
    blocks: list[bytes] = []
    reading.read_on(blocks.append)
    return b"".join(blocks)


def test_a_log_is_read_on_from_where_it_stopped(
    there: There, read: Callable[[], LogReader]
) -> None:
    there.log = b"1\n2\n3\n4\n5\n"
    reading = read()
    assert taken(reading) == b"3\n4\n5\n"
    there.log += b"6 \xc3"
    assert taken(reading) == b"6 \xc3"
    assert taken(reading) == b""
    there.log += b"\xa9\n"
    assert taken(reading) == b"\xa9\n"
    assert [one["tail"] for one in there.asked] == [3, 0, 0, 0]


def test_a_restored_runs_shorter_log_begins_anew(
    there: There, read: Callable[[], LogReader]
) -> None:
    there.log = b"a\nb\n"
    reading = read()
    taken(reading)
    before = reading.began_anew
    there.log, there.attempt = b"resumed\n", "r1-2"
    assert taken(reading) == b"resumed\n"
    assert reading.began_anew == before + 1


def test_of_a_flood_the_end_is_read(there: There, read: Callable[[], LogReader]) -> None:
    there.log = b"1\n"
    reading = read()
    taken(reading)
    there.log += b"x" * 50_000 + b"\nlast 1\nlast 2\nlast 3\n"
    assert taken(reading) == b""
    assert taken(reading) == b"last 1\nlast 2\nlast 3\n"
    assert reading.began_anew >= 1


async def events(stream: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, str]]:
    """(event, the text that its element has)."""
    async for block in stream:
        fields = [line.partition(": ") for line in block.decode().split("\n")]
        data = "\n".join(value for name, _, value in fields if name == "data")
        for name, _, value in fields:
            if name == "event":
                assert data.startswith("<span>")
                assert data.endswith("</span>")
                yield value, html.unescape(data[6:-7])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_streams, "SOON_S", 0.01)
    monkeypatch.setattr(log_streams, "LATE_S", 0.02)


def test_two_watchers_share_one_reader_and_see_the_same_end(
    there: There, read: Callable[[], LogReader]
) -> None:
    there.log = b"one\n"
    opened = []

    def open_() -> LogReader:
        opened.append(1)
        return read()

    async def watched() -> list[str]:
        shown = LogStreams()

        async def read_log() -> str:
            text = ""
            async for name, new in events(shown.watch("s", "r1", open_)):
                text += new if name in ("begin", "lines") or not new else f"[{new}]"
                if "three\n" in text:
                    there.state = "exited"
                elif "one\n" in text and b"three" not in there.log:
                    there.log += b"two\nthree\n"
            return text

        return await asyncio.wait_for(asyncio.gather(read_log(), read_log()), 60)

    first, second = asyncio.run(watched())
    assert first.startswith("one\ntwo\nthree\n")
    assert "the run has ended" in first
    assert second == first
    assert len(opened) == 1


def test_a_cut_link_is_told_and_read_through(there: There, read: Callable[[], LogReader]) -> None:
    there.log = b"before\n"

    async def watched() -> list[tuple[str, str]]:
        found = []
        async for name, text in events(LogStreams().watch("s", "r1", read)):
            found.append((name, text))
            if found[-1] == ("lines", "before\n"):
                there.cut = True
            elif name == "state" and "retrying" in text:
                there.log += b"after\n"
                there.cut = False
            elif "after\n" in text:
                there.state = "exited"
        return found

    found = asyncio.run(asyncio.wait_for(watched(), 60))
    assert ("lines", "after\n") in found
    assert found[-1][0] == "end"


def test_a_run_that_prints_nothing_is_not_read_for_ever(
    there: There, read: Callable[[], LogReader]
) -> None:
    """The page says "loading" until the server has answered, be it with nothing."""

    async def watched() -> list[tuple[str, str]]:
        found = []
        async for name, text in events(LogStreams().watch("s", "r1", read)):
            found.append((name, text))
            if name == "state":
                break
        return found

    assert asyncio.run(asyncio.wait_for(watched(), 60)) == [("begin", ""), ("state", "")]


def test_nobody_watching_means_nobody_reads(there: There, read: Callable[[], LogReader]) -> None:
    async def watched() -> int:
        shown = LogStreams()
        stream = shown.watch("s", "r1", read)
        async for _ in events(stream):
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        before = len(there.asked)
        await asyncio.sleep(0.2)
        return len(there.asked) - before

    there.log = b"x\n"
    assert asyncio.run(asyncio.wait_for(watched(), 60)) == 0


def test_there_are_not_endlessly_many_readers(there: There, read: Callable[[], LogReader]) -> None:
    async def watched() -> list[tuple[str, str]]:
        shown = LogStreams()
        open_ = [shown.watch("s", f"r{number}", read) for number in range(log_streams.MAX_LOGS)]
        for one in open_:
            await anext(one)
        return [event async for event in events(shown.watch("s", "one-more", read))]

    there.log = b"x\n"
    found = asyncio.run(asyncio.wait_for(watched(), 60))
    assert [name for name, _ in found] == ["state", "end"]
    assert "too many" in found[0][1]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r20%", "20%"),
        ("done\r", "done"),
        ("\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        ("bell\x07 \x9b and \u202eback", "bell\ufffd \ufffd and \ufffdback"),
        ("\ttab stays", "\ttab stays"),
    ],
)
def test_a_line_is_what_a_terminal_would_leave(line: str, shown: str) -> None:
    assert log_streams.clean_line(line) == shown


EVIL = "<img src=x onerror=alert(1)></span><script>"


def test_a_log_is_text_whatever_is_in_it() -> None:
    block = log_streams.encode_log_event("lines", f"a\n  {EVIL}\n").decode()
    assert block == (
        "event: lines\ndata: <span>a\ndata:   &lt;img src=x onerror=alert(1)&gt;&lt;/span&gt;"
        "&lt;script&gt;\ndata: </span>\n\n"
    )


def test_a_line_that_is_still_being_written_is_shown_and_replaced(
    there: There, read: Callable[[], LogReader]
) -> None:
    there.log = b"start\n10%"

    async def watched() -> list[tuple[str, str]]:
        found = []
        async for event in events(LogStreams().watch("s", "r1", read)):
            found.append(event)
            if event == ("rest", "10%"):
                there.log += b"\r20%"
            elif event == ("rest", "20%"):
                there.log += b"\rdone\n"
            elif event == ("rest", ""):
                there.state = "exited"
        return found

    found = asyncio.run(asyncio.wait_for(watched(), 60))
    shown = [event for event in found if event[0] in ("lines", "rest")]
    assert shown == [("lines", "start\n"), ("rest", "10%"), ("rest", "20%"),
                     ("lines", "done\n"), ("rest", "")]  # fmt: skip
    assert found[-1][0] == "end"


def test_a_page_never_holds_more_than_is_kept(
    there: There, read: Callable[[], LogReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a browser holds is replaced by the end of it, which says so."""
    monkeypatch.setattr(log_streams, "KEPT", 400)
    monkeypatch.setattr(log_streams, "MAX_SHOWN", 500)

    async def watched() -> list[tuple[str, str]]:
        found = []
        async for event in events(LogStreams().watch("s", "r1", read)):
            found.append(event)
            if event[0] in ("begin", "lines") and len(there.log) < 3000:
                there.log += b"%d\n" % len(there.log) * 30
            elif event[0] in ("begin", "lines"):
                there.state = "exited"
        return found

    there.log = b"first\n"
    held, most = "", 0
    for name, text in asyncio.run(asyncio.wait_for(watched(), 60)):
        held = text if name == "begin" else held + text if name == "lines" else held
        most = max(most, len(held))
    assert held.startswith(log_streams.LEFT_OUT)
    assert held.endswith(there.log.decode()[-100:])
    assert most < 500 + 400
