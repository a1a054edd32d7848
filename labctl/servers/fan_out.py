"""One command on the servers of all labs: many at once, told of in order.

sshd counts logins that are not finished (MaxStartups, ten by default) and turns further ones away
at random. Servers behind one door (a jump host, or one machine) therefore share a bound below
that; servers with doors of their own do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from labctl.errors import LabError, NotFoundError
from labctl.model import Endpoint, Server, Value
from labctl.servers.connections import Connections
from labctl.state import State
from labctl.transports import Result

AT_ONCE = 32
# Through one door.
LOGINS_AT_ONCE = 8


class Answer(Value, frozen=True):
    """What came of one server. `code` is the command's own; None where it did not get that far.

    Then `error` says what failed, `why` and `hint` as a LabError's. Output is text.
    """

    alias: str
    server_id: str
    code: int | None
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    why: str = ""
    hint: str = ""


def running_servers(state: State) -> list[Server]:
    """Every lab's server on this machine's record, by alias; NotFoundError where there is none.

    A stopped one is left out: nobody answers there.
    """
    found = [one for one in state.servers() if one.state != "stopped"]
    if not found:
        raise NotFoundError("no lab has a server", why="none is on record", hint="labctl up")
    return sorted(found, key=lambda one: (one.alias, one.id))


def run_everywhere(
    connections: Connections,
    servers: Sequence[Server],
    line: str,
    *,
    at_once: int = AT_ONCE,
    timeout_s: float | None = None,
    tell: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Run `line` in a POSIX shell on each of these; answers in the order of `servers`.

    `tell` hears each answer in that order too, as soon as all before it are there, in this thread.
    A server that fails stops no other. Interrupted, it begins on no further server.
    """
    doors = Doors(servers)

    def one(server: Server) -> Answer:
        with doors.through(server.endpoint):
            return _ask(connections, server, line, timeout_s)

    told = []
    with _threads(at_once) as threads:
        futures: list[Future[Answer]] = [threads.submit(one, server) for server in servers]
        for future in futures:
            told.append(future.result())
            tell(told[-1])
    return told


@contextmanager
def _threads(at_once: int) -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="labctl-everywhere")
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _ask(connections: Connections, server: Server, line: str, timeout_s: float | None) -> Answer:
    try:
        result: Result = connections.reopen(server).run(line, timeout_s=timeout_s, check=False)
    except LabError as error:
        return Answer(
            alias=server.alias,
            server_id=server.id,
            code=None,
            error=error.what,
            why=error.why,
            hint=error.hint,
        )
    return Answer(
        alias=server.alias,
        server_id=server.id,
        code=result.code,
        stdout=result.stdout,
        stderr=result.stderr,
    )


class Doors:
    """What each server's connection comes to first, and how many may be on their way through."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._slots = {
            door(one.endpoint): threading.BoundedSemaphore(LOGINS_AT_ONCE) for one in servers
        }

    @contextmanager
    def through(self, endpoint: Endpoint) -> Iterator[None]:
        with self._slots[door(endpoint)]:
            yield


def door(endpoint: Endpoint) -> str:
    """The sshd that a connection comes to first; a proxy is taken for a door of its own."""
    if endpoint.proxy_command:
        return f"{endpoint.proxy_command} {endpoint.host}:{endpoint.port}"
    return endpoint.jump.split(",")[0] or f"{endpoint.host}:{endpoint.port}"
