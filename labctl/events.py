"""How a flow talks to its user: it emits frozen Events to a Reporter and asks it Questions.

`cli/` draws the events and asks the user; tests record the events and answer. Nothing here prints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, runtime_checkable

import msgspec

from labctl.model import Value
from labctl.parallel import call_in_caller
from labctl.shell import Secret


class Event(Value, frozen=True):
    """Base of everything that a flow reports."""


class Step(Event, frozen=True):
    """A named step that takes some time began (`done` False) or ended (`done` True).

    A `brief` step is usually over at once: it is shown only if it lasts, and no line says its end.
    """

    name: str
    done: bool = False
    detail: str = ""
    brief: bool = False


class Progress(Event, frozen=True):
    """The progress of a step. `unit` is "bytes", "steps" or "files"; `total` is 0 if unknown.

    `detail` says what happens at this moment, in words that also say how far it is. `elapsed_s` is
    how long it has lasted when its first event comes.
    """

    name: str
    done: float
    total: float
    unit: str
    detail: str = ""
    elapsed_s: float = 0.0


class Part(Event, frozen=True):
    """A part of the way to a run's first line began, or ended (`done`). The screen shows none.

    `name` is "boot", "prepare", "image", "code", "data" or "start". Parts may overlap.
    """

    name: str
    done: bool = False


class Note(Event, frozen=True):
    """A message to the user. `level` is "info" or "warning"."""

    text: str
    level: str = "info"


class UniqueNote(Note, frozen=True):
    """A Note that several steps of a command may send. A screen shows the first of equal ones."""


class BlockerNote(Note, frozen=True):
    """A Note that says why no run can start on the server yet."""


class RepeatedNote(Note, frozen=True):
    """A Note that is sent again and again while something lasts, with each try to connect again.

    A terminal shows only the newest one of each `name`, until a brief Step with this name ends.
    Elsewhere the screen prints one a minute.
    """

    name: str = ""


class Question(Value, frozen=True):
    """A yes-or-no question. Without a terminal and without --yes the answer is no.

    `about` is "price" if a yes costs money, "billing" if nothing would ever end those costs, and
    "" for anything else. `typed` is a text that the user must type for a yes; --yes does not
    answer such a question.
    """

    question: str
    detail: str = ""
    default: bool = False
    about: str = ""
    typed: str = ""


class Reporter(Protocol):
    def emit(self, event: Event) -> None: ...

    def confirm(self, decision: Question) -> bool: ...


# Asks for a password with this prompt. What the user types is not shown.
AskPassword = Callable[[str], Secret]


@runtime_checkable
class PasswordSource(Protocol):
    """A Reporter that may have a terminal on which its user can type a password."""

    def find_password_prompt(self) -> AskPassword | None:
        """Return the function that asks for a password; None without a terminal."""


def find_password_prompt(reporter: Reporter) -> AskPassword | None:
    """Return the function that asks the reporter's user for a password; None if nobody can."""
    return reporter.find_password_prompt() if isinstance(reporter, PasswordSource) else None


@contextmanager
def report_part(reporter: Reporter, name: str) -> Iterator[None]:
    """Report that the Part `name` begins, and at the end of the block that it ends."""
    reporter.emit(Part(name=name))
    try:
        yield
    finally:
        reporter.emit(Part(name=name, done=True))


@contextmanager
def report_wait(reporter: Reporter, name: str, detail: str = "") -> Iterator[None]:
    """Report a brief Step around the block, which ends with it, however that ends."""
    reporter.emit(Step(name=name, detail=detail, brief=True))
    try:
        yield
    finally:
        reporter.emit(Step(name=name, done=True, brief=True))


# Opens a lock. If it is not free, it calls the first function once, with the holder, and the second
# one with each text in which the holder says how far it is.
OpenLock = Callable[[Callable[[str], None], Callable[[str], None]], AbstractContextManager[None]]


OTHER_COMMAND = "waiting for the other command"


