"""Find GPU memory that PyTorch has reserved and cannot use: fragmentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    from_events,
    from_log,
)
from labctl.insight.explain.sources import CUDA_NOTES
from labctl.insight.explain.wording import percent
from labctl.insight.scalars import Scalars, Series, split_words
from labctl.text import bytes_text

MIB = 1024**2
# Rules of thumb: from here on, what is reserved and not allocated is worth a finding.
MUCH_UNUSED_SHARE = 0.2
MUCH_UNUSED_BYTES = 256 * MIB
# What PyTorch adds to its error when memory runs out.
UNUSED = re.compile(r"([\d.]{1,12}) (MiB|GiB) is reserved by PyTorch but unallocated")
USED = re.compile(r"([\d.]{1,12}) (MiB|GiB) is allocated by PyTorch")
UNITS = {"MiB": MIB, "GiB": 1024 * MIB}


def check_fragmentation(material: RunData) -> Iterator[Answer]:
    """Report memory that was reserved and not allocated, by the error or by the run's curves."""
    finding = _judge_log(material.log) or _judge_curves(material.scalars)
    if finding is not None:
        yield finding


def is_fragmented(reserved: float, allocated: float) -> bool:
    """Whether much of what is reserved is not allocated, even where most of it is."""
    unused = reserved - allocated
    return unused >= max(MUCH_UNUSED_BYTES, MUCH_UNUSED_SHARE * reserved)


def make_finding(reserved: float, allocated: float, evidence: Evidence) -> Finding:
    unused = reserved - allocated
    return Finding(
        rule="gpu-memory-fragmented",
        level="advice",
        what=f"{bytes_text(unused)} of the GPU's memory is reserved and not used: fragmentation",
        why="PyTorch keeps what was freed in pieces; a tensor that fits into no piece needs new "
        "memory, although enough is free in total. Batches of different sizes cause it",
        evidence=(evidence,),
        next="set PYTORCH_CUDA_ALLOC_CONF to expandable_segments:True below `env` in lab.yaml; pad "
        "batches to few sizes; drop the last, smaller batch (drop_last=True)",
        source=CUDA_NOTES,
    )


def _judge_log(log: str) -> Finding | None:
    lines = [line for line in log.splitlines() if UNUSED.search(line)]
    unused = _parse_bytes(UNUSED, lines[-1]) if lines else 0.0
    used = _parse_bytes(USED, lines[-1]) if lines else 0.0
    if not unused or not is_fragmented(used + unused, used):
        return None
    return make_finding(used + unused, used, from_log(lines[-1].strip()[:300]))


def _parse_bytes(pattern: re.Pattern[str], line: str) -> float:
    match = pattern.search(line)
    try:
        return float(match[1]) * UNITS[match[2]] if match else 0.0
    except ValueError:  # several points in one number
        return 0.0


def _judge_curves(scalars: Scalars) -> Finding | None:
    """Compare the last points of the run's curves of reserved and of peak memory."""
    reserved, peak = _last(scalars, "reserved"), _last(scalars, "peak")
    if reserved is None or peak is None or not is_fragmented(reserved, peak):
        return None
    text = f"reserved {bytes_text(reserved)}, at most {bytes_text(peak)} of it allocated "
    text += f"({percent(peak / reserved)})"
    return make_finding(reserved, peak, from_events(text))


def _last(scalars: Scalars, word: str) -> float | None:
    """Return the last point of a curve such as gpu_memory/peak_mib, in bytes."""
    series = next((one for one in scalars.series if _is_memory(one, word)), None)
    if series is None or not series.values:
        return None
    value = series.values[-1] * (MIB if "mib" in split_words(series.tag) else 1)
    return value if 0 < value < float("inf") else None


def _is_memory(series: Series, word: str) -> bool:
    return {"memory", word} <= split_words(series.tag)


RULES = (check_fragmentation,)
