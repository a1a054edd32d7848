"""An estimate as people read it: how the sum is made, which GPUs hold it, what it costs."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from labctl.cli.exits import clean
from labctl.cli.screen import table

if TYPE_CHECKING:
    from labctl.actions.estimate import Cost, Estimate
    from labctl.estimate.fits import Fit
    from labctl.estimate.plan import Plan

GIB = 1024**3
WIDEST = 110
MOST_COSTS = 6
NAMES = {"kv_cache": "KV cache"}
ENORMOUS_HOURS = 48


def draw(found: Estimate) -> None:
    """Everything, on standard output. The answer comes last."""
    click.secho(_title(found), bold=True)
    _memory(found)
    _notes(found)
    click.echo()
    if found.plan.kind == "network":
        _fits(found)
        click.echo()
    if found.costs:
        _costs(found)
        click.echo()
    _answer(found)


def _say(text: str, indent: str = "", first: str | None = None) -> None:
    width = min(shutil.get_terminal_size((100, 24)).columns, WIDEST)
    start = indent if first is None else first
    click.echo(
        textwrap.fill(
            clean(text),
            width,
            initial_indent=start,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def amount(size: float) -> str:
    """Powers of ten, as memory is told for models: 16.0 GB, 10.8 MB, 377 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.95 * factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB" if size else "0"


