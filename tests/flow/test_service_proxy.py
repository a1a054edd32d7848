"""The origin of students' services: who gets through, and what is left of what passes."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from service_proxy_bed import (
    BIG,
    CODE,
    LAB_ID,
    TOKEN,
    Campus,
    OpenForward,
    ServiceVisitor,
    run_service,
    serve_campus,
    wait_until,
)
from websockets.sync.client import connect

from labctl.errors import LabError
from labctl.web.service_connections import make_pool
from labctl.web.student_services import TICKET_S


@pytest.fixture(scope="module")
def forward() -> Iterator[OpenForward]:
    with run_service() as forward:
        yield forward


@pytest.fixture(scope="module")
def campus(forward: OpenForward, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campus]:
    with serve_campus(tmp_path_factory.mktemp("campus"), lambda key: forward.open()) as campus:
        yield campus


def read(answer: tuple[int, dict[str, str], str]) -> dict[str, Any]:
    assert answer[0] == 200
    found: dict[str, Any] = json.loads(answer[2])
    return found


def test_a_request_arrives_as_if_it_was_made_on_the_server(campus: Campus) -> None:
    ada = campus.open("lovelace")
    origin = f"http://{ada.host}"
    cookie = f"{ada.cookie}; _xsrf=abc; labctl-student-y=secret; __Host-labctl-student-z=secret"
    ada.cookie = ""
    request = read(
        ada.ask(
            "/api/contents/a%2Fb?x=1%20&y",
            "POST",
            "body",
            Cookie=cookie,
            Origin=origin,
            Authorization="token other",
            X_Forwarded_For="192.0.2.1",
            Referer=f"{origin}/lab",
            Content_Type="text/plain",
        )
    )
    assert request["path"] == "/api/contents/a%2Fb"
    assert request["query"] == "x=1%20&y"
    assert (request["method"], request["body"]) == ("POST", "body")
    headers = dict(request["headers"])
    assert headers["host"] == "127.0.0.1:8888"
    assert headers["origin"] == "http://127.0.0.1:8888"
    assert headers["authorization"] == f"token {TOKEN}"
    assert headers["cookie"] == "_xsrf=abc"
    assert not {"referer", "x-forwarded-for"} & headers.keys()
    assert "labctl" not in json.dumps(request)


def test_an_answer_keeps_nothing_that_reaches_beyond_its_origin(campus: Campus) -> None:
    status, headers, _ = campus.open("lovelace").ask("/hostile")
    assert status == 200
    assert headers["x-own"] == "kept"
    assert headers["set-cookie"] == "mine=1; Path=/"
    assert headers["content-security-policy"] == "frame-ancestors 'self'"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    for name in (
        "service-worker-allowed", "clear-site-data", "access-control-allow-origin",
        "strict-transport-security",
    ):  # fmt: skip
        assert name not in headers


def test_tensorboard_does_not_see_its_path(campus: Campus) -> None:
    board = campus.open("lovelace", "tensorboard")
    assert read(board.ask("/tensorboard/data/runs?x=1"))["path"] == "/data/runs"
    assert read(board.ask("/tensorboard/"))["path"] == "/"


def test_much_data_arrives_whole(campus: Campus) -> None:
    assert len(campus.open("lovelace").ask("/big")[2]) == BIG


def test_an_upload_of_unknown_length_arrives_whole(campus: Campus) -> None:
    ada = campus.open("lovelace")
    connection = http.client.HTTPConnection(ada.host, timeout=60)
    headers = {"Cookie": ada.cookie, "Origin": f"http://{ada.host}"}
    connection.request("PUT", "/api/contents/a", iter([b"one ", b"two"]), headers)
    request = json.loads(connection.getresponse().read())
    connection.close()
    assert (request["method"], request["body"]) == ("PUT", "one two")
    headers = dict(request["headers"])
    assert headers["transfer-encoding"] == "chunked"
    assert not {"content-length", "user-agent", "accept"} & headers.keys()


def test_large_answers_are_read_in_large_blocks(tmp_path: Path) -> None:
    path = str(tmp_path / "service")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG
            connection.sendall(head + bytes(BIG))

    async def read_blocks() -> list[int]:
        pool = make_pool(path)
        async with pool, pool.stream("GET", "http://127.0.0.1/big") as reply:
            return [len(block) async for block in reply.aiter_stream()]

    thread = threading.Thread(target=answer)
    thread.start()
    sizes = asyncio.run(read_blocks())
    thread.join()
    listener.close()
    assert sum(sizes) == BIG
    assert max(sizes) > 64 * 1024


def test_no_other_student_and_no_stranger_gets_through(campus: Campus) -> None:
    ada, turing = campus.open("lovelace"), campus.enter("turing")
    for path in (f"/services/{LAB_ID}/jupyter", f"/services/{'a' * 12}/etcd", "/services/x/y"):
        assert turing.ask(path)[0] == 404
    origin = f"http://{ada.host}"
    name = ada.cookie.partition("=")[0]
    stranger = type(ada)(f"{origin}/")
    for cookie in ("", turing.cookie, f"{name}={turing.cookie.partition('=')[2]}", f"{name}=x"):
        status, headers, body = stranger.ask("/lab", Cookie=cookie)
        assert status == 403
        assert campus.url in body
        assert "set-cookie" not in headers
    assert stranger.ask("/labctl-open?ticket=x")[0] == 403


def test_a_ticket_works_once_and_not_for_long(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = campus.enter("lovelace")
    origin, ticket = campus.find_ticket(page)
    visitor = ServiceVisitor(f"{origin}/")
    assert visitor.confirm(ticket) == 303
    assert visitor.confirm(ticket) == 403
    assert visitor.ask(ticket)[0] == 403
    monkeypatch.setattr("labctl.web.student_services.TICKET_S", -TICKET_S)
    origin, ticket = campus.find_ticket(page)
    assert visitor.confirm(ticket) == 403


def test_a_browser_is_asked_before_it_opens_what_another_student_sent(campus: Campus) -> None:
    origin, ticket = campus.find_ticket(campus.enter("lovelace"))
    other = ServiceVisitor(f"{origin}/")
    status, headers, body = other.ask(ticket)
    assert (status, "Open Jupyter of lovelace?" in body) == (200, True)
    assert "set-cookie" not in headers
    assert "form-action 'self'" in headers["content-security-policy"]
    for origin_header in ({}, {"Origin": campus.url}, {"Origin": "https://evil.example"}):
        assert other.ask(ticket, "POST", **origin_header)[0] == 403
    assert other.ask("/lab")[0] == 403
    # A browser in which this student opened something before is not asked again.
    ada = campus.open("lovelace")
    assert ada.ask(campus.find_ticket(campus.enter("lovelace"))[1])[0] == 303


def test_a_page_of_another_origin_reaches_no_service(campus: Campus) -> None:
    ada = campus.open("lovelace")
    origin = f"http://{ada.host}"
    assert ada.ask("/api", Host="evil.example")[0] == 400
    for headers in (
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
        {"Origin": campus.url},
    ):
        assert ada.ask("/api", **headers)[0] == 403
    for headers in ({}, {"Origin": campus.url}, {"Origin": "null"}):
        assert ada.ask("/api", "POST", "x", **headers)[0] == 403
    assert ada.ask("/api", "POST", "x", Origin=origin)[0] == 200
    assert ada.ask("/files/x.js", Service_Worker="script")[0] == 403
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ada.ask("/lab", Sec_Fetch_Dest="document", **link)[0] == 200


def test_only_its_students_page_opens_a_service(campus: Campus) -> None:
    page = campus.enter("lovelace")
    path = f"/services/{LAB_ID}/jupyter"
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert page.ask(path, Sec_Fetch_Dest="document", **link)[0] == 403


def test_a_websocket_is_relayed_without_secrets(campus: Campus) -> None:
    ada = campus.open("lovelace")
    with connect(
        f"ws://{ada.host}/api/kernels/1/channels?x=1",
        origin=websockets.Origin(f"http://{ada.host}"),
        additional_headers={"Cookie": f"{ada.cookie}; _xsrf=abc"},
        subprotocols=[websockets.Subprotocol("v1.kernel.websocket.jupyter.org")],
        max_size=None,
    ) as websocket:
        path, pairs = json.loads(websocket.recv())
        headers = dict(pairs)
        assert path == "/api/kernels/1/channels"
        assert websocket.subprotocol == "v1.kernel.websocket.jupyter.org"
        assert (headers["host"], headers["cookie"]) == ("127.0.0.1:8888", "_xsrf=abc")
        assert headers["authorization"] == f"token {TOKEN}"
        assert headers["origin"] == "http://127.0.0.1:8888"
        for message in ("text", b"\x00bytes", "x" * 3_000_000, ""):
            websocket.send(message)
            assert websocket.recv() == message


@pytest.mark.parametrize("whose", ["nobody", "turing", "page", "evil"])
def test_a_websocket_of_another_is_refused(campus: Campus, whose: str) -> None:
    ada = campus.open("lovelace")
    own = f"http://{ada.host}"
    cookie, origin = {
        "nobody": ("", own),
        "turing": (campus.enter("turing").cookie, own),
        "page": (ada.cookie, campus.url),
        "evil": (ada.cookie, "https://evil.example"),
    }[whose]
    with pytest.raises(websockets.InvalidStatus) as refused:
        connect(
            f"ws://{ada.host}/api/kernels/1/channels",
            origin=websockets.Origin(origin),
            additional_headers={"Cookie": cookie},
        )
    assert refused.value.response.status_code == 403


def test_all_ends_with_the_students_access(campus: Campus) -> None:
    ada = campus.open("lovelace")
    with connect(
        f"ws://{ada.host}/api/kernels/1/channels",
        origin=websockets.Origin(f"http://{ada.host}"),
        additional_headers={"Cookie": ada.cookie},
    ) as websocket:
        websocket.recv()
        campus.invite("lovelace", "z" * 32)
        assert ada.ask("/lab")[0] == 403
        with pytest.raises(websockets.ConnectionClosed):
            websocket.recv(30)
    campus.invite("lovelace", CODE)
    assert ada.ask("/lab")[0] == 200, "the code that the session began with is valid again"


def expire(campus: Campus, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("labctl.web.student_access.SESSION_S", 0)


def leave_course(campus: Campus, patch: pytest.MonkeyPatch) -> None:
    write_roster(campus, "lovelace@example.edu,,a1,yes", "lovelace@example.edu,,a1,no")


def change_team(campus: Campus, patch: pytest.MonkeyPatch) -> None:
    write_roster(campus, "lovelace@example.edu,,", "lovelace@example.edu,owls,")


def release_server(campus: Campus, patch: pytest.MonkeyPatch) -> None:
    seat = campus.request_handler.get_seat_server(campus.bed.seat(0))
    (claim,) = seat.claims
    seat.release(claim.token, "lovelace")


def write_roster(campus: Campus, old: str, new: str) -> None:
    file = campus.bed.folder.roster_file
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.fixture
def unchanged(campus: Campus) -> Iterator[None]:
    """Restore the roster and lovelace's claim after the test."""
    file = campus.bed.folder.roster_file
    roster = file.read_text()
    seat = campus.request_handler.get_seat_server(campus.bed.seat(0))
    (claim,) = seat.claims
    yield
    file.write_text(roster)
    assert campus.request_handler.wait(60)
    if not seat.claims:
        seat.claim(claim)
        assert campus.request_handler.wait(60)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("end", [expire, leave_course, change_team, release_server])
