"""Output of `estimate`: how the memory adds up, the GPUs that it fits on, the cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.estimate_notes import print_checkpoints, print_layers, print_model, print_work
from labctl.cli.estimate_tables import (
    count_text,
    print_costs,
    print_fits,
    print_text,
    print_ways,
)
from labctl.cli.tables import print_table
from labctl.estimate.constants import BYTES, MOST_GPUS, STATE_BYTES, STATES
from labctl.estimate.memory import TERMS
from labctl.estimate.plan import ModelPlan, is_mixed
from labctl.text import (
    bytes_text,
    decimal_bytes_text,
    dollars_text,
    duration_text,
    price_text,
    timing_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from labctl.estimate.compute import Load
    from labctl.insight.estimate import Estimate, EstimateDetails

# hours from which the time is written in hours too
DAYS_FROM_HOURS = 48
NAMES = {"kv_cache": "KV cache"}
# how the activations of a model from code were found
ACTIVATIONS_TRAINING = {
    "measured": "measured: a training step on the CPU",
    "residuals": "what JAX keeps for the backward pass",
    "outputs": "the outputs of all layers",
    "unknown": "NOT counted: its layers have no fixed shapes",
}
ACTIVATIONS_SERVING = ACTIVATIONS_TRAINING | {
    "measured": "measured: a forward pass on the CPU",
    "residuals": "input and output of the largest operation",
    "outputs": "input and output of the largest layer",
}


def print_estimate(estimate: Estimate) -> None:
    """Print an estimate on standard output. The answer comes last."""
    click.secho(_title_text(estimate), bold=True)
    _print_memory(estimate)
    _print_notes(estimate)
    click.echo()
    if estimate.plan.kind == "network":
        print_fits(estimate)
        click.echo()
    if estimate.costs:
        print_costs(estimate)
        click.echo()
    _print_answer(estimate)


def _title_text(estimate: Estimate) -> str:
    plan = estimate.plan
    if plan.kind != "network":
        name = "trees over" if plan.kind == "trees" else "a model of"
        return f"{name} {count_text(plan.rows)} rows x {plan.columns} columns"
    model = plan.measured
    active = f" ({count_text(plan.active_params)} for a token)" if plan.active_params else ""
    size = count_text(model.parameters if model else plan.params)
    text = f"{size} parameters{active}, {plan.precision}, "
    text += f"training with {plan.optimizer}" if plan.training else "serving"
    if model or plan.seq:
        items = f"{plan.batch} items" if model else f"{plan.batch} x {plan.seq:,} tokens"
        text += f", batch of {items}"
    replicas = estimate.amount.replicas
    text += f", {plan.gpus} GPUs" if plan.gpus > 1 else ""
    return text + (f", {replicas} replicas" if replicas else "")


def _print_memory(estimate: Estimate) -> None:
    memory, rows = estimate.memory, []
    if estimate.plan.kind != "network":
        print_text(
            f"memory: {decimal_bytes_text(memory.total_bytes)}, half of it the table itself in fp32"
        )
        return
    origins = _explain_terms(estimate)
    for term in TERMS:
        size = getattr(memory, f"{term}_bytes")
        if size or term in origins:
            share = f"{size / memory.total_bytes:.0%}"
            name, origin = NAMES.get(term, term), origins.get(term, "")
            rows.append((name, f"{decimal_bytes_text(size):>10}", f"{share:>5}", origin))
    each = " on each GPU" if estimate.plan.gpus > 1 else ""
    total = f"{bytes_text(memory.total_bytes)}{each}"
    rows.append(("total", f"{decimal_bytes_text(memory.total_bytes):>10}", "", total))
    rule = _simple_rule_text(estimate.plan)
    rows.append(("simple rule", f"{decimal_bytes_text(memory.simple_rule_bytes):>10}", "", rule))
    print_table(rows, ("MEMORY", "      SIZE", "SHARE", "HOW"), cut=False)


def _simple_rule_text(plan: ModelPlan) -> str:
    scope = "the whole model, " if plan.gpus > 1 else ""
    if not plan.training:
        return f"{scope}weights only"
    return f"{scope}gradients and states in the weights' type"


def _explain_terms(estimate: Estimate) -> dict[str, str]:
    """Say where the size of each memory term comes from. These terms are shown even at zero."""
    plan, model = estimate.plan, estimate.plan.measured
    product = f"{BYTES[plan.precision]:g} bytes x {count_text(plan.params)}"
    origins = {"overhead": "assumed: CUDA's context, kernels, workspaces"}
    origins["weights"] = "parameters and buffers, counted" if model else product
    if plan.training:
        origins["gradients"] = "one for each trained parameter"
        origins["optimizer"] = _optimizer_states_text(plan)
        origins["activations"] = _activations_text(plan)
    elif plan.has_shape:
        origins["activations"] = "the working set of one layer"
        heads = plan.kv_heads or plan.all_heads
        full = estimate.details.kv_cache_all_heads_bytes
        origins["kv_cache"] = f"{heads} heads" + (
            f"; with all {plan.all_heads} heads {decimal_bytes_text(full)}"
            if heads != plan.all_heads
            else ""
        )
    elif model:
        origins["activations"] = ACTIVATIONS_SERVING[model.activations]
    return origins


def _optimizer_states_text(plan: ModelPlan) -> str:
    assert plan.optimizer
    states = f"{STATES[plan.optimizer]} states"
    if plan.measured:
        return f"{states} for each trained parameter"
    master = "fp32 weights 4 bytes + " if is_mixed(plan) else ""
    return f"{master}{states} x {STATE_BYTES[plan.optimizer]} bytes"


def _activations_text(plan: ModelPlan) -> str:
    if plan.measured:
        origin = ACTIVATIONS_TRAINING[plan.measured.activations]
        return f"{origin}, x {plan.micro_batch} items" if plan.measured.item_bytes else origin
    if not plan.has_shape:
        return "NOT counted: give --seq --hidden --layers"
    parts = [f"{plan.attention} attention"]
    parts += ["checkpointing"] if plan.checkpointing else []
    return f"{plan.micro_batch} x {plan.seq:,} tokens, {', '.join(parts)}"


def _print_notes(estimate: Estimate) -> None:
    plan, details = estimate.plan, estimate.details
    if plan.kind != "network":
        return
    name = details.largest_term
    print_text(f"The largest part: {NAMES.get(name, name)}.")
    if details.simple_rule_leaves_out:
        print_text(f"The simple rule ignores {_join_words(details.simple_rule_leaves_out)}.")
    print_checkpoints(estimate)
    if plan.measured:
        print_model(plan, plan.measured)
    print_work(estimate)
    _print_synchronization(estimate)
    print_layers(estimate)


def _join_words(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _print_synchronization(estimate: Estimate) -> None:
    """Print how long the gradients of a step take, and whether the link limits the training."""
    details, plan = estimate.details, estimate.plan
    if details.synchronization_seconds is None:
        return
    size = decimal_bytes_text(details.sent_bytes)
    time = timing_text(details.synchronization_seconds)
    compressed = f", compressed by {plan.compress}," if plan.compress else ""
    print_text(f"Each GPU sends {size} of gradients{compressed} per step: {time} over {plan.link}.")
    if details.step_seconds is None:
        return
    computed = timing_text(details.step_seconds)
    if details.synchronization_seconds > details.step_seconds:
        print_text(
            f"That is longer than the step computes ({computed} on {details.time_on}): the link "
            "limits the training. Use a larger --batch, a faster --link, or --compress."
        )
    else:
        print_text(f"The step computes {computed} on {details.time_on} meanwhile.")


def _print_answer(estimate: Estimate) -> None:
    if not estimate.gpu.needed:
        print_text(f"No GPU needed: {estimate.gpu.why}.")
    elif estimate.plan.fit is not None:
        print_text(f"A GPU may help, if {estimate.plan.fit.name} can use one.")
    else:
        _print_fitting_gpus(estimate)
    _print_time(estimate)
    _print_price(estimate)
    if estimate.ways:
        print_ways(estimate)


def _print_fitting_gpus(estimate: Estimate) -> None:
    gpus = [row.gpu for row in estimate.fits if row.fits and row.current and row.rentable]
    number = f", {estimate.plan.gpus} of them" if estimate.plan.gpus > 1 else ""
    if gpus:
        print_text(f"Fits on: {', '.join(gpus)}{number}.")
    elif estimate.cheapest is None:
        print_text("Fits on none of these GPUs.")
    if estimate.plan.kind != "network":
        return
    if estimate.plan.training and not estimate.plan.has_shape and not estimate.plan.measured:
        print_text("Activations are not included. To add them: --batch --seq --hidden --layers.")


def _print_time(estimate: Estimate) -> None:
    details, value = estimate.details, estimate.time.hours
    if estimate.amount.requests_per_day:
        load = details.load
        if load is None:
            print_text(
                "The time per request is unknown. Add --seconds-per-request 7 or --reply 300."
            )
            return
        print_text(
            f"{load.requests_per_day:,} requests a day of {load.seconds_per_request:.3g} s are "
            f"{load.gpu_hours_per_day:.1f} GPU-hours a day ({details.time_on}). If they come "
            f"evenly, they need at least {load.gpus} such server{'s' if load.gpus > 1 else ''}."
        )
        _print_replicas(estimate.amount.replicas, load)
    elif value is not None and details.time_basis.kind != "cpu":  # said with "No GPU needed"
        more = f" ({value:,.1f} hours)" if value >= DAYS_FROM_HOURS else ""
        print_text(f"Time: {duration_text(value * 3600)}{more}{_describe_basis(details)}.")


def _print_replicas(replicas: int, load: Load) -> None:
    if load.busy_share is None:
        return
    if load.busy_share > 1:
        few = "1 replica is" if replicas == 1 else f"{replicas} replicas are"
        more = f": use --replicas {load.gpus}" if load.gpus <= MOST_GPUS else ""
        print_text(f"{few} too few{more}.")
    else:
        are = "1 replica is" if replicas == 1 else f"{replicas} replicas are"
        print_text(f"{are} busy for {load.busy_share:.0%} of the time.")


def _describe_basis(details: EstimateDetails) -> str:
    basis = details.time_basis
    if basis.kind == "measured":
        return f", by {basis.name}"
    return f" on {basis.name}, {basis.why}"


def _print_price(estimate: Estimate) -> None:
    month = " a month (30 days, busy hours only)" if estimate.amount.requests_per_day else ""
    if estimate.amount.price_usd_per_hour is not None:
        row = estimate.costs[0]
        if row.usd is not None:
            price = price_text(row.price_usd_per_hour)
            print_text(f"Cost: {dollars_text(row.usd)}{month} at {price}.")
        if row.always_on_usd is not None:
            print_text(f"Always on: {dollars_text(row.always_on_usd)} a month.")
        return
    if estimate.cheapest is not None:
        cheapest = estimate.cheapest
        market = "spot" if cheapest.spot else "on demand"
        price = f"{price_text(cheapest.price_usd_per_hour)}, {market}"
        cost = f": {dollars_text(cheapest.usd)}{month}" if cheapest.usd else ""
        if cheapest.always_on_usd and cheapest.price_usd_per_hour:
            always = f"{dollars_text(cheapest.always_on_usd)} a month if always on"
            always = always if not cost else always.replace(" a month", "")
            cost += f", {always}" if cost else f": {always}"
        zone = f" in {cheapest.zone}" if cheapest.zone else ""
        price = price if cheapest.price_usd_per_hour else "free"
        print_text(f"The cheapest that fits: {cheapest.type}{zone} ({price}){cost}.")
    elif estimate.costs:
        print_text("It fits on none of the offers.")
    else:
        print_text(f"The cost is unknown: {estimate.details.costs_note}.")
