"""The memory of a profiled step as a table, beside what the estimate predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.estimate_tables import print_text
from labctl.cli.tables import print_table
from labctl.text import decimal_bytes_text

if TYPE_CHECKING:
    from labctl.insight.explain.memory_profile import MemoryProfile, MemorySizes
    from labctl.insight.profile import ProfileResult

NAMES = {"optimizer": "optimizer state"}
BAR = 20


def print_memory(profiled: ProfileResult) -> None:
    """Print what memory holds at a step's peak, by category; nothing if that was not recorded."""
    memory, predicted = profiled.profile.memory, profiled.predicted
    if memory is None:
        return
    has_estimate = predicted is not None and not predicted.why
    headings = ("MEMORY OF A STEP", " AT PEAK", "    MOST", "ESTIMATE", "SHARE")
    rows = [
        (
            NAMES.get(name, name),
            _size(getattr(memory.peak, name)),
            _size(getattr(memory.most, name)),
            _size(getattr(predicted.sizes, name)) if predicted and has_estimate else "-",
            _bar_text(memory.peak, name),
        )
        for name in memory.peak.__struct_fields__
    ]
    total = _size(predicted.sizes.total_bytes) if predicted and has_estimate else "-"
    rows.append(("total", _size(memory.peak.total_bytes), "", total, ""))
    click.echo()
    print_table(rows, headings)
    if predicted is not None and has_estimate:
        print_text(
            f"Estimate: {predicted.target} with a batch of {predicted.batch} "
            f"({predicted.where_batch}), items of {predicted.item}. It adds up the peak of each "
            "part, and leaves out the framework."
        )
    elif predicted is not None:
        print_text(f"No estimate: {predicted.why}.")
    _print_machine(memory)


def _size(size_bytes: int) -> str:
    return f"{decimal_bytes_text(size_bytes):>8}"


def _bar_text(sizes: MemorySizes, name: str) -> str:
    share = getattr(sizes, name) / sizes.total_bytes if sizes.total_bytes else 0.0
    return f"{share:>4.0%} {'█' * round(share * BAR)}".rstrip()


def _print_machine(memory: MemoryProfile) -> None:
    state = memory.allocator
    if state is None:
        process = decimal_bytes_text(memory.process_bytes)
        print_text(f"The process needed {process} at most, with Python, PyTorch and data.")
        return
    used = decimal_bytes_text(state.allocated_peak_bytes)
    reserved = decimal_bytes_text(state.reserved_peak_bytes)
    print_text(f"PyTorch reserved {reserved} of the GPU at most, and allocated {used} of it.")
