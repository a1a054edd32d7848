"""The check whether the servers of a lab reach one another, by real connections in both ways."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from ...wire.networks import CheckPeersReply, CheckPeersRequest, PeerAddress
from ..reply import Failure

# More than one packet, so that a path that loses large packets fails the check.
GREETING_BYTES = 16 * 1024
ANSWER_S, PAUSE_S, ACCEPT_S = 2.0, 0.1, 0.1


def check_peers(request: CheckPeersRequest) -> CheckPeersReply:
    """Listen for the other servers while connecting to them; return those that were reached.

    Ends when all have been reached, in both ways, and otherwise after the request's seconds.
    """
    own, peers = request.own, request.peers
    end_s = time.monotonic() + request.seconds
    with socket.socket() as listener, ThreadPoolExecutor(2 * len(peers) + 1) as threads:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((own.address, own.port))
        except OSError as error:
            what = "this server cannot listen for the lab's other servers"
            raise Failure("server", what, f"{own.address}:{own.port}: {error}") from None
        listener.listen()
        listener.settimeout(ACCEPT_S)
        connect = partial(_reach, token=request.token, end_s=end_s)
        attempts = [threads.submit(connect, peer) for peer in peers]
        answer = partial(_answer, greeting=_build_greeting(request.token, own.rank))
        answers = []
        while time.monotonic() < end_s:
            with suppress(OSError):  # nobody connects now
                connection, _ = listener.accept()
                answers.append(threads.submit(answer, connection))
            served = sum(each.done() and each.result() for each in answers)
            if served >= len(peers) and all(each.done() for each in attempts):
                break
        reached = [peer.rank for peer, each in zip(peers, attempts) if each.result()]
    return CheckPeersReply(tuple(reached))


def _build_greeting(token: str, rank: int) -> bytes:
    return f"{token} {rank} ".encode().ljust(GREETING_BYTES, b".")


def _answer(connection: socket.socket, greeting: bytes) -> bool:
    """Send the greeting; return whether the other side has read all of it."""
    with connection:
        try:
            connection.settimeout(ANSWER_S)
            connection.sendall(greeting)
            return connection.recv(1) == b"!"
        except OSError:
            return False


def _reach(peer: PeerAddress, token: str, end_s: float) -> bool:
    """Connect until the peer has answered with its greeting; False at the end of the time."""
    greeting = _build_greeting(token, peer.rank)
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return False
        try:
            place = (peer.address, peer.port)
            with socket.create_connection(place, min(left_s, ANSWER_S)) as connection:
                if _read(connection) == greeting:
                    connection.sendall(b"!")
                    return True
        except OSError:  # it does not listen yet, or cannot be reached
            pass
        time.sleep(PAUSE_S)


def _read(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.read(GREETING_BYTES)
