"""Handle the servers of many labs at once: shared requests are sent once, and waits overlap.

One lab's failure does not stop another, and repeating the call retries what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from labctl.errors import LabError
from labctl.errors.unexpected import as_lab_error
from labctl.events import Note
from labctl.lifecycle import up as server_up
from labctl.model import Server
from labctl.servers import adoption, attempts, end_server, reachability
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
    tell: Callable[[LabOutcome[T]], None] = lambda outcome: None,
    stopping: Callable[[], None] = lambda: None,
) -> list[LabOutcome[T]]:
    """Call `action` for every lab, `at_once` at a time; return outcomes in the order of the labs.

    `tell` is called with each outcome, in the thread that produced it. When interrupted, this calls
    `stopping`, starts no further lab, and waits for those in progress.
    """

    def run_one(context: LabContext) -> LabOutcome[T]:
        try:
            outcome = LabOutcome(context, value=action(context))
        except Exception as error:
            failure = as_lab_error(error, partial(_log, context))
            failure.subject = context.subject
            outcome = LabOutcome(context, error=failure)
        tell(outcome)
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


def up(
    contexts: Sequence[LabContext],
    *,
    at_once: int = AT_ONCE,
    tell: Callable[[LabOutcome[Server]], None] = lambda outcome: None,
) -> list[LabOutcome[Server]]:
    """Get a ready server for each lab. The labs share one provider (`LabContext.beside`)."""
    listed = contexts[0].provider.servers() if contexts else []
    return run_for_each(contexts, lambda lab: server_up.up(lab, listed), at_once=at_once, tell=tell)


def reach(contexts: Sequence[LabContext], *, at_once: int = AT_ONCE) -> list[LabOutcome[Server]]:
    """Get a server for each lab, up to the first login; unlike `up`, prepare nothing on it."""
    listed = contexts[0].provider.servers() if contexts else []

    def reach_one(context: LabContext) -> Server:
        need = context.config.server.need
        server = adoption.adopt(context, listed) or attempts.create_server(context, need)
        return reachability.reach(context, server)[0]

    return run_for_each(contexts, reach_one, at_once=at_once)


def end(contexts: Sequence[LabContext], servers: Sequence[Server]) -> None:
    """Terminate all of these together, wait for them, and delete their records.

    Resources that their group shares are deleted too.
    """
    if not contexts:
        return
    first = contexts[0]
    end_server.end(first, servers)
    if first.group:
        shared = [
            resource for resource in first.provider.leftovers() if resource.lab_id == first.group
        ]
        end_server.remove_resources(
            first, [resource for resource in shared if resource.expires_at is None]
        )
