"""Errors that one labctl sends another."""

from __future__ import annotations

import pytest

from labctl import errors
from labctl.errors import BusyError, CommandError, LabError, LockHeldError
from labctl.errors.replies import as_reply, parse_error


class TakenError(BusyError):
    """An error that is defined where it is raised."""


KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LabError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_arrives_as_what_it_was(kind: type[LabError]) -> None:
    more = {"code": 3} if kind is CommandError else {}
    sent = kind("it failed", why="because", hint="labctl doctor", **more)
    found = parse_error(as_reply(sent))
    # A reply carries no exit code of a command.
    assert type(found) is (LabError if kind is CommandError else kind)
    assert found is not None
    assert (found.what, found.why, found.hint) == ("it failed", "because", "labctl doctor")


def test_an_error_of_another_room_arrives_as_what_it_inherits_from() -> None:
    assert type(parse_error(as_reply(TakenError("taken")))) is BusyError


def test_a_lock_held_elsewhere_is_named_without_its_holder() -> None:
    found = parse_error(as_reply(LockHeldError("taken", holder="alice", hint="wait")))
    assert isinstance(found, LockHeldError)
    assert (found.what, found.holder) == ("taken", "")


@pytest.mark.parametrize("kind", ["", "os", "Subject", "OSError", "LabError"])
def test_a_strange_kind_is_a_plain_error(kind: str) -> None:
    found = parse_error({"error": {"kind": kind, "what": "x" * 9000}})
    assert type(found) is LabError
    assert len(found.what) == 2000
