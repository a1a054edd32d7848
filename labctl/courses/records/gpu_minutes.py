"""The minutes of GPUs that a class has used, as Slurm counted them when it was last asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from labctl.commands.slurm_accounting import ClassUser
from labctl.config import CourseConfig
from labctl.config.identity import write_private
from labctl.model import Value
from labctl.servers.shared_server import account_name

FILE = "gpu-minutes.json"


class GpuMinutes(Value, frozen=True):
    """What one seat has used, and what course.yaml gives it; None has no limit."""

    used: int
    granted: int | None = None

    def __str__(self) -> str:
        return f"{self.used}" if self.granted is None else f"{self.used} of {self.granted}"


class _Record(Value, frozen=True):
    version: int = 1
    at: float = 0.0
    used: dict[str, int] = msgspec.field(default_factory=dict)


def record_gpu_minutes(private: Path, users: Iterable[ClassUser]) -> None:
    """Store what these accounts have used. What others used before stays recorded."""
    used = {**_read(private), **{user.name: user.used_minutes for user in users}}
    write_private(private / FILE, msgspec.json.encode(_Record(at=time.time(), used=used)))


def read_gpu_minutes(
    config: CourseConfig, private: Path, seats: Iterable[str]
) -> dict[str, GpuMinutes]:
    """Return the recorded minutes by seat; nothing for a course whose engine is not Slurm."""
    if config.shared is None or not config.shared.has_queue:
        return {}
    used = _read(private)
    granted = config.shared.gpu_minutes
    return {seat: GpuMinutes(used.get(account_name(seat), 0), granted) for seat in seats}


def _read(private: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode((private / FILE).read_bytes(), type=_Record).used
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}  # the next refresh reads them again