def test_an_open_websocket_ends_with_what_allowed_it(
    campus: Campus,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Campus, pytest.MonkeyPatch], None],
) -> None:
    ada = campus.open("lovelace")
    with connect(
        f"ws://{ada.host}/api/kernels/1/channels",
        origin=websockets.Origin(f"http://{ada.host}"),
        additional_headers={"Cookie": ada.cookie},
    ) as websocket:
        websocket.recv()
        end(campus, monkeypatch)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            websocket.recv(30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    assert ada.ask("/lab")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/labctl-open",
        "/labctl-open?ticket=x",
        "//evil.example/terminals/websocket/1",
        "/tensorboard/../../terminals/websocket/1",
        "/tensorboard/%2e%2e/terminals/websocket/1",
        "/%74ensorboard/data",
        "/TENSORBOARD/data",
        "/..%2f..%2fterminals/websocket/1",
        "/%00/%ff",
        f"/user/turing/services/{'a' * 12}/jupyter",
        "http://evil.example/terminals/websocket/1",
    ],
)
def test_no_path_of_a_websocket_leads_to_another_student(campus: Campus, path: str) -> None:
    """Whatever the path: the session decides, and turing's opens nothing of lovelace."""
    ada, alan = campus.open("lovelace"), campus.enter("turing")
    name = ada.cookie.partition("=")[0]
    forged = f"{name}={alan.cookie.partition('=')[2]}"
    for cookie in (alan.cookie, forged, f"{alan.cookie}; {name}=", f"{name}={'A' * 4000}"):
        status = open_raw_websocket(ada.host, path, [f"Origin: http://{ada.host}"], cookie)
        assert status in (400, 403), status
    # Her own session gets her own service, or nothing.
    assert open_raw_websocket(ada.host, path, [f"Origin: http://{ada.host}"], ada.cookie) < 500


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Origin: null"],
        ["Origin: HTTP://localhost"],
        ["Origin: http://HOST.evil.example"],
        ["Origin: http://HOST", "Origin: https://evil.example"],
        ["Origin: http://HOST", "Host: evil.example"],
        ["Origin: https://evil.example", "ORIGIN: http://HOST"],
        ["Origin: http://HOST/"],
    ],
)
def test_only_the_exact_origin_opens_a_websocket(campus: Campus, headers: list[str]) -> None:
    ada = campus.open("lovelace")
    lines = [line.replace("HOST", ada.host) for line in headers]
    assert open_raw_websocket(ada.host, "/api/kernels/1/channels", lines, ada.cookie) in (400, 403)


