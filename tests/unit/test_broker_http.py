"""HTTP between a client, the broker and the Docker Engine, as it comes off the wire.

The engine here is a socket that says what the test wants; tests/e2e has a real one.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_socket import engine_socket

from labctl.agent.broker import http as broker_http
from labctl.agent.broker.broker import Broker
from labctl.agent.broker.http import HttpRefusal, read_request, send_refusal
from labctl.agent.broker.relay import parse_head, pass_on, send_on
from labctl.agent.broker.rules import BrokerAccount
from labctl.agent.broker.settings import BrokerSettings
from labctl.agent.host import engine as remote_engine
from labctl.agent.host.engine import EngineRequestError

WAIT_S = 120.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Engine: yes\r\n\r\nok"


def receive_head(link: socket.socket) -> bytes:
    text = b""
    while b"\r\n\r\n" not in text:
        block = link.recv(65536)
        assert block, text
        text += block
    return text


def receive_all(link: socket.socket) -> bytes:
    return b"".join(iter(lambda: link.recv(65536), b""))


@dataclass
class Engine:
    """Answers one request with `reply`, and keeps all that it heard."""

    place: str
    reply: Callable[[socket.socket], None]
    heard: bytearray = field(default_factory=bytearray)

    def serve(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            link.settimeout(WAIT_S)
            self.heard += receive_head(link)
            self.reply(link)
            with suppress(OSError):
                self.heard += receive_all(link)


@contextmanager
def engine(tmp_path: Path, reply: Callable[[socket.socket], None]) -> Iterator[Engine]:
    made = Engine(str(tmp_path / "s"), reply)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(made.place)
        listener.listen(1)
        thread = threading.Thread(target=made.serve, args=(listener,))
        thread.start()
        try:
            yield made
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer(link: socket.socket) -> None:
    link.sendall(OK)
    link.shutdown(socket.SHUT_WR)


Handler = Callable[[broker_http.Request], object]


@contextmanager
def broker(handle: Handler, text: bytes = b"") -> Iterator[socket.socket]:
    """A client's connection to a broker that does this with the request; `text` is there first."""
    here, there = socket.socketpair()
    there.sendall(text)

    def serve() -> None:
        with here, suppress(OSError):
            try:
                asked = read_request(here)
                if asked is not None:
                    handle(asked)
            except HttpRefusal as refusal:
                send_refusal(here, refusal)

    thread = threading.Thread(target=serve)
    thread.start()
    with there:
        there.settimeout(WAIT_S)
        yield there
    thread.join()


def converse(handle: Handler, text: bytes) -> bytes:
    """All that a client hears who says this and nothing more."""
    with broker(handle) as link:
        sender = threading.Thread(target=send_all, args=(link, text))
        sender.start()
        heard = receive_all(link)
        link.close()
        sender.join()
        return heard


def send_all(link: socket.socket, text: bytes) -> None:
    with suppress(OSError):
        link.sendall(text)
        link.shutdown(socket.SHUT_WR)


POST = b"POST / HTTP/1.1\r\nHost: d\r\n"
LENGTH = b"Content-Length: 2\r\n"


@pytest.mark.parametrize(
    "text",
    [
        b"GET /\r\n\r\n",
        b"GET / x y HTTP/1.1\r\nHost: d\r\n\r\n",
        b"GET / HTTP/1.x\r\nHost: d\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.x\nInjected: yes\r\nHost: d\r\n\r\n",
        b"GET / HTTP/1.1 \nInjected: yes\r\nHost: d\r\n\r\n",
        b"GET /\rInjected HTTP/1.1\r\nHost: d\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: d\r\n\r\n",
        b"GET /\xb2 HTTP/1.1\r\nHost: d\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: d\r\nX : y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: d\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: d\r\nHost: e\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: d\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /?name=a&Name=b HTTP/1.1\r\nHost: d\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: +2\r\n\r\n{}",
        POST + b"Content-Length: \xb2\r\n\r\n{}",
        POST + "Content-Length: ²\r\n\r\n{}".encode(),
        POST + LENGTH + b"Content-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: 2, 3\r\n\r\n{}",
        POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"Content-Length: 10\r\n\r\nshort",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 9999999\r\n\r\n" + b"x" * 2_000_000,
        POST + LENGTH + b"\r\n[]",
        POST + b'Content-Length: 15\r\n\r\n{"a":1,"A":[2]}',
    ],
)
def test_a_request_that_is_none_is_refused_aloud(text: bytes) -> None:
    """Whoever is still sending hears why, too."""
    heard = converse(lambda asked: asked.read_json_body(), text)
    assert heard.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
    assert b'{"message": "' in heard


