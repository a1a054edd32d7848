"""Where a run reads and writes.

On a server labctl says so in the environment; on a laptop, where nothing is set, everything lies
beside the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    dataset: Path  # holds train/, val/ and test/; perhaps read-only
    checkpoints: Path
    logs: Path
    spare_dataset: Path  # writable: where the digits are made when `dataset` is missing and locked
    run_id: str  # labctl's name for this run; "local" without labctl


def from_environment(environ: Mapping[str, str], dataset_name: str = "digits") -> Places:
    """The places that `LABCTL_*` name, else the local defaults."""
    run = Path(environ.get("LABCTL_RUN_DIR", "."))
    data = environ.get("LABCTL_DATA_DIR")
    return Places(
        dataset=Path(data) / dataset_name if data else Path("dataset"),
        checkpoints=Path(environ.get("LABCTL_CHECKPOINT_DIR", run / "checkpoints")),
        logs=Path(environ.get("LABCTL_LOG_DIR", run / "logs")),
        spare_dataset=Path(environ.get("LABCTL_CACHE_DIR", run)) / "dataset",
        run_id=environ.get("LABCTL_RUN_ID", "local"),
    )
