"""The terminal on a student's page: what it shows, who gets in, and when it ends.

In place of ssh to a server, a shell of this machine has the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets
from service_proxy_bed import LAB_ID, Campus, OpenForward, run_service, serve_campus
from websockets.sync.client import ClientConnection, connect

from labctl.errors import ConnectError
from labctl.services.remote_terminal import RemoteTerminal, build_terminal_line
from labctl.web import factory, student_terminal
from labctl.web.mutations import CourseActions
from labctl.web.student_terminal import TerminalKey

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Visitor, wait_until

# As the shell behind sshd, it has the terminal as its controlling one: for Ctrl+C.
SHELL = ("setsid", "--ctty", "env", "PS1=$ ", "TERM=dumb", "sh", "-i")


class Terminals:
    """The terminals that the pages have opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[TerminalKey, int, int]] = []
        self.argv: tuple[str, ...] = SHELL
        self.problem: Exception | None = None
        self.running: list[RemoteTerminal] = []

    def open(
        self, course: CourseActions, key: TerminalKey, columns: int, rows: int
    ) -> RemoteTerminal:
        self.opened.append((key, columns, rows))
        if self.problem is not None:
            raise self.problem
        terminal = RemoteTerminal(self.argv, columns, rows)
        self.running.append(terminal)
        return terminal


@pytest.fixture(scope="module")
def forward() -> Iterator[OpenForward]:
    with run_service() as forward:
        yield forward


@pytest.fixture
def terminals(monkeypatch: pytest.MonkeyPatch) -> Terminals:
    terminals = Terminals()
    monkeypatch.setattr(factory, "open_seat_terminal", terminals.open)
    monkeypatch.setattr(student_terminal, "CHECK_EVERY_S", 0.1)
    return terminals


@pytest.fixture
def campus(terminals: Terminals, forward: OpenForward, tmp_path: Path) -> Iterator[Campus]:
    with serve_campus(tmp_path, lambda key: forward.open()) as campus:
        yield campus


def open_socket(
    visitor: Visitor, lab_id: str = LAB_ID, *, origin: str = "", cookie: str | None = None
) -> ClientConnection:
    return connect(
        f"ws://{visitor.host}/terminal/{lab_id}/socket?columns=90&rows=30",
        origin=websockets.Origin(origin or f"http://{visitor.host}"),
        additional_headers={"Cookie": visitor.cookie if cookie is None else cookie},
        max_size=None,
    )


def type_text(socket: ClientConnection, text: str) -> None:
    socket.send(json.dumps({"typed": text}))


def read_until(socket: ClientConnection, text: str) -> str:
    """Read what the terminal prints until it has this text; draw it at once."""
    output = b""  # a block may end inside a letter
    while text.encode() not in output:
        block = socket.recv(30)
        assert isinstance(block, bytes)
        output += block
        socket.send(json.dumps({"drawn": len(block)}))
    return output.decode(errors="replace")


def read_until_end(socket: ClientConnection) -> None:
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            socket.recv(30)


def test_a_command_is_typed_and_its_output_shown(campus: Campus, terminals: Terminals) -> None:
    ada = campus.enter("lovelace")
    page = ada.ask("/")[2]
    assert f'href="/terminal/{LAB_ID}"' in page
    status, headers, body = ada.ask(f"/terminal/{LAB_ID}")
    assert (status, f'data-socket="/terminal/{LAB_ID}/socket"' in body) == (200, True)
    assert "script-src 'self';" in headers["content-security-policy"]
    assert "://" not in body.partition("<body")[0], "every script is a file of our own"
    with open_socket(ada) as socket:
        type_text(socket, "echo $((6 * 7)); stty size\n")
        assert "30 90" in read_until(socket, "30 90")
        socket.send(json.dumps({"size": [70, 20]}))
        type_text(socket, "stty size; tty\n")
        output = read_until(socket, "/dev/pts/")
        assert "20 70" in output
        type_text(socket, "echo Gr$(:)\u00fc\u00dfe\n")  # the echo of what is typed differs
        read_until(socket, "Gr\u00fc\u00dfe")
        type_text(socket, "exit\n")
        read_until_end(socket)
    (opened,) = terminals.opened
    key, columns, rows = opened
    assert (key.student, key.lab_id, columns, rows) == ("lovelace", LAB_ID, 90, 30)


def test_a_long_paste_and_a_flood_arrive_and_the_flood_can_be_stopped(campus: Campus) -> None:
    ada = campus.enter("lovelace")
    with open_socket(ada) as socket:
        type_text(socket, "stty -echo -icanon; echo rea''dy; head -c 200000 | wc -c\n")
        read_until(socket, "ready")
        type_text(socket, "x" * 200_000)
        read_until(socket, "200000")
        type_text(socket, "stty icanon; yes\n")
        # Nothing is drawn, so the server stops to send after half a megabyte.
        received = 0
        with contextlib.suppress(TimeoutError):
            while received < 2 * student_terminal.MOST_UNSEEN_BYTES:
                received += len(socket.recv(1))
        assert student_terminal.MOST_UNSEEN_BYTES <= received < 1024**2
        type_text(socket, "\x03")
        socket.send(json.dumps({"drawn": received}))
        type_text(socket, "echo still $((1 + 1)) here\n")
        read_until(socket, "still 2 here")


# A program that reads nothing, as the terminal takes a paste only as far as its buffer.
STUCK = "stty -echo -icanon; echo rea''dy; sleep 1000\n"


