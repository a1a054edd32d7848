"""The offers that fit an estimate, and what each of them costs."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from labctl.errors import ConfigError, InterruptError, LabError
from labctl.estimate.advice import GpuVerdict
from labctl.estimate.cards import find_card
from labctl.estimate.compute import (
    Workload,
    compute_cost_usd,
    compute_hours,
    cpu_seconds,
    measured_hours,
)
from labctl.estimate.constants import DAYS_A_MONTH
from labctl.estimate.fits import usable_bytes
from labctl.estimate.memory import MemoryEstimate
from labctl.estimate.plan import ModelPlan
from labctl.model import GpuNeed, Need, Offer, Value
from labctl.servers.context import LabContext
from labctl.servers.offers import list_offers

HOUR_S = 3600.0
MOST_GPUS_OF_A_SERVER = 8
FULL_DAY_H = 24.0


class CostEstimate(Value, frozen=True):
    """The cost of one offer. None: unknown.

    `usd` is for the training, or for the busy hours of 30 days of requests; `always_on_usd` is for
    30 days in which the servers stay on. `servers` are those of all replicas.
    """

    provider: str
    type: str
    zone: str
    spot: bool
    gpu: str
    gpu_count: int
    gpu_memory_bytes: int
    servers: int
    price_usd_per_hour: float
    fits: bool
    hours: float | None
    usd: float | None
    always_on_usd: float | None = None


def list_matching_offers(
    context: LabContext, plan: ModelPlan, amount: Workload, gpu_verdict: GpuVerdict
) -> tuple[Sequence[Offer], str]:
    """Return (the provider's offers, why there are none). Empty with a price given by the user."""
    if amount.price_usd_per_hour is not None:
        return (), ""
    is_chosen = context.config.origins.get("server.provider") == "--provider"
    aws = "" if is_chosen else "--provider aws for AWS prices, or "
    other = f"use {aws}--price 1.50 for your own"
    need = _choose_need(context.config.server.need, plan, gpu_verdict)
    try:
        offers = list_offers(context, need)
    except (ConfigError, InterruptError):
        raise
    except LabError as error:
        why = f" ({error.why.splitlines()[0]})" if error.why else ""
        return (), f"{error.what}{why}; {other}"
    if not offers:
        return (), f"{context.config.server.provider} has no matching offers; {other}"
    return offers, ""


def _choose_need(need: Need, plan: ModelPlan, gpu_verdict: GpuVerdict) -> Need:
    """Return the lab's need; if that leaves the GPU open, fill it in from the estimate."""
    if need.gpu.kind != "auto":
        return need
    if not gpu_verdict.needed:
        return replace(need, gpu=GpuNeed(kind="none"))
    count = min(plan.gpus, MOST_GPUS_OF_A_SERVER)
    memory_bytes = need.gpu.min_memory_bytes
    return replace(need, gpu=GpuNeed(kind="any", count=count, min_memory_bytes=memory_bytes))


def compute_costs(
    plan: ModelPlan,
    amount: Workload,
    needed: MemoryEstimate,
    offers: Sequence[Offer],
    gpu_verdict: GpuVerdict,
) -> tuple[CostEstimate, ...]:
    """Compute the cost of each offer: first those with enough memory, then by cost.

    The cost is in dollars if the hours are known (for requests, of a month left on), else per hour.
    """
    rows = [_compute_cost(plan, amount, needed, offer, gpu_verdict) for offer in offers]
    return tuple(sorted(rows, key=_rank))


def _rank(cost: CostEstimate) -> tuple[bool, bool, float, float]:
    price = cost.price_usd_per_hour * cost.servers
    usd = cost.usd if cost.always_on_usd is None else cost.always_on_usd
    return not cost.fits, usd is None, price if usd is None else usd, price


def _compute_cost(
    plan: ModelPlan, amount: Workload, needed: MemoryEstimate, offer: Offer, gpu_verdict: GpuVerdict
) -> CostEstimate:
    if offer.gpu_count:
        gpu_card = find_card(offer.gpu_name, offer.gpu_memory_bytes)
        fit = needed.total_bytes <= usable_bytes(offer.gpu_name, offer.gpu_memory_bytes)
        hours = measured_hours(amount, plan.gpus)
        if gpu_card is not None:
            hours = compute_hours(gpu_card, plan, amount)
        each = -(-plan.gpus // offer.gpu_count)
    else:
        # Not every provider reports main memory. A quarter of it is left for the system.
        fit = (not gpu_verdict.needed or plan.fit is not None) and needed.total_bytes <= (
            offer.memory_bytes * 0.75 or float("inf")
        )
        hours, each = cpu_hours(plan, amount), 1
    price = offer.price_usd_per_hour * each
    return CostEstimate(
        provider=offer.provider,
        type=offer.type,
        zone=offer.zone,
        spot=offer.spot,
        gpu=offer.gpu_name,
        gpu_count=offer.gpu_count,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        servers=each * max(amount.replicas, 1),
        price_usd_per_hour=offer.price_usd_per_hour,
        fits=fit,
        hours=hours,
        usd=compute_cost_usd(hours, price, amount),
        always_on_usd=_always_on(amount, hours, price),
    )


def cpu_hours(plan: ModelPlan, amount: Workload) -> float | None:
    if amount.requests_per_day:
        each = amount.seconds_per_request
        return amount.requests_per_day * each / HOUR_S if each else None
    seconds = cpu_seconds(plan, amount) if plan.training else None
    return measured_hours(amount, plan.gpus) if seconds is None else seconds / HOUR_S


def _always_on(amount: Workload, hours: float | None, price: float) -> float | None:
    """Compute 30 days of servers that stay on: the given replicas, else as many as are needed."""
    replicas = amount.replicas
    if not replicas:
        if not amount.requests_per_day or hours is None:
            return None
        replicas = max(1, -(-round(hours * 1e6) // round(FULL_DAY_H * 1e6)))
    return replicas * FULL_DAY_H * DAYS_A_MONTH * price


def compute_stated_cost(
    plan: ModelPlan, amount: Workload, price: float, hours: float | None
) -> CostEstimate:
    """Compute the cost at the price given on the command line, for all GPUs together."""
    return CostEstimate(
        provider="",
        type="stated",
        zone="",
        spot=False,
        gpu="",
        gpu_count=plan.gpus,
        gpu_memory_bytes=0,
        servers=1,
        price_usd_per_hour=price,
        fits=True,
        hours=hours,
        usd=compute_cost_usd(hours, price, amount),
        always_on_usd=_always_on(amount, hours, price),
    )
