"""Estimate a model's memory and time, and join them with the provider's offers and prices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from labctl.errors import ConfigError, InterruptError, LabError, UsageError
from labctl.estimate.advice import (
    GpuVerdict,
    Suggestion,
    judge_gpu,
    list_suggestions,
    why_simple_differs,
)
from labctl.estimate.cards import Card, find_card
from labctl.estimate.compute import (
    Load,
    Workload,
    compute_cost_usd,
    compute_hours,
    compute_load,
    cpu_seconds,
    flops,
    measured_hours,
    request_seconds,
    step_seconds,
    token_seconds,
    weight_seconds,
)
from labctl.estimate.constants import DAYS_A_MONTH
from labctl.estimate.fits import (
    GpuFit,
    compare_gpus,
    find_smallest_gpu,
    label,
    select_cards,
    usable_bytes,
)
from labctl.estimate.memory import (
    MemoryEstimate,
    checkpoint_bytes,
    estimate_memory,
    find_largest_term,
    kv_cache,
    simple_activations,
)
from labctl.estimate.plan import ModelMeasurement, ModelPlan, require_consistent
from labctl.estimate.synchronization import sent_bytes, synchronization_seconds
from labctl.insight.model_measurement import ModelSource, measure_model, suggest_target
from labctl.model import GpuNeed, Need, Offer, Value
from labctl.servers.context import LabContext

YARDSTICK = "H100"
HOUR_S = 3600.0
MOST_GPUS_OF_A_SERVER = 8
FULL_DAY_H = 24.0


class TimeEstimate(Value, frozen=True):
    """The time of the training, or of a day's requests; None if unknown."""

    hours: float | None


