"""HTTP between a client, the broker and the Docker Engine, as it comes off the wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labctl.remote import broker_http
from labctl.remote.broker_http import Refusal, pass_on, read_request


@pytest.fixture
def talk() -> Iterator[Callable[[bytes], broker_http.Request | None]]:
    """A request as it comes off the wire, its sender gone afterwards."""
    ends: list[socket.socket] = []

    def said(text: bytes) -> broker_http.Request | None:
        here, there = socket.socketpair()
        ends.extend((here, there))
        there.sendall(text)
        there.shutdown(socket.SHUT_WR)
        return read_request(here)

    yield said
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "text",
    [
        b"GET /\r\n\r\n",
        b"GET / x y HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nshort",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 2_000_000,
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]",
        b'POST / HTTP/1.1\r\nContent-Length: 15\r\n\r\n{"a":1,"A":[2]}',
        b"POST /?name=a&Name=b HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
def test_a_request_that_is_none_is_refused(text: bytes) -> None:
    def whole() -> None:
        here, there = socket.socketpair()
        with here, there:
            sender = threading.Thread(target=_sent, args=(there, text))
            sender.start()
            try:
                found = read_request(here)
                assert found is not None
                found.json()
            finally:
                here.close()
                sender.join()

    with pytest.raises(Refusal):
        whole()


def _sent(link: socket.socket, text: bytes) -> None:
    try:
        link.sendall(text)
        link.shutdown(socket.SHUT_WR)
    except OSError:
        return


def test_bodies_come_whole_in_every_form(
    talk: Callable[[bytes], broker_http.Request | None],
) -> None:
    counted = talk(
        b'POST /v1.41/a?b=c%20d HTTP/1.1\r\nContent-Length: 7\r\n\r\n{"a":1}GET / HTTP/1.1'
    )
    assert counted is not None
    assert (counted.path, counted.version, counted.query) == ("/a", "/v1.41", {"b": "c d"})
    assert counted.json() == {"a": 1}
    chunked = talk(
        b'POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;x\r\n":1}\r\n0\r\n\r\n'
    )
    assert chunked is not None
    assert chunked.json() == {"a": 1}
    assert talk(b"") is None


def test_a_client_never_reaches_the_engines_parser(tmp_path: Path) -> None:
    """An engine that does not switch to a stream hears of nothing behind the request."""
    heard = bytearray()
    place = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(place)
        engine.listen(1)

        def answer() -> None:
            link, _ = engine.accept()
            with link:
                while b"\r\n\r\n" not in heard:
                    heard.extend(link.recv(65536))
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                link.shutdown(socket.SHUT_WR)
                while block := link.recv(65536):
                    heard.extend(block)

        serving = threading.Thread(target=answer)
        serving.start()
        here, there = socket.socketpair()
        with here, there:
            there.sendall(
                b"POST /v1.41/exec/1/start HTTP/1.1\r\nUpgrade: tcp\r\nX: a\r\n\r\n"
                b"POST /containers/create HTTP/1.1\r\n\r\n"
            )
            asked = read_request(here)
            assert asked is not None
            assert pass_on(asked, place, "/exec/1/start", {"w": "1\r\nX: y"}) == 200
        serving.join()
    text = heard.decode()
    assert text.startswith("POST /v1.41/exec/1/start?w=1%0D%0AX%3A+y HTTP/1.1\r\nHost: docker\r\n")
    assert "create" not in text
    assert "X: a" not in text
