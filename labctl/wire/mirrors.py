"""Messages about a lab's store: passes of the mirror. Sizes are in bytes."""

from typing import NamedTuple, Tuple


class MirrorPassReply(NamedTuple):
    """How many files and bytes were sent, and `behind_bytes`, which were due and not sent.

    `failed` are names, each with the reason. `why` the store cannot be used now, "" if it can.
    `bytes_s` is the speed in bytes a second, 0.0 if nothing was sent.
    """

    sent: int
    bytes: int
    behind_bytes: int
    failed: Tuple[Tuple[str, str], ...]
    why: str
    bytes_s: float
