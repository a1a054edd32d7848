"""An estimate: what a model needs, joined with what the provider offers and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from labctl.errors import ConfigError, InterruptError, LabError, UsageError
from labctl.estimate.advice import Verdict, Way, verdict, ways, why_simple_differs
from labctl.estimate.cards import CARDS, Card, card
from labctl.estimate.compute import (
    Amount,
    Load,
    cpu_seconds,
    dollars,
    flops,
    hours_on,
    load,
    measured_hours,
    request_seconds,
    token_seconds,
    weight_seconds,
)
from labctl.estimate.constants import DAYS_A_MONTH
from labctl.estimate.fits import Fit, fits, label, smallest_for, usable_bytes
from labctl.estimate.memory import (
    Memory,
    checkpoint_bytes,
    kv_cache,
    largest,
    memory,
    simple_activations,
)
from labctl.estimate.plan import Measured, Plan, checked
from labctl.insight.model_measurement import Source, measured
from labctl.model import GpuNeed, Need, Offer, Value
from labctl.servers.context import Ground

YARDSTICK = "H100"
HOUR_S = 3600.0
MOST_GPUS_OF_A_SERVER = 8
FULL_DAY_H = 24.0


class Time(Value, frozen=True):
    """Of the training, or of a day's requests; None where it cannot be told."""

    hours: float | None


class Cost(Value, frozen=True):
    """One offer. `usd` is for the training, or for 30 days of requests at the hours of work;
    `always_on_usd` is for 30 days in which the servers stay on. None: not known."""

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


class Details(Value, frozen=True):
    """What the four answers rest on.

    `time_on` is the GPU (or the measurement) that `time` is for. `kv_cache_all_heads_bytes` is the
    full-head formula, beside `memory`'s with the given heads. `seconds_per_token` and
    `weights_seconds` are least times, at the bandwidth given or at `time_on`'s.
    """

    gpus: int
    largest_term: str
    simple_rule_leaves_out: tuple[str, ...]
    simple_activations_bytes: int
    checkpoint_bytes: int
    kv_cache_all_heads_bytes: int
    flops: float
    utilisation: float
    time_on: str
    seconds_per_token: float | None
    weights_seconds: float | None
    load: Load | None
    model: Measured | None
    costs_note: str


class Estimate(Value, frozen=True):
    """All of it: `memory` per GPU, a row of `fits` per kind of GPU, a row of `costs` per offer.

    `cheapest` is the first of the costs whose machine holds it. `ways` is what to change, filled
    where no offer holds it or, without offers, no GPU of the list.
    """

    plan: Plan
    amount: Amount
    memory: Memory
    time: Time
    fits: tuple[Fit, ...]
    costs: tuple[Cost, ...]
    gpu: Verdict
    cheapest: Cost | None
    ways: tuple[Way, ...]
    details: Details


def estimate(ground: Ground, plan: Plan, amount: Amount, source: Source | None = None) -> Estimate:
    """The estimate for a plan; with a source its model is built and measured first.

    UsageError where the plan makes no sense. A provider that cannot be asked is told in
    `details.costs_note`, and is no failure.
    """
    if source is not None:
        checked(replace(plan, measured=_unbuilt()))
        plan = replace(plan, measured=measured(source, plan, ground.reporter))
    plan = checked(plan)
    _check_amount(plan, amount)
    found = memory(plan)
    said = verdict(plan, amount)
    rows = fits(plan, amount, found.total_bytes)
    offers, note = _offers(ground, plan, amount, said)
    costs = _costs(plan, amount, found, offers, said)
    cheapest = next((cost for cost in costs if cost.fits), None)
    on = _time_card(cheapest, found.total_bytes)
    hours, time_on = _time(plan, amount, on, said)
    holds = cheapest is not None if costs else any(row.fits for row in rows)
    if amount.price_usd_per_hour is not None:
        costs = (_stated(plan, amount, amount.price_usd_per_hour, hours),)
        cheapest = None
    return Estimate(
        plan=plan,
        amount=amount,
        memory=found,
        time=Time(hours=hours),
        fits=rows,
        costs=costs,
        gpu=said,
        cheapest=cheapest,
        ways=() if holds else ways(plan),
        details=_details(plan, amount, found, on, time_on, note),
    )


def _unbuilt() -> Measured:
    """Stands for a model before it is built, so that a plan is refused before the wait."""
    return Measured(
        parameters=1,
        weight_bytes=4,
        trained_parameters=1,
        trained_bytes=4,
        fixed_bytes=0,
        item_bytes=0,
        item_flops=0,
    )


def _check_amount(plan: Plan, amount: Amount) -> None:
    if plan.training and amount.requests_per_day:
        raise UsageError(
            "requests are for a model in use",
            why="--train asks about making it",
            hint="--serve --requests-per-day 10k, without --train",
        )
    if amount.items and plan.measured is None:
        raise UsageError(
            "--items are counted for a model from code",
            why="a size alone does not tell what one item costs",
            hint="labctl estimate train.py:build_model --items 60k, or --tokens 100M",
        )
    if amount.tokens and plan.measured is not None and not amount.per_second:
        raise UsageError(
            "a model from code is measured per item",
            why="an item is one of its batch: for a language model, a whole sequence",
            hint="--items 60k",
        )
    if amount.per_second and not (amount.tokens or amount.items):
        raise UsageError(
            "--tokens-per-second needs to know how many", hint="--tokens 512M, or --items 60k"
        )


