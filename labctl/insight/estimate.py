"""Estimate a model's memory and time, and join them with the provider's offers and prices."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from labctl.errors import UsageError
from labctl.estimate.advice import (
    GpuVerdict,
    Suggestion,
    judge_gpu,
    list_suggestions,
    why_simple_differs,
)
from labctl.estimate.cards import Card, find_card
from labctl.estimate.checkpoint_interval import CheckpointInterval, compute_interval
from labctl.estimate.compute import (
    Load,
    Workload,
    compute_hours,
    compute_load,
    cpu_seconds,
    flops,
    measured_hours,
    reached_utilization,
    request_seconds,
    step_seconds,
    token_seconds,
    trainable_amount,
    weight_seconds,
)
from labctl.estimate.fits import GpuFit, choose_card, compare_gpus, label, select_cards
from labctl.estimate.intensity import Intensity, compute_intensity
from labctl.estimate.layers import LayerTable, compute_layers
from labctl.estimate.memory import (
    MemoryEstimate,
    checkpoint_bytes,
    estimate_memory,
    find_largest_term,
    kv_cache,
    simple_activations,
)
from labctl.estimate.plan import FitMeasurement, ModelMeasurement, ModelPlan, require_consistent
from labctl.estimate.synchronization import sent_bytes, synchronization_seconds
from labctl.insight.model_measurement import ModelSource, measure_model, suggest_target
from labctl.insight.offer_costs import (
    CostEstimate,
    compute_costs,
    compute_stated_cost,
    cpu_hours,
    list_matching_offers,
)
from labctl.model import Value
from labctl.servers.context import LabContext


class TimeEstimate(Value, frozen=True):
    """The time of the training, or of a day's requests; None if unknown."""

    hours: float | None


class TimeBasis(Value, frozen=True):
    """What a time is for: a GPU, with why it was chosen, a CPU, or what the user measured."""

    kind: Literal["gpu", "cpu", "measured"] = "gpu"
    name: str = ""
    why: str = ""


