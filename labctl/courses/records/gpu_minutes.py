"""The minutes of GPUs that a class has used, and its jobs, as Slurm last reported them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.commands.slurm_accounting import ClassUser
from labctl.commands.slurm_jobs import ClassJobs
from labctl.config import CourseConfig
from labctl.config.identity import write_private
from labctl.decoding import decode_json
from labctl.model import Value
from labctl.servers.shared_server import account_name

FILE = "gpu-minutes.json"


class GpuMinutes(Value, frozen=True):
    """What one seat has used, and what course.yaml gives it; None has no limit.

    Running jobs count in `used` too, but not in what `jobs` has used.
    """

    used: int
    granted: int | None = None
    jobs: ClassJobs = ClassJobs()

    def __str__(self) -> str:
        return f"{self.used}" if self.granted is None else f"{self.used} of {self.granted}"


class _Record(Value, frozen=True):
    version: int = 1
    at: float = 0.0
    used: dict[str, int] = msgspec.field(default_factory=dict)
    jobs: dict[str, ClassJobs] = msgspec.field(default_factory=dict)


def record_gpu_minutes(
    private: Path, users: Iterable[ClassUser], jobs: Mapping[str, ClassJobs]
) -> None:
    """Store what these accounts have used, and their jobs. Those of others stay recorded."""
    before = _read(private)
    record = _Record(
        at=time.time(),
        used={**before.used, **{user.name: user.used_minutes for user in users}},
        jobs={**before.jobs, **jobs},
    )
    write_private(private / FILE, msgspec.json.encode(record))


def read_gpu_minutes(
    config: CourseConfig, private: Path, seats: Iterable[str]
) -> dict[str, GpuMinutes]:
    """Return the recorded minutes by seat; nothing for a course whose engine is not Slurm."""
    if config.shared is None or not config.shared.has_queue:
        return {}
    record = _read(private)
    granted = config.shared.gpu_minutes
    accounts = {seat: account_name(seat) for seat in seats}
    return {
        seat: GpuMinutes(
            record.used.get(account, 0), granted, record.jobs.get(account, ClassJobs())
        )
        for seat, account in accounts.items()
    }


def _read(private: Path) -> _Record:
    try:
        return decode_json((private / FILE).read_bytes(), _Record)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _Record()  # the next refresh reads them again
