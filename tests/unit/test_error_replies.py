"""Errors that one labctl sends another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from labctl import errors
from labctl.errors import (
    BusyError,
    CommandError,
    ConfigError,
    LabError,
    LockHeldError,
    PolicyError,
    Problem,
)
from labctl.errors.replies import AGENT_KINDS, as_reply, decode_reply
from labctl.wire.codec import MessageError, encode
from labctl.wire.verbs import Empty


class TakenError(BusyError):
    """An error that is defined where it is raised."""


def send(error: LabError) -> LabError:
    """Return the error that the other side raises."""
    with pytest.raises(LabError) as caught:
        decode_reply(Empty, encode(as_reply(error)))
    return caught.value


KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LabError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_arrives_as_what_it_was(kind: type[LabError]) -> None:
    more = {"code": 3} if kind is CommandError else {}
    sent = kind("it failed", why="because", hint="labctl doctor", **more)
    found = send(sent)
    # A reply carries no exit code of a command.
    assert type(found) is (LabError if kind is CommandError else kind)
    assert (found.what, found.why, found.hint) == ("it failed", "because", "labctl doctor")


def test_an_error_of_another_room_arrives_as_what_it_inherits_from() -> None:
    assert type(send(TakenError("taken"))) is BusyError


def test_a_lock_held_elsewhere_is_named_without_its_holder() -> None:
    found = send(LockHeldError("taken", holder="alice", hint="wait"))
    assert isinstance(found, LockHeldError)
    assert (found.what, found.holder) == ("taken", "")


@pytest.mark.parametrize(
    "kind", ["", "os", "Subject", "Problem", "dataclass", "OSError", "CommandError", "LabError"]
)
def test_a_strange_kind_is_a_plain_error(kind: str) -> None:
    with pytest.raises(LabError) as caught:
        decode_reply(Empty, json.dumps({"error": {"kind": kind, "what": "x" * 9000}}))
    assert type(caught.value) is LabError
    assert len(caught.value.what) == 2000


def test_every_mistake_in_a_file_is_sent() -> None:
    error = ConfigError("lab.yaml has one mistake", (Problem("run", 3, "is empty"),))
    assert send(error).why == "run (line 3): is empty"


def test_a_kind_of_the_agent_is_the_same_error_everywhere() -> None:
    assert AGENT_KINDS["policy"] is PolicyError
    with pytest.raises(PolicyError, match="refused"):
        decode_reply(Empty, '{"error": {"kind": "policy", "what": "refused"}}')


@pytest.mark.parametrize("body", [{}, {"error": None}, {"done": True}])
def test_a_reply_without_an_error_is_its_message(body: Any) -> None:
    assert decode_reply(Empty, json.dumps(body)) == Empty()


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "null", "5", "[]", "[" * 100_000, b"\xff",
        '{"error": "no"}', '{"error": []}', '{"error": {}}', '{"error": {"kind": 1, "what": "it"}}',
        '{"error": {"kind": "PolicyError", "what": ["it"]}}',
    ],
)  # fmt: skip
def test_a_reply_of_another_shape_is_a_message_error(line: str | bytes) -> None:
    with pytest.raises(MessageError):
        decode_reply(Empty, line)
