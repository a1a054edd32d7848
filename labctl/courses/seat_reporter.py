"""Events of a flow over many seats, and a reporter that labels them with their seat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from labctl.courses.records.folder import Seat
from labctl.events import (
    AGREE_TO_ALL,
    ConsentPolicy,
    Event,
    Note,
    PolicyReporter,
    Progress,
    Reporter,
    Step,
)
from labctl.lifecycle.fleet import LabOutcome
from labctl.servers.context import LabContext

T = TypeVar("T")

_AGREE_UNLESS_PAID = ConsentPolicy(other=True, typed=True)


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


def make_seat_reporter(seat: str, reporter: Reporter, *, agreed: bool) -> PolicyReporter:
    """Return a reporter that passes on a seat's steps and notes as `SeatNews`.

    It agrees to questions about one seat, and to those about prices only with `agreed`, if the
    total was consented to before.
    """

    def show(event: Event) -> None:
        if isinstance(event, Step) and not event.done:
            reporter.emit(SeatNews(seat=seat, text=event.name))
        elif isinstance(event, Note) and event.level != "detail":
            warning = event.level == "warning"
            reporter.emit(SeatNews(seat=seat, text=event.text, warning=warning))
        elif isinstance(event, Progress) and event.unit == "bytes" and event.total:
            progress = f"{event.name} {event.done / event.total:.0%}"
            reporter.emit(SeatNews(seat=seat, text=progress))

    return PolicyReporter(show, AGREE_TO_ALL if agreed else _AGREE_UNLESS_PAID)


def label_events(context: LabContext, seat: str, *, agreed: bool = False) -> LabContext:
    """Return the context with its reporter labeled with a seat, by `make_seat_reporter`."""
    reporter = make_seat_reporter(seat, context.reporter, agreed=agreed)
    return context.make_sibling(context.config, context.lab_id, reporter)


def make_done_notifier(
    reporter: Reporter, by_lab: Mapping[str, Seat]
) -> Callable[[LabOutcome[T]], None]:
    """Return a function that reports the outcome of a seat, one of `by_lab`, as `SeatDone`."""

    def notify(outcome: LabOutcome[T]) -> None:
        error = outcome.error.what if outcome.error else ""
        reporter.emit(SeatDone(seat=by_lab[outcome.context.lab_id].name, error=error))

    return notify


def report_stopping(reporter: Reporter) -> None:
    """Report that Ctrl-C was received: finishing what has started may take minutes."""
    reporter.emit(Note(text="stopping, once what has started is finished", level="warning"))


def make_quiet_reporter(reporter: Reporter) -> Reporter:
    """Return a Reporter that passes on notes and questions, but not each task of a playbook."""

    def show(event: Event) -> None:
        if isinstance(event, Note):
            reporter.emit(event)

    return PolicyReporter(show, ask=reporter)
