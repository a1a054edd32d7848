"""The HTTP application of a simulated cloud: routing, counts, validation, faults, handlers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Protocol
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule
from werkzeug.wrappers import Request

from labctl.model import Value
from labctl.rehearsal.core.control import INSIDE, PREFIX, Control, handle_control
from labctl.rehearsal.core.faults import FaultCounts
from labctl.rehearsal.core.listener import lose_connection
from labctl.rehearsal.core.operations import AnyOperation, ApiError, ErrorReplies
from labctl.rehearsal.core.replies import HttpReply
from labctl.rehearsal.core.scenario import CloudScenario
from labctl.rehearsal.core.validation import ApiRequest, Validator

JSON = (("Content-Type", "application/json"),)
# The name of a call that no operation answers.
UNKNOWN = "unknown"
NOT_HERE = HttpReply(status=404, body=b"this is a rehearsal; see docs/rehearsal.md\n")
# The status of a reply to a request that breaks the description.
VIOLATION = 500


class CloudApi(Protocol):
    """What a cloud's package says about its API.

    `errors` has its general replies. `validator` is its official description, None without one.
    """

    @property
    def errors(self) -> ErrorReplies: ...

    @property
    def validator(self) -> Validator | None: ...

    def list_operations(self) -> tuple[AnyOperation, ...]: ...

    def check_access(self, name: str, headers: Headers) -> None:
        """ApiError unless the request's credentials are valid for the operation."""

    def write_error(self, error: ApiError) -> bytes:
        """Write the body of an error reply."""

    def write_result(self, result: Value) -> bytes:
        """Write the body of a handler's result."""


class CloudApplication:
    """A WSGI application. `control` answers POST /rehearsal/NAME with its JSON body.

    `calls` counts the calls of each operation, with any result; `held` those that were held (see
    Loss); `under_way` is how many are being answered now. `violations` are the requests and replies
    that broke the official description; such a request is answered with 500 and has no effect.
    """

    def __init__(
        self, api: CloudApi, scenario: Callable[[], CloudScenario], control: Control
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.under_way = 0
        self.violations: list[str] = []
        self.faults = FaultCounts()
        self._lock = threading.Lock()
        self._api = api
        self._scenario = scenario
        self._control = control
        self._operations = {operation.name: operation for operation in api.list_operations()}
        self._rules = Map(
            [
                Rule(operation.path, endpoint=operation.name, methods=[operation.method])
                for operation in self._operations.values()
            ],
            strict_slashes=False,
        )

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"].startswith(PREFIX):
            reply = handle_control(environ, self._control, NOT_HERE)
        else:
            with self._count_call():
                name, reply = self._answer(Request(environ))
            if reply.status == 0:
                lose_connection(environ, reply.hold_s, lambda: self._count(self.held, name))
        start_response(f"{reply.status} -", reply.list_headers())
        return [reply.body]

    def inside(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve machines: the same application without the control requests."""
        return self({**environ, INSIDE: True}, start_response)

    def _answer(self, request: Request) -> tuple[str, HttpReply]:
        """Return the operation's name and the reply."""
        seen = ApiRequest(
            method=request.method,
            path=request.path,
            query={name: tuple(values) for name, values in request.args.lists()},
            body=request.get_data(),
        )
        try:
            name, path = self._rules.bind_to_environ(request.environ).match()
        except HTTPException:
            self._count(self.calls, UNKNOWN)
            return UNKNOWN, self._check_reply(seen, self._refuse(self._api.errors.not_found))
        self._count(self.calls, name)
        scenario = self._scenario()
        time.sleep(scenario.delays.api)
        if validator := self._api.validator:
            problems = validator.check_request(seen)
            if problems:
                return name, self._report(problems)

        def matches(pattern: str) -> bool:
            return fnmatchcase(name, pattern)

        if (loss := self.faults.take("dropped", scenario.dropped, matches)) is not None:
            return name, HttpReply(status=0, hold_s=loss.hold)
        try:
            self._inject(scenario, matches)
            self._api.check_access(name, request.headers)
            reply = self._apply(self._operations[name], seen, path, request)
        except ApiError as error:
            reply = self._refuse(error)
        reply = self._check_reply(seen, reply)
        if (loss := self.faults.take("lost", scenario.lost, matches)) is not None:
            return name, HttpReply(status=0, hold_s=loss.hold)
        return name, reply

    def _inject(self, scenario: CloudScenario, matches: Callable[[str], bool]) -> None:
        """Raise the ApiError of a fault that the scenario has for this call."""
        errors = self._api.errors
        if scenario.expired:
            raise errors.expired
        if any(map(matches, scenario.denied)):
            raise errors.denied
        if self.faults.is_throttled(scenario.throttle, matches):
            raise errors.throttled
        if (failure := self.faults.take("failed", scenario.failed, matches)) is not None:
            raise ApiError(failure.status, errors.failed_code, "a failure of the rehearsal")

    def _apply(
        self,
        operation: AnyOperation,
        seen: ApiRequest,
        path: Mapping[str, str],
        request: Request,
    ) -> HttpReply:
        query = {name: values[0] for name, values in seen.query.items()}
        is_inside = bool(request.environ.get(INSIDE))
        try:
            result = operation.answer(seen.body, path, query, request.headers, is_inside)
        except msgspec.MsgspecError as error:
            raise ApiError(
                self._api.errors.invalid.status, self._api.errors.invalid.code, str(error)
            ) from error
        if isinstance(result, HttpReply):
            return result
        if result is None:
            return HttpReply(status=operation.status)
        body = self._api.write_result(result)
        return HttpReply(status=operation.status, body=body, headers=JSON)

    def _refuse(self, error: ApiError) -> HttpReply:
        body = self._api.write_error(error)
        return HttpReply(status=error.status, body=body, headers=(*JSON, *error.headers))

    def _check_reply(self, seen: ApiRequest, reply: HttpReply) -> HttpReply:
        """Return the reply, or that to a violation, if it is not as described."""
        if self._api.validator is None or reply.status == 0:
            return reply
        problems = self._api.validator.check_reply(seen, reply.status, reply.body)
        return self._report(problems) if problems else reply

    def _report(self, problems: tuple[str, ...]) -> HttpReply:
        with self._lock:
            self.violations += problems
        return HttpReply(status=VIOLATION, body="\n".join(problems).encode())

    def _count(self, counts: Counter[str], name: str) -> None:
        with self._lock:
            counts[name] += 1

    @contextmanager
    def _count_call(self) -> Iterator[None]:
        """Count a call while it is being answered."""
        with self._lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1
