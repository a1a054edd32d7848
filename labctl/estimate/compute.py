"""Compute operations and hours of a training, of a token, and of a day's requests."""

from __future__ import annotations

from labctl.estimate.cards import Card
from labctl.estimate.constants import (
    CPU_BYTES_PER_S,
    CPU_FLOPS,
    DAYS_A_MONTH,
    FP8_CARDS,
    FULL_TF32_CARDS,
    NO_BF16,
    UTILIZATION,
)
from labctl.estimate.fit_time import compute_fit_seconds
from labctl.estimate.memory import kv_cache, weights
from labctl.estimate.plan import ModelPlan
from labctl.estimate.synchronization import synchronization_seconds
from labctl.model import Value

HOUR_S, DAY_S = 3600.0, 86_400.0


class Workload(Value, frozen=True):
    """The amount of work. Zero or None: not given.

    `tokens` are a language model's, `items` those of a model from code (images, rows), in all
    epochs together. `per_second` is the measured throughput of tokens or items, of all GPUs
    together, and `gpu_hours` the whole training's, however many GPUs share them. `reply_tokens` is
    the length of one reply, `replicas` the number of copies of the model that answer.
    `bandwidth_bytes_per_s` overrides the card's memory bandwidth. `price_usd_per_hour` is for all
    GPUs of one copy. `reclaim_every_s` is the mean time between reclaims of the server,
    `checkpoint_s` the time to write a checkpoint.
    """

    tokens: int = 0
    items: int = 0
    per_second: float = 0.0
    utilization: float = UTILIZATION
    requests_per_day: int = 0
    seconds_per_request: float = 0.0
    reply_tokens: int = 0
    bandwidth_bytes_per_s: float = 0.0
    price_usd_per_hour: float | None = None
    gpu_hours: float = 0.0
    replicas: int = 0
    reclaim_every_s: int = 0
    checkpoint_s: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether the time of the training was measured, and needs no GPU's peak."""
        return bool(self.gpu_hours or (self.per_second and (self.tokens or self.items)))


def flops(plan: ModelPlan, amount: Workload) -> float:
    """Compute the operations of a training or of inference.

    Training: 6 N D (2 forward, 4 backward: Scaling, section 2.1), with checkpointing another
    forward pass, 8 N D: 33% more (Megatron, appendix). Inference: 2 N D. From code: as counted.
    In a mixture of experts, N are the parameters that one token uses (Switch Transformers, Fedus et
    al., 2021, arXiv:2101.03961, section 2). Attention's own share, about seq / (6 x hidden) of it
    (PaLM, appendix B), is left out.
    """
    recomputation = 4 / 3 if plan.training and plan.checkpointing else 1.0
    if plan.measured is not None:
        return plan.measured.item_flops * amount.items * recomputation
    used = plan.active_params or plan.params
    return (6 if plan.training else 2) * used * amount.tokens * recomputation


def peak_flops(card: Card, precision: str) -> float:
    """Return a GPU's peak operations per second in this precision, without sparsity; 0: unknown.

    TF32 has half of fp16's rate wherever it exists, fp8 twice of it (NVIDIA's data sheets). int8
    and int4 weights are unpacked to 16 bits before they are multiplied.
    """
    if precision == "fp32" or (precision in ("tf32", "bf16") and card.name in NO_BF16):
        return card.fp32_tflops * 1e12
    if precision == "tf32" and card.name not in FULL_TF32_CARDS:
        return max(card.fp16_tflops / 2, card.fp32_tflops) * 1e12
    double = 2 if precision == "fp8" and card.name in FP8_CARDS else 1
    return card.fp16_tflops * double * 1e12


def compute_hours(card: Card, plan: ModelPlan, amount: Workload) -> float | None:
    """Compute the hours of the training (or a day's requests) on `plan.gpus` cards, if known.

    Gradients are averaged while later ones are computed (PyTorch's DistributedDataParallel, Li et
    al., 2020, arXiv:2006.15704, section 3.2.3), so the longer of both counts.
    """
    if amount.requests_per_day:
        seconds = request_seconds(plan, amount, card)
        return None if seconds is None else amount.requests_per_day * seconds / HOUR_S
    measured = measured_hours(amount, plan.gpus)
    if measured is not None:
        return measured
    work = flops(plan, amount)
    rate = peak_flops(card, plan.precision) * amount.utilization * plan.gpus
    steps = count_steps(plan, amount)
    linked_s = (synchronization_seconds(plan) or 0.0) * steps
    return max(work / rate, linked_s) / HOUR_S if work and rate else None


def count_steps(plan: ModelPlan, amount: Workload) -> float:
    """Count the optimizer steps of the training; 0 if unknown."""
    if amount.items:
        return amount.items / plan.batch
    return amount.tokens / (plan.batch * plan.seq) if plan.seq else 0.0


def step_seconds(card: Card, plan: ModelPlan, amount: Workload) -> float | None:
    """Compute the seconds that one step computes, without its synchronization; None if unknown."""
    steps = count_steps(plan, amount)
    rate = peak_flops(card, plan.precision) * amount.utilization * plan.gpus
    return flops(plan, amount) / rate / steps if steps and rate else None