class EstimateDetails(Value, frozen=True):
    """Details behind an estimate.

    `time_on` is the GPU (or the measurement) that `time` is for, and `time_basis` says why.
    `kv_cache_all_heads_bytes` uses the full-head formula, while `memory` uses the given heads.
    `seconds_per_token` and `weights_seconds` are lower bounds, at the given bandwidth or that of
    `time_on`. `sent_bytes` is what each GPU sends in a step, for which the link needs
    `synchronization_seconds`, and `step_seconds` what the step computes; None if unknown.
    `card` is the GPU that `intensity`, `reached_utilization` and `trainable_amount` (tokens, or
    items of a model from code) are for; these two are of the given GPU-hours.
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
    time_basis: TimeBasis = TimeBasis()
    card: str = ""
    intensity: Intensity | None = None
    layers: LayerTable | None = None
    checkpoint_interval: CheckpointInterval | None = None
    reached_utilization: float | None = msgspec.field(default=None, name="reached_utilisation")
    trainable_amount: float | None = None


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
        plan = _add_measurement(plan, measure_model(source, plan, context.reporter))
    target = suggest_target(context.config.root)
    plan = require_consistent(plan, target)
    _check_amount(plan, amount, target)
    needed = estimate_memory(plan)
    gpu_verdict = judge_gpu(plan, amount)
    cards = select_cards(context.config.server.need.gpu)
    rows = compare_gpus(plan, amount, needed.total_bytes, cards)
    offers, note = list_matching_offers(context, plan, amount, gpu_verdict)
    costs = compute_costs(plan, amount, needed, offers, gpu_verdict)
    cheapest = next((cost for cost in costs if cost.fits), None)
    offered = find_card(cheapest.gpu, cheapest.gpu_memory_bytes) if cheapest else None
    need = context.config.server.need.gpu
    on, why = choose_card(plan, needed.total_bytes, need, offered)
    hours, basis = _compute_time(plan, amount, on, why, gpu_verdict)
    has_fit = cheapest is not None if costs else any(row.fits and row.rentable for row in rows)
    if amount.price_usd_per_hour is not None:
        costs = (compute_stated_cost(plan, amount, amount.price_usd_per_hour, hours),)
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
        details=_details(plan, amount, needed, on, basis, note),
    )


def _add_measurement(plan: ModelPlan, model: ModelMeasurement | FitMeasurement) -> ModelPlan:
    if isinstance(model, ModelMeasurement):
        return replace(plan, measured=model)
    rows = plan.rows or model.rows
    return replace(plan, kind="tabular", rows=rows, columns=model.columns, fit=model)


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
    if (amount.items or amount.tokens) and plan.fit is not None:
        raise UsageError(
            f"{plan.fit.name} is trained on rows of a table, not on items or tokens",
            hint=f"labctl estimate {target} --rows 60k",
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
    _check_hours(plan, amount)
    if amount.replicas and plan.training:
        raise UsageError(
            f"--replicas {amount.replicas} cannot be combined with --train",
            why="replicas answer requests; the copies of a training are data parallelism",
            hint=f"use --data-parallel {amount.replicas}, with a --batch of at least as many items",
        )


def _check_hours(plan: ModelPlan, amount: Workload) -> None:
    if amount.gpu_hours and not plan.training:
        raise UsageError(
            "--gpu-hours needs a training",
            why="the GPU-hours of requests follow from their number and time",
            hint="add --train adam, or use --requests-per-day 10k --seconds-per-request 7",
        )
    if amount.gpu_hours and amount.per_second:
        raise UsageError(
            "--gpu-hours cannot be combined with --tokens-per-second",
            why="each of them gives the time of the training",
            hint="leave out one of them",
        )
    if amount.checkpoint_s and not amount.reclaim_every_s:
        raise UsageError(
            "--checkpoint-time needs --reclaim-every",
            why="how often to save depends on how often a server is lost",
            hint="add --reclaim-every 6h",
        )
    if amount.reclaim_every_s and not plan.training:
        raise UsageError(
            "--reclaim-every needs a training",
            why="only a training saves checkpoints",
            hint="add --train adam",
        )


def _compute_time(
    plan: ModelPlan, amount: Workload, on: Card, why: str, gpu_verdict: GpuVerdict
) -> tuple[float | None, TimeBasis]:
    """Return (hours, what they were computed for). `why` says why the GPU `on` was chosen."""
    if amount.requests_per_day and amount.seconds_per_request:
        return compute_hours(on, plan, amount), TimeBasis(
            kind="measured", name="your seconds per request"
        )
    if measured_hours(amount, plan.gpus) is not None:
        name = "your GPU-hours" if amount.gpu_hours else "your throughput"
        return measured_hours(amount, plan.gpus), TimeBasis(kind="measured", name=name)
    if plan.fit is not None:
        name = "trainings on parts of the rows" if gpu_verdict.needed else "this machine's CPU"
        kind: Literal["cpu", "measured"] = "measured" if gpu_verdict.needed else "cpu"
        return cpu_hours(plan, amount), TimeBasis(kind=kind, name=name)
    if not gpu_verdict.needed and plan.training and cpu_seconds(plan, amount):
        return cpu_hours(plan, amount), TimeBasis(kind="cpu", name="a laptop's CPU")
    count = f"{plan.gpus} x " if plan.gpus > 1 else ""
    return compute_hours(on, plan, amount), TimeBasis(
        kind="gpu", name=f"{count}{label(on)}", why=why
    )


def _details(
    plan: ModelPlan, amount: Workload, needed: MemoryEstimate, on: Card, basis: TimeBasis, note: str
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
        time_on=basis.name,
        time_basis=basis,
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
        card=label(on),
        intensity=compute_intensity(plan, on, amount.bandwidth_bytes_per_s),
        layers=compute_layers(plan),
        checkpoint_interval=compute_interval(plan, amount),
        reached_utilization=reached_utilization(plan, amount, on),
        trainable_amount=trainable_amount(plan, amount, on),
    )
