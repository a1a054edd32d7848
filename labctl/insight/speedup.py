"""The speed-up of a training on several GPUs, which a run wrote to logs/speedup.json.

The file may come from an untrusted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value

FILE = "speedup.json"
LARGEST_BYTES = 1024**2
ShortText = Annotated[str, msgspec.Meta(max_length=40)]


class StepTime(Value, frozen=True):
    """A step with so many processes. `variant` is how they exchanged what they computed.

    `bytes_per_step` is what one process sent.
    """

    variant: ShortText
    processes: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    seconds_per_step: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    bytes_per_step: Annotated[float, msgspec.Meta(ge=0, le=1e18)] = 0.0


class Speedup(Value, frozen=True):
    """Measured steps, all of `batch_size` items (0 if unknown). One row has a single process."""

    rows: Annotated[tuple[StepTime, ...], msgspec.Meta(max_length=500)]
    device: ShortText = ""
    backend: ShortText = ""
    batch_size: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 0

    @property
    def alone_s(self) -> float:
        """Seconds per step with one process."""
        return next(row.seconds_per_step for row in self.rows if row.processes == 1)


def read_speedup(path: Path) -> Speedup | None:
    """Read the file; None if it does not exist.

    Raises OSError if it cannot be read, and ValueError with the reason if it is not valid.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
    try:
        speedup = decode_json(text, Speedup)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not any(row.processes == 1 for row in speedup.rows):
        raise ValueError("no row has 1 process, so there is nothing to compare with")
    return speedup
