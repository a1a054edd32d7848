"""Whose turn it is to recover a run, where several watch it.

On one machine the lab's lock decides. Between a laptop and a keeper with a store it is a lease
there, `runs/<run>/watch.json`: {"holder", "beat", "at"}, taken by a conditional put for the length
of one recovery and renewed every BEAT_S. A holder that falls silent for STALE_S, by the clock of
the one who waits, is replaced; it notices that before it does anything more. Without a store only
the keeper that the lab was handed to recovers.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from labctl.errors import BusyError, LabError
from labctl.events import Note
from labctl.servers.context import Ground
from labctl.state.ledgers import BACK, HANDED
from labctl.stores import Store

BEAT_S = 15.0
STALE_S = 60.0
LOOK_S = 2.0
LONGEST_WAIT_S = 3600.0


class NotOursError(BusyError):
    """Somebody else recovers this run now."""


def handed_to(ground: Ground) -> str:
    """The host whose keeper this lab was handed to; "" where it is this machine's own."""
    given = ground.state.events(lab_id=ground.lab_id, kind=HANDED, limit=1)
    taken = ground.state.events(lab_id=ground.lab_id, kind=BACK, limit=1)
    if not given or (taken and taken[0].at >= given[0].at):
        return ""
    return str(given[0].detail.get("keeper", ""))


class Turn:
    """One recovery's right to go on. `check` before each step that could be done twice."""

    def __init__(self, store: Store | None, key: str) -> None:
        self._store = store
        self._key = key
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self._beat = 0
        self._raw: bytes | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def take(self) -> str:
        """Take it where it is free: "" then, else who has it. Errors of the store as they come."""
        if self._store is None:
            return ""
        raw = self._store.read(self._key)
        holder = _holder(raw)
        if holder and holder != self._holder:
            return holder
        return "" if self._swap(raw, self._holder) else "somebody else"

    def take_from(self, silent: bytes) -> bool:
        """Replace a holder whose last words were `silent`; False where it has spoken since."""
        return self._swap(silent, self._holder)

    def seen(self) -> bytes | None:
        return None if self._store is None else self._store.read(self._key)

    def check(self) -> None:
        """NotOursError where it was taken over meanwhile, as after a long sleep of this machine."""
        with self._lock:
            if not self._swap(self._raw, self._holder) and not self._ours_after_all():
                raise NotOursError(
                    "another watcher has taken over this recovery",
                    why="this machine was silent for too long",
                    hint="labctl logs -f",
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renewed meanwhile, free afterwards."""
        if self._store is None:
            yield
            return
        beats = threading.Thread(target=self._beats, daemon=True)
        beats.start()
        try:
            yield
        finally:
            self._ended.set()
            beats.join()
            with suppress(LabError):  # one that stays behind is stale after STALE_S
                self._swap(self._raw, "")

    def _beats(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(LabError):  # `check` says it, where it matters
                self.check()

    def _ours_after_all(self) -> bool:
        """A write whose answer was lost has been done all the same."""
        raw = self.seen()
        if _holder(raw) != self._holder:
            return False
        self._raw = raw
        return True

    def _swap(self, expected: bytes | None, holder: str) -> bool:
        if self._store is None:
            return True
        self._beat += 1
        body = {"version": 1, "holder": holder, "beat": self._beat, "at": time.time()}
        raw = json.dumps(body).encode()
        if not self._store.swap(self._key, raw, expected):
            return False
        self._raw = raw
        return True


@contextmanager
def our_turn(ground: Ground, run_id: str, *, wait: bool) -> Iterator[Turn]:
    """Hold the turn to recover a run; without `wait`, NotOursError where another has it.

    The lab's own rule comes first: one that was handed to a keeper, and has no store, is not
    recovered here.
    """
    with _alone_here(ground, run_id, wait):
        yield from _agreed(ground, run_id, wait)


@contextmanager
def _alone_here(ground: Ground, run_id: str, wait: bool) -> Iterator[None]:
    """No other process of this machine recovers a run of this lab meanwhile."""
    name, wait_s = f"{ground.lab_id}-recover", LONGEST_WAIT_S if wait else 0.0
    with ExitStack() as held:
        try:
            held.enter_context(ground.state.exclusive(name, f"recover {run_id}", wait_s=wait_s))
        except BusyError as error:
            raise NotOursError(error.what, why=error.why, hint=error.hint) from error
        yield


def _agreed(ground: Ground, run_id: str, wait: bool) -> Iterator[Turn]:
    """Hold the turn among machines."""
    if not ground.config.store:
        if keeper := handed_to(ground):
            raise NotOursError(
                f"{ground.config.name} was handed to the keeper at {keeper}",
                why="the lab has no store, in which two watchers could agree",
                hint="labctl status",
            )
        yield Turn(None, "")
        return
    from labctl.stores.lab_store import lab_store

    turn = Turn(lab_store(ground), f"runs/{run_id}/watch.json")
    holder = turn.take()
    if holder and not wait:
        raise NotOursError(f"{_host(holder)} recovers {run_id} now", hint="labctl status")
    if holder:
        text = f"{_host(holder)} recovers {run_id} now; waiting for it"
        ground.reporter.emit(Note(text=text))
        _wait(turn)
    with turn.kept():
        yield turn


def _wait(turn: Turn) -> None:
    """Until the turn is ours: given free, or silent for too long."""
    last, since = turn.seen(), time.monotonic()
    while turn.take():
        time.sleep(LOOK_S)
        now = turn.seen()
        if now != last:
            last, since = now, time.monotonic()
        elif now is not None and time.monotonic() - since > STALE_S and turn.take_from(now):
            return


def _holder(raw: bytes | None) -> str:
    try:
        body: dict[str, Any] = json.loads(raw or b"{}")
        return str(body.get("holder", ""))
    except (ValueError, AttributeError):
        return ""


def _host(holder: str) -> str:
    return holder.partition(":")[0]
