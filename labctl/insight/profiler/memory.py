"""Find out what a training step's memory holds at its peak, by category.

`MemoryRecorder` runs in the container, beside the profiler: it notes where the parameters, the
gradients and the optimizer's state are. `summarize_memory` joins that with the allocations of the
profiler's trace ("[memory]" events: `Addr`, `Bytes`, negative when freed). All figures are bounded.
PyTorch's own snapshot is a pickle, which only the user's browser opens (pytorch.org/memory_viz).
Standard library and Python 3.8 only.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path
from typing import Any, Dict, Iterable, NamedTuple, Sequence, TypedDict

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
CPU, CUDA = 0, 1
STEP, OPTIMIZER_STEP = "ProfilerStep#", "Optimizer.step"
MOST_POINTS = 300
MOST_SEGMENTS = 50
MOST_TEXT = 64 * 1024
LARGEST_SNAPSHOT_BYTES = 64 * 1024**2
HISTORY_ENTRIES = 100_000
ROWS = 15
Sizes = Dict[str, int]


class Places(NamedTuple):
    """Where tensors of a program are after a step: address -> bytes, of each category."""

    parameters: dict[int, int]
    gradients: dict[int, int]
    optimizer: dict[int, int]


class Block(NamedTuple):
    """A block of memory: its bytes, and what it holds."""

    size: int
    category: str


class Allocation(NamedTuple):
    """An event of the trace: `size` is negative if the block was freed."""

    ts: float
    address: int
    size: int


class AllocatorFigures(TypedDict):
    """PyTorch's allocator on the GPU. `segments` are [bytes, allocated bytes]."""

    allocated_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    split_bytes: int
    retries: int
    total_bytes: int
    segments: list[list[int]]
    segment_count: int


class StepMemory(TypedDict):
    """What memory holds in one step; `timeline` has [microseconds, bytes of each category]."""

    device: str
    peak: dict[str, int]
    most: dict[str, int]
    timeline: list[list[float]]


class MemoryFigures(TypedDict):
    """The figures as profile.json has them; explain/memory_profile.py describes them."""

    device: str
    peak: dict[str, int]
    most: dict[str, int]
    timeline: list[list[float]]
    optimizer: str
    process_bytes: int
    allocator: AllocatorFigures | None


class MemoryRecorder:
    """Follows the memory of one program from its first optimizer step on."""

    def __init__(self) -> None:
        self.places: list[Places] = []
        self.optimizer = ""
        self.others: list[Any] = []

    def start(self, torch: Any) -> None:
        """Record PyTorch's history of allocations, where it has a GPU."""
        # Parameters that the optimizer does not have: frozen ones, and buffers.
        with contextlib.suppress(ReferenceError):
            modules = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
            self.others = [
                tensor
                for one in modules
                for tensor in (*one.parameters(False), *one.buffers(False))
            ]
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
            torch.cuda.reset_peak_memory_stats()

    def note(self, optimizer: Any) -> None:
        """Note where the program's tensors are; called after each step of the optimizer."""
        self.optimizer = type(optimizer).__name__
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        state = [
            value
            for values in optimizer.state.values()
            for value in (values.values() if isinstance(values, dict) else ())
            if hasattr(value, "untyped_storage")
        ]
        gradients = [p.grad for p in trained if p.grad is not None]
        self.places.append(
            Places(
                parameters=locate([*trained, *self.others]),
                gradients=locate(gradients),
                optimizer=locate(state),
            )
        )
        del self.places[:-2]

    def summarize(self, torch: Any, entries: Sequence[Any]) -> MemoryFigures:
        """Compute the figures of the last step that was traced. ValueError if it is incomplete."""
        cuda = torch.cuda.is_available()
        allocated = torch.cuda.memory_allocated() if cuda else None
        found = summarize_memory(entries, self.places, CUDA if cuda else CPU, allocated)
        return {
            **found,
            "optimizer": self.optimizer,
            "process_bytes": read_process_peak(),
            "allocator": describe_allocator(torch) if cuda else None,
        }

    def write_files(self, torch: Any, profile: Any, directory: Path) -> None:
        """Write PyTorch's summary as text; on a GPU its snapshot too, unless it is too large."""
        if not torch.cuda.is_available():
            table = profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=ROWS)
            (directory / "memory_summary.txt").write_text(table[:MOST_TEXT])
            return
        (directory / "memory_summary.txt").write_text(torch.cuda.memory_summary()[:MOST_TEXT])
        snapshot = directory / "memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(snapshot))
        if snapshot.stat().st_size > LARGEST_SNAPSHOT_BYTES:
            snapshot.unlink()
        torch.cuda.memory._record_memory_history(enabled=None)


def locate(tensors: Iterable[Any]) -> dict[int, int]:
    """Return address -> bytes of the storages; tensors without memory are left out."""
    places = {}
    for tensor in tensors:
        with contextlib.suppress(Exception):  # sparse, fake and meta tensors have no storage
            storage = tensor.untyped_storage()
            if storage.data_ptr():
                places[storage.data_ptr()] = storage.nbytes()
    return places


