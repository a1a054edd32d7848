"""The notes below the memory of an estimate: work, speed, layers, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.estimate_tables import count_text, print_text
from labctl.cli.tables import print_table
from labctl.text import decimal_bytes_text, duration_text, timing_text

if TYPE_CHECKING:
    from labctl.estimate.plan import ModelMeasurement, ModelPlan
    from labctl.insight.estimate import Estimate

# What the activations of a model from code leave out.
ACTIVATION_LIMITS = {
    "measured": "",
    "residuals": "Activations are counted before XLA fuses operations, so a step may keep less.",
    "outputs": "Not counted: what a layer keeps within it, such as the scores of attention.",
    "unknown": "Build the model from a keras.Input to have its activations counted.",
}
# A model from code with more layers is shown by its largest ones.
MOST_LAYERS = 12


def print_model(plan: ModelPlan, model: ModelMeasurement) -> None:
    """Print what was built, and what the figures of its activations leave out."""
    shape = " x ".join(str(size) for size in model.input_shape) or "one number"
    framework = model.framework or f"PyTorch {model.torch}"
    print_text(
        f"Input of one item: {shape} {model.input_type} (from {model.input_from}); {framework}"
        + (", bf16 by autocast" if model.autocast else "")
        + "."
    )
    if limit := ACTIVATION_LIMITS[model.activations]:
        print_text(limit)
    if model.framework and plan.precision != "fp32":
        print_text("Sizes are of the model's own types: --precision changes only the time.")
    if model.framework and not model.item_flops:
        print_text("Its operations cannot be counted, so its time is unknown.")


def print_work(estimate: Estimate) -> None:
    """Print the number of operations, and what limits a step."""
    plan, details = estimate.plan, estimate.details
    if details.flops:
        extra = ", with a third of a pass more for checkpointing" if plan.checkpointing else ""
        per_item = f" ({plan.measured.item_flops:.3g} per item)" if plan.measured else ""
        share = f"; assuming that a GPU reaches {details.utilization:.0%} of its peak"
        measured = estimate.amount.is_measured or estimate.amount.seconds_per_request
        print_text(
            f"Work: {details.flops:.3g} operations{per_item}{extra}{'' if measured else share}."
        )
    _print_token_time(estimate)
    _print_intensity(estimate)
    _print_gpu_hours(estimate)


def _print_token_time(estimate: Estimate) -> None:
    plan, details = estimate.plan, estimate.details
    if details.weights_seconds is None or details.seconds_per_token is None:
        return
    where = (
        "at the given bandwidth"
        if estimate.amount.bandwidth_bytes_per_s
        else f"on {details.time_on}"
    )
    weights = timing_text(details.weights_seconds)
    with_cache = timing_text(details.seconds_per_token)
    what, limit = "all weights", " No token can be faster."
    if plan.active_params:
        what = "the weights of the experts in use"
        limit = limit if plan.micro_batch == 1 else " It assumes other experts for each sequence."
    print_text(
        f"Reading {what} takes {weights} per token {where}, with the KV cache {with_cache}.{limit}"
    )


def _print_intensity(estimate: Estimate) -> None:
    """Print whether the arithmetic or the memory of the GPU limits a step."""
    found = estimate.details.intensity
    if found is None:
        return
    step = "a step" if estimate.plan.training else "a token"
    number = found.flop_per_byte
    own = f"{number:,.0f} FLOP per byte" if number >= 10 else f"{number:.2g} FLOP per byte"
    balance = f"the {estimate.details.card} balances at {found.ridge_flop_per_byte:,.0f}"
    if found.is_memory_bound:
        advice = "a larger batch or smaller numbers help, more FLOP/s do not"
        print_text(f"Memory-bound: {own}, {balance}. {step.capitalize()} waits for it: {advice}.")
    else:
        print_text(f"Compute-bound: {own}, {balance}.")


def _print_gpu_hours(estimate: Estimate) -> None:
    """Print what the given GPU-hours mean on the GPU."""
    details, amount = estimate.details, estimate.amount
    if details.trainable_amount is not None:
        unit = "items" if estimate.plan.measured else "tokens"
        number = count_text(details.trainable_amount)
        print_text(
            f"In {amount.gpu_hours:,.0f} GPU-hours, {details.card} trains {number} {unit} at "
            f"{details.utilization:.0%} of its peak."
        )
    if details.reached_utilization is not None:
        share = f"{_percent(details.reached_utilization)} of the peak of {details.card}"
        impossible = details.reached_utilization > 1
        print_text(
            f"{amount.gpu_hours:,.0f} GPU-hours for this work are {share}"
            + (": impossible, so they were of a faster GPU. Use --gpu." if impossible else ".")
        )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share * 100:.2g}%"


def print_layers(estimate: Estimate) -> None:
    """Print the activations of each layer, with and without activation checkpointing."""
    table = estimate.details.layers
    if table is None:
        return
    layers = sorted(table.layers, key=lambda layer: -layer.kept_bytes)
    rows = [
        (
            f"{layer.count} x {layer.name}" if layer.count > 1 else layer.name,
            layer.kept_bytes * layer.count,
            layer.checkpointed_bytes * layer.count,
        )
        for layer in layers[:MOST_LAYERS]
    ]
    if others := layers[MOST_LAYERS:]:
        kept = sum(layer.kept_bytes for layer in others)
        inputs = sum(layer.checkpointed_bytes for layer in others)
        name = "1 other" if len(others) == 1 else f"{len(others)} others"
        rows.append((name, kept, inputs))
    rows.append(("at the peak", table.total_bytes, table.checkpointed_total_bytes))
    cells = [
        (name, f"{decimal_bytes_text(kept):>8}", f"{decimal_bytes_text(inputs):>10}")
        for name, kept, inputs in rows
    ]
    click.echo()
    print_table(cells, ("ACTIVATIONS", "    KEPT", "CHECKPOINT"))


def print_checkpoints(estimate: Estimate) -> None:
    """Print the size of a checkpoint, and how often to save one."""
    details = estimate.details
    if details.checkpoint_bytes:
        print_text(f"Resumable checkpoint: {decimal_bytes_text(details.checkpoint_bytes)}.")
    found = details.checkpoint_interval
    if found is None:
        return
    written = "takes" if not found.is_assumed else "is assumed to take"
    if not found.is_useful:
        print_text(
            f"Writing a checkpoint {written} {timing_text(found.checkpoint_s)}, and a server is "
            f"reclaimed every {duration_text(found.reclaim_every_s)} on average: the training "
            "makes hardly any progress. Save less, or rent a server that is not reclaimed."
        )
        return
    print_text(
        f"Save a checkpoint every {duration_text(found.seconds)} (Young's formula): writing one "
        f"{written} {timing_text(found.checkpoint_s)}, and a server is reclaimed every "
        f"{duration_text(found.reclaim_every_s)} on average. Saving and repeated work take "
        f"{min(found.lost_share, 1):.0%} of the time."
    )
