"""What a PyTorch trace says of a few steps: where their time goes, and which operations take it.

The input is the Chrome trace that `torch.profiler` exports: "X" events with `ts` and `dur` in
microseconds, `cat` (cpu_op, user_annotation, cuda_runtime, kernel, gpu_memcpy, ...) and `tid`.
Shares are of the steps' time on the training's thread, from 0 to 1. This module runs in the
container too: standard library and Python 3.8 only.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Tuple

VERSION = 1
STEP = "ProfilerStep#"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
PHASES = ("data", "waiting", "optimizer", "backward", "forward")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
HOST = ("cpu_op", "user_annotation", "cuda_runtime")
MOST_ROWS = 15
MOST_BOXES = 1500
LEAST_BOX_SHARE = 0.001
LONGEST_NAME = 120
Span = Tuple[float, float]
Event = Dict[str, Any]


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """All figures of a trace; ValueError where it holds no step.

    `phases` are shares of a step; with `other` (Python between operations) they add up to 1, and
    `waiting` is for the GPU. `gpu_busy` is None where no GPU was traced. `syncs` counts, per step,
    how often the program asked for a value and so had to wait. Times are in microseconds.
    """
    events = [one for one in trace.get("traceEvents", ()) if _is_span(one)]
    steps = sorted(
        (one for one in events if one["name"].startswith(STEP) and not _on_gpu(one)),
        key=lambda one: one["ts"],
    )
    total_us = sum(one["dur"] for one in steps)
    if not total_us:
        raise ValueError("the trace holds no step")
    thread = (steps[0].get("pid"), steps[0].get("tid"))
    inside = _within(events, [_span(one) for one in steps])
    own = [one for one in inside if (one.get("pid"), one.get("tid")) == thread]
    kernels = [one for one in inside if one.get("cat") in GPU]
    phases = _phases(inside, thread, [_span(one) for one in steps])
    return {
        "version": VERSION,
        "steps": len(steps),
        "step_us": _middle([one["dur"] for one in steps]),
        "steps_us": [one["dur"] for one in steps],
        "phases": {name: spent / total_us for name, spent in phases.items()},
        "operations": _operations(inside, len(steps)),
        "kernels": _kernels(kernels, len(steps)),
        "kernel_count": len(kernels) / len(steps),
        "kernel_us": _middle([one["dur"] for one in kernels]),
        "gpu_busy": _length(_union(map(_span, kernels))) / total_us if kernels else None,
        "copies_us": sum(one["dur"] for one in kernels if one["cat"] == "gpu_memcpy") / len(steps),
        "syncs": sum(one["name"] == "aten::_local_scalar_dense" for one in own) / len(steps),
        "peak_bytes": _peak(trace),
        "boxes": _boxes(inside, steps, thread),
    }


def _is_span(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and one.get("ph") == "X"
        and isinstance(one.get("name"), str)
        and isinstance(one.get("ts"), (int, float))
        and isinstance(one.get("dur"), (int, float))
        and one["dur"] >= 0
    )


def _on_gpu(one: Event) -> bool:
    return str(one.get("cat", "")).startswith(("gpu", "kernel"))


def _span(one: Event) -> Span:
    return float(one["ts"]), float(one["ts"]) + float(one["dur"])


def _within(events: Iterable[Event], spans: list[Span]) -> list[Event]:
    """Events that begin in one of the steps; of the GPU, which lags, all from the first on."""
    begin, end = spans[0][0], spans[-1][1]
    return [
        one
        for one in events
        if begin <= one["ts"] < end
        and not one["name"].startswith(STEP)
        and one.get("cat") != "gpu_user_annotation"
    ]


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _minus(spans: list[Span], taken: list[Span]) -> list[Span]:
    """What of `spans` is in none of `taken`; both are unions."""
    left = []
    for begin, end in spans:
        for first, last in taken:
            if last <= begin or first >= end:
                continue
            if first > begin:
                left.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            left.append((begin, end))
    return left


def _phase(name: str) -> str:
    if name in WAITS:
        return "waiting"
    if name.startswith("enumerate(DataLoader)"):
        return "data"
    if name.startswith(("Optimizer.step", "Optimizer.zero_grad")):
        return "optimizer"
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    return "forward"


def _phases(inside: list[Event], thread: Any, steps: list[Span]) -> dict[str, float]:
    """Microseconds of each phase. What an earlier one has, a later one does not count again."""
    found: dict[str, list[Span]] = {name: [] for name in PHASES}
    for one in inside:
        if one.get("cat") not in HOST:
            continue
        phase = _phase(one["name"])
        if one["cat"] == "cuda_runtime" and phase != "waiting":
            continue
        # The backward pass may run on a thread of its own, while the training's waits for it.
        if phase == "backward" or (one.get("pid"), one.get("tid")) == thread:
            found[phase].append(_span(one))
    spent: dict[str, float] = {}
    taken: list[Span] = []
    bounds = _union(steps)
    for name in PHASES:
        clipped = _minus(bounds, _minus(bounds, _union(found[name])))
        fresh = _minus(clipped, taken)
        spent[name] = _length(fresh)
        taken = _union([*taken, *fresh])
    spent["other"] = max(0.0, _length(bounds) - _length(taken))
    return spent


def _self_times(events: list[Event]) -> list[tuple[Event, float]]:
    """Each operation with its time without those inside of it, thread by thread."""
    threads: dict[Any, list[Event]] = {}
    for one in events:
        threads.setdefault((one.get("pid"), one.get("tid")), []).append(one)
    found = []
    for own in threads.values():
        own.sort(key=lambda one: (one["ts"], -one["dur"]))
        open_: list[list[Any]] = []  # [event, end, time of the children]
        for one in own:
            while open_ and open_[-1][1] <= one["ts"]:
                last = open_.pop()
                found.append((last[0], max(0.0, last[0]["dur"] - last[2])))
            if open_:
                open_[-1][2] += one["dur"]
            open_.append([one, one["ts"] + one["dur"], 0.0])
        found += [(last[0], max(0.0, last[0]["dur"] - last[2])) for last in open_]
    return found


def _operations(inside: list[Event], steps: int) -> list[dict[str, Any]]:
    """By the processor's own time in each, per step."""
    return _top(_self_times([one for one in inside if one.get("cat") == "cpu_op"]), steps)


