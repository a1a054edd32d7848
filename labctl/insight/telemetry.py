"""What the server measured while a run was on it: one sample a line, kept with the run's logs.

The server's watchdog writes `runs/<run>/logs/telemetry.jsonl` (`agent/host/telemetry.py`): one
JSON object every 10 s, after six hours once a minute, at most 8 MiB. What could not be measured is
absent from the line and None here, never 0. Samples stand in the order in which they were written;
between two attempts, and wherever nobody measured, there are gaps. The run could write into that
file as well, so it proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from labctl.model import Value

# Its name below a run's `logs`.
TELEMETRY_FILE = "telemetry.jsonl"

# What is read of one file: twice of what the watchdog writes.
MOST_BYTES = 16 * 1024**2

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class GpuSample(Value, frozen=True):
    """One GPU (or MIG instance) at one moment.

    `energy_j` is the card's own counter, a total. `throttle` says why its clock is held down:
    "thermal", "power", "hardware" (the board's own protection); empty where it is not.
    """

    uuid: str = ""
    name: str = ""
    use_percent: Amount | None = None
    memory_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_w: Amount | None = None
    power_limit_w: Amount | None = None
    temperature_c: float | None = None
    sm_clock_mhz: Amount | None = None
    sm_clock_max_mhz: Amount | None = None
    throttle: tuple[str, ...] = ()
    energy_j: Amount | None = None


class Sample(Value, frozen=True):
    """One moment of a run's container. `at` is Unix time on the server's clock.

    `cpu_cores` is how many cores it kept busy since the sample before, of `cores` that it may use.
    Disk and network are totals since the container began. `attempt` counts the servers that a
    recovered run was on, from 1. `gpus` are those that the run was given.
    """

    at: Amount
    attempt: Count = 1
    cpu_cores: Amount | None = None
    cores: Amount | None = None
    memory_bytes: Count | None = None
    memory_limit_bytes: Count | None = None
    shm_bytes: Count | None = None
    shm_limit_bytes: Count | None = None
    disk_read_bytes: Count | None = None
    disk_write_bytes: Count | None = None
    net_in_bytes: Count | None = None
    net_out_bytes: Count | None = None
    processes: Count | None = None
    gpus: tuple[GpuSample, ...] = ()


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples in this file, in its order; none where there is no such file.

    A last line that was cut and lines that are no sample are passed over. OSError where the file
    is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).splitlines()
    except FileNotFoundError:
        return ()
    decoder = msgspec.json.Decoder(Sample)
    samples = []
    for line in lines:
        try:
            samples.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return tuple(samples)
