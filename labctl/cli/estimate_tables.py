"""The tables of an estimate, and how its figures are written."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.screen import table

if TYPE_CHECKING:
    from labctl.estimate.fits import Fit
    from labctl.insight.estimate import Cost, Estimate

WIDEST = 110
MOST_COSTS = 6
ENORMOUS_HOURS = 48


def say(text: str, indent: str = "", first: str | None = None) -> None:
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


def milliseconds(seconds: float) -> str:
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


def usd(dollars: float | None) -> str:
    if dollars is None:
        return "-"
    if 0 < dollars < 0.005:
        return "< 0.01"
    return f"{dollars:,.0f}" if dollars >= 100 else f"{dollars:.2f}"


def draw_fits(found: Estimate) -> None:
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
        cells.append("-" if row.seconds_per_token is None else milliseconds(row.seconds_per_token))
    return (*cells, row.note)


def _taken(share: float) -> str:
    """77%, 849%, 35x: of what the GPU can give."""
    return (f"{share:.0%}" if share < 10 else f"{share:,.0f}x").rjust(5)


def draw_costs(found: Estimate) -> None:
    """The best place for each type and market; those that hold it, if any do."""
    month = bool(found.amount.requests_per_day)
    holding = [one for one in found.costs if one.fits] or list(found.costs)
    best = {(one.type, one.spot): one for one in reversed(holding)}
    shown = [one for one in holding if best[one.type, one.spot] is one][:MOST_COSTS]
    spent = ("A DAY", "A MONTH", "ALL ON") if month else ("TIME", "USD")
    headings = ("TYPE", "GPU", "ZONE", "MARKET", "USD/H", *spent)
    table([_cost(one, month) for one in shown], headings)
    if len(found.costs) > len(shown):
        say(f"and {len(found.costs) - len(shown)} more: --json")


def _cost(one: Cost, month: bool) -> tuple[str, ...]:
    many = f"{one.servers}x " if one.servers > 1 else ""
    gpu = f"{one.gpu_count}x {one.gpu}" if one.gpu_count > 1 and one.gpu else one.gpu or "-"
    market = "spot" if one.spot else "on demand" if one.price_usd_per_hour else "-"
    cells = (
        f"{many}{one.type}",
        gpu,
        one.zone or "-",
        market if one.provider else "-",
        f"{one.price_usd_per_hour:.3f}",
        hours(one.hours),
        usd(one.usd),
    )
    return (*cells, usd(one.always_on_usd)) if month else cells


def draw_ways(found: Estimate) -> None:
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
        say(f"Together on one {fits_on}, {size.strip()}: {options}", "  ", "")
