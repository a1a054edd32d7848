"""Summarize a PyTorch trace of a few steps: where their time goes, and in which operations.

The input is the Chrome trace that `torch.profiler` exports: "X" events with `ts` and `dur` in
microseconds, `cat` (cpu_op, user_annotation, cuda_runtime, kernel, gpu_memcpy, ...) and `tid`.
Shares are of the steps' time on the training's thread, from 0 to 1. This module runs in the
container too: standard library and Python 3.8 only.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence, Tuple, TypedDict

VERSION = 1
STEP = "ProfilerStep#"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
PHASES = ("data", "waiting", "optimizer", "backward", "forward")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READ = "aten::_local_scalar_dense"
HOST = ("cpu_op", "user_annotation", "cuda_runtime")
MOST_ROWS = 15
MOST_BOXES = 1500
LEAST_BOX_SHARE = 0.001
LONGEST_NAME = 120
Span = Tuple[float, float]


class TraceEvent(NamedTuple):
    """One "X" event of the trace. `thread` is its (pid, tid)."""

    name: str
    ts: float
    dur: float
    cat: str
    thread: tuple[Any, Any]


class TraceRow(TypedDict):
    """An operation or a kernel: microseconds and calls per step, and its share of its kind."""

    name: str
    us: float
    count: float
    share: float


class TraceBoxes(TypedDict):
    """The median step to draw. A box is [lane, depth, start, us, phase, name]."""

    us: float
    lanes: list[str]
    boxes: list[tuple[int, int, float, float, str, str]]


class TraceSummary(TypedDict):
    """The figures of a trace, as profile.json has them; `summary` describes them."""

    version: int
    steps: int
    step_us: float
    steps_us: list[float]
    phases: dict[str, float]
    operations: list[TraceRow]
    kernels: list[TraceRow]
    kernel_count: float
    kernel_us: float
    gpu_busy: float | None
    copies_us: float
    syncs: float
    peak_bytes: int
    boxes: TraceBoxes


def summary(entries: Sequence[Any]) -> TraceSummary:
    """Compute all figures of a trace's `traceEvents`; ValueError if it contains no step.

    `phases` are shares of a step; with `other` (Python between operations) they add up to 1, and
    `waiting` is for the GPU. `gpu_busy` is None without a GPU in the trace. `syncs` counts, per
    step, how often the program read a value and had to wait for it. Times are in microseconds.
    """
    events = [_parse_event(entry) for entry in entries if _is_span(entry)]
    steps = sorted(
        (event for event in events if event.name.startswith(STEP) and not _is_on_gpu(event)),
        key=lambda event: event.ts,
    )
    total_us = sum(event.dur for event in steps)
    if not total_us:
        raise ValueError("the trace contains no step")
    thread = steps[0].thread
    inside = _select_inside(events, [_to_span(event) for event in steps])
    of_thread = [event for event in inside if event.thread == thread]
    kernels = [event for event in inside if event.cat in GPU]
    phases = _sum_phases(inside, thread, [_to_span(event) for event in steps])
    return {
        "version": VERSION,
        "steps": len(steps),
        "step_us": _median([event.dur for event in steps]),
        "steps_us": [event.dur for event in steps],
        "phases": {name: spent / total_us for name, spent in phases.items()},
        "operations": _operations(inside, len(steps)),
        "kernels": _kernels(kernels, len(steps)),
        "kernel_count": len(kernels) / len(steps),
        "kernel_us": _median([event.dur for event in kernels]),
        "gpu_busy": _total_length(_merge(map(_to_span, kernels))) / total_us if kernels else None,
        "copies_us": sum(event.dur for event in kernels if event.cat == "gpu_memcpy") / len(steps),
        "syncs": _count_syncs(of_thread) / len(steps),
        "peak_bytes": _find_peak(entries),
        "boxes": _build_boxes(inside, steps, thread),
    }


def _count_syncs(of_thread: list[TraceEvent]) -> int:
    """Count the values that were read from the GPU.

    A value of a CPU tensor is read by the same operation, without waiting: AdamW does so twice for
    each parameter.
    """
    waits = [event.ts for event in of_thread if event.name in WAITS]
    reads = [_to_span(event) for event in of_thread if event.name == READ]
    return sum(any(begin <= at < end for at in waits) for begin, end in reads)


def _is_span(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("ph") == "X"
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("ts"), (int, float))
        and isinstance(entry.get("dur"), (int, float))
        and entry["dur"] >= 0
    )


def _parse_event(entry: Any) -> TraceEvent:
    return TraceEvent(
        name=entry["name"],
        ts=entry["ts"],
        dur=entry["dur"],
        cat=str(entry.get("cat", "")),
        thread=(entry.get("pid"), entry.get("tid")),
    )


def _is_on_gpu(event: TraceEvent) -> bool:
    return event.cat.startswith(("gpu", "kernel"))


def _to_span(event: TraceEvent) -> Span:
    return float(event.ts), float(event.ts) + float(event.dur)


def _select_inside(events: Iterable[TraceEvent], spans: list[Span]) -> list[TraceEvent]:
    """Return the events from the first step's start to the last one's end; the GPU lags behind."""
    begin, end = spans[0][0], spans[-1][1]
    return [
        event
        for event in events
        if begin <= event.ts < end
        and not event.name.startswith(STEP)
        and event.cat != "gpu_user_annotation"
    ]


def _merge(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _total_length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _subtract(spans: list[Span], taken: list[Span]) -> list[Span]:
    """Return the parts of `spans` outside of `taken`; both are merged and sorted."""
    rest = []
    for begin, end in spans:
        for first, last in taken:
            if last <= begin or first >= end:
                continue
            if first > begin:
                rest.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            rest.append((begin, end))
    return rest


def _find_phase(name: str) -> str:
    if name in WAITS:
        return "waiting"
    if name.startswith("enumerate(DataLoader)"):
        return "data"
    if name.startswith(("Optimizer.step", "Optimizer.zero_grad")):
        return "optimizer"
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    return "forward"


def _sum_phases(inside: list[TraceEvent], thread: Any, steps: list[Span]) -> dict[str, float]:
    """Sum the microseconds of each phase. Time counts only for the first phase in PHASES order."""
    spans: dict[str, list[Span]] = {name: [] for name in PHASES}
    for event in inside:
        if event.cat not in HOST:
            continue
        phase = _find_phase(event.name)
        if event.cat == "cuda_runtime" and phase != "waiting":
            continue
        # The backward pass may run on its own thread, while the training's thread waits for it.
        if phase == "backward" or event.thread == thread:
            spans[phase].append(_to_span(event))
    spent: dict[str, float] = {}
    taken: list[Span] = []
    bounds = _merge(steps)
    for name in PHASES:
        clipped = _subtract(bounds, _subtract(bounds, _merge(spans[name])))
        fresh = _subtract(clipped, taken)
        spent[name] = _total_length(fresh)
        taken = _merge([*taken, *fresh])
    spent["other"] = max(0.0, _total_length(bounds) - _total_length(taken))
    return spent


def _self_times(events: list[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Return each operation with its time excluding nested ones, thread by thread."""
    threads: dict[Any, list[TraceEvent]] = {}
    for event in events:
        threads.setdefault(event.thread, []).append(event)
    timed = []
    for of_thread in threads.values():
        of_thread.sort(key=lambda event: (event.ts, -event.dur))
        open_: list[list[Any]] = []  # [event, end, time of the children]
        for event in of_thread:
            while open_ and open_[-1][1] <= event.ts:
                last = open_.pop()
                timed.append((last[0], max(0.0, last[0].dur - last[2])))
            if open_:
                open_[-1][2] += event.dur
            open_.append([event, event.ts + event.dur, 0.0])
        timed += [(last[0], max(0.0, last[0].dur - last[2])) for last in open_]
    return timed


