"""Verbs of the agent as typed values: what a call sends, and what it returns.

Each module of messages defines its verbs (`START = Verb("start", StartRequest, StartReply)`). The
client passes the verb to `AgentClient.call` or `stream`; the agent finds the handler by its name.
"""

from typing import Generic, NamedTuple, Optional, Type, TypeVar

Request = TypeVar("Request", bound=NamedTuple)
Reply = TypeVar("Reply", bound=NamedTuple)
Opening = TypeVar("Opening", bound=NamedTuple)


class Verb(Generic[Request, Reply]):
    """A verb that answers with one message."""

    def __init__(self, name: str, request: Type[Request], reply: Type[Reply]) -> None:
        self.name = name
        self.request = request
        self.reply = reply


class StreamingVerb(Generic[Request, Opening, Reply]):
    """A verb that answers with an opening message, then bytes, then a closing message."""

    def __init__(
        self, name: str, request: Type[Request], opening: Type[Opening], closing: Type[Reply]
    ) -> None:
        self.name = name
        self.request = request
        self.opening = opening
        self.closing = closing


class ErrorMessage(NamedTuple):
    """A failure; `labctl.errors.replies` says which LabError its kind is."""

    kind: str
    what: str
    why: str = ""
    hint: str = ""


class ErrorReply(NamedTuple):
    """What reports a failure in place of a reply; None in the reply of any verb."""

    error: Optional[ErrorMessage] = None


class Empty(NamedTuple):
    """A message without content."""


class LabRequest(NamedTuple):
    """A request that names a lab and nothing else. `lab_id` tells labs of one name apart."""

    lab: str
    lab_id: str
