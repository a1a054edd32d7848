"""What a step's memory holds, recorded in real programs and compared with counts by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from template_project import TEMPLATE
from test_template_profile import profiled

from labctl.insight import nsight, profile
from labctl.insight.explain.memory_profile import MemoryProfile
from labctl.insight.explain.profile import read_profile
from labctl.insight.nsight import is_nsys_missing

pytestmark = pytest.mark.train
SETTINGS = {
    "LABCTL_PROFILE_STEPS": "2",
    "LABCTL_PROFILE_WARMUP": "3",
    "LABCTL_PROFILE_MEMORY": "1",
}
# Two layers without a bias: 4 MB, and 40 kB of weights.
PROGRAM = """
import torch
from torch import nn
layers = nn.Linear(1000, 1000, bias=False), nn.Tanh(), nn.Linear(1000, 10, bias=False)
model = nn.Sequential(*layers)
optimizer = {optimizer}
batch = torch.ones(5000, 1000)
for step in range(6):
    {before}
    model(batch).sum().backward()
    optimizer.step()
    {after}
"""
PARAMETERS = 4 * (1000 * 1000 + 1000 * 10)


def run_program(tmp_path: Path, **parts: str) -> MemoryProfile:
    script = tmp_path / "two.py"
    script.write_text(PROGRAM.format(**{"before": "", "after": "", **parts}))
    done = profiled(tmp_path, sys.executable, str(script), **SETTINGS)
    assert done.returncode == 0, done.stderr
    memory = read_profile(tmp_path / "logs" / "profile").memory
    assert memory is not None
    return memory


@pytest.mark.long
def test_a_step_is_divided_as_counted_by_hand(tmp_path: Path) -> None:
    memory = run_program(
        tmp_path,
        optimizer="torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        after="optimizer.zero_grad()",
    )
    assert (memory.device, memory.optimizer, memory.allocator) == ("cpu", "SGD", None)
    assert memory.peak.parameters == memory.most.parameters == PARAMETERS
    assert memory.peak.optimizer == PARAMETERS
    assert memory.most.gradients == PARAMETERS
    # At the peak, in the backward pass of tanh: its output, and the gradients on both of its sides.
    tensor = 4 * 5000 * 1000
    assert 3 * tensor <= memory.peak.activations <= 3.2 * tensor
    # The gradient of the second layer exists by then, that of the first does not.
    assert memory.peak.gradients == 4 * 1000 * 10
    assert memory.process_bytes > 50_000_000
    assert 2 < len(memory.timeline) <= 300
    summary = tmp_path / "logs" / "profile" / "memory_summary.txt"
    assert "aten::mm" in summary.read_text()


@pytest.mark.long
def test_adam_and_kept_gradients(tmp_path: Path) -> None:
    """Gradients that are set to zero stay where they are, also those from before the trace."""
    memory = run_program(
        tmp_path,
        optimizer="torch.optim.Adam(model.parameters())",
        before="optimizer.zero_grad(set_to_none=False)",
    )
    assert memory.peak.gradients == PARAMETERS
    # Adam also keeps the number of its steps, in 4 bytes for each parameter.
    assert memory.peak.optimizer == 2 * PARAMETERS + 2 * 4


@pytest.mark.long
def test_frozen_parameters_are_parameters(tmp_path: Path) -> None:
    memory = run_program(tmp_path, optimizer="torch.optim.SGD(model[2].parameters(), lr=0.1)")
    assert memory.peak.parameters == PARAMETERS
    assert memory.most.optimizer == 0


@pytest.mark.long
def test_the_sample_needs_what_the_estimate_predicts(tmp_path: Path, small: Path) -> None:
    command = (sys.executable, "-B", str(TEMPLATE / "train.py"), "--epochs", "500")
    done = profiled(tmp_path, *command, data=small, **SETTINGS)
    assert done.returncode == 0, done.stderr
    memory = read_profile(tmp_path / "logs" / "profile").memory
    assert memory is not None
    # 94,186 parameters and some buffers in fp32, a gradient and two states for each parameter.
    assert memory.peak.parameters == pytest.approx(377_000, rel=0.02)
    assert memory.most.gradients == pytest.approx(377_000, rel=0.02)
    assert memory.peak.optimizer == pytest.approx(754_000, rel=0.02)
    # labctl estimate train.py:build_model --batch 32: 5.4 MB
    assert memory.most.activations == pytest.approx(5.4e6, rel=0.25)


@pytest.mark.long
def test_without_the_option_nothing_of_it_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        PROGRAM.format(optimizer="torch.optim.SGD(model.parameters(), lr=0.1)", before="", after="")
    )
    few = {"LABCTL_PROFILE_STEPS": "1", "LABCTL_PROFILE_WARMUP": "3"}
    done = profiled(tmp_path, sys.executable, str(script), **few)
    assert done.returncode == 0, done.stderr
    assert read_profile(tmp_path / "logs" / "profile").memory is None
    assert not (tmp_path / "logs" / "profile" / "memory_summary.txt").exists()


def run_nsight(run: Path, nsys: str) -> subprocess.CompletedProcess[str]:
    """A training as --nsight has the container run it, with this script as nsys."""
    script = run / "two.py"
    script.write_text(
        PROGRAM.format(
            optimizer="torch.optim.SGD(model.parameters(), lr=0.1)", before="", after=""
        ).replace("range(6)", "range(100)")
    )
    programs = run / "bin"
    programs.mkdir()
    if nsys:
        (programs / "nsys").write_text(nsys)
        (programs / "nsys").chmod(0o755)
    wrap = nsight.WRAP.replace("/tmp/labctl-profiler.zip", str(run / "profiler.zip"))
    return subprocess.run(
        ["sh", "-c", wrap, profile.NAME, sys.executable, str(script)],
        cwd=run,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "LABCTL_LOG_DIR": str(run / "logs"),
            "LABCTL_PROFILER": profile.pack_profiler(),
            "LABCTL_PROFILE_NSIGHT": "1",
            "LABCTL_PROFILE_STEPS": "2",
            "LABCTL_PROFILE_WARMUP": "3",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Nsight Systems is not installed here: this stands in for it and runs the program as it would.
NSYS = """#!/bin/sh
echo "$@" >"$LABCTL_LOG_DIR/arguments"
for word; do case "$word" in --output=*) touch "${word#--output=}.nsys-rep";; esac; done
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done
exec "$@"
"""


@pytest.mark.long
def test_nsight_counts_the_steps_and_ends_the_program(tmp_path: Path) -> None:
    done = run_nsight(tmp_path, NSYS)
    assert done.returncode == 0, done.stderr
    assert "labctl profile: step 5 of 5" in done.stderr
    assert "step 6" not in done.stderr
    directory = tmp_path / "logs" / "profile"
    assert sorted(path.name for path in directory.iterdir()) == ["nsight.nsys-rep"]
    assert (tmp_path / "logs" / "arguments").read_text().startswith("profile --trace=cuda,nvtx")


def test_an_image_without_nsys_is_noted(tmp_path: Path) -> None:
    done = run_nsight(tmp_path, "")
    directory = tmp_path / "logs" / "profile"
    assert (done.returncode, done.stdout) == (127, "")
    assert is_nsys_missing(directory)
    for wrong in ('{"missing": 1}', "[" * 100_000, ""):
        (directory / "nsight.json").write_text(wrong)
        assert not is_nsys_missing(directory)
    assert not is_nsys_missing(tmp_path)
