"""The tables of an estimate, and the format of its figures."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.tables import print_table
from labctl.cli.wrapping import read_output_width
from labctl.text import (
    decimal_bytes_text,
    dollars_text,
    duration_text,
    optional_text,
    price_or_free_text,
    timing_text,
)

if TYPE_CHECKING:
    from labctl.estimate.fits import GpuFit
    from labctl.insight.estimate import Estimate
    from labctl.insight.offer_costs import CostEstimate

MAX_WIDTH = 110
MAX_COSTS = 6


def print_text(text: str, indent: str = "", first: str | None = None) -> None:
    """Print text wrapped to the screen; `first` replaces the indent of the first line."""
    width = read_output_width(MAX_WIDTH)
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


def count_text(number: float) -> str:
    """Write a number with a suffix: 8B, 512M, 98.3k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def print_fits(estimate: Estimate) -> None:
    """Print for each GPU whether the model fits, and how long it takes there."""
    headings = ["GPU", "FITS", "USED"]
    has_times = any(row.hours is not None for row in estimate.fits)
    has_token_times = any(row.seconds_per_token is not None for row in estimate.fits)
    has_token_times = has_token_times and not estimate.amount.bandwidth_bytes_per_s
    measured = estimate.amount.is_measured or bool(estimate.amount.seconds_per_request)
    if has_times and not measured:
        headings.append("GPU-TIME/DAY" if estimate.amount.requests_per_day else "TIME")
    if has_token_times:
        headings.append("PER TOKEN")
    rows = [_fit_cells(row, headings) for row in estimate.fits]
    if any(row.note for row in estimate.fits):
        print_table(rows, (*headings, ""), cut=False)
    else:
        print_table([row[:-1] for row in rows], tuple(headings))


def _fit_cells(row: GpuFit, headings: list[str]) -> tuple[str, ...]:
    cells = [row.gpu, "yes" if row.fits else "no", _share_text(row.share)]
    if "TIME" in headings or "GPU-TIME/DAY" in headings:
        cells.append(_hours_text(row.hours))
    if "PER TOKEN" in headings:
        cells.append(optional_text(row.seconds_per_token, timing_text))
    return (*cells, row.note)


def _hours_text(hours: float | None) -> str:
    return optional_text(hours, lambda known: duration_text(known * 3600))


def _share_text(share: float) -> str:
    """Write a share of the GPU's usable memory: 77%, 849%, 35x."""
    return (f"{share:.0%}" if share < 10 else f"{share:,.0f}x").rjust(5)


def print_costs(estimate: Estimate) -> None:
    """Print the best zone for each server type and market; only those that fit, if any do."""
    month = bool(estimate.amount.requests_per_day or estimate.amount.replicas)
    costs = [cost for cost in estimate.costs if cost.fits] or list(estimate.costs)
    best = {(cost.type, cost.spot): cost for cost in reversed(costs)}
    rows = [cost for cost in costs if best[cost.type, cost.spot] is cost][:MAX_COSTS]
    amounts = ("PER DAY", "PER MONTH", "ALWAYS ON") if month else ("TIME", "COST")
    headings = ("TYPE", "GPU", "ZONE", "MARKET", "PRICE", *amounts)
    optional = ("ZONE", "GPU", "PRICE", "TIME", "PER DAY")
    print_table([_cost_cells(cost, month) for cost in rows], headings, optional=optional)
    if len(estimate.costs) > len(rows):
        print_text(f"and {len(estimate.costs) - len(rows)} more: --json")


def _cost_cells(cost: CostEstimate, month: bool) -> tuple[str, ...]:
    number = f"{cost.servers}x " if cost.servers > 1 else ""
    gpu = f"{cost.gpu_count}x {cost.gpu}" if cost.gpu_count > 1 and cost.gpu else cost.gpu or "-"
    market = "spot" if cost.spot else "on demand" if cost.price_usd_per_hour else "-"
    cells = (
        f"{number}{cost.type}",
        gpu,
        cost.zone or "-",
        market if cost.provider else "-",
        price_or_free_text(cost.price_usd_per_hour),
        _hours_text(cost.hours),
        optional_text(cost.usd, dollars_text) if cost.price_usd_per_hour else "free",
    )
    return (*cells, optional_text(cost.always_on_usd, dollars_text)) if month else cells


def print_ways(estimate: Estimate) -> None:
    """Print changes that make the model fit, each with its price in quality or time."""
    click.echo()
    rows = [
        (
            way.options,
            f"{decimal_bytes_text(way.total_bytes):>10}",
            (f"{way.gpus}x " if way.gpus > 1 else "") + way.fits_on if way.fits_on else "no",
            way.what,
        )
        for way in estimate.ways
    ]
    together = [row for row in rows if row[3] == "together"]
    print_table(
        [row for row in rows if row not in together],
        ("CHANGE", "      SIZE", "FITS ON", "PRICE"),
        cut=False,
    )
    for options, size, fits_on, _ in together:
        print_text(f"Together on one {fits_on}, {size.strip()}: {options}", "  ", "")