def test_bodies_come_whole_in_every_form() -> None:
    found: list[object] = []

    def keep(asked: broker_http.Request) -> None:
        found.extend((asked.path, asked.version, asked.query, asked.read_json_body()))

    counted = b'POST /v1.41/a?b=c%20d HTTP/1.1\r\nHost: d\r\nContent-Length: 7\r\n\r\n{"a":1}'
    chunked = b'POST /a HTTP/1.1\r\nHost: d\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n'
    converse(keep, counted + b"GET / HTTP/1.1")
    converse(keep, chunked + b'4;x\r\n":1}\r\n0\r\nTrailer: x\r\n\r\n')
    assert found == ["/a", "/v1.41", {"b": "c d"}, {"a": 1}, "/a", "", {}, {"a": 1}]
    assert converse(keep, b"") == b""


def test_a_client_that_waits_for_leave_to_send_gets_it() -> None:
    with broker(lambda asked: asked.read_json_body()) as link:
        link.sendall(POST + LENGTH + b"Expect: 100-continue\r\n\r\n")
        assert receive_head(link).startswith(b"HTTP/1.1 100")
        link.sendall(b"[]")
        assert b"the body is not an object" in receive_all(link)


@pytest.mark.parametrize(
    "text",
    [
        b"GET /_ping HTTP/1.1\r\nHost: d\r\nInjected: yes\r\n\r\n",
        b"GET /_ping HTTP/1.1\nInjected: yes\nHost: d\n\n",
        b"GET /_ping HTTP/1.1\r\nHost: d\r\nX: a\r\n Injected: yes\r\n\r\n",
        b"GET /_ping HTTP/1.1\r\nHost: d\r\n\r\nGET /Injected HTTP/1.1\r\nHost: d\r\n\r\n",
        b"GET /_ping HTTP/1.0\r\nContent-Length: 8\r\n\r\nInjected",
        b"GET /_ping?a=%0d%0aInjected:%20yes HTTP/1.1\r\nHost: Injected\r\n\r\n",
    ],
)
def test_of_a_clients_own_words_none_reach_the_engines_parser(tmp_path: Path, text: bytes) -> None:
    def ask(asked: broker_http.Request) -> None:
        assert pass_on(asked, made.place, "/_ping", {"w": "1\r\nX: y"}) == 200

    with engine(tmp_path, answer) as made:
        heard = converse(ask, text)
    assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Engine: yes\r\n" in heard
    assert made.heard.decode().split("\r\n") == [
        "GET /_ping?w=1%0D%0AX%3A+y HTTP/1.1",
        "Host: docker",
        "Content-Type: application/json",
        "Content-Length: 0",
        "Connection: close",
        "",
        "",
    ]


def test_an_engine_that_does_not_switch_hears_of_nothing_behind_the_request(
    tmp_path: Path,
) -> None:
    text = (
        b"POST /v1.41/exec/1/start HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
    )
    smuggled = b"\r\nPOST /containers/create HTTP/1.1\r\n\r\n"
    with engine(tmp_path, answer) as made:
        converse(lambda asked: pass_on(asked, made.place, "/exec/1/start", {}), text + smuggled)
    assert made.heard.startswith(b"POST /v1.41/exec/1/start HTTP/1.1\r\nHost: docker\r\n")
    assert b"Connection: Upgrade\r\nUpgrade: tcp\r\n" in made.heard
    assert b"create" not in made.heard