def _kernels(kernels: list[Event], steps: int) -> list[dict[str, Any]]:
    return _top([(one, float(one["dur"])) for one in kernels], steps)


def _top(timed: list[tuple[Event, float]], steps: int) -> list[dict[str, Any]]:
    rows: dict[str, list[float]] = {}
    for one, took_us in timed:
        row = rows.setdefault(one["name"][:LONGEST_NAME], [0.0, 0.0])
        row[0] += took_us
        row[1] += 1
    ordered = sorted(rows.items(), key=lambda item: -item[1][0])[:MOST_ROWS]
    whole = sum(took_us for _, took_us in timed) or 1.0
    return [
        {"name": name, "us": us / steps, "count": count / steps, "share": us / whole}
        for name, (us, count) in ordered
    ]


def _peak(trace: dict[str, Any]) -> int:
    """The most that tensors took on the device that the program uses; 0 where not traced."""
    most: dict[int, int] = {}
    for one in trace.get("traceEvents", ()):
        if isinstance(one, dict) and one.get("name") == "[memory]":
            about = one.get("args") or {}
            total, device = about.get("Total Allocated"), about.get("Device Type")
            if isinstance(total, int) and isinstance(device, int):
                most[device] = max(most.get(device, 0), total)
    return next((size for device, size in sorted(most.items(), reverse=True) if size), 0)


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2]) if ordered else 0.0


def _boxes(inside: list[Event], steps: list[Event], thread: Any) -> dict[str, Any]:
    """The step of median length as boxes to draw: [lane, depth, from, us, phase, name]."""
    step = sorted(steps, key=lambda one: one["dur"])[len(steps) // 2]
    begin, end = _span(step)
    least = (end - begin) * LEAST_BOX_SHARE
    lanes: dict[Any, list[Event]] = {}
    for one in inside:
        if begin <= one["ts"] < end and one["dur"] >= least:
            key = "GPU" if one.get("cat") in GPU else (one.get("pid"), one.get("tid"))
            if key == "GPU" or one.get("cat") in ("cpu_op", "user_annotation"):
                lanes.setdefault(key, []).append(one)
    ordered = sorted(lanes, key=lambda key: (key != thread, key == "GPU", str(key)))
    boxes, names = [], []
    for number, key in enumerate(ordered):
        names.append("GPU" if key == "GPU" else "program" if key == thread else "thread")
        ends: list[float] = []
        phase = ""
        for one in sorted(lanes[key], key=lambda one: (one["ts"], -one["dur"])):
            first, last = _span(one)
            while ends and ends[-1] <= first:
                ends.pop()
            if not ends:  # what is called belongs to its caller's phase
                phase = "gpu" if key == "GPU" else _phase(one["name"])
            name = one["name"][:LONGEST_NAME]
            boxes.append([number, len(ends), first - begin, one["dur"], phase, name])
            ends.append(last)
    boxes.sort(key=lambda box: -box[3])
    return {"us": end - begin, "lanes": names, "boxes": boxes[:MOST_BOXES]}
