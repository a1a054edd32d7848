"""Compute bytes per GPU: weights, gradients, optimizer, activations, KV cache, overhead.

Each docstring has the formula and its source; `constants` names the papers in full.
"""

from __future__ import annotations

from labctl.estimate.constants import (
    BYTES,
    DEFAULT_VOCABULARY,
    FP8_GRADIENT_BYTES,
    MASTER_BYTES,
    OVERHEAD_BYTES,
    STATE_BYTES,
    STATES,
)
from labctl.estimate.plan import ModelPlan, is_mixed
from labctl.model import Value


class MemoryEstimate(Value, frozen=True):
    """Bytes on one GPU. `simple_rule_bytes` is the rule of thumb for the undivided model."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    kv_cache_bytes: int
    overhead_bytes: int
    total_bytes: int
    simple_rule_bytes: int


TERMS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "overhead")


def estimate_memory(plan: ModelPlan) -> MemoryEstimate:
    """Compute all terms and their sum for a checked plan."""
    if plan.kind != "network":
        return _table_memory(plan)
    parts = {
        "weights_bytes": weights(plan),
        "gradients_bytes": gradients(plan),
        "optimizer_bytes": optimizer(plan),
        "activations_bytes": activations(plan),
        "kv_cache_bytes": 0 if plan.training else kv_cache(plan, plan.kv_heads),
        "overhead_bytes": OVERHEAD_BYTES,
    }
    sizes = {name: round(size) for name, size in parts.items()}
    return MemoryEstimate(
        **sizes, total_bytes=sum(sizes.values()), simple_rule_bytes=round(simple_rule(plan))
    )


def _table_memory(plan: ModelPlan) -> MemoryEstimate:
    """Assume a table in fp32 and one working copy of it, both in main memory."""
    table = plan.rows * plan.columns * 4
    return MemoryEstimate(
        weights_bytes=0,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=table,
        kv_cache_bytes=0,
        overhead_bytes=table,
        total_bytes=2 * table,
        simple_rule_bytes=table,
    )


def _count_shards(plan: ModelPlan, from_stage: int) -> int:
    """Return the number of GPUs that a term is divided among.

    That is always tensor and pipeline parallelism, and data parallelism from a stage of ZeRO on
    (1: optimizer, 2: gradients, 3: weights; ZeRO, section 5).
    """
    shards = plan.data_parallel if plan.zero >= from_stage else 1
    return plan.tensor_parallel * plan.pipeline_parallel * shards


def weights(plan: ModelPlan) -> float:
    """Compute parameters x bytes; from code, parameters and buffers in their own types."""
    if plan.measured is not None:
        return plan.measured.weight_bytes / _count_shards(plan, 3)
    return plan.params * BYTES[plan.precision] / _count_shards(plan, 3)


def gradients(plan: ModelPlan) -> float:
    """Compute the gradients: one per trained parameter, in the type of its weight.

    In mixed precision that is 2 bytes (ZeRO).
    """
    if not plan.training:
        return 0
    if plan.measured is not None:
        return plan.measured.trained_bytes / _count_shards(plan, 2)
    each = FP8_GRADIENT_BYTES if plan.precision == "fp8" else BYTES[plan.precision]
    return plan.params * each / _count_shards(plan, 2)


def optimizer(plan: ModelPlan) -> float:
    """Compute the optimizer's states and, in mixed precision, the fp32 weights.

    For Adam that is 4 + 4 + 4 bytes per parameter; with 2 + 2 for weights and gradients, it makes
    the 16 of ZeRO, section 3.1. PyTorch's own optimizers keep their states in the type of the
    weight, and autocast leaves weights in fp32, so from code there is no second copy.
    """
    if not plan.training:
        return 0
    assert plan.optimizer
    if plan.measured is not None:
        states = plan.measured.trained_bytes * STATES[plan.optimizer]
        if plan.optimizer == "adam8bit":
            states = plan.measured.trained_parameters * STATES["adam8bit"]
        return states / _count_shards(plan, 1)
    each = STATES[plan.optimizer] * STATE_BYTES[plan.optimizer]
    return plan.params * (each + (MASTER_BYTES if is_mixed(plan) else 0)) / _count_shards(plan, 1)


def element_bytes(plan: ModelPlan) -> int:
    """Return the bytes per element of an activation: products use at least 16 bits."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def activations(plan: ModelPlan) -> float:
    """Compute the activations.

    Training: what is kept for the backward pass, on the pipeline stage that keeps the most.
    Inference: the working set of one layer, and the last token's logits.
    """
    if plan.measured is not None:
        measured = plan.measured
        return measured.fixed_bytes + measured.item_bytes * plan.micro_batch
    if not plan.has_shape:
        return 0
    if not plan.training:
        return _layer(plan, masks=0) + plan.micro_batch * _vocabulary(plan) * 4
    layers = -(-plan.layers // plan.pipeline_parallel)
    in_flight = min(plan.pipeline_parallel, plan.accumulate)
    first = _stage(plan, layers) * in_flight
    last = _stage(plan, layers) + logits_bytes(plan)
    return last if plan.pipeline_parallel == 1 else max(first, last)


def _stage(plan: ModelPlan, layers: int) -> float:
    """Compute the activations of a pipeline stage (Recomputation, sections 4.1 and 5).

    With checkpointing each layer keeps only its input, and one layer at a time is recomputed. A
    pipeline's first stage holds as many micro-batches as there are stages (section 4.2.3), or fewer
    if there are fewer.
    """
    if not plan.checkpointing:
        return _layer(plan) * layers
    kept = plan.seq * plan.micro_batch * plan.hidden * element_bytes(plan) * layers
    return kept + _layer(plan)


def _layer(plan: ModelPlan, masks: int = 2) -> float:
    """Compute the activations of one layer (Recomputation, equations 1 and 2).

    With e bytes per element instead of 2, and fewer key and value heads:
    s b h ((4e + 2) + e (10 + 2 kv/a) / t), plus a s^2 b (2e + 1) / t if attention stores its
    scores. For e = 2 that is s b h (34 + 5 a s / h). Fused attention (FlashAttention,
    arXiv:2205.14135) stores no scores.
    """
    e, t = element_bytes(plan), plan.tensor_parallel
    tokens = plan.seq * plan.micro_batch
    share = (plan.kv_heads or plan.all_heads) / plan.all_heads
    linear = tokens * plan.hidden * (4 * e + masks + e * (10 + 2 * share) / t)
    if plan.attention == "fused":
        return linear
    return linear + plan.all_heads * plan.seq * tokens * (2 * e + 1) / t


def _vocabulary(plan: ModelPlan) -> int:
    return plan.vocabulary or DEFAULT_VOCABULARY


def logits_bytes(plan: ModelPlan) -> float:
    """Compute the logits, a score per token and word of the vocabulary.

    They exist in the computing type, and in fp32 for the loss (Recomputation, section 4.3: 4 sbv).
    """
    tokens = plan.seq * plan.micro_batch
    return tokens * _vocabulary(plan) * (4 + element_bytes(plan)) / plan.tensor_parallel


def simple_activations(plan: ModelPlan) -> int:
    """Apply the rule of thumb: one tensor per layer, batch x tokens x hidden x layers x bytes."""
    each = element_bytes(plan)
    return plan.batch * plan.seq * plan.hidden * plan.layers * each if plan.has_shape else 0


def kv_cache(plan: ModelPlan, kv_heads: int = 0) -> float:
    """Compute the KV cache: 2 x layers x kv heads x head width x tokens x batch x bytes.

    Source: Pope et al., 2022, arXiv:2211.05102, section 2. It uses 16 bits, also with quantized
    weights. 0 `kv_heads` means all heads, so the hidden width.
    """
    if not plan.has_shape or plan.measured is not None:
        return 0
    heads = kv_heads or plan.all_heads
    width = heads / min(heads, plan.tensor_parallel) * plan.hidden / plan.all_heads
    tokens = plan.seq * plan.micro_batch
    return 2 * plan.layers * width * tokens * element_bytes(plan) / plan.pipeline_parallel


def simple_rule(plan: ModelPlan) -> float:
    """Apply the rule of thumb: everything in the weights' own type.

    Training with Adam: weights, as many gradients, and twice as many states, so 4 x the weights.
    """
    if plan.measured is not None:
        own, params = float(plan.measured.weight_bytes), plan.measured.parameters
    else:
        own, params = plan.params * BYTES[plan.precision], plan.params
    if not plan.optimizer:
        return own
    state = params if plan.optimizer == "adam8bit" else own
    return 2 * own + STATES[plan.optimizer] * state


def checkpoint_bytes(plan: ModelPlan) -> int:
    """Compute the size of a resumable checkpoint: weights and optimizer states, undivided.

    The weights are in fp32, or in their own type if there is no fp32 copy.
    """
    if not plan.optimizer:
        return 0
    if plan.measured is not None:
        states = plan.measured.trained_bytes * STATES[plan.optimizer]
        if plan.optimizer == "adam8bit":
            states = plan.measured.trained_parameters * STATES["adam8bit"]
        return plan.measured.weight_bytes + states
    each = STATES[plan.optimizer] * STATE_BYTES[plan.optimizer]
    return plan.params * (MASTER_BYTES + each)


def find_largest_term(needed: MemoryEstimate) -> str:
    """Return the name of the largest term."""
    return max(TERMS, key=lambda term: getattr(needed, f"{term}_bytes"))
