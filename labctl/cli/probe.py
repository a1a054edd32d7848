"""`run --probe`: estimate time and cost of the whole run, and ask whether to start it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.options import SCREEN, stop_drawing
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.events import Question
from labctl.text import dollars_text, duration_text, price_or_free_text, timing_text

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Run
    from labctl.runs.probe import OfferComparison, ProbeResult


def confirm_after_probe(
    ctx: click.Context,
    lab: Lab,
    command: tuple[str, ...],
    amount: str,
    *,
    push: bool,
    json_: bool,
) -> bool:
    """Run the probe, print the estimate, and return whether to start the whole run.

    With `json_` the estimate is printed as one object and the whole run is not started. Nor is it
    if the command ended before its probe did.
    """

    def report_start(run: Run) -> None:
        print_message(f"probing with run {run.id}")

    estimate = lab.probe(command, amount=amount, push=push, on_start=report_start)
    stop_drawing(ctx)
    if json_:
        print_json({"probe": estimate})
        return False
    if estimate.finished:
        elapsed = duration_text(estimate.time.seconds)
        print_message(f"the whole run finished during the probe: it took {elapsed}")
        print_message(f"labctl pull {estimate.run.id}    download its results")
        return False
    question = f"{estimate_text(estimate)}; continue?"
    print_message(describe_estimate(estimate))
    if ctx.meta[SCREEN].yes:
        print_message(f"{question} yes")
        return True
    if lab.context.reporter.confirm(Question(question=question, about="price")):
        return True
    print_message("nothing more was started; labctl down removes the server")
    return False


def estimate_text(estimate: ProbeResult) -> str:
    """Write the result: `the whole run will take 47 min, $0.31 on this spot offer`."""
    text = f"the whole run will take {duration_text(estimate.time.seconds)}"
    offer = estimate.server.offer
    if not offer.price_usd_per_hour:
        return f"{text}, free"
    return f"{text}, {dollars_text(estimate.usd)} on this {'spot ' if offer.spot else ''}offer"


def _range_text(low: str, high: str) -> str:
    return f"about {low}" if low == high else f"between {low} and {high}"


def describe_estimate(estimate: ProbeResult) -> str:
    """Describe how it was measured, its range, what it leaves out, and the other offers."""
    lines = []
    pace = estimate.pace
    if pace is not None:
        step = f"{timing_text(pace.seconds_per_step)} each"
        warm_up = f"{pace.warm_up_steps:.0f} steps of warm-up"
        lines.append(
            f"measured {pace.steps:.0f} of {estimate.total_steps:.0f} steps after {warm_up}: {step}"
        )
        low, high = duration_text(estimate.time.low_s), duration_text(estimate.time.high_s)
        limits = f"the whole run takes {_range_text(low, high)}"
        if pace.start_s >= 1:
            limits += f", {duration_text(pace.start_s)} of it to start"
        lines.append(limits)
        if estimate.usd:
            low, high = dollars_text(estimate.low_usd), dollars_text(estimate.high_usd)
            lines.append(f"it costs {_range_text(low, high)}")
        lines.append("it does not include validation or evaluation that the probe did not reach")
    if estimate.ends_before:
        lines.append(f"the server's {estimate.ends_before} ends it before that: labctl extend 2h")
    timed = tuple(row for row in estimate.elsewhere if row.seconds is not None)
    if timed:
        lines += ["", *offer_table_lines(timed)]
    if any(row.offer.type != estimate.server.offer.type for row in timed):
        lines.append("times on other GPUs are scaled by their peak in half precision")
    if len(timed) < len(estimate.elsewhere):
        lines.append("the time on the other offers is unknown: labctl offers")
    if estimate.offers_note:
        lines.append(estimate.offers_note)
    return "\n".join(lines)


def offer_table_lines(rows: tuple[OfferComparison, ...]) -> list[str]:
    """Format a table of the whole run on other offers. The time of each row must be known."""
    head = ("OTHER OFFER", "GPU", "PRICE", "TIME", "COST")
    cells = [head]
    for row in rows:
        offer = row.offer
        kind = f"{offer.type}{' spot' if offer.spot else ''}"
        gpu = f"{offer.gpu_count} x {offer.gpu_name}" if offer.gpu_count else "none"
        time, usd = duration_text(row.seconds or 0.0), dollars_text(row.usd or 0.0)
        cells.append((kind, gpu, price_or_free_text(offer.price_usd_per_hour), time, usd))
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(head))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in cells]
    return [line.rstrip() for line in lines]