def test_a_tab_that_closes_while_a_paste_waits_ends_the_terminal(
    campus: Campus, terminals: Terminals
) -> None:
    with open_socket(campus.enter("lovelace")) as socket:
        type_text(socket, STUCK)
        read_until(socket, "ready")
        type_text(socket, "x" * 200_000)
    (terminal,) = terminals.running
    wait_until(lambda: has_ended(terminal))


def test_a_paste_that_is_printed_while_it_is_typed_does_not_stop(campus: Campus) -> None:
    with open_socket(campus.enter("lovelace")) as socket:
        type_text(socket, "stty raw -echo; echo rea''dy; head -c 2000000\n")
        read_until(socket, "ready")
        type_text(socket, "x" * 2_000_000)
        received = 0
        while received < 2_000_000:
            block = socket.recv(30)
            received += block.count(b"x") if isinstance(block, bytes) else 0
            socket.send(json.dumps({"drawn": len(block)}))


def test_a_paste_that_nobody_reads_is_limited(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_terminal, "MOST_UNREAD_BYTES", 100_000)
    with open_socket(campus.enter("lovelace")) as socket:
        type_text(socket, STUCK)
        read_until(socket, "ready")
        type_text(socket, "x" * 200_000)
        assert json.loads(socket.recv(30))["problem"] == student_terminal.PASTED


@pytest.mark.parametrize("whose", ["nobody", "other", "forged", "notebook", "evil", "other-lab"])
def test_nobody_else_gets_in(campus: Campus, terminals: Terminals, whose: str) -> None:
    ada, alan = campus.enter("lovelace"), campus.enter("turing")
    services = campus.find_ticket(ada)[0]
    own = f"http://{ada.host}"
    cookie, origin, lab_id = {
        "nobody": ("", own, LAB_ID),
        "other": (alan.cookie, own, LAB_ID),
        "forged": (ada.cookie[:-3] + "abc", own, LAB_ID),
        "notebook": (ada.cookie, services, LAB_ID),
        "evil": (ada.cookie, "https://evil.example", LAB_ID),
        "other-lab": (ada.cookie, own, "a" * 12),
    }[whose]
    with pytest.raises(websockets.InvalidStatus) as refused:
        open_socket(ada, lab_id, origin=origin, cookie=cookie)
    assert refused.value.response.status_code == 403
    assert terminals.opened == []
    if whose in ("other", "other-lab"):
        visitor = alan if whose == "other" else ada
        assert visitor.ask(f"/terminal/{lab_id}")[0] == 404
    if whose == "nobody":
        assert Visitor(f"{campus.url}/").ask(f"/terminal/{LAB_ID}")[0] == 303


def has_ended(terminal: RemoteTerminal) -> bool:
    try:
        os.fstat(terminal.fileno())
    except OSError:
        return True
    return False


@pytest.mark.parametrize("how", ["code", "sign-out", "lab", "leave"])
def test_a_terminal_ends_with_the_access(campus: Campus, terminals: Terminals, how: str) -> None:
    ada = campus.enter("lovelace")
    with open_socket(ada) as socket:
        read_until(socket, "$")
        word = ada.ask("/")[2].partition('name="csrf" value="')[2].partition('"')[0]
        if how == "code":
            campus.invite("lovelace", "z" * 32)
        elif how == "sign-out":
            assert ada.form("/sign-out", csrf=word)[0] == 303
        elif how == "lab":
            assert ada.form("/server/end", csrf=word)[0] == 303
        else:
            socket.close()
        read_until_end(socket)
    (terminal,) = terminals.running
    wait_until(lambda: has_ended(terminal))


def test_a_server_that_cannot_be_reached_is_reported(campus: Campus, terminals: Terminals) -> None:
    terminals.problem = ConnectError("the server does not answer", why="timed out")
    with open_socket(campus.enter("lovelace")) as socket:
        problem = json.loads(socket.recv(30))["problem"]
        assert "the server does not answer" in problem.lower()


def test_a_student_has_a_few_terminals_at_once(campus: Campus, terminals: Terminals) -> None:
    ada = campus.enter("lovelace")
    with contextlib.ExitStack() as stack:
        for _ in range(student_terminal.MOST_OWN):
            read_until(stack.enter_context(open_socket(ada)), "$")
        with open_socket(ada) as another:
            assert "Too many terminals" in json.loads(another.recv(30))["problem"]
    assert len(terminals.running) == student_terminal.MOST_OWN

    def can_open() -> bool:
        with open_socket(ada) as socket:
            return isinstance(socket.recv(30), bytes)

    wait_until(can_open)


@pytest.mark.parametrize("message", ["not json", '{"size": [1]}', '{"typed": 5}'])
def test_a_message_of_another_form_ends_the_terminal(campus: Campus, message: str) -> None:
    with open_socket(campus.enter("lovelace")) as socket:
        read_until(socket, "$")
        socket.send(message)
        read_until_end(socket)


def test_each_student_has_a_session_of_their_own() -> None:
    keys = [TerminalKey(student=one, seat="owls", lab_id=LAB_ID) for one in ("ada", "alan")]
    assert len({key.session for key in keys}) == 2
    line = build_terminal_line("ml'x", LAB_ID, keys[0].session)
    assert f"tmux -u new-session -A -s {keys[0].session} " in line
    assert "'ml'\"'\"'x'" in line