SWITCHED = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
SWITCHED += b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def test_a_stream_goes_both_ways_once_the_engine_has_switched(tmp_path: Path) -> None:
    """Bytes of any kind, what came early, and an end of input that is none of the output."""

    def echo(link: socket.socket) -> None:
        while not made.heard.endswith(b"{}"):
            made.heard.extend(link.recv(65536))
        link.sendall(SWITCHED + b"early\n")
        link.sendall(receive_all(link)[::-1])
        link.shutdown(socket.SHUT_WR)

    text = POST + b"Connection: Upgrade\r\nUpgrade: tcp\r\n" + LENGTH + b"\r\n{}"
    with (
        engine(tmp_path, echo) as made,
        broker(lambda asked: pass_on(asked, made.place, "/exec/1/start", {}, b"{}")) as link,
    ):
        link.sendall(text + b"\0abc")
        head = receive_head(link)
        assert head.startswith(b"HTTP/1.1 101")
        assert b"vnd.docker.raw-stream" in head
        link.sendall(b"\r\n\r\nGET")
        link.shutdown(socket.SHUT_WR)
        assert head.partition(b"\r\n\r\n")[2] + receive_all(link) == b"early\nTEG\n\r\n\rcba\0"


def test_docker_build_is_refused_with_what_to_do_instead() -> None:
    serving = Broker(BrokerSettings(), None)  # type: ignore[arg-type]
    account = BrokerAccount(1, 1, "lab-ann", "/home/lab-ann")
    ask = b"POST /v1.41/build?t=x HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\n\r\n"
    heard = converse(lambda asked: serving._answer(account, asked), ask)
    assert heard.startswith(b"HTTP/1.1 403")
    assert b"docker save NAME | labctl ssh -- docker load" in heard


