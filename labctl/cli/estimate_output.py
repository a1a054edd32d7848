"""An estimate as people read it: how the sum is made, which GPUs hold it, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.estimate_tables import (
    ENORMOUS_HOURS,
    amount,
    count,
    draw_costs,
    draw_fits,
    draw_ways,
    hours,
    milliseconds,
    say,
    usd,
)
from labctl.cli.screen import table

if TYPE_CHECKING:
    from labctl.estimate.plan import Plan
    from labctl.insight.estimate import Estimate

GIB = 1024**3
NAMES = {"kv_cache": "KV cache"}


def draw(found: Estimate) -> None:
    """Everything, on standard output. The answer comes last."""
    click.secho(_title(found), bold=True)
    _memory(found)
    _notes(found)
    click.echo()
    if found.plan.kind == "network":
        draw_fits(found)
        click.echo()
    if found.costs:
        draw_costs(found)
        click.echo()
    _answer(found)


def _title(found: Estimate) -> str:
    plan = found.plan
    if plan.kind != "network":
        name = "trees over" if plan.kind == "trees" else "a model of"
        return f"{name} {count(plan.rows)} rows x {plan.columns} columns"
    model = plan.measured
    words = f"{count(model.parameters if model else plan.params)} parameters, {plan.precision}, "
    words += f"training with {plan.optimizer}" if plan.training else "in use"
    if model or plan.seq:
        items = f"{plan.batch} items" if model else f"{plan.batch} x {plan.seq:,} tokens"
        words += f", batch of {items}"
    return words + (f", {plan.gpus} GPUs" if plan.gpus > 1 else "")


def _memory(found: Estimate) -> None:
    from labctl.estimate.memory import TERMS

    memory, rows = found.memory, []
    if found.plan.kind != "network":
        say(f"memory: {amount(memory.total_bytes)}, half of it the table itself in fp32")
        return
    how = _how(found)
    for term in TERMS:
        size = getattr(memory, f"{term}_bytes")
        if size or term in how:
            share = f"{size / memory.total_bytes:.0%}"
            rows.append(
                (NAMES.get(term, term), f"{amount(size):>10}", f"{share:>5}", how.get(term, ""))
            )
    each = " on each GPU" if found.plan.gpus > 1 else ""
    total = f"{memory.total_bytes / GIB:,.1f} GiB{each}"
    rows.append(("total", f"{amount(memory.total_bytes):>10}", "", total))
    rows.append(("simple rule", f"{amount(memory.simple_rule_bytes):>10}", "", _simple(found.plan)))
    table(rows, ("MEMORY", "      SIZE", "SHARE", "HOW"))


def _simple(plan: Plan) -> str:
    whole = "the whole model, " if plan.gpus > 1 else ""
    if not plan.training:
        return f"{whole}weights alone"
    return f"{whole}gradients and states in the weights' type"


def _how(found: Estimate) -> dict[str, str]:
    """Why each term is as large as it is. A term that stands here is shown even at zero."""
    from labctl.estimate.constants import BYTES

    plan, model = found.plan, found.plan.measured
    each = f"{BYTES[plan.precision]:g} bytes x {count(plan.params)}"
    how = {"overhead": "assumed: CUDA's context, kernels, workspaces"}
    how["weights"] = "parameters and buffers, counted" if model else each
    if plan.training:
        how["gradients"] = "one for each trained parameter"
        how["optimizer"] = _states(plan)
        how["activations"] = _activations(plan)
    elif plan.shaped:
        how["activations"] = "the working set of one layer"
        heads = plan.kv_heads or plan.all_heads
        full = found.details.kv_cache_all_heads_bytes
        how["kv_cache"] = f"{heads} heads" + (
            f"; with all {plan.all_heads} heads {amount(full)}" if heads != plan.all_heads else ""
        )
    elif model:
        how["activations"] = "measured: a forward pass on the CPU"
    return how


def _states(plan: Plan) -> str:
    from labctl.estimate.constants import STATE_BYTES, STATES
    from labctl.estimate.plan import mixed

    assert plan.optimizer
    own = f"{STATES[plan.optimizer]} states"
    if plan.measured:
        return f"{own} for each trained parameter"
    master = "fp32 weights 4 bytes + " if mixed(plan) else ""
    return f"{master}{own} x {STATE_BYTES[plan.optimizer]} bytes"


def _activations(plan: Plan) -> str:
    if plan.measured:
        return f"measured: a training step on the CPU, x {plan.micro_batch} items"
    if not plan.shaped:
        return "NOT counted: give --seq --hidden --layers"
    parts = [f"{plan.attention} attention"]
    parts += ["checkpointing"] if plan.checkpointing else []
    return f"{plan.micro_batch} x {plan.seq:,} tokens, {', '.join(parts)}"


def _notes(found: Estimate) -> None:
    plan, details = found.plan, found.details
    if plan.kind != "network":
        return
    name = details.largest_term
    say(f"The largest part: {NAMES.get(name, name)}.")
    if details.simple_rule_leaves_out:
        say(f"The simple rule leaves out: {'; '.join(details.simple_rule_leaves_out)}.")
    if details.checkpoint_bytes:
        say(f"A checkpoint to go on from: {amount(details.checkpoint_bytes)}.")
    if plan.measured:
        _model(found)
    _work(found)


def _model(found: Estimate) -> None:
    model = found.plan.measured
    assert model is not None
    shape = " x ".join(str(size) for size in model.input_shape) or "one number"
    say(
        f"Input of one item: {shape} {model.input_type} (from {model.input_from}); "
        f"PyTorch {model.torch}" + (", bf16 by autocast" if model.autocast else "") + "."
    )


def _work(found: Estimate) -> None:
    """Operations, and the least time of a token."""
    plan, details = found.plan, found.details
    if details.flops:
        again = ", a third of a pass again for checkpointing" if plan.checkpointing else ""
        per_item = f" ({plan.measured.item_flops:.3g} an item)" if plan.measured else ""
        share = f"; a GPU is assumed to reach {details.utilisation:.0%} of its peak"
        measured = found.amount.per_second or found.amount.seconds_per_request
        say(f"Work: {details.flops:.3g} operations{per_item}{again}{'' if measured else share}.")
    if details.weights_seconds is not None and details.seconds_per_token is not None:
        at = (
            "at the bandwidth given"
            if found.amount.bandwidth_bytes_per_s
            else f"on {details.time_on}"
        )
        say(
            f"Reading all weights takes {milliseconds(details.weights_seconds)} a token {at}, with "
            f"the KV cache {milliseconds(details.seconds_per_token)}: no token comes faster."
        )


def _answer(found: Estimate) -> None:
    if not found.gpu.needed:
        say(f"No GPU needed: {found.gpu.why}.")
    else:
        _where(found)
    _when(found)
    _what_it_costs(found)
    if found.ways:
        draw_ways(found)


def _where(found: Estimate) -> None:
    holding = [row.gpu for row in found.fits if row.fits and row.current]
    each = f", {found.plan.gpus} of them" if found.plan.gpus > 1 else ""
    if holding:
        say(f"Fits on: {', '.join(holding)}{each}.")
    elif found.cheapest is None:
        say("Fits on none of these GPUs.")
    if found.plan.training and not found.plan.shaped and not found.plan.measured:
        say("Without activations: say --batch --seq --hidden --layers before you believe it.")


def _when(found: Estimate) -> None:
    details, value = found.details, found.time.hours
    if found.amount.requests_per_day:
        load = details.load
        if load is None:
            say("How long a request takes is not known: --seconds-per-request 7, or --reply 300.")
            return
        say(
            f"{load.requests_per_day:,} requests a day of {load.seconds_per_request:.3g} s are "
            f"{load.gpu_hours_per_day:.1f} GPU-hours a day ({details.time_on}): "
            f"{load.gpus} such server{'s' if load.gpus > 1 else ''} at least, if they come evenly."
        )
    elif value is not None:
        spoken = hours(value)
        exact = f"{value:,.1f} hours" if value >= 1 else spoken
        more = f" ({spoken})" if value >= ENORMOUS_HOURS else ""
        say(
            f"Time: {exact}{more}, by {details.time_on}."
            if "your" in details.time_on
            else f"Time: {exact}{more} on {details.time_on}."
        )


def _what_it_costs(found: Estimate) -> None:
    month = " a month (30 days, the hours of work)" if found.amount.requests_per_day else ""
    if found.amount.price_usd_per_hour is not None:
        own = found.costs[0]
        if own.usd is not None:
            say(f"Cost: {usd(own.usd)} dollars{month} at {own.price_usd_per_hour:g} an hour.")
        if own.always_on_usd is not None:
            say(f"Left on all day: {usd(own.always_on_usd)} dollars a month.")
        return
    if found.cheapest is not None:
        one = found.cheapest
        market = "spot" if one.spot else "on demand"
        price = f"{one.price_usd_per_hour:.3f} an hour, {market}"
        costs = f": {usd(one.usd)} dollars{month}" if one.usd else ""
        if costs and one.always_on_usd:
            costs += f", {usd(one.always_on_usd)} left on all day"
        place = f" in {one.zone}" if one.zone else ""
        price = price if one.price_usd_per_hour else "costs nothing"
        say(f"The cheapest that fits: {one.type}{place} ({price}){costs}.")
    elif found.costs:
        say("None of the offers holds it.")
    else:
        say(f"Costs: none known. {found.details.costs_note}.")
