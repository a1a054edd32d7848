"""A command that logs in to a server reports it, so that a terminal names a long login."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from labctl.errors import TurnedAwayError
from labctl.events import Event, SilentReporter, Step
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Server


class Steps(SilentReporter):
    """Keeps the brief steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, bool]] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Step) and event.brief:
            self.steps.append((event.name, event.done))


def close_each_connection(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def test_a_login_is_reported_while_it_is_under_way(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=close_each_connection, args=(listener,), daemon=True).start()
        steps = Steps()
        lab = Lab.load(".", reporter=steps)
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], user="alice")
        server = Server(
            id="box-1", provider="local", lab="digits", lab_id=lab.id, alias="digits",
            endpoint=endpoint, offer=Offer(provider="local", type="container"), created_at=0.0,
            state="running",
        )  # fmt: skip
        lab.context.state.save_server(server)
        with pytest.raises(TurnedAwayError):
            lab.context.open_agent(server).transport.run("true")
        listener.shutdown(socket.SHUT_RDWR)
    assert steps.steps[:2] == [
        ("connecting to 127.0.0.1", False),
        ("connecting to 127.0.0.1", True),
    ]