class CostEstimate(Value, frozen=True):
    """The cost of one offer. None: unknown.

    `usd` is for the training, or for the busy hours of 30 days of requests; `always_on_usd` is for
    30 days in which the servers stay on.
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


class EstimateDetails(Value, frozen=True):
    """Details behind an estimate.

    `time_on` is the GPU (or the measurement) that `time` is for. `kv_cache_all_heads_bytes` uses
    the full-head formula, while `memory` uses the given heads. `seconds_per_token` and
    `weights_seconds` are lower bounds, at the given bandwidth or that of `time_on`. `sent_bytes` is
    what each GPU sends in a step, for which the link needs `synchronization_seconds`, and
    `step_seconds` what the step computes; None if unknown.
    """

    gpus: int
    largest_term: str
    simple_rule_leaves_out: tuple[str, ...]
    simple_activations_bytes: int
    checkpoint_bytes: int
    kv_cache_all_heads_bytes: int
    flops: float
    utilization: float = msgspec.field(name="utilisation")
    time_on: str
    seconds_per_token: float | None
    weights_seconds: float | None
    load: Load | None
    model: ModelMeasurement | None
    costs_note: str
    sent_bytes: int = 0
    synchronization_seconds: float | None = None
    step_seconds: float | None = None


class Estimate(Value, frozen=True):
    """A whole estimate: `memory` per GPU, a row of `fits` per GPU type, a row of `costs` per offer.

    If the lab or the command names a GPU, `fits` has only rows for it.
    `cheapest` is the first of the costs with enough memory. `ways` suggests changes if no offer or,
    without offers, no listed GPU has enough memory.
    """

    plan: ModelPlan
    amount: Workload
    memory: MemoryEstimate
    time: TimeEstimate
    fits: tuple[GpuFit, ...]
    costs: tuple[CostEstimate, ...]
    gpu: GpuVerdict
    cheapest: CostEstimate | None
    ways: tuple[Suggestion, ...]
    details: EstimateDetails


def estimate(
    context: LabContext, plan: ModelPlan, amount: Workload, source: ModelSource | None = None
) -> Estimate:
    """Compute the estimate for a plan; with a source, build and measure its model first.

    UsageError for an inconsistent plan. If the provider cannot be queried, that is not an error:
    `details.costs_note` says why.
    """
    if source is not None:
        require_consistent(replace(plan, measured=_placeholder()))
        plan = replace(plan, measured=measure_model(source, plan, context.reporter))
    target = suggest_target(context.config.root)
    plan = require_consistent(plan, target)
    _check_amount(plan, amount, target)
    needed = estimate_memory(plan)
    gpu_verdict = judge_gpu(plan, amount)
    cards = select_cards(context.config.server.need.gpu)
    rows = compare_gpus(plan, amount, needed.total_bytes, cards)
    offers, note = _list_offers(context, plan, amount, gpu_verdict)
    costs = _compute_costs(plan, amount, needed, offers, gpu_verdict)
    cheapest = next((cost for cost in costs if cost.fits), None)
    on = _choose_card(cheapest, needed.total_bytes, cards)
    hours, time_on = _compute_time(plan, amount, on, gpu_verdict)
    has_fit = cheapest is not None if costs else any(row.fits for row in rows)
    if amount.price_usd_per_hour is not None:
        costs = (_stated_cost(plan, amount, amount.price_usd_per_hour, hours),)
        cheapest = None
    return Estimate(
        plan=plan,
        amount=amount,
        memory=needed,
        time=TimeEstimate(hours=hours),
        fits=rows,
        costs=costs,
        gpu=gpu_verdict,
        cheapest=cheapest,
        ways=() if has_fit else list_suggestions(plan),
        details=_details(plan, amount, needed, on, time_on, note),
    )


def _placeholder() -> ModelMeasurement:
    """Return a placeholder for a model before it is built, to check the plan before the wait."""
    return ModelMeasurement(
        parameters=1,
        weight_bytes=4,
        trained_parameters=1,
        trained_bytes=4,
        fixed_bytes=0,
        item_bytes=0,
        item_flops=0,
    )


def _check_amount(plan: ModelPlan, amount: Workload, target: str) -> None:
    if plan.training and amount.requests_per_day:
        raise UsageError(
            "--requests-per-day cannot be combined with --train",
            why="requests are served by a trained model",
            hint="labctl estimate --params 8B --serve --requests-per-day 10k   # without --train",
        )
    if amount.items and plan.measured is None:
        raise UsageError(
            "--items needs a model from code",
            why="the cost of one item cannot be derived from the model's size",
            hint=f"labctl estimate {target} --items 60k   # or --tokens 100M",
        )
    if amount.tokens and plan.measured is not None and not amount.per_second:
        raise UsageError(
            "--tokens cannot be used with a model from code",
            why="it is measured per item of a batch; for a language model, that is a sequence",
            hint="use --items 60k instead",
        )
    if amount.per_second and not (amount.tokens or amount.items):
        raise UsageError(
            "--tokens-per-second needs the total number",
            hint="add --tokens 512M, or --items 60k",
        )


def _list_offers(
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
        offers = context.provider.offers(need)
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


def _compute_costs(
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
        hours = compute_hours(gpu_card, plan, amount) if gpu_card else measured_hours(amount)
        servers = -(-plan.gpus // offer.gpu_count)
    else:
        # Not every provider reports main memory. A quarter of it is left for the system.
        fit = not gpu_verdict.needed and needed.total_bytes <= (
            offer.memory_bytes * 0.75 or float("inf")
        )
        hours, servers = _cpu_hours(plan, amount), 1
    price = offer.price_usd_per_hour * servers
    return CostEstimate(
        provider=offer.provider,
        type=offer.type,
        zone=offer.zone,
        spot=offer.spot,
        gpu=offer.gpu_name,
        gpu_count=offer.gpu_count,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        servers=servers,
        price_usd_per_hour=offer.price_usd_per_hour,
        fits=fit,
        hours=hours,
        usd=compute_cost_usd(hours, price, amount),
        always_on_usd=_always_on(plan, amount, hours, price),
    )


def _cpu_hours(plan: ModelPlan, amount: Workload) -> float | None:
    if amount.requests_per_day:
        each = amount.seconds_per_request
        return amount.requests_per_day * each / HOUR_S if each else None
    seconds = cpu_seconds(plan, amount) if plan.training else None
    return measured_hours(amount) if seconds is None else seconds / HOUR_S


def _always_on(
    plan: ModelPlan, amount: Workload, hours: float | None, price: float
) -> float | None:
    if not amount.requests_per_day or hours is None:
        return None
    replicas = max(1, -(-round(hours * 1e6) // round(FULL_DAY_H * 1e6)))
    return replicas * FULL_DAY_H * DAYS_A_MONTH * price


def _stated_cost(
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
        always_on_usd=_always_on(plan, amount, hours, price),
    )


def _choose_card(cheapest: CostEstimate | None, total_bytes: int, cards: Sequence[Card]) -> Card:
    """Choose the GPU for the time: the cheapest offer's, the smallest that fits, or YARDSTICK.

    If the lab names a GPU on which the model does not fit, it is that one.
    """
    if cheapest is not None and (offered := find_card(cheapest.gpu, cheapest.gpu_memory_bytes)):
        return offered
    smallest = find_smallest_gpu(total_bytes, cards)
    yardstick = next((listed for listed in cards if listed.name == YARDSTICK), cards[-1])
    return next((listed for listed in cards if label(listed) == smallest), yardstick)


def _compute_time(
    plan: ModelPlan, amount: Workload, on: Card, gpu_verdict: GpuVerdict
) -> tuple[float | None, str]:
    """Return (hours, what they were computed for)."""
    if amount.requests_per_day and amount.seconds_per_request:
        return compute_hours(on, plan, amount), "your seconds per request"
    if measured_hours(amount) is not None:
        return measured_hours(amount), "your throughput"
    if not gpu_verdict.needed and plan.training and cpu_seconds(plan, amount):
        return _cpu_hours(plan, amount), "a laptop's CPU"
    count = f"{plan.gpus} x " if plan.gpus > 1 else ""
    return compute_hours(on, plan, amount), f"{count}{label(on)}"


def _details(
    plan: ModelPlan, amount: Workload, needed: MemoryEstimate, on: Card, time_on: str, note: str
) -> EstimateDetails:
    is_serving = not plan.training and plan.kind == "network"
    bandwidth = amount.bandwidth_bytes_per_s or on.bandwidth_gb_per_s * 1e9
    return EstimateDetails(
        gpus=plan.gpus,
        largest_term=find_largest_term(needed),
        simple_rule_leaves_out=why_simple_differs(plan, needed),
        simple_activations_bytes=simple_activations(plan),
        checkpoint_bytes=checkpoint_bytes(plan),
        kv_cache_all_heads_bytes=round(kv_cache(plan)) if is_serving else 0,
        flops=flops(plan, amount),
        utilization=amount.utilization,
        time_on=time_on,
        seconds_per_token=token_seconds(plan, amount, on),
        weights_seconds=weight_seconds(plan, bandwidth)
        if is_serving and not plan.measured
        else None,
        load=compute_load(amount, request_seconds(plan, amount, on)),
        model=plan.measured,
        costs_note=note,
        sent_bytes=round(sent_bytes(plan)),
        synchronization_seconds=synchronization_seconds(plan),
        step_seconds=step_seconds(on, plan, amount) if plan.training else None,
    )
