"""What a flow tells of a seat among many, and a reporter that says whose news it is."""

from __future__ import annotations

from labctl.events import Decision, Event, Note, Progress, Reporter, Step


class SeatEvent(Event, frozen=True):
    """Base of what is told of one seat. Events of several seats come from several threads."""

    seat: str


class News(SeatEvent, frozen=True):
    """What is going on there now: a step that began, or a note."""

    text: str
    warning: bool = False


class Done(SeatEvent, frozen=True):
    """The seat is through: `error` is what failed, "" where nothing did."""

    error: str = ""


class SeatReporter:
    """Hands on a seat's steps and notes as `News`. With `agreed`, prices were agreed to before.

    Everything else that would be asked of one seat is answered with yes: the whole was asked.
    """

    def __init__(self, seat: str, reporter: Reporter, *, agreed: bool) -> None:
        self._seat = seat
        self._reporter = reporter
        self._agreed = agreed

    def emit(self, event: Event) -> None:
        if isinstance(event, Step) and not event.done:
            self._reporter.emit(News(seat=self._seat, text=event.name))
        elif isinstance(event, Note) and event.level != "detail":
            warning = event.level == "warning"
            self._reporter.emit(News(seat=self._seat, text=event.text, warning=warning))
        elif isinstance(event, Progress) and event.unit == "bytes" and event.total:
            share = f"{event.name} {event.done / event.total:.0%}"
            self._reporter.emit(News(seat=self._seat, text=share))

    def ask(self, decision: Decision) -> bool:
        return self._agreed or decision.about not in ("price", "billing")


def stopping(reporter: Reporter) -> None:
    """Say that Ctrl-C was heard: what was begun may take some minutes."""
    reporter.emit(Note(text="stopping: what was begun is finished first", level="warning"))
