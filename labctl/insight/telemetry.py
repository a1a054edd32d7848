"""Read the telemetry of a run: one sample per line, stored with the run's logs.

A recorder beside the run writes `runs/<run>/logs/telemetry.jsonl` (`agent/host/telemetry.py`): one
JSON object every 10 s, after six hours once a minute, at most 8 MiB. A value that could not be
measured is absent from the line and None here, never 0. Samples are in the order of writing, with
gaps between attempts and while the recorder did not run. The run itself could write to the file,
so it proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from labctl.model import Value

# File name in a run's `logs`.
TELEMETRY_FILE = "telemetry.jsonl"

# bytes read of one file at most: twice what the recorder writes
MOST_BYTES = 16 * 1024**2

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class GpuSample(Value, frozen=True):
    """One GPU (or MIG instance) at one moment.

    `energy_j` is the total of the GPU's own counter. `throttle` lists why its clock is reduced:
    "thermal", "power", "hardware" (the board's own protection).
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


class OtherProgram(Value, frozen=True):
    """A program beside a run. `run` is its run if it has one of the same account.

    `gpus` are the UUIDs of those of the run's GPUs on which it computes too.
    """

    name: str
    person: str = ""
    run: str = ""
    cpu_cores: Amount = 0.0
    gpus: tuple[str, ...] = ()


class Sample(Value, frozen=True):
    """One moment of a run's container. `at` is Unix time on the server's clock.

    `cpu_cores` is the number of cores busy since the previous sample, of `cores` that it may use.
    Disk and network are totals since the container's start. `attempt` counts the servers of a
    recovered run, from 1. `gpus` are those of the run. `host_cpu_cores` of the server's
    `host_cores` were busy, with this run, and `other_runs` lived beside it. `others` are
    the busiest programs beside the run, and those on its GPUs; earlier versions recorded none.
    `log_bytes` is the size of the run's log.
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
    host_cores: Amount | None = None
    host_cpu_cores: Amount | None = None
    other_runs: Count | None = None
    others: tuple[OtherProgram, ...] = ()
    log_bytes: Count | None = None


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read the samples of this file, in its order; empty if the file does not exist.

    An incomplete last line and invalid lines are skipped. OSError if an existing file cannot be
    read.
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
