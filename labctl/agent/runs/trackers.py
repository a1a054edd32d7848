"""The files by which a run in its image finds MLflow or Weights & Biases; see trackers.sh."""

from __future__ import annotations

from pathlib import Path

from ..host.paths import write_text

# Variables of a run that ask for a tracker begin with this.
PREFIX = "LABCTL_TRACK_"
FILES = ("trackers.sh", "mlflow_run.py")


def write_tracker_files(directory: Path, env: dict[str, str]) -> None:
    """Write the files beside entry.sh if a variable of the run asks for a tracker."""
    if any(name.startswith(PREFIX) for name in env):
        for name in FILES:
            write_text(directory / name, Path(__file__).with_name(name).read_text())
