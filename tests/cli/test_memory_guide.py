"""The transcripts of docs/memory.md, replayed: estimates, a real profile, and a run that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from guide_session import save_run
from transcripts import list_steps, make_session, replay

from labctl.config import ensure_lab_id, find_paths
from labctl.insight.profile import NAME, WRAP, pack_profiler
from labctl.insight.telemetry import GpuSample
from labctl.model import Run
from labctl.state import State

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
PROFILE = "profile-1121-072912-dd1d"
COMMAND = ("python", "train.py", "--batch-size", "256")
GIB = 1024**3
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 1.31 GiB is free.\n"
)


def test_the_page_shows_what_the_estimate_prints(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    session = make_session(tmp_path, tmp_path / "empty", {})
    assert "\n".join(replay(PAGE, "here", session)) == ""


def test_every_transcript_of_the_page_is_replayed() -> None:
    places = ("here", "sample", "profiled", "sample_big")
    assert all(list_steps(PAGE, place) for place in places)
    assert PAGE.read_text().count("```console\n") == len(places)


@pytest.mark.long
@pytest.mark.train
def test_the_page_shows_a_real_profile_of_the_sample(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: labctl[train]")
    (tmp_path / "empty").mkdir()
    session = make_session(tmp_path, tmp_path / "empty", {})
    assert "\n".join(replay(PAGE, "sample", session)) == ""
    inside = session.enter("digits")
    lab_id = ensure_lab_id(inside.directory)
    make_profile(inside.directory, tmp_path)
    command = ("sh", "-c", WRAP, NAME, *COMMAND)
    run = Run(id=PROFILE, lab_id=lab_id, server_id="gone", state="exited", command=command)
    with State(find_paths({"HOME": inside.environ["HOME"]}).database) as state:
        state.save_run(run)
    assert "\n".join(replay(PAGE, "profiled", inside)) == ""
    full = GpuSample(uuid="GPU-1", name="T4", use_percent=90.0, memory_total_bytes=16 * GIB)
    save_run(inside, lab_id, "big", 1, OUT_OF_MEMORY, full, (*COMMAND[:3], "131072"))
    assert "\n".join(replay(PAGE, "sample_big", inside)) == ""


def make_profile(project: Path, folder: Path) -> None:
    """Profile a training of the sample as labctl has the container run it."""
    run = project / "runs" / PROFILE
    (run / "logs").mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LABCTL_")}
    settings = {
        "LABCTL_RUN_ID": PROFILE,
        "LABCTL_RUN_DIR": str(run),
        "LABCTL_LOG_DIR": str(run / "logs"),
        "LABCTL_PROFILER": pack_profiler(),
        "LABCTL_PROFILE_STEPS": "2",
        "LABCTL_PROFILE_WARMUP": "3",
        "LABCTL_PROFILE_MEMORY": "1",
    }
    script = WRAP.replace("/tmp/labctl-profiler.zip", str(folder / "profiler.zip"))
    subprocess.run(
        ["sh", "-c", script, NAME, sys.executable, "-B", *COMMAND[1:]],
        cwd=project,
        env={**kept, **settings},
        capture_output=True,
        timeout=600,
        check=True,
    )
