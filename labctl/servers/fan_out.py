"""Run one command on the servers of all labs: many in parallel, with results in order.

sshd counts logins that are not finished (MaxStartups, ten by default) and rejects further ones at
random. Servers behind the same first hop (a jump host, or one machine) therefore share a limit
below that; servers with different first hops do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from labctl.errors import LabError, NotFoundError, assign_subject
from labctl.errors.subject import LAB, Subject
from labctl.model import Endpoint, Server, Value
from labctl.servers.connections import Connections
from labctl.state import State
from labctl.transports import Result

AT_ONCE = 32
# Parallel logins through one first hop.
LOGINS_AT_ONCE = 8


class ServerResult(Value, frozen=True):
    """The result on one server. `code` is the command's exit code, None if it did not start.

    In that case `error`, `why` and `hint` are those of the LabError. Output is text. `alias` is the
    server's, or the name that the caller gave it.
    """

    alias: str
    server_id: str
    code: int | None
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    why: str = ""
    hint: str = ""


def list_running_servers(state: State) -> list[Server]:
    """List the recorded servers of all labs, sorted by alias; NotFoundError without any.

    Stopped servers are left out, since they cannot answer.
    """
    servers = [server for server in state.list_servers() if server.state != "stopped"]
    if not servers:
        raise NotFoundError("no lab has a server", why="none is on record", hint="labctl up")
    return sorted(servers, key=lambda server: (server.alias, server.id))


def run_on_all(
    connections: Connections,
    servers: Sequence[Server],
    line: str,
    *,
    names: Sequence[str] = (),
    subjects: Sequence[Subject] = (),
    at_once: int = AT_ONCE,
    timeout_s: float | None = None,
    on_result: Callable[[ServerResult], None] = lambda answer: None,
) -> list[ServerResult]:
    """Run `line` in a POSIX shell on each server; return the results in the order of `servers`.

    Results have the servers' aliases, or `names`, one for each server. `subjects` are those of the
    errors in the same order, by default a lab. `on_result` is called in this thread with each
    result, in that order too, as soon as all earlier ones are there. A server that fails does not
    stop the others. After an interrupt no further server is started.
    """
    login_limiter = LoginLimiter(servers)

    def run_one(server: Server, name: str, subject: Subject) -> ServerResult:
        with login_limiter.acquire_slot(server.endpoint):
            return _run_on_server(connections, server, name, subject, line, timeout_s)

    answers = []
    with _start_threads(at_once) as threads:
        futures: list[Future[ServerResult]] = [
            threads.submit(run_one, *target)
            for target in zip(
                servers,
                names or [server.alias for server in servers],
                subjects or [LAB] * len(servers),
                strict=True,
            )
        ]
        for future in futures:
            answers.append(future.result())
            on_result(answers[-1])
    return answers


@contextmanager
def _start_threads(at_once: int) -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="labctl-everywhere")
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _run_on_server(
    connections: Connections,
    server: Server,
    name: str,
    subject: Subject,
    line: str,
    timeout_s: float | None,
) -> ServerResult:
    try:
        with assign_subject(subject):
            result: Result = connections.reopen(server).run(line, timeout_s=timeout_s, check=False)
    except LabError as error:
        return ServerResult(
            alias=name,
            server_id=server.id,
            code=None,
            error=error.what,
            why=error.why,
            hint=error.hint,
        )
    return ServerResult(
        alias=name,
        server_id=server.id,
        code=result.code,
        stdout=result.stdout,
        stderr=result.stderr,
    )


class LoginLimiter:
    """Limits the parallel logins through each first hop to LOGINS_AT_ONCE."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._slots = {
            first_hop(server.endpoint): threading.BoundedSemaphore(LOGINS_AT_ONCE)
            for server in servers
        }

    @contextmanager
    def acquire_slot(self, endpoint: Endpoint) -> Iterator[None]:
        with self._slots[first_hop(endpoint)]:
            yield


def first_hop(endpoint: Endpoint) -> str:
    """Return the first sshd that a connection reaches; each proxy command counts as its own."""
    if endpoint.proxy_command:
        return f"{endpoint.proxy_command} {endpoint.host}:{endpoint.port}"
    return endpoint.jump.split(",")[0] or f"{endpoint.host}:{endpoint.port}"
