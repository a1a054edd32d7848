"""Jupyter and TensorBoard of students: started on their servers, reached by private sockets."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from labctl.courses.requests import RequestHandler
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.errors.replies import describe_error
from labctl.errors.unexpected import as_lab_error
from labctl.model import Value
from labctl.runs import images, wheelhouse
from labctl.services import lab_services, services
from labctl.services.socket_forward import SocketForward, SocketForwardSpec
from labctl.transports.ssh_client import runtime_dir
from labctl.web.mutations import CourseActions

JUPYTER, TENSORBOARD = "jupyter", "tensorboard"
# the address there that begins a session, with a ticket
OPEN = "/labctl-open"
# service -> its path there
TITLES = {JUPYTER: "Jupyter", TENSORBOARD: "TensorBoard"}
PATHS = {JUPYTER: "/lab", TENSORBOARD: "/tensorboard/"}
TICKET_S = 120.0
# services that start at the same time: each may build an image on its server
MOST_STARTING = 16


class ServiceKey(Value, frozen=True):
    """A service of one lab on a seat's server."""

    seat: str
    lab_id: str
    name: str


class OpenService(Value, frozen=True):
    """A service that is reached through the Unix socket at `path`. Only the keeper has `token`."""

    path: str
    port: int
    token: str = ""


class StudentServices:
    """The services of all students of a course, safe for several threads.

    `open_service` starts a service and returns the forward to it, which may take minutes.
    """

    def __init__(
        self,
        request_handler: RequestHandler,
        open_service: Callable[[ServiceKey], SocketForward],
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._requests = request_handler
        self._open_service = open_service
        self._notify = notify
        self._lock = threading.Lock()
        self._forwards: dict[ServiceKey, SocketForward] = {}
        self._starting: set[ServiceKey] = set()
        self._problems: dict[ServiceKey, LabError] = {}
        self._tickets: dict[str, tuple[float, dict[str, object]]] = {}

    def list_labs(self, seat: str, student: str) -> dict[str, str]:
        """Return the id -> the name of each lab with which the student holds the seat's server."""
        claims = self._requests.list_claims(seat, student)
        return {claim.lab_id: claim.lab for claim in claims if not claim.leaving}

    def require_lab(self, seat: str, student: str, lab_id: str) -> None:
        """Raise NotFoundError unless the student holds the seat's server with this lab."""
        if lab_id not in self.list_labs(seat, student):
            raise NotFoundError("you have no such lab on your server")

    def is_held(self, student: str, key: ServiceKey) -> bool:
        """Tell whether the student holds the seat's server with the service's lab."""
        return key.lab_id in self.list_labs(key.seat, student)

    def _is_ready(self, student: str, key: ServiceKey) -> bool:
        claims = self._requests.list_claims(key.seat, student)
        return any(
            self._requests.is_ready(key.seat, claim)
            for claim in claims
            if claim.lab_id == key.lab_id
        )

    def find(self, student: str, key: ServiceKey) -> OpenService | None:
        """Return a service that is open; None if it is not, or not for this student."""
        if not self.is_held(student, key):
            return None
        with self._lock:
            forward = self._forwards.get(key)
        if forward is None or not forward.is_alive:
            return None
        service = forward.spec.service
        return OpenService(path=forward.spec.path, port=service.port or 80, token=service.token)

    def ensure(self, student: str, key: ServiceKey) -> bool:
        """Tell whether a service is open and answers; if not, start it in a thread.

        A server that is not ready yet has to be prepared first. NotFoundError for another student's
        lab. An error of the last start is raised once.
        """
        self.require_lab(key.seat, student, key.lab_id)
        if not self._is_ready(student, key):
            return False
        with self._lock:
            forward = self._forwards.get(key)
        if forward is not None and forward.is_alive and forward.is_answering():
            return True
        self._start_once(key)
        return False

    def _start_once(self, key: ServiceKey) -> None:
        with self._lock:
            if (problem := self._problems.pop(key, None)) is not None:
                raise problem
            if key in self._starting:
                return
            if len(self._starting) >= MOST_STARTING:
                raise PolicyError("many services are starting now", why="try again in a minute")
            self._starting.add(key)
        threading.Thread(target=partial(self._start, key), name="service", daemon=True).start()

    def _start(self, key: ServiceKey) -> None:
        forward: SocketForward | None = None
        try:
            self._close_old(key)
            forward = self._open_service(key)
        except Exception as error:
            problem = self._problems[key] = as_lab_error(error, self._notify)
            # Students do not read the reason, which may have paths of this machine.
            self._notify(f"{key.seat}: {key.name} does not start: {describe_error(problem)}")
        with self._lock:
            if forward is not None:
                self._forwards[key] = forward
            self._starting.discard(key)

    def _close_old(self, key: ServiceKey) -> None:
        """Close the forward before, whose socket the new one replaces, and all that have ended."""
        with self._lock:
            old = [one for one, way in self._forwards.items() if one == key or not way.is_alive]
            forwards = [self._forwards.pop(one) for one in old]
        for forward in forwards:
            forward.close()

    def issue_ticket(self, data: dict[str, object]) -> str:
        """Return a ticket that takes these data of a session to the other origin, once."""
        now = time.monotonic()
        with self._lock:
            tickets = self._tickets.items()
            self._tickets = {name: one for name, one in tickets if one[0] > now}
            ticket = secrets.token_urlsafe(32)
            self._tickets[ticket] = (now + TICKET_S, data)
        return ticket

    def read_ticket(self, ticket: str) -> dict[str, object] | None:
        """Return the data of a ticket that was not redeemed."""
        with self._lock:
            expires, data = self._tickets.get(ticket, (0.0, None))
        return data if expires > time.monotonic() else None

    def redeem_ticket(self, ticket: str) -> dict[str, object] | None:
        """Return the data of a ticket, which becomes invalid."""
        data = self.read_ticket(ticket)
        with self._lock:
            return data if self._tickets.pop(ticket, None) is not None else None

    def close(self) -> None:
        """Close every forward; the services themselves continue."""
        with self._lock:
            forwards, self._forwards = list(self._forwards.values()), {}
        for forward in forwards:
            forward.close()


def open_seat_service(course: CourseActions, key: ServiceKey) -> SocketForward:
    """Start a service of a lab on a seat's server, and open the forward to it."""
    lab, server = course.open_lab(key.seat, key.lab_id)
    remote = lab.open_agent(server)
    request = lab_services.build_request(lab, server, key.name)
    service = services.ensure_service(
        remote,
        request,
        lab.reporter,
        # The student's files stay as they are: nothing is pushed from here.
        provide_image=lambda: images.ensure_image(lab, server, remote, request.image),
        provide_wheels=lambda: wheelhouse.push_wheelhouse(lab, server, remote),
    )
    digest = hashlib.sha256(f"{server.id} {key.lab_id} {key.name}".encode()).hexdigest()[:16]
    spec = SocketForwardSpec(
        config=str(lab.connections.write(server)),
        server_id=server.id,
        endpoint=server.endpoint,
        service=service,
        path=str(runtime_dir() / f"service-{digest}"),
    )
    return SocketForward(spec)
