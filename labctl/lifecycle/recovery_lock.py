"""The lock that lets only one of several watchers recover a run.

On one machine, the lab's lock decides. A laptop and a keeper with a store use a lease in the store,
`runs/<run>/watch.json`: {"holder", "beat", "at"}. It is taken by a conditional put, held for one
recovery, and renewed every BEAT_S seconds. A holder that is silent for STALE_S seconds, by the
waiting watcher's clock, is replaced, and notices that before its next step. Without a store, only
the keeper that the lab was exported to recovers.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from labctl.errors import BusyError, LabError
from labctl.events import Note
from labctl.lazy import lazy_imports
from labctl.retry import poll_until
from labctl.servers.context import LabContext
from labctl.state.ledgers import BACK, HANDED
from labctl.stores import LabStore

with lazy_imports(__name__):
    from labctl.stores import lab_store

BEAT_S = 15.0
STALE_S = 60.0
POLL_S = 2.0
LONGEST_WAIT_S = 3600.0


class RecoveryLockedError(BusyError):
    """Another watcher is recovering this run."""


def find_keeper(context: LabContext, run_id: str = "") -> str:
    """Return the host of the keeper that this lab was exported to, "" if none keeps it.

    With `run_id`, only if that run was exported. The keeper itself has no other keeper, although it
    shares the records of a user who exported the lab to their own account.
    """
    if context.is_keeper:
        return ""
    exports = context.state.list_events(
        lab_id=context.lab_id, run_id=run_id or None, kind=HANDED, limit=1
    )
    returns = context.state.list_events(lab_id=context.lab_id, kind=BACK, limit=1)
    if not exports or (returns and returns[0].at >= exports[0].at):
        return ""
    return str(exports[0].detail.get("keeper", ""))


class RecoveryLock:
    """The lock for one recovery. Call `check` before each step that must not be done twice."""

    def __init__(self, store: LabStore | None, key: str) -> None:
        self._store = store
        self._key = key
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self._beat = 0
        self._raw: bytes | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def try_acquire(self) -> str:
        """Take the lock if it is free; return "", or the holder. Raises the store's errors."""
        if self._store is None:
            return ""
        raw = self._store.read(self._key)
        holder = _holder(raw)
        if holder and holder != self._holder:
            return holder
        return "" if self._swap(raw, self._holder) else "another watcher"

    def take_over(self, silent: bytes) -> bool:
        """Replace a holder whose last record is `silent`; False if it was renewed since."""
        return self._swap(silent, self._holder)

    def read_record(self) -> bytes | None:
        return None if self._store is None else self._store.read(self._key)

    def renew(self) -> None:
        """RecoveryLockedError if another watcher took over, as while this machine slept."""
        with self._lock:
            if not self._swap(self._raw, self._holder) and not self._is_still_holder():
                raise RecoveryLockedError(
                    "another watcher has taken over this recovery",
                    why=f"this machine did not renew its lease for {STALE_S:.0f} s",
                    hint="labctl logs -f",
                )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Renew the lock in a thread meanwhile, and release it afterwards."""
        if self._store is None:
            yield
            return
        beats = threading.Thread(target=self._renew_regularly, daemon=True)
        beats.start()
        try:
            yield
        finally:
            self._ended.set()
            beats.join()
            with suppress(LabError):  # a lease that is not released is stale after STALE_S
                self._swap(self._raw, "")

    def _renew_regularly(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(LabError):  # the next `check` of the recovery itself reports it
                self.renew()

    def _is_still_holder(self) -> bool:
        """Whether this watcher still holds the lock: a write whose reply was lost did succeed."""
        raw = self.read_record()
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
def hold_recovery_lock(context: LabContext, run_id: str, *, wait: bool) -> Iterator[RecoveryLock]:
    """Hold the lock to recover a run.

    RecoveryLockedError if another watcher holds it and `wait` is false, or if a lab without a store
    was exported to a keeper: only that keeper recovers it.
    """
    with _lock_machine(context, run_id, wait):
        yield from _lock_store(context, run_id, wait)


@contextmanager
def hold_recovery_locks(
    context: LabContext, run_ids: Sequence[str]
) -> Iterator[dict[str, RecoveryLock]]:
    """Hold the locks to recover several runs of the lab, by run id; waits for other watchers."""
    if not run_ids:
        yield {}
        return
    with ExitStack() as held:
        held.enter_context(_lock_machine(context, run_ids[0], wait=True))
        lock = contextmanager(_lock_store)
        yield {run_id: held.enter_context(lock(context, run_id, True)) for run_id in run_ids}


@contextmanager
def _lock_machine(context: LabContext, run_id: str, wait: bool) -> Iterator[None]:
    """Exclude other processes of this machine from recovering a run of this lab."""
    name, wait_s = f"{context.lab_id}-recover", LONGEST_WAIT_S if wait else 0.0
    with ExitStack() as held:
        try:
            what = f"recovering the run {run_id}"
            lock = context.state.lock(name, what, wait_s=wait_s, is_command=False)
            held.enter_context(lock)
        except BusyError as error:
            raise RecoveryLockedError(error.what, why=error.why, hint=error.next_step) from error
        yield


def _lock_store(context: LabContext, run_id: str, wait: bool) -> Iterator[RecoveryLock]:
    """Hold the lock among machines, a lease in the lab's store."""
    if not context.config.store:
        if keeper := find_keeper(context):
            raise RecoveryLockedError(
                f"{context.config.name} was exported to the keeper at {keeper}",
                why="without a store, only the keeper can recover its runs",
                hint="labctl status",
            )
        yield RecoveryLock(None, "")
        return
    lock = RecoveryLock(lab_store.open_lab_store(context), f"runs/{run_id}/watch.json")
    holder = lock.try_acquire()
    if holder and not wait:
        raise RecoveryLockedError(f"{_host(holder)} is recovering {run_id}", hint="labctl status")
    if holder:
        text = f"{_host(holder)} is recovering {run_id}; waiting for it to finish"
        context.reporter.emit(Note(text=text))
        _await_lock(lock)
    with lock.hold():
        yield lock


def _await_lock(lock: RecoveryLock) -> None:
    """Wait until the lock is released, or its holder was silent for too long; then take it."""
    last, since = lock.read_record(), time.monotonic()

    def acquire() -> bool:
        nonlocal last, since
        if not lock.try_acquire():
            return True
        now = lock.read_record()
        if now != last:
            last, since = now, time.monotonic()
            return False
        if now is None or time.monotonic() - since <= STALE_S:
            return False
        return lock.take_over(now)

    poll_until(acquire, pause_s=POLL_S)


def _holder(raw: bytes | None) -> str:
    try:
        body: dict[str, Any] = json.loads(raw or b"{}")
        return str(body.get("holder", ""))
    except (ValueError, AttributeError):
        return ""


def _host(holder: str) -> str:
    return holder.partition(":")[0]
