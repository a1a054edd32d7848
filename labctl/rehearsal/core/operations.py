"""The operations of a simulated cloud: method, path and handler, with typed requests.

A handler takes an ApiCall and returns a value, which is sent as JSON, None for an empty body, or an
HttpReply. It raises ApiError for an error that the cloud's documentation names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from werkzeug.datastructures import Headers

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.rehearsal.core.replies import HttpReply

Body = TypeVar("Body")
Result = Value | HttpReply | None


class NoBody(Value, frozen=True):
    """The body of a request without one; whatever is sent is ignored."""


@dataclass(frozen=True)
class ApiCall(Generic[Body]):
    """A request as its handler gets it. `path` and `query` have the parameters by name.

    Repeated query parameters have only their first value here. `is_inside`: a machine sent it.
    """

    body: Body
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=Headers)
    is_inside: bool = False


class ApiError(Exception):
    """An error reply. `code` is the cloud's own; the cloud's package decides how it is written."""

    def __init__(
        self, status: int, code: str, message: str = "", headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers


@dataclass(frozen=True)
class Operation(Generic[Body]):
    """One operation. `path` is a rule of werkzeug: `/v1/instances/<id>`.

    `name` is what scenarios and counts call it. `body` is the type of its JSON body; ApiError of
    `ErrorReplies.invalid` answers a body of another form.
    """

    name: str
    method: str
    path: str
    handler: Callable[[ApiCall[Body]], Result]
    body: type[Body]
    status: int = 200

    def answer(
        self,
        data: bytes,
        path: Mapping[str, str],
        query: Mapping[str, str],
        headers: Headers,
        is_inside: bool,
    ) -> Result:
        """Decode the body and call the handler; msgspec.MsgspecError for a body of another form."""
        text = b"{}" if self.body is NoBody or not data else data
        body = decode_json(text, self.body)
        return self.handler(ApiCall(body, path, query, headers, is_inside))


AnyOperation = Operation[Any]


@dataclass(frozen=True)
class ErrorReplies:
    """How a cloud answers what is not about one operation: its documented status and code each."""

    unauthorized: ApiError
    expired: ApiError
    denied: ApiError
    throttled: ApiError
    not_found: ApiError
    invalid: ApiError
    failed_code: str = "internal-error"
