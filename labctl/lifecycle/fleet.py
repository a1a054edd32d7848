"""Handle the servers of many labs at once, so that waits overlap.

One lab's failure does not stop another, and repeating the call retries what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from labctl.errors import LabError
from labctl.errors.unexpected import as_lab_error
from labctl.events import Note
from labctl.servers.context import LabContext

T = TypeVar("T")
AT_ONCE = 32


@dataclass(frozen=True)
class LabOutcome(Generic[T]):
    """The result of one lab: `value`, or `error`."""

    context: LabContext
    value: T | None = None
    error: LabError | None = None


def run_for_each(
    contexts: Iterable[LabContext],
    action: Callable[[LabContext], T],
    *,
    at_once: int = AT_ONCE,
    on_result: Callable[[LabOutcome[T]], None] = lambda outcome: None,
    stopping: Callable[[], None] = lambda: None,
) -> list[LabOutcome[T]]:
    """Call `action` for every lab, `at_once` at a time; return outcomes in the order of the labs.

    `on_result` is called with each outcome, in the thread that produced it. When interrupted, this
    calls `stopping`, starts no further lab, and waits for those in progress.
    """

    def run_one(context: LabContext) -> LabOutcome[T]:
        try:
            outcome = LabOutcome(context, value=action(context))
        except Exception as error:
            failure = as_lab_error(error, partial(_log, context))
            failure.subject = context.subject
            outcome = LabOutcome(context, error=failure)
        on_result(outcome)
        return outcome

    with ThreadPoolExecutor(at_once) as threads:
        try:
            return list(threads.map(run_one, contexts))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            stopping()
            raise


def _log(context: LabContext, text: str) -> None:
    context.reporter.emit(Note(text=text, level="warning"))
