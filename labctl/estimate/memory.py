"""Bytes per GPU: weights, gradients, optimizer, activations, KV cache, overhead.

Formulas and their sources are in each docstring; `figures` names the papers in full.
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
from labctl.estimate.plan import Plan, mixed
from labctl.model import Value


class Memory(Value, frozen=True):
    """Bytes on one GPU. `simple_rule_bytes` is the rule of thumb for the whole, undivided model."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    kv_cache_bytes: int
    overhead_bytes: int
    total_bytes: int
    simple_rule_bytes: int


TERMS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "overhead")


def memory(plan: Plan) -> Memory:
    """The sum for a checked plan."""
    if plan.kind != "network":
        return _of_table(plan)
    parts = {
        "weights_bytes": weights(plan),
        "gradients_bytes": gradients(plan),
        "optimizer_bytes": optimizer(plan),
        "activations_bytes": activations(plan),
        "kv_cache_bytes": 0 if plan.training else kv_cache(plan, plan.kv_heads),
        "overhead_bytes": OVERHEAD_BYTES,
    }
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(
        **whole, total_bytes=sum(whole.values()), simple_rule_bytes=round(simple_rule(plan))
    )


def _of_table(plan: Plan) -> Memory:
    """A table in fp32 and one working copy of it: an assumption. It lies in main memory."""
    table = plan.rows * plan.columns * 4
    return Memory(
        weights_bytes=0,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=table,
        kv_cache_bytes=0,
        overhead_bytes=table,
        total_bytes=2 * table,
        simple_rule_bytes=table,
    )


def _parts(plan: Plan, from_stage: int) -> int:
    """Among how many GPUs a term is divided: always tensor and pipeline parallel, and data parallel
    from a stage of ZeRO on (1: optimizer, 2: gradients, 3: weights; ZeRO, section 5)."""
    shards = plan.data_parallel if plan.zero >= from_stage else 1
    return plan.tensor_parallel * plan.pipeline_parallel * shards


def weights(plan: Plan) -> float:
    """Parameters x bytes each; from code, parameters and buffers in their own types."""
    if plan.measured is not None:
        return plan.measured.weight_bytes / _parts(plan, 3)
    return plan.params * BYTES[plan.precision] / _parts(plan, 3)


def gradients(plan: Plan) -> float:
    """One per trained parameter, in the type of its weight (ZeRO: 2 bytes in mixed precision)."""
    if not plan.training:
        return 0
    if plan.measured is not None:
        return plan.measured.trained_bytes / _parts(plan, 2)
    each = FP8_GRADIENT_BYTES if plan.precision == "fp8" else BYTES[plan.precision]
    return plan.params * each / _parts(plan, 2)


def optimizer(plan: Plan) -> float:
    """The optimizer's numbers, and in mixed precision the fp32 weights: for Adam 4 + 4 + 4 bytes a
    parameter, which with 2 + 2 for weights and gradients makes the 16 of ZeRO, section 3.1.

    PyTorch's own optimizers keep their numbers in the type of the weight, and autocast leaves
    weights in fp32: so from code there is no second copy.
    """
    if not plan.training:
        return 0
    assert plan.optimizer
    if plan.measured is not None:
        own = plan.measured.trained_bytes * STATES[plan.optimizer]
        if plan.optimizer == "adam8bit":
            own = plan.measured.trained_parameters * STATES["adam8bit"]
        return own / _parts(plan, 1)
    each = STATES[plan.optimizer] * STATE_BYTES[plan.optimizer]
    return plan.params * (each + (MASTER_BYTES if mixed(plan) else 0)) / _parts(plan, 1)


def element_bytes(plan: Plan) -> int:
    """Of an activation: products are computed in 16 bits at least."""
    return 4 if plan.precision in ("fp32", "tf32") else 2


