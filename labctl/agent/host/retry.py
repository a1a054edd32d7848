"""Call a function again after an error.

The client uses tenacity for this. The agent does not: its vendored packages are the files that are
installed with labctl, and tenacity 9.0, the last version for Python 3.8, would have to be that
version for everybody. Importing it also loads 40 modules, more than a run's start needs in all.
"""

from __future__ import annotations

import time
from typing import Callable, Iterable, Iterator, Tuple, Type, TypeVar, Union

T = TypeVar("T")
Errors = Union[Type[Exception], Tuple[Type[Exception], ...]]


def retry_on(errors: Errors, function: Callable[[], T], pauses_s: Iterable[float]) -> T:
    """Call a function until it raises none of these errors, with these pauses between the calls.

    The last error is raised once no pause is left.
    """
    for pause_s in pauses_s:
        try:
            return function()
        except errors:
            time.sleep(pause_s)
    return function()


def repeat_pause(pause_s: float, limit_s: float) -> Iterator[float]:
    """Yield the same pause again and again, for `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        yield pause_s
