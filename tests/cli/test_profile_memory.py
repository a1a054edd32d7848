"""`labctl profile --memory` and `--nsight` as they are typed and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from labctl.config import ensure_lab_id, find_paths
from labctl.estimate.plan import ModelMeasurement, ModelPlan
from labctl.insight import memory_comparison
from labctl.insight.memory_fit import RunModel
from labctl.model import Run
from labctl.state import State

MB = 10**6
SIZES = {
    "parameters": 4 * MB,
    "gradients": 4 * MB,
    "optimizer": 8 * MB,
    "activations": 64 * MB,
    "other": 0,
}
MEMORY = {
    "device": "cuda",
    "peak": SIZES,
    "most": SIZES,
    "timeline": [[0.0, 4 * MB, 0, 8 * MB, 0, 0], [900.0, 4 * MB, 0, 8 * MB, 64 * MB, 0]],
    "optimizer": "AdamW",
    "process_bytes": 900 * MB,
    "allocator": None,
}
ALLOCATOR = {
    "allocated_peak_bytes": 1024**3,
    "reserved_bytes": 2 * 1024**3,
    "reserved_peak_bytes": 2 * 1024**3,
    "split_bytes": 900 * 1024**2,
    "segments": [[1024**3, 0]],
    "segment_count": 7,
}
FIGURES = {
    "steps": 2, "step_us": 1500.0, "phases": {}, "operations": [], "kernels": [],
    "kernel_count": 0.0, "kernel_us": 0.0, "gpu_busy": None, "copies_us": 0.0, "syncs": 0.0,
    "command": ["train.py"], "boxes": {"us": 1, "lanes": [], "boxes": []},
}  # fmt: skip
MODEL = ModelMeasurement(
    parameters=MB,
    weight_bytes=4 * MB,
    trained_parameters=MB,
    trained_bytes=4 * MB,
    fixed_bytes=0,
    item_bytes=2 * MB,
    item_flops=1,
)


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a profile of `train.py --batch-size 32`, whose server is gone."""
    root = home / "digits"
    run = Run(
        id="profile-1", lab_id=ensure_lab_id(root), server_id="gone", state="exited", exit_code=0,
        command=("sh", "-c", "x", "labctl-profile", "python", "train.py", "--batch-size", "32"),
    )  # fmt: skip
    with State(find_paths().database) as state:
        state.save_run(run)
    made = root / "runs" / "profile-1" / "logs" / "profile"
    made.mkdir(parents=True)
    # The model is not built: that needs PyTorch. tests/template compares real figures.
    plan = ModelPlan(precision="fp32", measured=MODEL)

    def build(context: Any, run: Run, log: str, optimizer: Any) -> RunModel:
        return RunModel(plan=replace(plan, optimizer=optimizer), target="train.py:build_model")

    monkeypatch.setattr(memory_comparison, "measure_run_model", build)
    return made


def write(folder: Path, **changes: Any) -> None:
    body = {**FIGURES, "memory": {**MEMORY, **changes}}
    (folder / "profile.json").write_text(json.dumps(body))


def test_memory_stands_beside_the_estimate(labctl: Any, folder: Path) -> None:
    write(folder)
    said = labctl("profile", "profile-1", "--memory")
    assert said.code == 0, said.err
    rows = [" ".join(line.split()) for line in said.out.splitlines()]
    assert "activations 64.0 MB 64.0 MB 64.0 MB 80% ████████████████" in rows
    assert "optimizer state 8.0 MB 8.0 MB 8.0 MB 10% ██" in rows
    assert "total 80.0 MB 80.0 MB" in rows
    assert "! 80% of the memory at the peak holds activations" in rows
    assert "Estimate: train.py:build_model with a batch of 32 (the command), items of" in said.out
    assert rows[-1] == "page: runs/profile-1/logs/profile/index.html"
    page = (folder / "index.html").read_text()
    inlined = page.partition('id="profile">')[2].partition("</script>")[0]
    assert json.loads(inlined)["predicted"]["batch"] == 32
    body = json.loads(labctl("profile", "profile-1", "--json").out)
    assert body["predicted"]["sizes"]["activations"] == 64 * MB


def test_fragmentation_is_named(labctl: Any, folder: Path) -> None:
    write(folder, allocator=ALLOCATOR)
    out = " ".join(labctl("profile", "profile-1").out.split())
    assert "PyTorch reserved 2.1 GB of the GPU at most, and allocated 1.1 GB of it." in out
    assert "1.0 GiB of the GPU's memory is reserved and not used: fragmentation" in out
    assert "expandable_segments:True" in out


def test_an_optimizer_that_the_estimate_does_not_know_is_no_error(
    labctl: Any, folder: Path
) -> None:
    write(folder, optimizer="Lion<script>\x1b[2J")
    said = labctl("profile", "profile-1")
    assert said.code == 0
    assert "No estimate: labctl estimate does not know Lion<script>" in said.out
    assert "\x1b" not in said.out
    page = (folder / "index.html").read_text()
    assert "Lion<script>" not in page
    assert "Lion\\u003cscript>" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"peak": {**SIZES, "parameters": -1}},
        {"peak": {**SIZES, "parameters": 10**30}},
        {"peak": "large"},
        {"timeline": [[0.0]] * 5000},
        {"allocator": {**ALLOCATOR, "segments": [[1, 1]] * 5000}},
    ],
)
def test_figures_that_no_profiler_writes_are_refused(
    labctl: Any, folder: Path, changes: dict[str, Any]
) -> None:
    write(folder, **changes)
    said = labctl("profile", "profile-1")
    assert said.code == 1
    assert "is not a valid profile" in said.err
    assert not (folder / "index.html").exists()


def test_a_snapshot_is_never_opened(labctl: Any, folder: Path) -> None:
    """It is a pickle: this one would create a file when it is loaded."""
    write(folder, allocator=ALLOCATOR)
    trap = folder / "trap"
    (folder / "memory_snapshot.pickle").write_bytes(
        b"cbuiltins\nopen\n(V" + str(trap).encode() + b"\nVw\ntR."
    )
    assert labctl("profile", "profile-1", "--memory").code == 0
    assert not trap.exists()


def test_an_earlier_profile_without_memory_says_how_to_get_it(labctl: Any, folder: Path) -> None:
    (folder / "profile.json").write_text(json.dumps(FIGURES))
    assert labctl("profile", "profile-1").code == 0
    said = labctl("profile", "profile-1", "--memory")
    assert said.code == 4
    assert "next: labctl profile --memory" in said.err


def test_one_tool_at_a_time(labctl: Any, folder: Path) -> None:
    said = labctl("profile", "--memory", "--nsight")
    assert said.code == 2
    assert "--nsight cannot be combined with --memory" in said.err
    assert labctl("profile", "profile-1", "--nsight").code == 2