@contextmanager
def report_lock_wait(reporter: Reporter, open_lock: OpenLock) -> Iterator[None]:
    """Hold a lock around the block. While it waits, name the holder, and show how far that is."""
    waiting: list[Step] = []

    def announce(holder: str) -> None:
        reporter.emit(Note(text=f"{holder}; waiting for it to finish"))
        waiting.append(Step(name=OTHER_COMMAND, brief=True))
        reporter.emit(waiting[0])

    def show(text: str) -> None:
        reporter.emit(Progress(name=OTHER_COMMAND, done=0, total=0, unit="steps", detail=text))

    with ExitStack() as held:
        try:
            held.enter_context(open_lock(announce, show))
        finally:
            for step in waiting:
                reporter.emit(msgspec.structs.replace(step, done=True))
        yield


class SharedProgress:
    """A Reporter that passes every event on, and `share`s the step that a command is at as a text.

    A text that equals the last one is not shared again.
    """

    def __init__(self, reporter: Reporter, share: Callable[[str], None]) -> None:
        self._reporter = reporter
        self._share = share
        self._text = ""

    def emit(self, event: Event) -> None:
        self._reporter.emit(event)
        is_over = isinstance(event, Step) and event.done
        if not isinstance(event, Step | Progress) or is_over:
            return
        text = _describe_step(event)
        if text != self._text:
            self._text = text
            self._share(text)

    def confirm(self, decision: Question) -> bool:
        return self._reporter.confirm(decision)

    def find_password_prompt(self) -> AskPassword | None:
        return find_password_prompt(self._reporter)


def _describe_step(event: Step | Progress) -> str:
    """Return what a step does now; of bytes, each tenth of them."""
    if isinstance(event, Progress) and event.unit == "bytes" and event.total:
        tenths = int(10 * event.done / event.total)
        return f"{event.name}, {tenths}0%" if tenths else event.name
    return event.detail if isinstance(event, Progress) and event.detail else event.name


class ConsentPolicy(Value, frozen=True):
    """The questions that are answered with yes without asking a user, by what they are about.

    `typed` includes questions to which a user would have to type a text.
    """

    price: bool = False
    billing: bool = False
    other: bool = False
    typed: bool = False

    def is_accepted(self, question: Question) -> bool:
        about = {"price": self.price, "billing": self.billing}
        return about.get(question.about, self.other) and (self.typed or not question.typed)


AGREE_TO_NOTHING = ConsentPolicy()
AGREE_TO_ALL = ConsentPolicy(price=True, billing=True, other=True, typed=True)
AGREE_TO_PRICES = ConsentPolicy(price=True, typed=True)
# For what replaces a server whose costs the user has agreed to.
AGREE_TO_COSTS = ConsentPolicy(price=True, billing=True, typed=True)


class PolicyReporter:
    """A Reporter that calls `show` with each event and answers questions by a policy.

    It passes on to `ask` what the policy does not agree to; without `ask` the answer is no.
    """

    def __init__(
        self,
        show: Callable[[Event], None],
        policy: ConsentPolicy = AGREE_TO_NOTHING,
        ask: Reporter | None = None,
    ) -> None:
        self._show = show
        self._policy = policy
        self._ask = ask

    def emit(self, event: Event) -> None:
        self._show(event)

    def confirm(self, decision: Question) -> bool:
        if self._policy.is_accepted(decision):
            return True
        return self._ask is not None and self._ask.confirm(decision)

    def find_password_prompt(self) -> AskPassword | None:
        return find_password_prompt(self._ask) if self._ask is not None else None


class SilentReporter:
    """A Reporter that draws nothing and answers every question with its default."""

    def emit(self, event: Event) -> None:
        pass

    def confirm(self, decision: Question) -> bool:
        return decision.default


class SharedReporter:
    """A Reporter for parts of a flow that run side by side (`parallel.py`).

    It passes on one event at a time, and asks questions in the thread that waits for the parts.
    Events of other parts wait for the answer.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._lock = threading.RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._reporter.emit(event)

    def confirm(self, decision: Question) -> bool:
        return call_in_caller(lambda: self._confirm_here(decision))

    def find_password_prompt(self) -> AskPassword | None:
        ask = find_password_prompt(self._reporter)
        if ask is None:
            return None

        def ask_here(prompt: str) -> Secret:
            with self._lock:
                return ask(prompt)

        return lambda prompt: call_in_caller(lambda: ask_here(prompt))

    def _confirm_here(self, decision: Question) -> bool:
        with self._lock:
            return self._reporter.confirm(decision)
