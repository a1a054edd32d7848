"""The servers of a rehearsal, on the loopback or on Unix sockets, and the loss of replies."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

LOOPBACK = "127.0.0.1"


class QuietHandler(WSGIRequestHandler):
    """A handler that does not log requests to the terminal."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return

    def address_string(self) -> str:
        return "machine"


def listen(port: int, handler: type[QuietHandler] = QuietHandler) -> BaseWSGIServer:
    """Bind a port of the loopback, 0 for any, before its application exists.

    Set the server's `app`, then call `start`.
    """
    return make_server(LOOPBACK, port, _refuse_early, threaded=True, request_handler=handler)


def start(server: BaseWSGIServer) -> None:
    """Serve from a thread until the server's `shutdown`."""
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.name = "rehearsal-api"
    thread.start()


def serve(application: WSGIApplication, socket: Path) -> BaseWSGIServer:
    """Run a server on a Unix socket until its `shutdown`."""
    server = make_server(
        f"unix://{socket}", 0, application, threaded=True, request_handler=QuietHandler
    )
    socket.chmod(0o666)
    name = f"rehearsal-{socket.stem}"
    threading.Thread(target=server.serve_forever, args=(0.2,), name=name, daemon=True).start()
    return server


def lose_connection(environ: WSGIEnvironment, hold_s: float, held: Callable[[], None]) -> NoReturn:
    """Close the connection below the server, so that the caller gets no response.

    With `hold_s` it stays open that long, or until the caller is gone; `held` is called before.
    """
    wire: socket.socket = environ["werkzeug.socket"]
    if hold_s:
        held()
        # A waiting caller sends nothing: the socket becomes readable when the caller is gone.
        select.select([wire], [], [], hold_s)
    wire.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("the rehearsal loses this reply")


def _refuse_early(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    start_response("503 -", [])
    return []