def _operations(inside: list[TraceEvent], steps: int) -> list[TraceRow]:
    """List the operations by their own CPU time per step."""
    return _top(_self_times([one for one in inside if one.cat == "cpu_op"]), steps)


def _kernels(kernels: list[TraceEvent], steps: int) -> list[TraceRow]:
    return _top([(one, float(one.dur)) for one in kernels], steps)


def _top(timed: list[tuple[TraceEvent, float]], steps: int) -> list[TraceRow]:
    rows: dict[str, list[float]] = {}
    for event, took_us in timed:
        row = rows.setdefault(event.name[:LONGEST_NAME], [0.0, 0.0])
        row[0] += took_us
        row[1] += 1
    ordered = sorted(rows.items(), key=lambda item: -item[1][0])[:MOST_ROWS]
    total_us = sum(took_us for _, took_us in timed) or 1.0
    return [
        {"name": name, "us": us / steps, "count": count / steps, "share": us / total_us}
        for name, (us, count) in ordered
    ]


def _find_peak(entries: Sequence[Any]) -> int:
    """Find the peak bytes of tensors on the device that the program uses; 0 if not traced."""
    peaks: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == "[memory]":
            details = entry.get("args") or {}
            total, device = details.get("Total Allocated"), details.get("Device Type")
            if isinstance(total, int) and isinstance(device, int):
                peaks[device] = max(peaks.get(device, 0), total)
    return next((size for device, size in sorted(peaks.items(), reverse=True) if size), 0)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2]) if ordered else 0.0


def _build_boxes(inside: list[TraceEvent], steps: list[TraceEvent], thread: Any) -> TraceBoxes:
    """Build the boxes of the median step to draw: [lane, depth, start, us, phase, name]."""
    step = sorted(steps, key=lambda event: event.dur)[len(steps) // 2]
    begin, end = _to_span(step)
    least_us = (end - begin) * LEAST_BOX_SHARE
    lanes: dict[Any, list[TraceEvent]] = {}
    for event in inside:
        if begin <= event.ts < end and event.dur >= least_us:
            key = "GPU" if event.cat in GPU else event.thread
            if key == "GPU" or event.cat in ("cpu_op", "user_annotation"):
                lanes.setdefault(key, []).append(event)
    ordered = sorted(lanes, key=lambda key: (key != thread, key == "GPU", str(key)))
    boxes, names = [], []
    for number, key in enumerate(ordered):
        names.append("GPU" if key == "GPU" else "program" if key == thread else "thread")
        ends: list[float] = []
        phase = ""
        for event in sorted(lanes[key], key=lambda event: (event.ts, -event.dur)):
            first, last = _to_span(event)
            while ends and ends[-1] <= first:
                ends.pop()
            if not ends:  # nested operations belong to the phase of their caller
                phase = "gpu" if key == "GPU" else _find_phase(event.name)
            name = event.name[:LONGEST_NAME]
            boxes.append((number, len(ends), first - begin, event.dur, phase, name))
            ends.append(last)
    boxes.sort(key=lambda box: -box[3])
    return {"us": end - begin, "lanes": names, "boxes": boxes[:MOST_BOXES]}
