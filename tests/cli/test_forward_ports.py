"""`labctl forward` over a real sshd of this account, to programs that listen on this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from calibration import waiting_factor

from labctl import Lab
from labctl.model import Endpoint, Offer, Server
from labctl.services.port_forward import find_free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# seconds until an error says that nothing listens: 1 for a late listener, the rest to connect
NO_LISTENER_S = 3.0
CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason="needs sshd")


def make_key(path: Path) -> str:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def has_greeted(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
        return link.recv(4) == b"SSH-"
    return False


@contextmanager
def run_sshd(folder: Path) -> Iterator[Endpoint]:
    """An sshd of this account, and how it is reached."""
    folder.mkdir()
    make_key(folder / "key")
    host_key = make_key(folder / "host")
    port = find_free_port(0)
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    words = [SSHD, "-D", "-e", "-f", str(folder / "config")]
    with (folder / "log").open("wb") as log, subprocess.Popen(words, stderr=log) as sshd:
        try:
            wait_for(lambda: has_greeted(port))
            yield Endpoint(
                host="127.0.0.1",
                port=port,
                user=getpass.getuser(),
                identity=str(folder / "key"),
                host_key=host_key,
            )
        finally:
            sshd.terminate()


@pytest.fixture
def server(home: Path) -> Iterator[None]:
    """The lab "digits" with this machine as its server."""
    with run_sshd(home / "sshd") as endpoint:
        lab = Lab.load(home / "digits", environ={"HOME": str(home)})
        record = Server(
            id="box-1", provider="local", lab="digits", lab_id=lab.id, alias="digits",
            state="running", endpoint=endpoint, created_at=1.0,
            offer=Offer(provider="local", type="container"),
        )  # fmt: skip
        with closing(lab.context.state) as state:
            state.save_server(record)
        yield


@contextmanager
def listening(delay_s: float = 0.0) -> Iterator[str]:
    """The port of a program that answers each request after a while."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as links:

        def answer(link: socket.socket) -> None:
            with suppress(OSError):
                if link.recv(1000):
                    time.sleep(delay_s)
                    link.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")
                link.close()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    link = links.enter_context(listener.accept()[0])
                    threading.Thread(target=answer, args=(link,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield str(listener.getsockname()[1])


class Terminal:
    """labctl in a process of its own."""

    def __init__(self, home: Path, *words: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", "labctl", *words],
            cwd=home / "digits",
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def interrupt(self) -> str:
        """Press Ctrl-C once it waits for that; what it then writes on standard error."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("Press Ctrl-C"):
                break
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=60)[1]


Start = Callable[..., Terminal]


@pytest.fixture
def start(home: Path, server: None) -> Iterator[Start]:
    terminals: list[Terminal] = []

    def begin(*words: str) -> Terminal:
        terminals.append(Terminal(home, "forward", *words))
        return terminals[-1]

    yield begin
    for terminal in terminals:
        if terminal.process.poll() is None:
            terminal.interrupt()


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timed
def test_a_ready_service_does_not_wait_for_a_slow_one(start: Start) -> None:
    with listening(4.0) as slow, listening() as quick:
        terminal = start(slow, quick)
        assert terminal.read_line().startswith(f"{quick}: http://127.0.0.1:")
        shown_at = time.monotonic()
        assert terminal.read_line().startswith(f"{slow}: http://127.0.0.1:")
        assert time.monotonic() - shown_at > 0.3
        assert terminal.interrupt().splitlines()[-1] == "closed"
        assert terminal.process.returncode == 0


def test_a_second_forward_finds_that_of_another_terminal(start: Start, labctl: Any) -> None:
    with listening() as port:
        first = start(port)
        line = first.read_line()
        again = labctl("forward", port)
        assert (again.code, again.out) == (0, f"{line}\n")
        assert again.err == f"{port} is open in another terminal; Ctrl-C there closes it\n"
        other = find_free_port(0)
        third = start(port, "--port", str(other))
        assert third.read_line() == f"{port}: http://127.0.0.1:{other}/"
        first.interrupt()


def test_a_second_forward_finds_that_of_the_background(server: None, labctl: Any) -> None:
    with listening() as port:
        detached = labctl("forward", port, "--detach")
        try:
            url = detached.out.split()[1]
            assert f"local port {port} was in use; {port} is at {url}\n" in detached.err
            again = labctl("forward", port)
            assert (again.code, again.out) == (0, detached.out)
            assert again.err == (
                f"{port} is open in the background; to close it: labctl forward --stop {port}\n"
            )
        finally:
            assert labctl("forward", "--stop", port).code == 0


@pytest.mark.timed
def test_a_port_without_a_listener_is_an_error_in_two_seconds(server: None, labctl: Any) -> None:
    limit_s = NO_LISTENER_S * waiting_factor()
    port = find_free_port(0)
    began_at = time.monotonic()
    # Server and client are one machine: on the same port, the forward would connect to itself.
    refused = labctl("forward", str(port), "--port", str(find_free_port(0)))
    assert refused.code != 0
    assert time.monotonic() - began_at < limit_s
    assert f"nothing listens on port {port} of the server" in refused.err
    assert refused.err.splitlines()[-1].endswith("next: labctl ssh -- ss -ltn")


def test_a_misspelled_name_is_corrected(server: None, labctl: Any) -> None:
    refused = labctl("forward", "jupyter", "tensorbord")
    assert refused.code == 2
    assert "did you mean tensorboard?" in refused.err
    assert "next: labctl forward jupyter tensorboard" in refused.err
    refused = labctl("forward", "99999")
    assert (refused.code, "99999 is not a port" in refused.err) == (2, True)
    refused = labctl("offers", "--provider", "statik")
    assert refused.code == 2
    assert "did you mean static?" in refused.err
