"""Where a run reads and writes.

On a server labctl says so in the environment; on a laptop, where nothing is
set, everything lies beside the code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOCAL = "local"


@dataclass(frozen=True)
class Places:
    dataset: Path  # holds train/, val/ and test/; perhaps read-only
    checkpoints: Path
    logs: Path
    # An earlier run's checkpoints, which a new run continues from.
    start: Path
    # Writable: where the digits are made when `dataset` is missing and locked.
    spare_dataset: Path
    run_id: str  # labctl's name for this run; "local" without labctl

    @property
    def where(self) -> str:
        """The name of this machine in evaluation.json: "here" or "server"."""
        return "here" if self.run_id == LOCAL else "server"


def from_environment(environ: Mapping[str, str], dataset_name: str = "digits") -> Places:
    """Return the paths that `LABCTL_*` name, else the local defaults."""
    run = Path(environ.get("LABCTL_RUN_DIR", "."))
    data = environ.get("LABCTL_DATA_DIR")
    return Places(
        dataset=Path(data) / dataset_name if data else Path("dataset"),
        checkpoints=Path(environ.get("LABCTL_CHECKPOINT_DIR", run / "checkpoints")),
        logs=Path(environ.get("LABCTL_LOG_DIR", run / "logs")),
        start=(Path(data) if data else run) / "start",
        spare_dataset=Path(environ.get("LABCTL_CACHE_DIR", run)) / "dataset",
        run_id=environ.get("LABCTL_RUN_ID", LOCAL),
    )


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a file atomically, so that a reader sees either the old or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values) + "\n")
    partial.replace(path)
