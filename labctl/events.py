"""One flow per file. A flow emits frozen Events to a Reporter and asks it for Decisions.

`cli/` draws the events and asks the person; tests record and answer. Nothing here prints.
"""

from __future__ import annotations

from typing import Protocol

from labctl.model import Value


class Event(Value, frozen=True):
    """Base of what a flow tells."""


class Step(Event, frozen=True):
    """A named step of some length began (`done` False) or ended (`done` True)."""

    name: str
    done: bool = False
    detail: str = ""


class Progress(Event, frozen=True):
    """How far a step is. `unit` is "bytes", "steps" or "files"; `total` 0 when unknown."""

    name: str
    done: float
    total: float
    unit: str


class Note(Event, frozen=True):
    """Something the person should know. `level` is "info" or "warning"."""

    text: str
    level: str = "info"


class Decision(Value, frozen=True):
    """A question. Without a terminal and without --yes the answer is no.

    `about` is "price" where a yes costs money, "billing" where nothing would end what it costs; ""
    for anything else. `typed` is what a person has to type for a yes: --yes does not answer that.
    """

    question: str
    detail: str = ""
    default: bool = False
    about: str = ""
    typed: str = ""


class Reporter(Protocol):
    def emit(self, event: Event) -> None: ...

    def ask(self, decision: Decision) -> bool: ...


class Silent:
    """A Reporter that draws nothing and answers every question with its default."""

    def emit(self, event: Event) -> None:
        pass

    def ask(self, decision: Decision) -> bool:
        return decision.default
