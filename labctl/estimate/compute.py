"""Operations and hours: of a training, of a token, of a day's requests."""

from __future__ import annotations

from labctl.estimate.cards import Card
from labctl.estimate.constants import (
    CPU_BYTES_PER_S,
    CPU_FLOPS,
    DAYS_A_MONTH,
    FP8_CARDS,
    NO_BF16,
    UTILISATION,
)
from labctl.estimate.memory import kv_cache, weights
from labctl.estimate.plan import Plan
from labctl.model import Value

HOUR_S, DAY_S = 3600.0, 86_400.0


class Amount(Value, frozen=True):
    """How much there is to do. Zero or None: not given.

    `tokens` are a language model's, `items` those of a model from code (images, rows), in all
    epochs together. `tokens_per_second` (or items) is measured throughput, of all GPUs together.
    `reply_tokens` is what one request makes, `bandwidth_bytes_per_s` a GPU's memory, where it is
    not to be a card's own. `price_usd_per_hour` is for all GPUs together.
    """

    tokens: int = 0
    items: int = 0
    per_second: float = 0.0
    utilisation: float = UTILISATION
    requests_per_day: int = 0
    seconds_per_request: float = 0.0
    reply_tokens: int = 0
    bandwidth_bytes_per_s: float = 0.0
    price_usd_per_hour: float | None = None


def flops(plan: Plan, amount: Amount) -> float:
    """Training: 6 N D (2 forward, 4 backward: Scaling, section 2.1), and with checkpointing another
    forward pass, 8 N D: 33 % more (Megatron, appendix). Use: 2 N D. From code: as counted.

    Attention's own share, about seq / (6 x hidden) of it (PaLM, appendix B), is left out.
    """
    again = 4 / 3 if plan.training and plan.checkpointing else 1.0
    if plan.measured is not None:
        return plan.measured.item_flops * amount.items * again
    return (6 if plan.training else 2) * plan.params * amount.tokens * again


def peak_flops(card: Card, precision: str) -> float:
    """A GPU's best per second in this precision, without sparsity.

    TF32 has half of fp16's rate wherever it exists, fp8 twice of it (NVIDIA's data sheets). int8
    and int4 weights are unpacked to 16 bits before they are multiplied.
    """
    if precision == "fp32" or (precision in ("tf32", "bf16") and card.name in NO_BF16):
        return card.fp32_tflops * 1e12
    if precision == "tf32":
        return max(card.fp16_tflops / 2, card.fp32_tflops) * 1e12
    double = 2 if precision == "fp8" and card.name in FP8_CARDS else 1
    return card.fp16_tflops * double * 1e12


def hours_on(card: Card, plan: Plan, amount: Amount) -> float | None:
    """Of the training (or of a day of requests) on `plan.gpus` of these; None: not known."""
    if amount.requests_per_day:
        seconds = request_seconds(plan, amount, card)
        return None if seconds is None else amount.requests_per_day * seconds / HOUR_S
    measured = measured_hours(amount)
    if measured is not None:
        return measured
    work = flops(plan, amount)
    rate = peak_flops(card, plan.precision) * amount.utilisation * plan.gpus
    return work / rate / HOUR_S if work else None


def measured_hours(amount: Amount) -> float | None:
    """From throughput, whatever machine it was measured on."""
    todo = amount.tokens or amount.items
    return todo / amount.per_second / HOUR_S if todo and amount.per_second else None


def token_seconds(plan: Plan, amount: Amount, card: Card | None) -> float | None:
    """The least time for one token of each sequence in the batch: all weights and the KV cache are
    read once (Pope et al., 2022, arXiv:2211.05102, section 2). None where nothing is known."""
    if plan.training or plan.measured is not None or plan.kind != "network":
        return None
    bandwidth = amount.bandwidth_bytes_per_s
    bandwidth = bandwidth or (card.bandwidth_gb_per_s * 1e9 if card else 0.0)
    return (weights(plan) + kv_cache(plan, plan.kv_heads)) / bandwidth if bandwidth else None


def weight_seconds(plan: Plan, bandwidth_bytes_per_s: float) -> float:
    """To read the weights alone."""
    return weights(plan) / bandwidth_bytes_per_s


def request_seconds(plan: Plan, amount: Amount, card: Card | None) -> float | None:
    """GPU time for one request: as given, else its tokens, shared among those of a batch."""
    if amount.seconds_per_request:
        return amount.seconds_per_request
    each = token_seconds(plan, amount, card)
    if each is None or not amount.reply_tokens:
        return None
    return each * amount.reply_tokens / plan.micro_batch


class Load(Value, frozen=True):
    """A day of requests. `gpus` must stay on for it at least, if it comes evenly."""

    requests_per_day: int
    seconds_per_request: float
    gpu_hours_per_day: float
    gpus: int


def load(amount: Amount, seconds: float | None) -> Load | None:
    if not amount.requests_per_day or seconds is None:
        return None
    hours = amount.requests_per_day * seconds / HOUR_S
    return Load(
        requests_per_day=amount.requests_per_day,
        seconds_per_request=seconds,
        gpu_hours_per_day=hours,
        gpus=max(1, -(-round(hours * 1e6) // round(24 * 1e6))),
    )


def dollars(hours: float | None, price_usd_per_hour: float, amount: Amount) -> float | None:
    """Of the training; of a month (30 days) of requests, for the hours at work."""
    if hours is None:
        return None
    return hours * price_usd_per_hour * (DAYS_A_MONTH if amount.requests_per_day else 1)


def cpu_seconds(plan: Plan, amount: Amount) -> float | None:
    """The training on a laptop's processor; None where the amount is not known."""
    work = flops(plan, amount)
    return work / CPU_FLOPS if work else None


def cpu_token_seconds(plan: Plan) -> float:
    """One token (or item) of use there: all weights are read once, and all sums done."""
    work = plan.measured.item_flops if plan.measured else 0
    return max(weights(plan) / CPU_BYTES_PER_S, work / CPU_FLOPS)
