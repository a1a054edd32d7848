"""What is tried again, how often, and after which pauses; nothing here waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labctl.errors import BusyError, ConnectError, LabError, ThrottledError, TurnedAwayError
from labctl.retry import (
    ReconnectPolicy,
    poll_until,
    retry_on,
    retry_rejected_logins,
    retry_throttled_calls,
)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, on a clock that nothing else moves."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(made))
    return made


class Call:
    """Raises these errors, one a call, then answers."""

    def __init__(self, *errors: LabError) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self, answer: str) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return answer


def test_an_answer_costs_no_pause(pauses: list[float]) -> None:
    assert retry_on(BusyError, pause_s=1.0)(Call(), "yes") == "yes"
    assert pauses == []


def test_pauses_double_up_to_the_longest_and_half_of_each_is_random(pauses: list[float]) -> None:
    call = Call(*[BusyError("later")] * 60)
    assert retry_on(BusyError, pause_s=1.0, longest_pause_s=8.0)(call, "yes") == "yes"
    for pause, most in zip(pauses, [1.0, 2.0, 4.0, *[8.0] * 57], strict=True):
        assert most / 2 <= pause <= most
    assert len(set(pauses)) > 30


def test_pauses_grow_as_slowly_as_asked(pauses: list[float]) -> None:
    call = Call(*[BusyError("later")] * 20)
    policy = retry_on(BusyError, pause_s=0.1, longest_pause_s=2.0, growth=1.25)
    assert policy(call, "yes") == "yes"
    for number, pause in enumerate(pauses):
        most = min(2.0, 0.1 * 1.25**number)
        assert most / 2 <= pause <= most


def test_without_a_longest_pause_all_are_alike(pauses: list[float]) -> None:
    retry_on(BusyError, pause_s=1.0)(Call(*[BusyError("later")] * 20), "yes")
    assert all(0.5 <= pause <= 1.0 for pause in pauses)


def test_the_last_error_is_raised_before_the_deadline_is_over(pauses: list[float]) -> None:
    errors = [BusyError(str(number)) for number in range(100)]
    call = Call(*errors)
    with pytest.raises(BusyError) as caught:
        retry_on(BusyError, pause_s=1.0, deadline_s=10.0)(call, "yes")
    assert caught.value is errors[call.count - 1]
    assert 9.0 - 1.0 < sum(pauses) < 10.0


def test_the_last_error_is_raised_when_all_tries_are_spent(pauses: list[float]) -> None:
    call = Call(*[BusyError("later")] * 9)
    with pytest.raises(BusyError):
        retry_on(BusyError, pause_s=1.0, tries=3)(call, "yes")
    assert (call.count, len(pauses)) == (3, 2)


@pytest.mark.parametrize("error", [LabError("broken"), KeyboardInterrupt()])
def test_any_other_error_is_raised_at_once(pauses: list[float], error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        retry_on(BusyError, pause_s=1.0)(fail)
    assert caught.value is error
    assert pauses == []


def test_each_error_that_is_followed_by_a_try_is_told(pauses: list[float]) -> None:
    heard: list[str] = []
    policy = retry_on(
        BusyError, pause_s=1.0, tries=3, before_pause=lambda error: heard.append(str(error))
    )
    with pytest.raises(BusyError, match="c"):
        policy(Call(BusyError("a"), BusyError("b"), BusyError("c")), "yes")
    assert heard == ["a", "b"]


def test_who_is_turned_away_comes_back_within_seconds(pauses: list[float]) -> None:
    call = Call(*[TurnedAwayError("away")] * 9)
    with pytest.raises(TurnedAwayError):
        retry_rejected_logins(call, "yes")
    assert call.count == 7
    assert pauses[0] <= 0.2
    assert sum(pauses) <= 4.5
    unreachable = Call(ConnectError("unreachable"))
    with pytest.raises(ConnectError):
        retry_rejected_logins(unreachable, "yes")
    assert unreachable.count == 1


def test_throttling_is_waited_out_for_two_minutes(pauses: list[float]) -> None:
    assert retry_throttled_calls()(Call(*[ThrottledError("too fast")] * 20), "yes") == "yes"
    with pytest.raises(ThrottledError):
        retry_throttled_calls()(Call(*[ThrottledError("too fast")] * 999), "yes")
    assert all(pause <= 5.0 for pause in pauses)


def test_a_login_that_is_not_rejected_does_not_import_tenacity() -> None:
    lines = (
        "import sys",
        "from labctl.retry import retry_rejected_logins",
        "print(retry_rejected_logins(max, 1, 2), 'tenacity' in sys.modules)",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    "call",
    [
        "poll_until(lambda: 2, pause_s=1.0)",
        "ReconnectPolicy(OSError, on_cut=lambda error, pause_s: None)(lambda: 2)",
    ],
)
def test_what_succeeds_at_once_neither_waits_nor_imports_tenacity(call: str) -> None:
    lines = (
        "import sys, time",
        "time.sleep = None",
        "from labctl.retry import *",
        f"print({call}, 'tenacity' in sys.modules)",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_a_poll_calls_the_check_once_after_each_pause(pauses: list[float]) -> None:
    values = [0, None, "", "yes", "later"]
    assert poll_until(lambda: values.pop(0), pause_s=1.0) == "yes"
    assert pauses == [1.0, 1.0, 1.0]
    assert values == ["later"]


def test_the_pauses_of_a_poll_double_up_to_the_longest(pauses: list[float]) -> None:
    values = iter([False] * 6 + [True])
    assert poll_until(lambda: next(values), pause_s=1.0, longest_pause_s=6.0)
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("deadline_s", "expected"), [(3.0, [1.0] * 3), (2.5, [1.0] * 3), (0.0, []), (-5.0, [])]
)
def test_a_poll_returns_the_last_value_once_the_deadline_has_passed(
    pauses: list[float], deadline_s: float, expected: list[float]
) -> None:
    values = iter(["", None, 0, False, "no more"])
    last = poll_until(lambda: next(values), pause_s=1.0, deadline_s=deadline_s)
    assert last == ("" if deadline_s <= 0 else False)
    assert pauses == expected


def test_the_time_of_the_first_check_counts(pauses: list[float]) -> None:
    def check() -> bool:
        pauses.append(4.0)  # seconds that one check takes
        return False

    assert not poll_until(check, pause_s=1.0, deadline_s=8.0)
    assert pauses == [4.0, 1.0, 4.0]


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_of_the_check_ends_the_poll(pauses: list[float], before: int) -> None:
    error = BusyError("later")

    def check() -> bool:
        if len(pauses) == before:
            raise error
        return False

    with pytest.raises(BusyError) as caught:
        poll_until(check, pause_s=1.0)
    assert caught.value is error
    assert len(pauses) == before


def test_a_lost_connection_is_made_again_after_the_announced_pause(pauses: list[float]) -> None:
    errors = [ConnectError(str(number)) for number in range(7)]
    cuts: list[tuple[ConnectError, float]] = []
    policy = ReconnectPolicy(
        ConnectError, on_cut=lambda error, pause_s: cuts.append((error, pause_s))
    )
    call = Call(*errors)
    assert policy(lambda: call("yes")) == "yes"
    assert [error for error, _ in cuts] == errors
    assert pauses == [pause_s for _, pause_s in cuts] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_connection_that_worked_starts_with_the_shortest_pause_again(
    pauses: list[float],
) -> None:
    policy = ReconnectPolicy(
        (ConnectError, BusyError), on_cut=lambda error, pause_s: None, pause_s=1.0
    )
    calls = Call(*[ConnectError("cut")] * 3, *[BusyError("cut")] * 2)

    def connect() -> str:
        if calls.count == 3:
            policy.reset()
        return calls("yes")

    assert policy(connect) == "yes"
    assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_a_first_pause_is_no_longer_than_the_longest(pauses: list[float]) -> None:
    policy = ReconnectPolicy(
        BusyError, on_cut=lambda error, pause_s: None, pause_s=30.0, longest_pause_s=20.0
    )
    call = Call(BusyError("later"), BusyError("later"))
    assert policy(lambda: call("yes")) == "yes"
    assert pauses == [20.0, 20.0]


@pytest.mark.parametrize("cuts_before", [0, 2])
def test_no_connection_is_made_again_after_on_cut_raises(
    pauses: list[float], cuts_before: int
) -> None:
    error = ConnectError("last")
    call = Call(*[ConnectError("cut")] * cuts_before, error, ConnectError("never"))

    def on_cut(cut: ConnectError, pause_s: float) -> None:
        if cut is error:
            raise cut

    with pytest.raises(ConnectError) as caught:
        ReconnectPolicy(ConnectError, on_cut=on_cut)(lambda: call("yes"))
    assert caught.value is error
    assert (call.count, len(pauses)) == (cuts_before + 1, cuts_before)


@pytest.mark.parametrize("cuts_before", [0, 1])
def test_a_reconnect_ends_with_any_other_error(pauses: list[float], cuts_before: int) -> None:
    error = LabError("broken")
    call = Call(*[ConnectError("cut")] * cuts_before, error)
    with pytest.raises(LabError) as caught:
        ReconnectPolicy(ConnectError, on_cut=lambda cut, pause_s: None)(lambda: call("yes"))
    assert caught.value is error
    assert len(pauses) == cuts_before


def test_each_call_of_a_reconnect_policy_starts_with_the_shortest_pause(
    pauses: list[float],
) -> None:
    policy = ReconnectPolicy(ConnectError, on_cut=lambda error, pause_s: None, pause_s=1.0)
    for _ in range(2):
        call = Call(ConnectError("cut"), ConnectError("cut"))
        assert policy(lambda call=call: call("yes")) == "yes"
    assert pauses == [1.0, 2.0, 1.0, 2.0]
