"""The activations of a training, layer by layer, with and without activation checkpointing.

Source of the formulas: Recomputation, sections 4.1 and 5; `memory` has their sums.
"""

from __future__ import annotations

from msgspec.structs import replace

from labctl.estimate.memory import activations, element_bytes, logits_bytes
from labctl.estimate.plan import ModelPlan
from labctl.model import Value


class LayerActivations(Value, frozen=True):
    """The bytes that one layer (or part of one) keeps for the backward pass.

    `checkpointed_bytes` is what it keeps with activation checkpointing: its input. `count` is how
    many such layers there are.
    """

    name: str
    kept_bytes: int
    checkpointed_bytes: int
    count: int = 1


class LayerTable(Value, frozen=True):
    """All layers, and what they keep together on one GPU.

    The recomputation of one layer needs that layer's whole activations again, so
    `checkpointed_total_bytes` has the largest of them once.
    """

    layers: tuple[LayerActivations, ...]
    total_bytes: int
    checkpointed_total_bytes: int


def compute_layers(plan: ModelPlan) -> LayerTable | None:
    """Compute the table for a training on one GPU's share; None if the layers are unknown."""
    if not plan.training or plan.kind != "network":
        return None
    if plan.measured is not None:
        return _measured_layers(plan)
    return _transformer_layers(plan) if plan.has_shape else None


def _transformer_layers(plan: ModelPlan) -> LayerTable:
    count = -(-plan.layers // plan.pipeline_parallel)
    stored = plan.seq * plan.micro_batch * plan.hidden * element_bytes(plan)
    parts = (
        LayerActivations(name=name, kept_bytes=round(size), checkpointed_bytes=kept, count=count)
        for name, size, kept in (
            ("norms, input", _norms(plan), stored),
            ("attention", _attention(plan), 0),
            ("feed-forward", _feed_forward(plan), 0),
        )
    )
    logits = round(logits_bytes(plan))
    last = LayerActivations(name="scores and loss", kept_bytes=logits, checkpointed_bytes=logits)
    return LayerTable(
        layers=(*parts, last),
        total_bytes=round(activations(replace(plan, checkpointing=False))),
        checkpointed_total_bytes=round(activations(replace(plan, checkpointing=True))),
    )


def _norms(plan: ModelPlan) -> float:
    """Compute the inputs of a layer's two normalizations: 4 s b h in 16 bits."""
    return 2 * element_bytes(plan) * plan.seq * plan.micro_batch * plan.hidden


def _attention(plan: ModelPlan) -> float:
    """Compute the inputs of attention's products, and its dropout mask: 11 s b h in 16 bits.

    Stored attention adds 5 a s^2 b: two matrices of scores and a mask.
    """
    e, t, tokens = element_bytes(plan), plan.tensor_parallel, plan.seq * plan.micro_batch
    share = (plan.kv_heads or plan.all_heads) / plan.all_heads
    linear = tokens * plan.hidden * (e + 1 + e * (2 + 2 * share) / t)
    if plan.attention == "fused":
        return linear
    return linear + plan.all_heads * plan.seq * tokens * (2 * e + 1) / t


def _feed_forward(plan: ModelPlan) -> float:
    """Compute the inputs of its two products and of GeLU, and a mask: 19 s b h in 16 bits."""
    e, tokens = element_bytes(plan), plan.seq * plan.micro_batch
    return tokens * plan.hidden * (e + 1 + 8 * e / plan.tensor_parallel)


def _measured_layers(plan: ModelPlan) -> LayerTable | None:
    assert plan.measured is not None
    layers = tuple(
        LayerActivations(
            name=layer.name,
            kept_bytes=layer.fixed_bytes + layer.item_bytes * plan.micro_batch,
            checkpointed_bytes=layer.input_item_bytes * plan.micro_batch,
        )
        for layer in plan.measured.layers
    )
    if not layers:
        return None
    kept = sum(layer.kept_bytes for layer in layers)
    # The backward pass needs more than what is kept (the gradients of activations).
    total = round(activations(plan))
    peak = max(0, total - kept)
    largest = max(layer.kept_bytes for layer in layers)
    inputs = sum(layer.checkpointed_bytes for layer in layers)
    return LayerTable(
        layers=layers,
        total_bytes=total,
        checkpointed_total_bytes=min(total, inputs + largest + peak),
    )
