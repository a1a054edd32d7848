"""The command quantize: what fewer bits per weight cost in accuracy, and save in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.insight.compare.wording import describe_pairs
from labctl.insight.quantization.comparison import quantize
from labctl.insight.quantization.paired_tests import compare_rows
from labctl.insight.report.formatting import SPACE
from labctl.runs.evaluation import confidence_interval
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.insight.compare.pairs import PairComparison
    from labctl.insight.quantization.measurements import QuantizedModel, QuantizedRow

KINDS = ("int8", "int4", "fp8")


@click.command("quantize")
@click.argument("target", default="", metavar="[RUN|DIRECTORY]", shell_complete=complete_runs)
@click.option("--to", "kind", type=click.Choice(KINDS), required=True, help="Type of the weights.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure a language model on this text.",
)
@json_option
@click.pass_context
def quantize_command(
    ctx: click.Context, target: str, kind: str, text: Path | None, json_: bool
) -> None:
    """Round the weights of RUN (default: the latest run) after training, and compare both.

    The project's quantize.py does it on this machine, with the checkpoints that you pulled. For a
    language model, DIRECTORY has its config.json and safetensors. The table shows size, latency and
    accuracy with its 95% interval, before and after. If quantize.py writes its predictions,
    McNemar's test decides whether the accuracies differ.

    \b
    labctl pull && labctl quantize --to int8
    labctl quantize ./tiny-llama --to int4 --text sample.txt
    """
    lab = open_lab(ctx, quiet=json_)
    result = quantize(lab.context, target, kind, text)
    pairs = compare_rows(result)
    if json_:
        rows = [replace(row, predictions=None) for row in result.rows]
        print_json({"quantized": replace(result, rows=tuple(rows)), "pairs": pairs})
        return
    click.echo(clean(result.model))
    cells = [_build_row(row) for row in result.rows]
    print_table(cells, ("WEIGHTS", "SIZE", "LATENCY", "ACCURACY", "95% INTERVAL"), cut=False)
    print_message(_describe_difference(result, pairs))
    for sentences in describe_pairs(pairs):
        print_message(clean(sentences.replace(SPACE, " ")))


def _build_row(row: QuantizedRow) -> tuple[str, ...]:
    low, high = confidence_interval(row.correct, row.total) or (0.0, 1.0)
    return (
        row.name,
        bytes_text(row.size_bytes),
        f"{row.latency_ms:.3g} ms",
        f"{row.accuracy:.2%} ({row.correct:,} of {row.total:,})",
        f"{low:.2%} to {high:.2%}",
    )


def _describe_difference(result: QuantizedModel, pairs: Sequence[PairComparison]) -> str:
    """Say how much smaller the model is, and how its accuracy differs.

    Without a paired test, the interval must tell whether that is chance.
    """
    before, after = result.rows[0], result.rows[-1]
    points = (after.accuracy - before.accuracy) * 100
    times = before.size_bytes / after.size_bytes
    text = f"{times:.1f} times smaller; accuracy {points:+.2f} points"
    if pairs:
        return text
    low, high = confidence_interval(before.correct, before.total) or (0.0, 1.0)
    within = "within" if low <= after.accuracy <= high else "outside"
    return f"{text}, {within} the interval of the original"
