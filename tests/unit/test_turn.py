"""Whose turn it is to recover: a lease in a store that two watchers share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from labctl.errors import ConnectError
from labctl.lifecycle import recovery_lock
from labctl.lifecycle.recovery_lock import RecoveryLock, RecoveryLockedError

KEY = "runs/night/watch.json"


class Memory:
    """A store of one machine, whose answers can get lost."""

    url = "memory://"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.loses_answer = False
        self.unreachable = False

    def read(self, key: str) -> bytes | None:
        self._reached()
        return self.held.get(key)

    def write(self, key: str, data: bytes) -> None:
        raise AssertionError("a lease is only ever swapped")

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        raise AssertionError("a lease is small")

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        self._reached()
        with self.lock:
            if self.held.get(key) != expected:
                return False
            self.held[key] = data
        if self.loses_answer:
            self.loses_answer = False
            raise ConnectError("the answer was lost")
        return True

    def _reached(self) -> None:
        if self.unreachable:
            raise ConnectError("the store cannot be reached")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_lock, "BEAT_S", 0.02)
    monkeypatch.setattr(recovery_lock, "POLL_S", 0.02)
    monkeypatch.setattr(recovery_lock, "STALE_S", 0.3)


def test_of_two_one_has_the_turn_and_hands_it_on() -> None:
    store = Memory()
    laptop, keeper = RecoveryLock(store, KEY), RecoveryLock(store, KEY)
    assert laptop.try_acquire() == ""
    with laptop.hold():
        laptop.renew()
        assert keeper.try_acquire() != ""
    assert keeper.try_acquire() == ""


def test_of_many_at_once_one_has_it() -> None:
    store = Memory()
    turns = [RecoveryLock(store, KEY) for _ in range(20)]
    start, got = threading.Barrier(20), []

    def take(one: RecoveryLock) -> None:
        start.wait()
        if not one.try_acquire():
            got.append(one)

    threads = [threading.Thread(target=take, args=(one,)) for one in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


@pytest.mark.usefixtures("quick")
def test_who_falls_silent_is_replaced_and_notices() -> None:
    store = Memory()
    asleep, awake = RecoveryLock(store, KEY), RecoveryLock(store, KEY)
    assert asleep.try_acquire() == ""
    recovery_lock._await_lock(awake)
    awake.renew()
    with pytest.raises(RecoveryLockedError, match="taken over"):
        asleep.renew()


@pytest.mark.usefixtures("quick")
def test_who_goes_on_speaking_is_not_replaced() -> None:
    store = Memory()
    busy, waiting = RecoveryLock(store, KEY), RecoveryLock(store, KEY)
    assert busy.try_acquire() == ""
    waiter = threading.Thread(target=recovery_lock._await_lock, args=(waiting,))
    with busy.hold():
        waiter.start()
        waiter.join(1.0)  # three times as long as one may be silent
        assert waiter.is_alive()
        busy.renew()
    waiter.join(120)
    assert not waiter.is_alive()
    waiting.renew()


def test_an_answer_that_was_lost_costs_nobody_the_turn() -> None:
    store = Memory()
    ours = RecoveryLock(store, KEY)
    assert ours.try_acquire() == ""
    store.loses_answer = True
    with pytest.raises(ConnectError):
        ours.renew()
    ours.renew()


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_away_for_a_moment_is_no_end() -> None:
    store = Memory()
    ours = RecoveryLock(store, KEY)
    assert ours.try_acquire() == ""
    with ours.hold():
        store.unreachable = True
        with pytest.raises(ConnectError):
            ours.renew()
        store.unreachable = False
        ours.renew()


def test_what_lies_there_and_is_no_lease_counts_as_free() -> None:
    store = Memory()
    store.held[KEY] = b"[half"
    assert RecoveryLock(store, KEY).try_acquire() == ""
