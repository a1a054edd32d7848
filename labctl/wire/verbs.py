"""Verbs of the agent as typed values: what a call sends, and what it returns.

Each module of messages defines its verbs (`START = Verb("start", StartRequest, StartReply)`). The
client passes the verb to `AgentClient.call` or `stream`; the agent finds the handler by its name.
"""

from typing import Dict, Generic, NamedTuple, Optional, Tuple, Type, TypeVar, Union

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


class HintPart(NamedTuple):
    """A part of a hint: plain text, or what differs between a lab and a seat of a course.

    `kind` is "text", "config" (the configuration file) or a command: "up", "push", "status" or
    "ssh". `text` is the text, the line that "ssh" runs on the server, or options that the command
    has for a lab only.
    """

    kind: str
    text: str = ""


CONFIG_FILE = HintPart("config")
UP_COMMAND = HintPart("up")
PUSH_COMMAND = HintPart("push")
STATUS_COMMAND = HintPart("status")
SHOW_DISK = HintPart("ssh", "df -h")
SHOW_DOCKER = HintPart("ssh", "systemctl status docker")
# A hint that is the same for every reader, or its parts in their order.
Hint = Union[str, HintPart, Tuple[Union[str, HintPart], ...]]
_FOR_LABS: Dict[str, str] = {
    "text": "",
    "config": "lab.yaml",
    "up": "labctl up",
    "push": "labctl push",
    "status": "labctl status",
    "ssh": "labctl ssh --",
}


class ErrorMessage(NamedTuple):
    """A failure of the agent: its kind selects the class of the LabError that labctl raises.

    `hint` is the next step for a lab. `hint_parts` is the same for any subject, and () where the
    hint is the same for all, and from an agent that does not send parts yet.
    """

    kind: str
    what: str
    why: str = ""
    hint: str = ""
    hint_parts: Tuple[HintPart, ...] = ()


def make_error(kind: str, what: str, why: str = "", hint: Hint = "") -> ErrorMessage:
    """Build the message of a failure."""
    if isinstance(hint, str):
        return ErrorMessage(kind, what, why, hint)
    parts = (hint,) if isinstance(hint, HintPart) else hint
    typed = tuple(HintPart("text", part) if isinstance(part, str) else part for part in parts)
    words = (" ".join(filter(None, [_FOR_LABS[part.kind], part.text])) for part in typed)
    return ErrorMessage(kind, what, why, "".join(words), typed)


class ErrorReply(NamedTuple):
    """What reports a failure in place of a reply; None in the reply of any verb."""

    error: Optional[ErrorMessage] = None


class Empty(NamedTuple):
    """A message without content."""


class LabRequest(NamedTuple):
    """A request that names a lab and nothing else. `lab_id` tells labs of one name apart."""

    lab: str
    lab_id: str
