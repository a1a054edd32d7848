"""run --probe: what the whole run will take, and whether to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.options import SCREEN, rest

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Run
    from labctl.runs.probe import Elsewhere, Probed


def asked(
    ctx: click.Context,
    lab: Lab,
    command: tuple[str, ...],
    amount: str,
    *,
    push: bool,
    json_: bool,
) -> bool:
    """Probe, tell what the whole run will take, and ask whether to go on with it.

    With `json_` what was found is one object, and the whole run is not begun. A run that was over
    before its probe needs no other one.
    """
    from labctl.cli.screen import as_json
    from labctl.events import Decision

    def started(run: Run) -> None:
        click.echo(f"probing with run {run.id}", err=True)

    found = lab.probe(command, amount=amount, push=push, on_start=started)
    rest(ctx)
    if json_:
        as_json({"probe": found})
        return False
    if found.finished:
        took = f"it took {lasting(found.time.seconds)}"
        click.echo(f"the whole run was over before the probe was: {took}", err=True)
        click.echo(f"labctl pull {found.run.id}    bring home what it made", err=True)
        return False
    question = f"{sentence(found)}; go on?"
    click.echo(details(found), err=True)
    if ctx.meta[SCREEN].yes:
        click.echo(f"{question} yes", err=True)
        return True
    if lab.ground.reporter.ask(Decision(question=question, about="price")):
        return True
    click.echo("nothing more was started; labctl down ends the bill", err=True)
    return False


def sentence(found: Probed) -> str:
    """`whole run will take 47 min, 0.31 dollars on this spot offer`."""
    said = f"whole run will take {lasting(found.time.seconds)}"
    offer = found.server.offer
    if not offer.price_usd_per_hour:
        return f"{said} and costs nothing"
    return f"{said}, {money(found.usd)} dollars on this {'spot ' if offer.spot else ''}offer"


def details(found: Probed) -> str:
    """How it was measured, the range, what is not in it, and the other offers."""
    lines = []
    if found.pace is not None:
        step = f"{found.pace.seconds_per_step * 1000:.3g} ms each"
        warm = f"the first {found.pace.warm_up_steps:.0f} dropped as warm-up"
        lines.append(
            f"{found.pace.steps:.0f} of {found.total_steps:.0f} steps measured, {step}; {warm}"
        )
        between = f"between {lasting(found.time.low_s)} and {lasting(found.time.high_s)}"
        if found.usd:
            between += f", {money(found.low_usd)} and {money(found.high_usd)} dollars"
        start = found.pace.start_s
        lines.append(f"{between}; {lasting(start)} of it to start" if start >= 1 else between)
        lines.append("validation and evaluation count only as far as the probe came to them")
    if found.ends_before:
        lines.append(f"the server's {found.ends_before} ends it before that: labctl extend 2h")
    known = tuple(row for row in found.elsewhere if row.seconds is not None)
    if known:
        lines += ["", *offers(known)]
    if any(row.offer.type != found.server.offer.type for row in known):
        lines.append("times on other GPUs are this one's, by their peaks in half precision")
    if len(known) < len(found.elsewhere):
        lines.append("how long it takes on the others is not known: labctl offers")
    if found.offers_note:
        lines.append(found.offers_note)
    return "\n".join(lines)


def offers(rows: tuple[Elsewhere, ...]) -> list[str]:
    """A table of the whole run on other offers, whose time is known."""
    head = ("OTHER OFFER", "GPU", "USD/H", "TIME", "DOLLARS")
    cells = [head]
    for row in rows:
        one = row.offer
        kind = f"{one.type}{' spot' if one.spot else ''}"
        gpu = f"{one.gpu_count} x {one.gpu_name}" if one.gpu_count else "none"
        took, usd = lasting(row.seconds or 0.0), money(row.usd or 0.0)
        cells.append((kind, gpu, f"{one.price_usd_per_hour:.4g}", took, usd))
    widths = [max(len(cell[place]) for cell in cells) for place in range(len(head))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in cells]
    return [line.rstrip() for line in lines]


def lasting(seconds: float) -> str:
    """`42 s`, `2.2 min`, `47 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 9.95 * 60:
        return f"{seconds / 60:.1f} min"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 36 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def money(usd: float) -> str:
    """Cents, or two figures where that is less."""
    return f"{usd:.2f}" if usd >= 0.1 or not usd else f"{usd:.2g}"