def count(number: float) -> str:
    """8B, 512M, 98.3k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


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
        _say(f"memory: {amount(memory.total_bytes)}, half of it the table itself in fp32")
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
    from labctl.estimate.figures import BYTES

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
        how["KV cache"] = ""
        heads = plan.kv_heads or plan.all_heads
        full = found.details.kv_cache_all_heads_bytes
        how["kv_cache"] = f"{heads} heads" + (
            f"; with all {plan.all_heads} heads {amount(full)}" if heads != plan.all_heads else ""
        )
    elif model:
        how["activations"] = "measured: a forward pass on the CPU"
    return how


def _states(plan: Plan) -> str:
    from labctl.estimate.figures import STATE_BYTES, STATES
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
        return "NOT counted: give --batch --seq --hidden --layers"
    parts = [f"{plan.attention} attention"]
    parts += ["checkpointing"] if plan.checkpointing else []
    return f"{plan.micro_batch} x {plan.seq:,} tokens, {', '.join(parts)}"


def _notes(found: Estimate) -> None:
    plan, details = found.plan, found.details
    if plan.kind != "network":
        return
    name = details.largest_term
    _say(f"The largest part: {NAMES.get(name, name)}.")
    if details.simple_rule_leaves_out:
        _say(f"The simple rule leaves out: {'; '.join(details.simple_rule_leaves_out)}.")
    if details.checkpoint_bytes:
        _say(f"A checkpoint to go on from: {amount(details.checkpoint_bytes)}.")
    if plan.measured:
        _model(found)
    _work(found)


def _model(found: Estimate) -> None:
    model = found.plan.measured
    assert model is not None
    shape = " x ".join(str(size) for size in model.input_shape) or "one number"
    _say(
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
        _say(f"Work: {details.flops:.3g} operations{per_item}{again}{'' if measured else share}.")
    if details.weights_seconds is not None and details.seconds_per_token is not None:
        at = (
            "at the bandwidth given"
            if found.amount.bandwidth_bytes_per_s
            else f"on {details.time_on}"
        )
        _say(
            f"Reading all weights takes {_ms(details.weights_seconds)} a token {at}, with the KV "
            f"cache {_ms(details.seconds_per_token)}: faster than that no token comes."
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def hours(value: float | None) -> str:
    """`-`, 12 min, 47.4 h, 3.2 years."""
    if value is None:
        return "-"
    if value < 1 / 60:
        return f"{value * 3600:.0f} s" if value >= 1 / 3600 else "< 1 s"
    if value < 1:
        return f"{value * 60:.0f} min"
    if value < ENORMOUS_HOURS:
        return f"{value:.1f} h"
    if value < 2 * 365 * 24:
        return f"{value / 24:,.0f} days"
    return f"{value / 24 / 365:,.0f} years"


def _fits(found: Estimate) -> None:
    headings = ["GPU", "FITS", "TAKEN"]
    timed = any(row.hours is not None for row in found.fits)
    tokens = any(row.seconds_per_token is not None for row in found.fits)
    tokens = tokens and not found.amount.bandwidth_bytes_per_s
    measured = bool(found.amount.per_second or found.amount.seconds_per_request)
    if timed and not measured:
        headings.append("GPU-TIME A DAY" if found.amount.requests_per_day else "TIME")
    if tokens:
        headings.append("A TOKEN")
    rows = [_fit(row, headings) for row in found.fits]
    if any(row.note for row in found.fits):
        table(rows, (*headings, ""))
    else:
        table([row[:-1] for row in rows], tuple(headings))


def _fit(row: Fit, headings: list[str]) -> tuple[str, ...]:
    cells = [row.gpu, "yes" if row.fits else "no", _taken(row.share)]
    if "TIME" in headings or "GPU-TIME A DAY" in headings:
        cells.append(hours(row.hours))
    if "A TOKEN" in headings:
        cells.append("-" if row.seconds_per_token is None else _ms(row.seconds_per_token))
    return (*cells, row.note)


def _taken(share: float) -> str:
    """77%, 849%, 35x: of what the GPU can give."""
    return (f"{share:.0%}" if share < 10 else f"{share:,.0f}x").rjust(5)


def _costs(found: Estimate) -> None:
    month = bool(found.amount.requests_per_day)
    headings = ["TYPE", "GPU", "ZONE", "MARKET", "USD/H", "FITS"]
    headings += ["WORK/DAY", "USD/MONTH", "ALWAYS ON"] if month else ["TIME", "USD"]
    shown = found.costs[:MOST_COSTS]
    table([_cost(one, month) for one in shown], tuple(headings))
    if len(found.costs) > len(shown):
        _say(f"and {len(found.costs) - len(shown)} more: --json")


def _cost(one: Cost, month: bool) -> tuple[str, ...]:
    many = f"{one.servers}x " if one.servers > 1 else ""
    gpu = f"{one.gpu_count}x {one.gpu}" if one.gpu_count > 1 and one.gpu else one.gpu or "-"
    stated = not one.provider
    market = "spot" if one.spot else "on demand" if one.price_usd_per_hour else "-"
    cells = (
        f"{many}{one.type}",
        gpu,
        one.zone or "-",
        "-" if stated else market,
        f"{one.price_usd_per_hour:.3f}",
        "-" if stated else "yes" if one.fits else "no",
        hours(one.hours),
        _usd(one.usd),
    )
    return (*cells, _usd(one.always_on_usd)) if month else cells


def _usd(dollars: float | None) -> str:
    if dollars is None:
        return "-"
    return f"{dollars:,.0f}" if dollars >= 100 else f"{dollars:.2f}"


def _answer(found: Estimate) -> None:
    if not found.gpu.needed:
        _say(f"No GPU needed: {found.gpu.why}.")
    else:
        _where(found)
    _when(found)
    _what_it_costs(found)
    if found.ways:
        _ways(found)


def _where(found: Estimate) -> None:
    holding = [row.gpu for row in found.fits if row.fits]
    each = f", {found.plan.gpus} of them" if found.plan.gpus > 1 else ""
    if holding:
        _say(f"Fits on: {', '.join(holding)}{each}.")
    elif found.cheapest is None:
        _say("Fits on none of these GPUs.")
    if found.plan.training and not found.plan.shaped and not found.plan.measured:
        _say("Without activations: say --batch --seq --hidden --layers before you believe it.")


def _when(found: Estimate) -> None:
    details, value = found.details, found.time.hours
    if found.amount.requests_per_day:
        load = details.load
        if load is None:
            _say("How long a request takes is not known: --seconds-per-request 7, or --reply 300.")
            return
        _say(
            f"{load.requests_per_day:,} requests a day of {load.seconds_per_request:.3g} s are "
            f"{load.gpu_hours_per_day:.1f} GPU-hours a day ({details.time_on}): "
            f"{load.gpus} such server{'s' if load.gpus > 1 else ''} at least, if they come evenly."
        )
    elif value is not None:
        spoken = hours(value)
        exact = f"{value:,.1f} hours" if value >= 1 else spoken
        more = f" ({spoken})" if value >= ENORMOUS_HOURS else ""
        _say(
            f"Time: {exact}{more}, by {details.time_on}."
            if "your" in details.time_on
            else f"Time: {exact}{more} on {details.time_on}."
        )


def _what_it_costs(found: Estimate) -> None:
    month = " a month (30 days, the hours of work)" if found.amount.requests_per_day else ""
    if found.amount.price_usd_per_hour is not None:
        own = found.costs[0]
        if own.usd is not None:
            _say(f"Cost: {_usd(own.usd)} dollars{month} at {own.price_usd_per_hour:g} an hour.")
        if own.always_on_usd is not None:
            _say(f"Left on all day: {_usd(own.always_on_usd)} dollars a month.")
        return
    if found.cheapest is not None:
        one = found.cheapest
        market = "spot" if one.spot else "on demand"
        price = f"{one.price_usd_per_hour:.3f} an hour, {market}"
        costs = f": {_usd(one.usd)} dollars{month}" if one.usd else ""
        place = f" in {one.zone}" if one.zone else ""
        price = price if one.price_usd_per_hour else "costs nothing"
        _say(f"The cheapest that fits: {one.type}{place} ({price}){costs}.")
    elif found.costs:
        _say("None of the offers holds it.")
    else:
        _say(f"Costs: none known. {found.details.costs_note}.")


def _ways(found: Estimate) -> None:
    click.echo()
    rows = [
        (
            way.options,
            f"{amount(way.total_bytes):>10}",
            (f"{way.gpus}x " if way.gpus > 1 else "") + way.fits_on if way.fits_on else "no",
            way.what,
        )
        for way in found.ways
    ]
    together = [row for row in rows if row[3] == "together"]
    table(
        [row for row in rows if row not in together], ("CHANGE", "      SIZE", "FITS ON", "PRICE")
    )
    for options, size, fits_on, _ in together:
        _say(f"Together on one {fits_on}, {size.strip()}: {options}", "  ", "")
