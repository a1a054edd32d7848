"""What staff decides about a shared server: one JSON file of root's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..reply import Failure
from . import cgroup
from .rules import GIB, Share

# Of the machine's memory, shared out evenly; the rest is for the machine itself.
MEMORY_SHARE = 0.9


class Settings(NamedTuple):
    """A number that is 0 is decided here: memory by even shares, cpus as many as there are, for
    then the cores go round evenly among those who want them.

    A container with a GPU that is not started within `gpu_claim_s` loses it.
    `disk_free_bytes` is left free where images lie; `image_bytes` is the largest that is taken.
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

    @property
    def share(self) -> Share:
        whole = cgroup.whole_memory_bytes() * MEMORY_SHARE
        memory = self.memory_bytes or round(whole / max(1, self.accounts))
        cpus = min(self.cpus or 1e6, float(os.cpu_count() or 1))
        return Share(memory, cpus, self.pids)


def load(path: Path) -> Settings:
    """Failure where it is not root's alone to change, or not understood."""
    try:
        with path.open(encoding="utf-8") as file:
            held = os.fstat(file.fileno())
            found: Any = json.load(file)
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise Failure("usage", f"{path} cannot be read", str(error)) from None
    if held.st_uid != os.geteuid() or held.st_mode & 0o022:
        raise Failure("policy", f"{path} could be changed by others than root")
    unknown = sorted(set(found) - set(Settings._fields)) if isinstance(found, dict) else ["all"]
    if unknown:
        raise Failure("usage", f"{path}: not known: {', '.join(unknown)}")
    return Settings(**found)