def measured_hours(amount: Workload, gpus: int = 1) -> float | None:
    """Compute the hours from the measured throughput or GPU-hours; None without both."""
    if not amount.is_measured:
        return None
    if amount.gpu_hours:
        return amount.gpu_hours / gpus
    return (amount.tokens or amount.items) / amount.per_second / HOUR_S


def reached_utilization(plan: ModelPlan, amount: Workload, card: Card) -> float | None:
    """Compute the share of the card's peak that measured GPU-hours mean; None if unknown.

    This is the model FLOPs utilization of PaLM, section 4.1: operations that the model needs, by
    those that the GPUs could do in that time.
    """
    work, peak = flops(plan, amount), peak_flops(card, plan.precision)
    if not (amount.gpu_hours and work and peak):
        return None
    return work / (amount.gpu_hours * HOUR_S * peak)


def trainable_amount(plan: ModelPlan, amount: Workload, card: Card) -> float | None:
    """Compute the tokens (or items of a model from code) that `gpu_hours` train; None if unknown.

    Only if their number is not given.
    """
    if not amount.gpu_hours or amount.tokens or amount.items:
        return None
    each = flops(plan, Workload(tokens=1, items=1))
    seconds = amount.gpu_hours * HOUR_S * amount.utilization
    return seconds * peak_flops(card, plan.precision) / each if each else None


def token_seconds(plan: ModelPlan, amount: Workload, card: Card | None) -> float | None:
    """Compute the least time for one token of each sequence in the batch; None if unknown.

    The weights that it uses and the KV cache are read once (Pope et al., 2022, arXiv:2211.05102,
    section 2).
    """
    if plan.training or plan.measured is not None or plan.kind != "network":
        return None
    bandwidth = amount.bandwidth_bytes_per_s
    bandwidth = bandwidth or (card.bandwidth_gb_per_s * 1e9 if card else 0.0)
    read = weights(plan) * read_share(plan) + kv_cache(plan, plan.kv_heads)
    return read / bandwidth if bandwidth else None


def read_share(plan: ModelPlan) -> float:
    """Return the share of the weights that one step of inference reads.

    In a mixture of experts, that is at least what one token uses. Assumption: each sequence of the
    batch uses other experts, until all are read.
    """
    if not plan.active_params:
        return 1.0
    return min(1.0, plan.active_params * plan.micro_batch / plan.params)


def weight_seconds(plan: ModelPlan, bandwidth_bytes_per_s: float) -> float:
    """Compute the seconds to read only the weights that a step uses."""
    return weights(plan) * read_share(plan) / bandwidth_bytes_per_s


def request_seconds(plan: ModelPlan, amount: Workload, card: Card | None) -> float | None:
    """Return the GPU time of one request: as given, else by its tokens, shared in a batch."""
    if amount.seconds_per_request:
        return amount.seconds_per_request
    each = token_seconds(plan, amount, card)
    if each is None or not amount.reply_tokens:
        return None
    return each * amount.reply_tokens / plan.micro_batch


class Load(Value, frozen=True):
    """A day of requests. `gpus` is the number needed if the requests come evenly.

    `busy_share` is how busy the given replicas are then; above 1 they are too few.
    """

    requests_per_day: int
    seconds_per_request: float
    gpu_hours_per_day: float
    gpus: int
    busy_share: float | None = None


def compute_load(amount: Workload, seconds: float | None) -> Load | None:
    """Compute the GPU load of a day of requests; None if unknown."""
    if not amount.requests_per_day or seconds is None:
        return None
    hours = amount.requests_per_day * seconds / HOUR_S
    return Load(
        requests_per_day=amount.requests_per_day,
        seconds_per_request=seconds,
        gpu_hours_per_day=hours,
        gpus=max(1, -(-round(hours * 1e6) // round(24 * 1e6))),
        busy_share=hours / (24 * amount.replicas) if amount.replicas else None,
    )


def compute_cost_usd(
    hours: float | None, price_usd_per_hour: float, amount: Workload
) -> float | None:
    """Compute the cost of the training, or of the busy hours of 30 days of requests."""
    if hours is None:
        return None
    return hours * price_usd_per_hour * (DAYS_A_MONTH if amount.requests_per_day else 1)


def cpu_seconds(plan: ModelPlan, amount: Workload) -> float | None:
    """Compute the seconds of the training on a laptop CPU; None if the amount is unknown.

    A model for tables was trained on this machine, on parts of the rows.
    """
    if plan.fit is not None:
        return compute_fit_seconds(plan.fit, plan.rows)
    work = flops(plan, amount)
    return work / CPU_FLOPS if work else None


def cpu_token_seconds(plan: ModelPlan) -> float:
    """Compute the seconds of one token (or item) of inference on a laptop CPU.

    All weights are read once, and all operations done.
    """
    work = plan.measured.item_flops if plan.measured else 0
    return max(weights(plan) / CPU_BYTES_PER_S, work / CPU_FLOPS)