def read_process_peak() -> int:
    """Return the most main memory that the process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_allocator(torch: Any) -> AllocatorFigures:
    """Describe what PyTorch has reserved on the GPU: its segments, the fullest last."""
    stats = torch.cuda.memory_stats()
    segments = [
        [int(one["total_size"]), int(one["allocated_size"])]
        for one in torch.cuda.memory._snapshot()["segments"]
    ]
    segments.sort(key=lambda sizes: sizes[1] - sizes[0])
    return {
        "allocated_peak_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
        "reserved_bytes": int(stats.get("reserved_bytes.all.current", 0)),
        "reserved_peak_bytes": int(stats.get("reserved_bytes.all.peak", 0)),
        "split_bytes": int(stats.get("inactive_split_bytes.all.current", 0)),
        "retries": int(stats.get("num_alloc_retries", 0)),
        "total_bytes": int(torch.cuda.get_device_properties(0).total_memory),
        "segments": segments[:MOST_SEGMENTS],
        "segment_count": len(segments),
    }


def summarize_memory(
    entries: Sequence[Any], places: Sequence[Places], device: int, allocated: int | None
) -> StepMemory:
    """Compute what memory holds in the trace's last step: at its peak, and over time.

    `most` is the most of each category, whenever that is.

    `places` are those after the step before, and after this one. `allocated` are all bytes of the
    allocator at the end, if known: what the trace does not explain of them is "other".
    """
    spans = list_spans(entries, STEP)
    if not spans or len(places) < 2:
        raise ValueError("the trace has no complete step")
    begin, end = spans[-1]
    before, after = places[-2:]
    updates = list_spans(entries, OPTIMIZER_STEP)
    live, timeline = replay(list_allocations(entries, device), (begin, end), before, after, updates)
    always = {
        "parameters": sum_unseen(after.parameters, live),
        "gradients": sum_unseen(after.gradients, live),
        "optimizer": sum_unseen(after.optimizer, live),
    }
    if allocated is not None:
        known = sum(always.values()) + sum(block.size for block in live.values())
        always["other"] = max(0, allocated - known)
    rows = [(ts - begin, add_sizes(sizes, always)) for ts, sizes in timeline]
    peak = max((sizes for _, sizes in rows), key=lambda sizes: sum(sizes.values()))
    return {
        "device": "cuda" if device == CUDA else "cpu",
        "peak": peak,
        "most": {name: max(sizes[name] for _, sizes in rows) for name in CATEGORIES},
        "timeline": [[round(us, 1), *sizes.values()] for us, sizes in thin_out(rows)],
    }


def list_spans(entries: Sequence[Any], name: str) -> list[tuple[float, float]]:
    """List the spans of the trace whose name begins with `name`, in order."""
    spans = [
        (float(one["ts"]), float(one["ts"]) + float(one.get("dur", 0)))
        for one in entries
        if isinstance(one, dict)
        and one.get("ph") == "X"
        and str(one.get("name", "")).startswith(name)
        and not str(one.get("cat", "")).startswith("gpu")
    ]
    return sorted(spans)


def list_allocations(entries: Sequence[Any], device: int) -> list[Allocation]:
    """List the allocations on this kind of device, in order."""
    found = []
    for one in entries:
        if isinstance(one, dict) and one.get("name") == "[memory]":
            details = one.get("args") or {}
            if details.get("Device Type") == device:
                address, size = details.get("Addr"), details.get("Bytes")
                if isinstance(address, int) and isinstance(size, int):
                    found.append(Allocation(float(one["ts"]), address, size))
    return sorted(found, key=lambda event: event.ts)


def replay(
    events: Sequence[Allocation],
    step: tuple[float, float],
    before: Places,
    after: Places,
    updates: Sequence[tuple[float, float]],
) -> tuple[dict[int, Block], list[tuple[float, Sizes]]]:
    """Replay the allocations; return (blocks at the end of the step, sizes at each moment of it).

    The gradient that a step ends with is the last block at its address.
    """
    begin, end = step
    last = {one.address: one.ts for one in events if one.size > 0 and one.ts <= end}
    live: dict[int, Block] = {}
    sizes = dict.fromkeys(CATEGORIES, 0)
    timeline: list[tuple[float, Sizes]] = []
    for event in events:
        if event.ts > end:
            break
        if event.ts >= begin and not timeline:
            timeline.append((begin, dict(sizes)))
        if event.size > 0:
            is_last = last[event.address] == event.ts
            block = Block(event.size, categorize(event, begin, before, after, is_last, updates))
            live[event.address] = block
            sizes[block.category] += block.size
        elif event.address in live:
            block = live.pop(event.address)
            sizes[block.category] -= block.size
        if event.ts >= begin:
            timeline.append((event.ts, dict(sizes)))
    return live, [*timeline, (end, dict(sizes))]


def categorize(
    event: Allocation,
    begin: float,
    before: Places,
    after: Places,
    is_last: bool,
    updates: Sequence[tuple[float, float]],
) -> str:
    """Return what a block holds, by where it is and when it was allocated."""
    address = event.address
    if address in after.parameters and is_last:
        return "parameters"
    if address in after.optimizer and is_last:
        return "optimizer"
    if address in after.gradients and is_last:
        return "gradients"
    if event.ts < begin:
        return "gradients" if address in before.gradients else "other"
    # Temporary results of the optimizer are no activations.
    in_update = any(first <= event.ts < last for first, last in updates)
    return "other" if in_update else "activations"


def sum_unseen(places: dict[int, int], live: dict[int, Block]) -> int:
    """Sum the bytes of tensors that were there before the trace began."""
    return sum(size for address, size in places.items() if address not in live)


def add_sizes(sizes: Sizes, always: Sizes) -> Sizes:
    return {name: max(0, size + always.get(name, 0)) for name, size in sizes.items()}


def thin_out(rows: list[tuple[float, Sizes]]) -> list[tuple[float, Sizes]]:
    """Keep of each stretch of the step the moment with the most memory."""
    stretch = -(-len(rows) // MOST_POINTS)
    parts = [rows[first : first + stretch] for first in range(0, len(rows), stretch)]
    return [max(part, key=lambda row: sum(row[1].values())) for part in parts]
