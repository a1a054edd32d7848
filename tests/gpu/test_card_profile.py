"""`labctl profile` of programs on a real GPU: kernels, copies, and waiting for the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_card import NoteFigure
from template_project import TEMPLATE

from labctl.insight.explain.profile import Profile, advise, read_profile
from labctl.insight.profile import NAME, WRAP, pack_profiler

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card")]
# Large products, and after each step a value is read, so that the program waits for the GPU.
WAITING = """
import torch
weight = torch.nn.Parameter(torch.randn(8192, 8192, device="cuda"))
inputs = torch.randn(8192, 8192).pin_memory()
optimizer = torch.optim.AdamW([weight], lr=1e-3)
for step in range(100):
    batch = inputs.to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = (batch @ weight).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
"""


def profile(run: Path, *command: str, data: Path | None = None) -> Profile:
    """Profile a command as labctl has the container run it."""
    environment = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environment |= {
        "LABCTL_RUN_DIR": str(run),
        "LABCTL_LOG_DIR": str(run / "logs"),
        "LABCTL_RUN_ID": "profile-1",
        "LABCTL_PROFILER": pack_profiler(),
    }
    if data:
        environment["LABCTL_DATA_DIR"] = str(data.parent)
    script = WRAP.replace("/tmp/labctl-profiler.zip", str(run / "profiler.zip"))
    done = subprocess.run(
        ["sh", "-c", script, NAME, *command],
        cwd=run,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_profile(run / "logs" / "profile")


def note(figure: NoteFigure, name: str, found: Profile) -> None:
    figure(f"{name}, phases", {key: round(share, 3) for key, share in found.phases.items()})
    figures = ("steps", "step_us", "kernel_count", "kernel_us", "gpu_busy", "copies_us", "syncs")
    figure(name, {key: getattr(found, key) for key in (*figures, "peak_bytes")})
    figure(f"{name}, kernels", [(row.name[:40], round(row.share, 3)) for row in found.kernels[:4]])
    figure(f"{name}, findings", [(finding.rule, finding.what) for finding in advise(found)])


def test_the_sample_project(tmp_path: Path, digits: Path, card: str, figure: NoteFigure) -> None:
    command = (sys.executable, "-B", str(TEMPLATE / "train.py"), "--epochs", "500")
    found = profile(tmp_path, *command, data=digits)
    note(figure, "profile of the sample project", found)
    assert (found.steps, found.device) == (5, card)
    assert sum(found.phases.values()) == pytest.approx(1.0, abs=0.01)
    assert found.gpu_busy is not None
    assert 0 < found.gpu_busy < 1
    assert found.kernel_count > 50
    assert found.kernel_us > 0
    assert found.copies_us > 0
    assert found.peak_bytes > 0
    assert any("Memcpy" not in row.name for row in found.kernels)


def test_a_program_that_waits_for_the_gpu(tmp_path: Path, figure: NoteFigure) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    found = profile(tmp_path, sys.executable, "-B", str(script))
    note(figure, "profile of large products", found)
    assert found.gpu_busy is not None
    assert found.gpu_busy > 0.8
    assert found.phases["waiting"] > 0.5
    assert found.syncs >= 1
    # Weights, gradients, two moments and the batch, 256 MiB each; more is temporary.
    assert 5 * 8192 * 8192 * 4 < found.peak_bytes < 15 * 8192 * 8192 * 4
    # 256 MiB over PCI Express.
    assert found.copies_us > 2000
    assert any("Memcpy HtoD" in row.name for row in found.kernels)
    assert "step-gpu-busy" in {finding.rule for finding in advise(found)}