def _offers(
    ground: Ground, plan: Plan, amount: Amount, said: Verdict
) -> tuple[Sequence[Offer], str]:
    """What the provider offers, and a word on why that is nothing. A stated price asks nobody."""
    if amount.price_usd_per_hour is not None:
        return (), ""
    other = "--provider aws asks AWS, --price 1.50 takes your own figure"
    need = _need(ground.config.server.need, plan, said)
    try:
        found = ground.provider.offers(need)
    except (ConfigError, InterruptError):
        raise
    except LabError as error:
        why = f" ({error.why.splitlines()[0]})" if error.why else ""
        return (), f"{error.what}{why}; {other}"
    if not found:
        return (), f"{ground.config.server.provider} offers nothing; {other}"
    return found, ""


def _need(need: Need, plan: Plan, said: Verdict) -> Need:
    """The lab's own need; where that leaves the GPU open, what the estimate asks for."""
    if need.gpu.kind != "auto":
        return need
    if not said.needed:
        return replace(need, gpu=GpuNeed(kind="none"))
    count = min(plan.gpus, MOST_GPUS_OF_A_SERVER)
    memory_bytes = need.gpu.min_memory_bytes
    return replace(need, gpu=GpuNeed(kind="any", count=count, min_memory_bytes=memory_bytes))


def _costs(
    plan: Plan, amount: Amount, found: Memory, offers: Sequence[Offer], said: Verdict
) -> tuple[Cost, ...]:
    """What holds it first, by dollars where hours are known (of a month left on, for requests),
    else by price."""
    rows = [_cost(plan, amount, found, offer, said) for offer in offers]
    return tuple(sorted(rows, key=_rank))


def _rank(one: Cost) -> tuple[bool, bool, float, float]:
    price = one.price_usd_per_hour * one.servers
    usd = one.usd if one.always_on_usd is None else one.always_on_usd
    return not one.fits, usd is None, price if usd is None else usd, price


def _cost(plan: Plan, amount: Amount, found: Memory, offer: Offer, said: Verdict) -> Cost:
    if offer.gpu_count:
        known = card(offer.gpu_name, offer.gpu_memory_bytes)
        fit = found.total_bytes <= usable_bytes(offer.gpu_name, offer.gpu_memory_bytes)
        hours = hours_on(known, plan, amount) if known else measured_hours(amount)
        servers = -(-plan.gpus // offer.gpu_count)
    else:
        # Main memory is not told by every provider; where it is, a quarter is the system's.
        fit = not said.needed and found.total_bytes <= (offer.memory_bytes * 0.75 or float("inf"))
        hours, servers = _cpu_hours(plan, amount), 1
    price = offer.price_usd_per_hour * servers
    return Cost(
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
        usd=dollars(hours, price, amount),
        always_on_usd=_always_on(plan, amount, hours, price),
    )


def _cpu_hours(plan: Plan, amount: Amount) -> float | None:
    if amount.requests_per_day:
        each = amount.seconds_per_request
        return amount.requests_per_day * each / HOUR_S if each else None
    seconds = cpu_seconds(plan, amount) if plan.training else None
    return measured_hours(amount) if seconds is None else seconds / HOUR_S


def _always_on(plan: Plan, amount: Amount, hours: float | None, price: float) -> float | None:
    if not amount.requests_per_day or hours is None:
        return None
    replicas = max(1, -(-round(hours * 1e6) // round(FULL_DAY_H * 1e6)))
    return replicas * FULL_DAY_H * DAYS_A_MONTH * price


def _stated(plan: Plan, amount: Amount, price: float, hours: float | None) -> Cost:
    """The price that was given on the command line, for all GPUs together."""
    return Cost(
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
        usd=dollars(hours, price, amount),
        always_on_usd=_always_on(plan, amount, hours, price),
    )


def _time_card(cheapest: Cost | None, total_bytes: int) -> Card:
    """The GPU that the time is for: the cheapest offer's, else the smallest that holds it, else the
    yardstick."""
    if cheapest is not None and (known := card(cheapest.gpu, cheapest.gpu_memory_bytes)):
        return known
    fitting = smallest_for(total_bytes)
    yardstick = next(one for one in CARDS if one.name == YARDSTICK)
    return next((one for one in CARDS if label(one) == fitting), yardstick)


def _time(plan: Plan, amount: Amount, on: Card, said: Verdict) -> tuple[float | None, str]:
    """Hours, and on what."""
    if amount.requests_per_day and amount.seconds_per_request:
        return hours_on(on, plan, amount), "your seconds per request"
    if measured_hours(amount) is not None:
        return measured_hours(amount), "your throughput"
    if not said.needed and plan.training and cpu_seconds(plan, amount):
        return _cpu_hours(plan, amount), "a laptop's processor"
    many = f"{plan.gpus} x " if plan.gpus > 1 else ""
    return hours_on(on, plan, amount), f"{many}{label(on)}"


def _details(
    plan: Plan, amount: Amount, found: Memory, on: Card, time_on: str, note: str
) -> Details:
    use = not plan.training and plan.kind == "network"
    bandwidth = amount.bandwidth_bytes_per_s or on.bandwidth_gb_per_s * 1e9
    return Details(
        gpus=plan.gpus,
        largest_term=largest(found),
        simple_rule_leaves_out=why_simple_differs(plan, found),
        simple_activations_bytes=simple_activations(plan),
        checkpoint_bytes=checkpoint_bytes(plan),
        kv_cache_all_heads_bytes=round(kv_cache(plan)) if use else 0,
        flops=flops(plan, amount),
        utilisation=amount.utilisation,
        time_on=time_on,
        seconds_per_token=token_seconds(plan, amount, on),
        weights_seconds=weight_seconds(plan, bandwidth) if use and not plan.measured else None,
        load=load(amount, request_seconds(plan, amount, on)),
        model=plan.measured,
        costs_note=note,
    )