def activations(plan: Plan) -> float:
    """Training: what is kept for the backward pass, on the pipeline stage that keeps most.
    Use: the working set of one layer and the last token's logits."""
    if plan.measured is not None:
        found = plan.measured
        return found.fixed_bytes + found.item_bytes * plan.micro_batch
    if not plan.shaped:
        return 0
    if not plan.training:
        return _layer(plan, masks=0) + plan.micro_batch * _vocabulary(plan) * 4
    here = -(-plan.layers // plan.pipeline_parallel)
    in_flight = min(plan.pipeline_parallel, plan.accumulate)
    first = _stage(plan, here) * in_flight
    last = _stage(plan, here) + _logits(plan)
    return last if plan.pipeline_parallel == 1 else max(first, last)


def _stage(plan: Plan, layers: int) -> float:
    """Recomputation, sections 4.1 and 5: with checkpointing each layer keeps its input alone, and
    one layer at a time is computed again. A pipeline's first stage holds as many micro-batches as
    there are stages (section 4.2.3), or as there are at all."""
    if not plan.checkpointing:
        return _layer(plan) * layers
    kept = plan.seq * plan.micro_batch * plan.hidden * element_bytes(plan) * layers
    return kept + _layer(plan)


def _layer(plan: Plan, masks: int = 2) -> float:
    """Recomputation, equations 1 and 2, with e bytes an element in place of 2, and with fewer key
    and value heads: s b h ((4e + 2) + e (10 + 2 kv/a) / t), and where attention keeps its scores
    a s^2 b (2e + 1) / t. For e = 2 that is s b h (34 + 5 a s / h). Fused attention (FlashAttention,
    arXiv:2205.14135) keeps no scores."""
    e, t = element_bytes(plan), plan.tensor_parallel
    tokens = plan.seq * plan.micro_batch
    share = (plan.kv_heads or plan.all_heads) / plan.all_heads
    linear = tokens * plan.hidden * (4 * e + masks + e * (10 + 2 * share) / t)
    if plan.attention == "fused":
        return linear
    return linear + plan.all_heads * plan.seq * tokens * (2 * e + 1) / t


def _vocabulary(plan: Plan) -> int:
    return plan.vocabulary or DEFAULT_VOCABULARY


def _logits(plan: Plan) -> float:
    """A score per word of the vocabulary and token: in the computing type, and in fp32 for the loss
    (Recomputation, section 4.3: 4 s b v)."""
    tokens = plan.seq * plan.micro_batch
    return tokens * _vocabulary(plan) * (4 + element_bytes(plan)) / plan.tensor_parallel


def simple_activations(plan: Plan) -> int:
    """The rule of thumb: one tensor a layer. batch x tokens x hidden x layers x bytes."""
    each = element_bytes(plan)
    return plan.batch * plan.seq * plan.hidden * plan.layers * each if plan.shaped else 0


def kv_cache(plan: Plan, kv_heads: int = 0) -> float:
    """2 x layers x kv heads x head width x tokens x batch x bytes (Pope et al., 2022,
    arXiv:2211.05102, section 2), in 16 bits also beside quantised weights. 0 heads: as many as
    there are at all, so the hidden width."""
    if not plan.shaped or plan.measured is not None:
        return 0
    heads = kv_heads or plan.all_heads
    here = heads / min(heads, plan.tensor_parallel) * plan.hidden / plan.all_heads
    tokens = plan.seq * plan.micro_batch
    return 2 * plan.layers * here * tokens * element_bytes(plan) / plan.pipeline_parallel


def simple_rule(plan: Plan) -> float:
    """The rule of thumb: everything in the weights' own type. Training with Adam: weights, as many
    gradients, and twice as many states, so four times the weights."""
    if plan.measured is not None:
        own, params = float(plan.measured.weight_bytes), plan.measured.parameters
    else:
        own, params = plan.params * BYTES[plan.precision], plan.params
    if not plan.optimizer:
        return own
    state = params if plan.optimizer == "adam8bit" else own
    return 2 * own + STATES[plan.optimizer] * state


def checkpoint_bytes(plan: Plan) -> int:
    """A file to go on from: weights in fp32 (or in their own type where there is no such copy) and
    the optimizer's numbers, undivided."""
    if not plan.optimizer:
        return 0
    if plan.measured is not None:
        states = plan.measured.trained_bytes * STATES[plan.optimizer]
        if plan.optimizer == "adam8bit":
            states = plan.measured.trained_parameters * STATES["adam8bit"]
        return plan.measured.weight_bytes + states
    each = STATES[plan.optimizer] * STATE_BYTES[plan.optimizer]
    return plan.params * (MASTER_BYTES + each)


def largest(found: Memory) -> str:
    """The name of the term that dominates."""
    return max(TERMS, key=lambda term: getattr(found, f"{term}_bytes"))
