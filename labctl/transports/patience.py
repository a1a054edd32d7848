"""Trying again where sshd turned us away before anything began."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from labctl.errors import ConnectError

T = TypeVar("T")

PAUSES_S = (0.2, 0.4, 0.8, 1.6)


class TurnedAwayError(ConnectError):
    """The server hung up before it greeted: too many log in at once (sshd's MaxStartups)."""


def patiently(attempt: Callable[[], T]) -> T:
    """`attempt`'s result, tried again a few times, within about 3 s, while it is turned away.

    The pauses are random, so that a class that came at once does not come back at once.
    """
    for pause_s in PAUSES_S:
        try:
            return attempt()
        except TurnedAwayError:
            time.sleep(random.uniform(0.5, 1.5) * pause_s)
    return attempt()
