"""A trace's figures: where a step goes, kernels, copies; and what to make of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labctl.errors import LabError, NotFoundError
from labctl.insight.explain.profile import Profile, ProfileRow, advise, read_profile
from labctl.insight.profiler.trace import _merge, _subtract, summary

MAIN, ENGINE = 10, 11


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid}


def gpu_step(begin: float) -> list[dict[str, Any]]:
    """A step of 1000 us: 200 data, 100 waiting, 100 optimizer, 250 backward, 250 forward."""
    backward = "autograd::engine::evaluate_function: MulBackward0"
    return [
        event("ProfilerStep#12", begin, 1000, "user_annotation"),
        event("enumerate(DataLoader)#_SingleProcess.__next__", begin, 200, "user_annotation"),
        event("aten::stack", begin + 50, 100),  # part of getting the batch
        event("aten::conv2d", begin + 200, 200),
        event("aten::_conv", begin + 250, 100),
        event("aten::item", begin + 400, 150),
        event("aten::_local_scalar_dense", begin + 410, 140),
        event("cudaLaunchKernel", begin + 420, 10, "cuda_runtime"),
        event("cudaStreamSynchronize", begin + 450, 100, "cuda_runtime"),
        event(backward, begin + 600, 250, tid=ENGINE),
        event("aten::mul", begin + 610, 100, tid=ENGINE),
        event("Optimizer.step#AdamW.step", begin + 850, 100, "user_annotation"),
        event("sgemm_128x64", begin + 300, 200, "kernel", 7),
        event("relu", begin + 400, 200, "kernel", 8),  # on another stream, at the same time
        event("Memcpy HtoD", begin + 200, 50, "gpu_memcpy", 7),
        event("ProfilerStep#12", begin + 5, 900, "gpu_user_annotation", 7),
    ]


def trace(*events: dict[str, Any]) -> list[dict[str, Any]]:
    memory = {"ph": "i", "name": "[memory]", "ts": 1}
    return [
        {**memory, "args": {"Total Allocated": 500, "Device Type": 0}},
        {**memory, "args": {"Total Allocated": 9000, "Device Type": 1}},
        {**memory, "args": {"Total Allocated": 7000, "Device Type": 1}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        *events,
    ]


def test_a_step_on_a_gpu_is_taken_apart() -> None:
    found = summary(trace(*gpu_step(0), *gpu_step(1000)))
    assert (found["steps"], found["step_us"]) == (2, 1000)
    shares = {name: round(share, 3) for name, share in found["phases"].items()}
    assert shares == {
        "data": 0.2,
        "waiting": 0.1,
        "optimizer": 0.1,
        "backward": 0.25,
        "forward": 0.25,
        "other": 0.1,
    }
    assert math.isclose(sum(found["phases"].values()), 1.0)
    # Two kernels overlap for 100 us: 50 + 300 of 1000.
    assert found["gpu_busy"] == pytest.approx(0.35)
    assert [row["name"] for row in found["kernels"]] == ["sgemm_128x64", "relu", "Memcpy HtoD"]
    assert found["kernels"][0]["share"] == pytest.approx(200 / 450)
    assert (found["kernel_count"], found["copies_us"], found["syncs"]) == (3, 50, 1)
    assert found["peak_bytes"] == 9000
    rows = {row["name"]: row["us"] for row in found["operations"]}
    assert rows["aten::conv2d"] == 100  # without what it calls
    assert rows["autograd::engine::evaluate_function: MulBackward0"] == 150
    assert (
        found["boxes"]["lanes"] == ["program", "thread", "GPU"]
        or "GPU" in (found["boxes"]["lanes"])
    )


def test_only_values_of_the_gpu_are_waited_for() -> None:
    """AdamW reads its step count, a CPU tensor, twice for each parameter."""
    read = event("aten::_local_scalar_dense", 860, 1)
    found = summary(trace(*gpu_step(0), read, {**read, "ts": 870}))
    assert found["syncs"] == 1


def test_boxes_show_callers_above_what_they_call_and_in_their_colour() -> None:
    found = summary(trace(*gpu_step(0)))["boxes"]
    by_name = {box[5]: box for box in found["boxes"]}
    assert by_name["aten::_conv"][1] == by_name["aten::conv2d"][1] + 1
    assert by_name["aten::mul"][4] == "backward"
    assert by_name["aten::stack"][4] == "data"
    assert by_name["relu"][4] == "gpu"
    assert found["lanes"][by_name["relu"][0]] == "GPU"
    assert found["lanes"][by_name["aten::conv2d"][0]] == "program"


def test_without_a_gpu_its_figures_are_none() -> None:
    host = [one for one in gpu_step(0) if one["cat"] in ("cpu_op", "user_annotation")]
    found = summary(trace(*host))
    assert (found["gpu_busy"], found["kernels"], found["kernel_count"]) == (None, [], 0)


@pytest.mark.parametrize("content", [[], [None, 3, {}]])
def test_a_trace_without_a_step_is_refused(content: list[Any]) -> None:
    with pytest.raises(ValueError, match="no step"):
        summary(content)


SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1]))
)


@given(SPANS, SPANS)
def test_spans_are_joined_and_taken_away_without_loss(one: Any, other: Any) -> None:
    def points(spans: Any) -> set[int]:
        return {at for begin, end in spans for at in range(begin, end)}

    left, right = _merge(one), _merge(other)
    assert points(left) == points(one)
    assert points(_subtract(left, right)) == points(one) - points(other)


NAMES = st.sampled_from(
    ["ProfilerStep#1", "aten::mul", "enumerate(DataLoader)#x", "Optimizer.step#a", "k", ""]
)
EVENTS = st.builds(
    lambda name, ts, dur, cat, tid: event(name, ts, dur, cat, tid),
    NAMES,
    st.floats(-1e9, 1e9),
    st.floats(0, 1e9),
    st.sampled_from(["cpu_op", "user_annotation", "kernel", "gpu_memcpy", "cuda_runtime", "odd"]),
    st.integers(0, 3),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_no_events_make_it_fail(events: list[dict[str, Any]]) -> None:
    try:
        found = summary(trace(*events))
    except ValueError:  # it holds no step
        return
    json.dumps(found, allow_nan=False)


def made(**fields: Any) -> Profile:
    phases = {"data": 0.05, "waiting": 0.0, "optimizer": 0.05, "backward": 0.4, "forward": 0.45}
    known: dict[str, Any] = {
        "steps": 5,
        "step_us": 10_000.0,
        "phases": {**phases, "other": 0.05},
        "operations": (),
        "kernels": (ProfileRow(name="h884gemm", us=900.0, count=3.0, share=0.5),),
        "kernel_count": 50.0,
        "kernel_us": 100.0,
        "gpu_busy": 0.9,
        "copies_us": 10.0,
        "syncs": 0.0,
    }
    return Profile(**{**known, **fields})


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "step-gpu-busy"),
        ({"phases": {"data": 0.3}}, "step-waits-for-data"),
        ({"phases": {"optimizer": 0.3}}, "step-optimizer"),
        ({"phases": {"other": 0.5}, "gpu_busy": 0.4}, "step-python"),
        ({"gpu_busy": 0.4, "syncs": 3.0}, "step-syncs"),
        ({"gpu_busy": 0.4, "kernel_us": 4.0, "kernel_count": 900.0}, "step-small-kernels"),
        ({"gpu_busy": 0.4, "copies_us": 2000.0}, "step-copies"),
        (
            {
                "gpu_busy": 0.4,
                "kernels": (
                    ProfileRow(name="volta_sgemm_128x64_nn", us=1.0, count=1.0, share=0.6),
                ),
            },
            "step-fp32-products",
        ),
        (
            {
                "gpu_busy": None,
                "kernels": (),
                "operations": (ProfileRow(name="aten::mul", us=1.0, count=1.0, share=1.0),),
            },
            "step-on-processor",
        ),
    ],
)
def test_each_rule_speaks_where_it_should_and_alone(fields: dict[str, Any], rule: str) -> None:
    found = advise(made(**fields))
    assert [one.rule for one in found if one.rule != "step-gpu-busy" or rule == one.rule] == [rule]
    assert all(one.evidence and one.next and one.source.url for one in found)


@pytest.mark.parametrize(
    ("kind", "advice"), [("Pageable", "pin_memory=True"), ("Pinned", "torch.cuda.Stream")]
)
def test_memory_that_is_pinned_is_not_to_be_pinned(kind: str, advice: str) -> None:
    copy = ProfileRow(name=f"Memcpy HtoD ({kind} -> Device)", us=2000.0, count=1.0, share=0.5)
    (found,) = advise(made(gpu_busy=0.4, copies_us=2000.0, kernels=(copy,)))
    assert advice in found.next


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    found = summary(trace(*gpu_step(0)))
    (tmp_path / "profile.json").write_text(json.dumps({**found, "run": "x", "threads": 2}))
    assert read_profile(tmp_path).run == "x"


def test_why_nothing_was_profiled_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        read_profile(tmp_path)
    assert "the command did not import them" in caught.value.why
    # Fewer steps would not help.
    assert caught.value.hint.startswith("labctl explain ")
    (tmp_path / "note.json").write_bytes(msgspec.json.encode({"why": "in time", "steps": 0}))
    with pytest.raises(NotFoundError, match="nothing was profiled") as caught:
        read_profile(tmp_path)
    assert caught.value.hint.startswith("labctl explain ")
    note = {"why": "it made 3 steps", "steps": 3}
    (tmp_path / "note.json").write_bytes(msgspec.json.encode(note))
    with pytest.raises(NotFoundError) as caught:
        read_profile(tmp_path)
    assert caught.value.why == "it made 3 steps"
    assert caught.value.hint.startswith("labctl profile --warmup 3 --steps 2 ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"steps": "many"}', "\udcff", "x" * (5 * 1024**2)]
)
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text, errors="surrogateescape")
    with pytest.raises(LabError, match="is not a valid profile"):
        read_profile(tmp_path)
