"""Retry, reconnect and polling policies over tenacity.

Half of each pause between two tries is random, so that a whole class that was rejected at the same
moment does not come back at the same moment. tenacity takes 10 ms to import, so a login imports it
only after a first rejection, and a poll only after a first check.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from labctl.errors import ThrottledError, TurnedAwayError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying
    from tenacity.wait import WaitBaseT

with lazy_imports(__name__):
    import tenacity

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Exception)
THROTTLED_PAUSE_S = 0.25
Errors = type[Exception] | tuple[type[Exception], ...]


def retry_on(
    errors: Errors,
    *,
    pause_s: float,
    longest_pause_s: float | None = None,
    growth: float = 2.0,
    deadline_s: float = math.inf,
    tries: int = sys.maxsize,
    before_pause: Callable[[BaseException], None] | None = None,
) -> Retrying:
    """Return a policy that calls a function again while it raises one of these errors.

    Call the policy with the function; it returns the function's result. Pauses grow by the factor
    `growth` up to `longest_pause_s`; without it all pauses are equal. The last error is raised when
    the next try would begin after `deadline_s` seconds, or when all `tries` are used.
    `before_pause` is called with each error that is followed by another try.
    """

    def announce(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if before_pause is not None and error is not None:
            before_pause(error)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        wait=_build_wait(pause_s, longest_pause_s, growth),
        stop=tenacity.stop_after_attempt(tries) | tenacity.stop_before_delay(deadline_s),
        before_sleep=announce,
        reraise=True,
    )


def retry_rejected_logins(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, and repeat the call while sshd rejects its login for load, for about 3 s.

    Pauses stay short: whichever client sshd accepts next has waited about as long, and a server
    that boots in a second would otherwise be ready for half of one before the next try.
    """
    return _retry_lazily(
        lambda: function(*args, **kwargs),
        TurnedAwayError,
        lambda: retry_on(TurnedAwayError, pause_s=0.2, longest_pause_s=1.5, growth=1.5, tries=7),
    )


def retry_throttled_calls() -> Retrying:
    """Retry while the provider throttles calls, for up to 120 s."""
    return retry_on(
        ThrottledError, pause_s=THROTTLED_PAUSE_S, longest_pause_s=5.0, deadline_s=120.0
    )


class ReconnectPolicy(Generic[E]):
    """Calls a function again while it raises one of these errors, for as long as that takes.

    Pauses double from `pause_s` up to `longest_pause_s`; `reset` makes the next one the first
    again. `on_cut` is called with each error and the seconds until the next try, and may raise to
    stop.
    """

    def __init__(
        self,
        errors: type[E] | tuple[type[E], ...],
        *,
        on_cut: Callable[[E, float], None],
        pause_s: float = 0.5,
        longest_pause_s: float = 10.0,
    ) -> None:
        self._errors = errors
        self._on_cut = on_cut
        self._first_pause_s = min(pause_s, longest_pause_s)
        self._longest_pause_s = longest_pause_s
        self._pause_s = self._first_pause_s

    def reset(self) -> None:
        """Start over with the shortest pause: call it once the connection works."""
        self._pause_s = self._first_pause_s

    def __call__(self, function: Callable[[], T]) -> T:
        self.reset()
        return _retry_lazily(function, self._errors, self._build)

    def _build(self) -> Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(self._errors),
            wait=lambda state: self._pause_s,
            before_sleep=self._announce,
            reraise=True,
        )

    def _announce(self, state: RetryCallState) -> None:
        error: Any = state.outcome.exception() if state.outcome else None
        self._on_cut(error, self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)


def poll_until(
    check: Callable[[], T],
    *,
    pause_s: float,
    longest_pause_s: float | None = None,
    deadline_s: float = math.inf,
) -> T:
    """Call `check` until it returns a true value, or until `deadline_s` seconds have passed.

    Returns the last call's value, which is false only after the deadline. `check` is called at
    least once. Pauses double up to `longest_pause_s`; without it all pauses are equal. An error of
    `check` ends the polling.
    """
    began_s = time.monotonic()
    results = [check()]
    if results[0]:
        return results[0]

    def repeat() -> T:
        return results.pop() if results else check()

    policy = tenacity.Retrying(
        retry=tenacity.retry_if_not_result(bool),
        wait=tenacity.wait_exponential(pause_s, longest_pause_s or pause_s),
        stop=tenacity.stop_after_delay(deadline_s - (time.monotonic() - began_s)),
        retry_error_callback=_return_last_result,
    )
    return policy(repeat)


def _retry_lazily(
    function: Callable[[], T], errors: Errors, build_policy: Callable[[], Retrying]
) -> T:
    """Call a function under a policy that is built, and tenacity imported, after a first error."""
    try:
        return function()
    except errors as error:
        first_errors = [error]

    def repeat() -> T:
        if first_errors:
            raise first_errors.pop()  # of the call above, which counts as the first try
        return function()

    return build_policy()(repeat)


def _return_last_result(state: RetryCallState) -> Any:
    return state.outcome.result() if state.outcome else None


def _build_wait(first_s: float, longest_s: float | None, growth: float) -> WaitBaseT:
    half, most = first_s / 2, (first_s if longest_s is None else longest_s) / 2
    fixed = tenacity.wait_exponential(half, most, growth)
    return fixed + tenacity.wait_random_exponential(half, most, growth)
