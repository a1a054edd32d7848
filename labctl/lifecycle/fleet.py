"""The servers of many labs at once: what they share is asked once, and waiting is done together.

One lab's failure stops no other, and the same call again mends what failed.
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
from labctl.servers.context import Ground

T = TypeVar("T")
AT_ONCE = 32


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one lab: `value`, or `error`."""

    ground: Ground
    value: T | None = None
    error: LabError | None = None


def each(
    grounds: Iterable[Ground],
    deed: Callable[[Ground], T],
    *,
    at_once: int = AT_ONCE,
    tell: Callable[[Outcome[T]], None] = lambda outcome: None,
    stopping: Callable[[], None] = lambda: None,
) -> list[Outcome[T]]:
    """Do `deed` for every lab, `at_once` at a time; outcomes in the order of the labs.

    `tell` hears of each as it ends, in the thread where it ended. Interrupted, it begins with no
    further lab, and waits for those that it has begun, once it has called `stopping`.
    """

    def one(ground: Ground) -> Outcome[T]:
        try:
            outcome = Outcome(ground, value=deed(ground))
        except Exception as error:
            outcome = Outcome(ground, error=as_lab_error(error, partial(_log, ground)))
        tell(outcome)
        return outcome

    with ThreadPoolExecutor(at_once) as threads:
        try:
            return list(threads.map(one, grounds))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            stopping()
            raise


def _log(ground: Ground, text: str) -> None:
    ground.reporter.emit(Note(text=text, level="warning"))


def up(
    grounds: Sequence[Ground],
    *,
    at_once: int = AT_ONCE,
    tell: Callable[[Outcome[Server]], None] = lambda outcome: None,
) -> list[Outcome[Server]]:
    """A ready server for each lab. They share one provider (`Ground.beside`)."""
    listed = grounds[0].provider.servers() if grounds else []
    return each(grounds, lambda one: server_up.up(one, listed), at_once=at_once, tell=tell)


def reach(grounds: Sequence[Ground], *, at_once: int = AT_ONCE) -> list[Outcome[Server]]:
    """Like `up`, but only to the first login: nothing is prepared there."""
    listed = grounds[0].provider.servers() if grounds else []

    def one(ground: Ground) -> Server:
        need = ground.config.server.need
        server = adoption.adopt(ground, listed) or attempts.make(ground, need)
        return reachability.reach(ground, server)[0]

    return each(grounds, one, at_once=at_once)


def end(grounds: Sequence[Ground], servers: Sequence[Server]) -> None:
    """Terminate all of these, ordered and waited for together; their records go.

    What their group shared goes with them.
    """
    if not grounds:
        return
    first = grounds[0]
    end_server.end(first, servers)
    if first.group:
        shared = [one for one in first.provider.leftovers() if one.lab_id == first.group]
        end_server.take_away(first, [one for one in shared if one.expires_at is None])
