"""Whether a service answers, at a port of the loopback or at a Unix socket."""

from __future__ import annotations

import http.client
import socket


def _connect(address: int | str) -> socket.socket:
    """Connect to a port of the loopback, or to a Unix socket."""
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), timeout=5)
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(5)
    try:
        link.connect(address)
    except OSError:
        link.close()
        raise
    return link


def is_http_ready(address: int | str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", timeout=5)
    try:
        connection.sock = _connect(address)
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_listening(address: int | str) -> bool:
    """Return whether the service behind Docker's proxy, or the broker's, accepts a connection.

    The proxy accepts every connection, and drops it at once if the container does not listen.
    """
    try:
        with _connect(address) as connection:
            connection.settimeout(0.3)
            return bool(connection.recv(1))
    except socket.timeout:  # not the same class as TimeoutError before Python 3.10
        return True
    except OSError:
        return False
