"""When a server counts as dead: by checks of a process that was awake all the time."""

from __future__ import annotations

from labctl.lifecycle.server_loss import DEAD_CHECKS, DEAD_S, PAUSE_S, FailedChecks


def counts_as_dead(silences: FailedChecks, start_s: float, count: int, apart_s: float) -> bool:
    return [silences.note_failure("one", start_s + n * apart_s) for n in range(count)][-1]


def test_ten_minutes_of_silence_are_death() -> None:
    apart_s = DEAD_S / DEAD_CHECKS
    assert not counts_as_dead(FailedChecks(), 0.0, DEAD_CHECKS, apart_s)
    assert counts_as_dead(FailedChecks(), 0.0, DEAD_CHECKS + 1, apart_s)


def test_many_looks_in_a_moment_are_not() -> None:
    assert not counts_as_dead(FailedChecks(), 0.0, 100, 1.0)


def test_a_machine_that_slept_begins_anew() -> None:
    silences = FailedChecks()
    assert not counts_as_dead(silences, 0.0, DEAD_CHECKS - 1, 30.0)
    assert not silences.note_failure("one", DEAD_CHECKS * 30.0 + PAUSE_S + 1)


def test_an_answer_begins_anew_and_servers_are_counted_each() -> None:
    silences = FailedChecks()
    assert not counts_as_dead(silences, 0.0, DEAD_CHECKS, 50.0)
    silences.reset("one")
    assert not silences.note_failure("one", DEAD_S + 1)
    assert not silences.note_failure("two", DEAD_S + 2)
