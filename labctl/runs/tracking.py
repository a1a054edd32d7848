"""Variables by which a run's program finds its experiment trackers, with ids that a resume keeps.

The rest, paths and the MLflow run, depends on the server: agent/runs/trackers.sh sets it.
"""

from __future__ import annotations

from labctl.config import LabConfig

MLFLOW = "mlflow"


def build_tracking_env(config: LabConfig, run_id: str) -> dict[str, str]:
    """Return the variables of a run. Those in lab.yaml's `env` have priority."""
    variables: dict[str, str] = {}
    service = config.services.get(MLFLOW)
    if service is not None and not service.command:
        variables["LABCTL_TRACK_MLFLOW"] = config.name
    if config.track.wandb:
        variables |= {
            "LABCTL_TRACK_WANDB": config.track.wandb,
            "WANDB_MODE": config.track.wandb,
            "WANDB_PROJECT": config.name,
            "WANDB_RUN_ID": run_id,
            "WANDB_RESUME": "allow",
        }
    return {**variables, **config.env}
