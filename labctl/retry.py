"""Trying again what may succeed later: policies over tenacity.

Half of each pause is random: a class that was turned away at once must not come back at once.
tenacity is imported by the first call that may have to be repeated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from labctl.errors import ThrottledError, TurnedAwayError

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying
    from tenacity.wait import WaitBaseT

THROTTLED_PAUSE_S = 0.25
Errors = type[Exception] | tuple[type[Exception], ...]


def retry_on(
    errors: Errors,
    *,
    pause_s: float,
    longest_pause_s: float | None = None,
    deadline_s: float = math.inf,
    tries: int = sys.maxsize,
    before_pause: Callable[[BaseException], None] | None = None,
) -> Retrying:
    """A policy, to be called with a function: its result, through these errors.

    Pauses double up to `longest_pause_s`; without it all are alike. The last error is raised when
    the next try would begin after `deadline_s` seconds, or when all `tries` are spent.
    `before_pause` hears each error after which there is another try.
    """
    import tenacity

    def announce(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if before_pause is not None and error is not None:
            before_pause(error)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        wait=_pauses(pause_s, longest_pause_s),
        stop=tenacity.stop_after_attempt(tries) | tenacity.stop_before_delay(deadline_s),
        before_sleep=announce,
        reraise=True,
    )


def while_turned_away() -> Retrying:
    """For about 3 s: whoever sshd lets in next was waiting as long."""
    return retry_on(TurnedAwayError, pause_s=0.3, longest_pause_s=2.4, tries=5)


def while_throttled() -> Retrying:
    """Until the provider takes calls again."""
    return retry_on(
        ThrottledError, pause_s=THROTTLED_PAUSE_S, longest_pause_s=5.0, deadline_s=120.0
    )


def _pauses(first_s: float, longest_s: float | None) -> WaitBaseT:
    from tenacity import wait_exponential, wait_random_exponential

    half, most = first_s / 2, (first_s if longest_s is None else longest_s) / 2
    return wait_exponential(half, most) + wait_random_exponential(half, most)
