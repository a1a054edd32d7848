"""`track:` in lab.yaml: which experiment tracker a run's program reports to."""

from __future__ import annotations

from typing import Literal

import msgspec

from labctl.model import Value

# The secret with the user's key for Weights & Biases.
WANDB_KEY = "WANDB_API_KEY"


class TrackConfig(Value, frozen=True):
    """How runs use Weights & Biases: not at all, into files to upload later, or at once."""

    wandb: Literal["", "offline", "online"] = msgspec.field(default="")


def find_tracking_problem(track: TrackConfig, secrets: tuple[str, ...]) -> str:
    """Describe what the secrets lack for the tracker; "" if nothing."""
    if track.wandb == "online" and WANDB_KEY not in secrets:
        return (
            f"online needs your key: write `secrets: [{WANDB_KEY}]`, then labctl secret set "
            f"{WANDB_KEY}; or write `wandb: offline`"
        )
    return ""
