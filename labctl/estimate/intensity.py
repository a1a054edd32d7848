"""Arithmetic intensity: whether the GPU's arithmetic or its memory limits a step.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", 2009, doi:10.1145/1498765.1498785. A program that does fewer operations
for each byte than the ridge point (peak operations / peak bandwidth) waits for memory.
"""

from __future__ import annotations

from msgspec.structs import replace

from labctl.estimate.cards import Card
from labctl.estimate.compute import Workload, flops, peak_flops, read_share
from labctl.estimate.memory import activations, gradients, kv_cache, optimizer, weights
from labctl.estimate.plan import ModelPlan
from labctl.model import Value

# Each state of the optimizer, and each fp32 weight, is read and written.
READ_AND_WRITTEN = 2


class Intensity(Value, frozen=True):
    """Operations per byte of one step, and the ridge point of a card."""

    flop_per_byte: float
    ridge_flop_per_byte: float
    step_flops: float
    step_bytes: float

    @property
    def is_memory_bound(self) -> bool:
        return self.flop_per_byte < self.ridge_flop_per_byte


def compute_intensity(plan: ModelPlan, card: Card, bandwidth: float = 0.0) -> Intensity | None:
    """Compare a step (in inference: one token of each sequence) with a card; None if unknown.

    `bandwidth` in bytes per second overrides the card's.
    """
    work, moved = _step_flops(plan), _step_bytes(plan)
    peak = peak_flops(card, plan.precision)
    if not (work and moved and peak):
        return None
    return Intensity(
        flop_per_byte=work / moved,
        ridge_flop_per_byte=peak / (bandwidth or card.bandwidth_gb_per_s * 1e9),
        step_flops=work,
        step_bytes=moved,
    )


def _step_flops(plan: ModelPlan) -> float:
    """Compute the operations of a step on one GPU; 0 if unknown."""
    if plan.kind != "network":
        return 0.0
    if plan.measured is not None:
        return flops(plan, Workload(items=plan.batch)) / plan.gpus
    if plan.training:
        return flops(plan, Workload(tokens=plan.batch * plan.seq)) / plan.gpus
    shards = plan.tensor_parallel * plan.pipeline_parallel
    # Each new token is compared with, and sums up, all of its sequence: 2 x 2 x seq x hidden.
    attention = 4 * plan.layers * plan.seq * plan.hidden * plan.micro_batch
    return (flops(plan, Workload(tokens=plan.micro_batch)) + attention) / shards


def _step_bytes(plan: ModelPlan) -> float:
    """Compute the least bytes that a step moves: each tensor once, as if all caches were large.

    Training: the weights are read in the forward and the backward pass (and once more where
    activations are recomputed), activations are written and read, gradients as well, the optimizer
    reads and writes its states, and writes the weights. Inference: weights and KV cache are read.
    """
    undivided = replace(plan, zero=0)  # ZeRO-3 gathers the weights before it uses them
    if not plan.training:
        if plan.measured is not None:
            return weights(plan) + 2 * activations(plan)
        return weights(plan) * read_share(plan) + kv_cache(plan, plan.kv_heads)
    if not activations(plan):
        return 0.0
    passes = 3 if plan.checkpointing else 2
    part = passes * weights(undivided) + 2 * activations(undivided)
    update = READ_AND_WRITTEN * (gradients(plan) + optimizer(plan)) + weights(plan)
    return plan.accumulate * part + update
