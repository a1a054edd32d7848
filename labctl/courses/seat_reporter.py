"""Events of a flow over many seats, and a reporter that labels them with their seat."""

from __future__ import annotations

from labctl.events import Event, Note, Progress, Question, Reporter, Step


class SeatEvent(Event, frozen=True):
    """Base of the events of one seat. They come from several threads."""

    seat: str


class SeatNews(SeatEvent, frozen=True):
    """A step that has started for a seat, or a note."""

    text: str
    warning: bool = False


class SeatDone(SeatEvent, frozen=True):
    """The flow is done with a seat: `error` is what failed, "" if nothing did."""

    error: str = ""


class SeatReporter:
    """Passes on a seat's steps and notes as `SeatNews`, and agrees to questions about one seat.

    Questions about prices are agreed to only with `agreed`, if the total was consented to before.
    """

    def __init__(self, seat: str, reporter: Reporter, *, agreed: bool) -> None:
        self._seat = seat
        self._reporter = reporter
        self._agreed = agreed

    def emit(self, event: Event) -> None:
        if isinstance(event, Step) and not event.done:
            self._reporter.emit(SeatNews(seat=self._seat, text=event.name))
        elif isinstance(event, Note) and event.level != "detail":
            warning = event.level == "warning"
            self._reporter.emit(SeatNews(seat=self._seat, text=event.text, warning=warning))
        elif isinstance(event, Progress) and event.unit == "bytes" and event.total:
            progress = f"{event.name} {event.done / event.total:.0%}"
            self._reporter.emit(SeatNews(seat=self._seat, text=progress))

    def confirm(self, decision: Question) -> bool:
        return self._agreed or decision.about not in ("price", "billing")


def report_stopping(reporter: Reporter) -> None:
    """Report that Ctrl-C was received: finishing what has started may take minutes."""
    reporter.emit(Note(text="stopping, once what has started is finished", level="warning"))