@pytest.mark.parametrize(
    ("version", "framing"), [("1.1", b"Transfer-Encoding: chunked"), ("1.0", b"Connection: close")]
)
def test_an_answer_comes_as_the_client_can_read_it(
    tmp_path: Path, version: str, framing: bytes
) -> None:
    """Piece by piece: a log that is followed has no end."""
    more = threading.Event()

    def log(link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        assert more.wait(WAIT_S)
        link.sendall(b"3\r\ntwo\r\n0\r\n\r\n")

    with (
        engine(tmp_path, log) as made,
        broker(lambda asked: pass_on(asked, made.place, "/logs", {})) as link,
    ):
        link.sendall(f"GET /logs HTTP/{version}\r\nHost: d\r\n\r\n".encode())
        head = b""
        while not head.endswith((b"one", b"one\r\n")):
            head += link.recv(65536)
        more.set()
        assert framing in head
        assert b"two" in receive_all(link)


def test_half_an_answer_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    def stop(link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        link.shutdown(socket.SHUT_RDWR)

    with engine(tmp_path, stop) as made:
        heard = converse(
            lambda asked: pass_on(asked, made.place, "/logs", {}),
            b"GET /logs HTTP/1.1\r\nHost: d\r\n\r\n",
        )
    assert b"one" in heard
    assert not heard.endswith(b"0\r\n\r\n")
    assert heard.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("text", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 101 no\r\n\r\n"])
def test_an_engine_that_answers_nonsense_is_told_of(tmp_path: Path, text: bytes) -> None:
    def speak(link: socket.socket) -> None:
        link.sendall(text)
        link.shutdown(socket.SHUT_RDWR)

    with engine(tmp_path, speak) as made:
        ask = b"GET /logs HTTP/1.1\r\nHost: d\r\n\r\n"
        heard = converse(lambda asked: pass_on(asked, made.place, "/logs", {}), ask)
    assert heard.startswith(b"HTTP/1.1 502")
    gone = converse(lambda asked: pass_on(asked, str(tmp_path / "none"), "/logs", {}), ask)
    assert gone.startswith(b"HTTP/1.1 503")


def test_a_client_that_goes_ends_what_was_done_for_it(tmp_path: Path) -> None:
    """Else `docker wait` would hold one of its account's connections for as long as a run takes."""
    gone = threading.Event()

    def stay_silent(link: socket.socket) -> None:
        assert link.recv(1) == b""
        gone.set()

    with (
        engine(tmp_path, stay_silent) as made,
        broker(lambda asked: pass_on(asked, made.place, "/wait", {})) as link,
    ):
        link.sendall(b"POST /wait HTTP/1.1\r\nHost: d\r\n\r\n")
        while b"/wait" not in made.heard:
            assert not gone.wait(0.01)
        link.close()
        assert gone.wait(WAIT_S)


def upload(place: str, idle_s: float = WAIT_S) -> Handler:
    def handle(asked: broker_http.Request) -> None:
        send_on(asked, place, "/images/load", {"quiet": "1"}, asked.read_blocks(1 << 30, idle_s))

    return handle


def test_an_upload_goes_on_in_pieces_of_our_own(tmp_path: Path) -> None:
    def take(link: socket.socket) -> None:
        while not made.heard.endswith(b"\r\n0\r\n\r\n"):
            made.heard.extend(link.recv(65536))
        answer(link)

    with engine(tmp_path, take) as made, broker(upload(made.place)) as link:
        client = http.client.HTTPConnection("docker")
        client.sock = link
        client.request("POST", "/images/load", iter([b"ab", b"cde"]), {}, encode_chunked=True)
        reply = client.getresponse()
        assert (reply.status, reply.read()) == (200, b"ok")
    head, _, body = bytes(made.heard).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /images/load?quiet=1 HTTP/1.1\r\n")
    assert b"Content-Type: application/x-tar" in head
    assert body.endswith(b"\r\n0\r\n\r\n")
    assert b"".join(body.split(b"\r\n")[1::2]) == b"abcde"


def test_an_engine_that_has_heard_enough_of_an_upload_is_heard(tmp_path: Path) -> None:
    def refuse_it(link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\ndisk full")
        link.close()

    text = POST + b"Content-Length: 99999999\r\n\r\n" + bytes(20_000_000)
    with engine(tmp_path, refuse_it) as made:
        heard = converse(upload(made.place), text)
    assert heard.startswith(b"HTTP/1.1 500")
    assert b"disk full" in heard


@pytest.mark.parametrize("text", [b"", b"GET / HTTP/1.1\r\nHost: d", POST + LENGTH + b"\r\n["])
def test_a_client_that_sends_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(broker_http, "HEAD_S", 0.2)
    with broker(lambda asked: list(asked.read_blocks(10, 0.2)), text) as link:
        assert receive_all(link).startswith(b"HTTP/1.1 408")


def test_a_silent_upload_is_ended_in_its_own_time_and_costs_the_engine_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker save` takes minutes to its first byte, which is longer than a head may take."""
    monkeypatch.setattr(broker_http, "HEAD_S", 0.0)
    head = POST + b"Content-Length: 4\r\n\r\n"
    with broker(upload(str(tmp_path / "none"), 0.2), head) as link:
        assert receive_all(link).startswith(b"HTTP/1.1 408")
    with engine(tmp_path, answer) as made, broker(upload(made.place), head) as link:
        assert not broker_http.is_readable(link, 0.5), "it is waited for"
        link.sendall(b"abcd")
        assert receive_all(link).endswith(b"ok")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.x 200 OK\r\n\r\n",
        b"HTTP/1.1 2\xb20 OK\r\n\r\n",
        b"HTTP/1.1 101 no\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    ],
)
def test_what_the_engine_answers_the_broker_is_read_as_strictly(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineRequestError):
        parse_head(text)
    monkeypatch.setattr(remote_engine, "_parse", remote_engine._parse)
    remote_engine.set_head_parser(parse_head)
    with engine_socket() as made:
        monkeypatch.setenv("DOCKER_HOST", made.host)
        made.answers = lambda method, path, body: (200, {"path": path})
        assert json.loads(remote_engine.call("GET", "/info")) == {"path": "/v1.41/info"}
        made.answers = lambda method, path, body: (404, {"message": "no such thing"})
        with pytest.raises(EngineRequestError, match="refused") as refused:
            remote_engine.call("GET", "/info")
        assert (refused.value.status, refused.value.message) == (404, "no such thing")
