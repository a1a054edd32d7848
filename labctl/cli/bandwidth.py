"""The command bandwidth."""

from __future__ import annotations

import click

from labctl.cli.options import json_option, open_lab, stop_drawing
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.insight.bandwidth import AllReduce, Bandwidth
from labctl.text import bytes_text, timing_text


@click.command("bandwidth")
@json_option
@click.pass_context
def bandwidth_command(ctx: click.Context, json_: bool) -> None:
    """Measure how fast the GPUs of the server, or the servers of the lab, exchange data.

    A short run sends messages of 1 KiB to 256 MiB from each process to all others (all-reduce), as
    data parallelism does with gradients. The lab's image needs PyTorch.

    \b
    labctl bandwidth
    """
    result = open_lab(ctx, quiet=json_).measure_bandwidth()
    stop_drawing(ctx)
    if json_:
        print_json({"bandwidth": result, "link_share": result.link_share})
        return
    print_result(result)


def print_result(result: Bandwidth) -> None:
    """Print a table, what share of the link that is, and a warning of a slow link."""
    print_table([_make_row(row) for row in result.rows], ("MESSAGE", "TIME", "BUS BANDWIDTH"))
    click.echo()
    print_message(describe(result), err=False)
    if result.is_slow:
        text = "Such a link is slow for a training on several servers. What it costs:"
        command = f"labctl estimate --train --data-parallel {result.processes} --link 1gbit"
        print_message(text, err=False)
        click.echo(f"  {command}")


def _make_row(row: AllReduce) -> tuple[str, ...]:
    speed = f"{8e-9 * row.bus_bytes_per_s:.2f} Gbit/s"
    return bytes_text(row.bytes), timing_text(row.seconds), speed


def describe(result: Bandwidth) -> str:
    """Say between what was measured, over which interface, and what share of the link that is."""
    best = f"{result.best_bits_per_s / 1e9:.2f} Gbit/s"
    who = f"{result.processes} processes ({result.device}, {result.backend})"
    if result.servers == 1:
        return f"{who} on one server exchange {best} at best."
    text = f"{who} on {result.servers} servers exchange {best} at best over {result.interface}"
    if result.is_encrypted:
        return f"{text}, through WireGuard. Its encryption uses the CPU and limits the bandwidth."
    if result.link_share is None:
        return f"{text}. The network card does not say how fast it is."
    speed = result.link_bits_per_s / 1e9
    return f"{text}, {result.link_share:.0%} of the {speed:g} Gbit/s of its card."
