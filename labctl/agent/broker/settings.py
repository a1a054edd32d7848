"""Settings of a shared server, which staff decides: a JSON file that root owns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..reply import Failure
from . import cgroup
from .rules import GIB, AccountShare

# fraction of the machine's memory for all accounts, in equal shares; the rest is for the machine
MEMORY_SHARE = 0.9


class BrokerSettings(NamedTuple):
    """The settings. 0 selects a default: equal shares of memory, and all cpus.

    With all cpus, the kernel divides the cores evenly among the accounts that use them. A
    container with a GPU that is not started within `gpu_claim_s` loses it. `disk_free_bytes` stay
    free on the disk of images; `image_bytes` is the size of the largest image accepted. With
    `needs_job` a container is a part of a job of Slurm, which decides about memory, cpus and GPUs.
    """

    group: str = "labctl"
    accounts: int = 8
    memory_bytes: int = 0
    cpus: float = 0.0
    pids: int = 4096
    containers: int = 16
    gpus_per_account: int = 1
    gpu_lease_s: int = 4 * 3600
    gpu_claim_s: float = 60.0
    disk_free_bytes: int = 5 * GIB
    image_bytes: int = 30 * GIB
    needs_job: bool = False

    @property
    def share(self) -> AccountShare:
        available = cgroup.read_total_memory_bytes() * MEMORY_SHARE
        memory = self.memory_bytes or round(available / max(1, self.accounts))
        cpus = min(self.cpus or 1e6, float(os.cpu_count() or 1))
        return AccountShare(memory, cpus, self.pids)


def load(path: Path) -> BrokerSettings:
    """Read the settings. Failure if others than root can change the file, or if it is invalid."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            fields: Any = json.load(file)
    except FileNotFoundError:
        return BrokerSettings()
    except (OSError, ValueError) as error:
        raise Failure("usage", f"cannot read {path}", str(error)) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Failure("policy", f"{path} can be changed by accounts other than root")
    unknown = (
        sorted(set(fields) - set(BrokerSettings._fields)) if isinstance(fields, dict) else ["all"]
    )
    if unknown:
        raise Failure("usage", f"{path}: unknown settings: {', '.join(unknown)}")
    return BrokerSettings(**fields)
