"""Control requests to a running rehearsal, of a later command or of a test in another process.

POST /rehearsal/state, /rehearsal/set and /rehearsal/reclaim, with a JSON body. Machines cannot
send them.
"""

from __future__ import annotations

from collections.abc import Callable
from wsgiref.types import WSGIEnvironment

import msgspec

from labctl.errors import LabError
from labctl.model import Value
from labctl.rehearsal.core.replies import HttpReply

PREFIX = "/rehearsal/"
# A header that a web page cannot send to another origin without a preflight request.
HEADER = "HTTP_X_LABCTL_REHEARSAL"
# Host names of this machine that a page cannot rebind by DNS.
LOCAL = ("127.0.0.1", "localhost")
# In the environment of calls that come from a machine.
INSIDE = "rehearsal.inside"

# Takes the name and the body of a control request.
Control = Callable[[str, bytes], Value]


class ReclaimControl(Value, frozen=True):
    """The body of /rehearsal/reclaim."""

    instance: str
    notice_s: float = 120.0
    rebalance_s: float = 0.0


class OverrideScenarioRequest(Value, frozen=True):
    """The body of /rehearsal/set: overrides of the scenario, as on the command line."""

    switches: tuple[str, ...]


class RehearsalState(Value, frozen=True):
    """The state of each instance by id, and how often each action was called.

    `violations` are the requests and replies that broke the cloud's official description.
    """

    instances: dict[str, str]
    calls: dict[str, int]
    violations: tuple[str, ...] = ()


class ControlError(Value, frozen=True):
    """The reply to a control request that failed."""

    error: str


def handle_control(environ: WSGIEnvironment, control: Control, refusal: HttpReply) -> HttpReply:
    """Answer a control request; `refusal` is the reply to those from elsewhere."""
    host = environ.get("HTTP_HOST", "").rpartition(":")[0]
    if not environ.get(HEADER) or host not in LOCAL or environ.get(INSIDE):
        return refusal
    length = int(environ.get("CONTENT_LENGTH") or 0)
    try:
        body = environ["wsgi.input"].read(length) or b"{}"
        return _build_reply(control(environ["PATH_INFO"].removeprefix(PREFIX), body), 200)
    except (LabError, ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
        return _build_reply(ControlError(error=str(error)), 400)


def _build_reply(content: Value, status: int) -> HttpReply:
    headers = (("Content-Type", "application/json"),)
    return HttpReply(status=status, body=msgspec.json.encode(content), headers=headers)
