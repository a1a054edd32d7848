"""Whether a service answers, at a port of the loopback or at a Unix socket."""

from __future__ import annotations

import http.client
import socket


def _connected(place: int | str) -> socket.socket:
    """To a port of the loopback, or to a Unix socket."""
    if isinstance(place, int):
        return socket.create_connection(("127.0.0.1", place), timeout=5)
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(5)
    try:
        link.connect(place)
    except OSError:
        link.close()
        raise
    return link


def speaks_http(place: int | str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", timeout=5)
    try:
        connection.sock = _connected(place)
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def listens(place: int | str) -> bool:
    """Whether somebody behind Docker's proxy, or the broker's, takes a connection.

    The proxy itself takes every one, and drops it at once when the container does not.
    """
    try:
        with _connected(place) as connection:
            connection.settimeout(0.3)
            return bool(connection.recv(1))
    except socket.timeout:  # another class than TimeoutError before Python 3.10
        return True
    except OSError:
        return False
