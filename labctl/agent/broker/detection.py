"""Detection of a shared server, where accounts reach the engine only through a broker."""

from __future__ import annotations

import os
from pathlib import Path

BROKER = "/run/labctl/broker.sock"
# has a file for each job of Slurm that runs on this machine; missing where Slurm gives out no GPUs
JOBS = Path("/run/labctl/jobs")
ENGINE = "/var/run/docker.sock"
# the key of an error response that tells the broker's limits from the engine's own errors
LIMIT_KEY = "labctl_limit"


def is_in_job() -> bool:
    """Return whether this process is in a job of Slurm, which can open the job's own GPUs."""
    return "SLURM_JOB_ID" in os.environ


def is_brokered() -> bool:
    """Return whether this account reaches the engine through the broker and not directly."""
    return os.path.exists(BROKER) and not os.access(ENGINE, os.W_OK)  # noqa: PTH110 (3 ms less)
