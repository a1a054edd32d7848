"""The time that data parallelism takes for each step: the gradients of all GPUs are averaged.

Sources:

- Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  2009, doi:10.1016/j.jpdc.2008.09.002. Each of N GPUs sends 2 (N-1)/N of the data, and receives as
  much.
- ZeRO: arXiv:1910.02054, section 7. Stages 1 and 2 send as much as plain data parallelism, stage 3
  half as much again, for the weights.
- PowerSGD: Vogels et al., 2019, arXiv:1905.13727. A gradient of n x m becomes r (n + m) numbers.
"""

from __future__ import annotations

from msgspec.structs import replace

from labctl.estimate.memory import gradients
from labctl.estimate.plan import LINKS, ModelPlan

POWERSGD_RANK = 1  # PyTorch's default
STAGE_3_FACTOR = 1.5
# A transformer's layer (Recomputation, section 4.1): four matrices of h x h for attention, h x 4h
# and 4h x h after it.
LAYER_MATRICES = ((1, 1), (1, 1), (1, 1), (1, 1), (1, 4), (4, 1))


def sent_bytes(plan: ModelPlan) -> float:
    """Compute the bytes that each GPU sends in a step; 0 without data parallelism."""
    ranks = plan.data_parallel
    if not plan.training or ranks == 1:
        return 0.0
    whole = gradients(replace(plan, zero=0))
    factor = STAGE_3_FACTOR if plan.zero == 3 else 1.0
    return 2 * (ranks - 1) / ranks * whole * _compressed_share(plan) * factor


def synchronization_seconds(plan: ModelPlan) -> float | None:
    """Compute the least seconds of a step that the link is busy; None if no link was given."""
    if not plan.link:
        return None
    return sent_bytes(plan) / LINKS[plan.link]


def _compressed_share(plan: ModelPlan) -> float:
    """Return the compressed gradients as a share of all. Embeddings are left out."""
    if plan.compress == "fp16":
        return 0.5
    if plan.compress == "powersgd":
        model = plan.measured
        parameters = model.trained_parameters if model else plan.params
        numbers = sum(POWERSGD_RANK * (n + m) * plan.hidden for n, m in LAYER_MATRICES)
        return min(1.0, numbers * plan.layers / parameters)
    return 1.0
