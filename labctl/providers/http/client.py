"""The client: one session, a bearer key, timeouts, typed replies, and labctl's own errors.

A call that is throttled is repeated after the time that the cloud names. A call that only reads is
repeated after a lost reply. Any other lost reply is raised as ConnectError: whether the call had
its effect is unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from labctl.decoding import decode_json
from labctl.errors import BusyError, ConnectError, ProviderError, ThrottledError
from labctl.http_client import open_session, read_body
from labctl.model import Value
from labctl.providers.http.description import (
    CloudDescription,
    make_lost_reply_error,
    translate_reply,
)
from labctl.providers.http.keys import require_key, resolve_endpoint
from labctl.retry import retry_on

if TYPE_CHECKING:
    from requests import Response, Session

Reply = TypeVar("Reply")
CONNECT_S, READ_S = 10.0, 60.0
MOST_BYTES = 64 * 1024 * 1024
# How long a throttled call is repeated in all, and the pause if the cloud names none.
THROTTLED_S, THROTTLED_PAUSE_S = 30.0, 1.0
# How often a call that only reads is tried.
READ_TRIES, READ_PAUSE_S = 3, 0.5


class Nothing(Value, frozen=True):
    """A reply whose content does not matter."""


class ApiClient:
    """Calls one cloud. Safe to use from many threads; nothing is sent before the first call.

    `repeat_throttled_s` is how long a throttled call is repeated; 0 raises the ThrottledError.
    """

    def __init__(self, cloud: CloudDescription, repeat_throttled_s: float = THROTTLED_S) -> None:
        self.cloud = cloud
        self._repeat_throttled_s = repeat_throttled_s
        self._sessions = threading.local()

    def get(
        self, action: str, path: str, kind: type[Reply], query: Mapping[str, str] | None = None
    ) -> Reply:
        """Read something. `action` says for users what is done: "list the instances"."""
        policy = retry_on((ConnectError, BusyError), pause_s=READ_PAUSE_S, tries=READ_TRIES)
        return policy(lambda: self.call("GET", action, path, kind, query=query))

    def post(self, action: str, path: str, kind: type[Reply], body: Value) -> Reply:
        return self.call("POST", action, path, kind, body=body)

    def delete(self, action: str, path: str, body: Value | None = None) -> None:
        """Delete something; AbsentError if it is gone, as after a lost reply."""
        self.call("DELETE", action, path, Nothing, body=body)

    def call(
        self,
        method: str,
        action: str,
        path: str,
        kind: type[Reply],
        *,
        body: Value | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one call, again while it is throttled, and decode its reply.

        Raises CredentialsError, DeniedError, QuotaError, CapacityError, ThrottledError, BusyError,
        AbsentError or ProviderError by status and code; ConnectError after a lost reply.
        """
        deadline = time.monotonic() + self._repeat_throttled_s
        while True:
            status, headers, content = self._send(method, action, path, body, query)
            if status < 300:
                return self._decode(action, content, kind)
            error = translate_reply(self.cloud, action, status, self.cloud.parse_error(content))
            pause_s = _parse_retry_after(headers)
            if not isinstance(error, ThrottledError) or time.monotonic() + pause_s > deadline:
                raise error
            time.sleep(pause_s)

    def _send(
        self,
        method: str,
        action: str,
        path: str,
        body: Value | None,
        query: Mapping[str, str] | None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        url = resolve_endpoint(self.cloud) + path
        headers = {
            "Authorization": f"Bearer {require_key(self.cloud)}",
            "Accept": "application/json",
            **({} if body is None else {"Content-Type": "application/json"}),
        }
        try:
            with self._open().request(
                method,
                url,
                params=dict(query or {}),
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=(CONNECT_S, READ_S),
                allow_redirects=False,
                stream=True,
            ) as response:
                return response.status_code, response.headers, self._read(response)
        except OSError as error:  # requests raises nothing else
            raise make_lost_reply_error(self.cloud, action, error) from error

    def _read(self, response: Response) -> bytes:
        return read_body(response, MOST_BYTES)

    def _decode(self, action: str, content: bytes, kind: type[Reply]) -> Reply:
        if kind is Nothing:
            return kind()
        try:
            return decode_json(content, kind)
        except msgspec.MsgspecError as error:
            raise ProviderError(
                f"labctl does not understand {self.cloud.name}'s reply to the request to {action}",
                why=str(error),
                hint="a newer labctl may understand it",
            ) from error

    def _open(self) -> Session:
        """Return this thread's session: requests does not promise that threads can share one."""
        session: Session | None = getattr(self._sessions, "session", None)
        if session is None:
            session = self._sessions.session = open_session()
            # A proxy cannot reach this machine's loopback, where a rehearsal listens.
            session.trust_env = not resolve_endpoint(self.cloud).startswith("http://")
        return session


def _parse_retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a throttled caller should wait; a date is ignored."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() and len(text) < 5 else THROTTLED_PAUSE_S