def open_raw_websocket(host: str, path: str, headers: list[str], cookie: str) -> int:
    """Send the request for a WebSocket as it is; return the status of the answer."""
    name, port = host.split(":")
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *headers,
        f"Cookie: {cookie}",
    ]
    with socket.create_connection((name, int(port)), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.makefile("rb").readline().split()[1])


def test_signing_out_of_the_page_closes_the_services(campus: Campus) -> None:
    page = campus.enter("lovelace")
    origin, ticket = campus.find_ticket(page)
    ada = ServiceVisitor(f"{origin}/")
    assert ada.confirm(ticket) == 303
    uri, own = f"ws://{ada.host}/api/kernels/1/channels", websockets.Origin(origin)
    with connect(uri, origin=own, additional_headers={"Cookie": ada.cookie}) as websocket:
        websocket.recv()
        word = page.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
        assert page.form("/sign-out", csrf=word)[0] == 303
        assert ada.ask("/lab")[0] == 403
        with pytest.raises(websockets.ConnectionClosed):
            websocket.recv(30)


def test_an_unknown_method_and_address_are_refused(campus: Campus) -> None:
    ada = campus.open("lovelace")
    own = f"http://{ada.host}"
    assert ada.ask("/lab", "TRACE", Origin=own)[0] == 405
    assert ada.ask("http://evil.example/lab")[0] in (200, 400, 404, 502)


def test_a_student_who_released_the_server_loses_the_service(campus: Campus) -> None:
    ada = campus.open("lovelace")
    seat = campus.request_handler.get_seat_server(campus.bed.seat(0))
    (claim,) = seat.claims
    try:
        seat.release(claim.token, "lovelace")
        assert ada.ask("/lab")[0] == 403
    finally:
        assert campus.request_handler.wait(60)
        seat.claim(claim)
        assert campus.request_handler.wait(60)


def test_a_service_that_is_gone_is_said(campus: Campus, forward: OpenForward) -> None:
    ada = campus.open("lovelace")
    forward.is_alive = False
    try:
        status, _, body = ada.ask("/lab")
        assert (status, "open it at" in body) == (403, True)
    finally:
        forward.is_alive = True


def test_a_service_that_stopped_answering_is_started_again(
    campus: Campus, forward: OpenForward
) -> None:
    page = campus.enter("lovelace")
    campus.find_ticket(page)
    forward.answers, forward.calls[:] = False, []
    status, headers, body = page.ask(f"/services/{LAB_ID}/jupyter")
    assert (status, "Starting Jupyter" in body, headers["refresh"]) == (200, True, "2")
    forward.answers = True
    campus.find_ticket(page)
    # Both have the same socket: closing the old one later would remove the new one's.
    assert forward.calls == ["close", "open"]
    assert campus.open("lovelace").ask("/lab")[0] == 200


def test_a_service_that_does_not_start_says_what_to_do(
    campus: Campus, forward: OpenForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = campus.enter("lovelace")
    campus.find_ticket(page)
    failures: list[str] = []

    def fail() -> OpenForward:
        raise LabError("the server cannot pull x:1", why="/srv/courses/ml is full")

    def has_failed() -> bool:
        status, _, body = page.ask(f"/services/{LAB_ID}/jupyter")
        failures.extend([body] * (status == 503))
        return bool(failures)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "open", fail)
        patch.setattr(forward, "answers", False)
        wait_until(has_failed)
    assert "The server cannot pull x:1" in failures[0]
    assert "Jupyter could not be started" in failures[0]
    assert f'href="/services/{LAB_ID}/jupyter">Try again</a>' in failures[0]
    assert "tell your instructor" in failures[0]
    assert "/srv/courses" not in failures[0]
    # It is tried again.
    wait_until(lambda: page.ask(f"/services/{LAB_ID}/jupyter")[0] == 303)


def test_one_student_cannot_hold_all_connections(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.web.student_access.MOST_AT_ONCE", 2)
    ada = campus.open("lovelace")
    headers = {"Cookie": ada.cookie}
    own = websockets.Origin(f"http://{ada.host}")
    uri = f"ws://{ada.host}/api/kernels/1/channels"
    with (
        connect(uri, origin=own, additional_headers=headers),
        connect(uri, origin=own, additional_headers=headers),
    ):
        assert ada.ask("/lab")[0] == 429
        with pytest.raises(websockets.InvalidStatus):
            connect(uri, origin=own, additional_headers=headers)
