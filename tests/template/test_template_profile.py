"""The profiler in real programs: PyTorch's own steps, without a change to the code."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from template_project import TEMPLATE

from labctl.errors import NotFoundError
from labctl.events import Event, Progress
from labctl.insight import profile
from labctl.insight.explain.profile import read_profile
from labctl.insight.profile import NAME, WRAP, pack_profiler
from labctl.insight.profiler.sitecustomize import STEPPED

pytestmark = pytest.mark.train
FEW = """
import sys
import torch
weight = torch.nn.Parameter(torch.ones(4))
first, second = (torch.optim.{name}([weight], lr=0.1) for _ in range(2))
for step in range(int(sys.argv[1])):
    for optimizer in (first, second):
        weight.sum().backward()
        optimizer.step()
print("went on to its end")
"""


def profiled(
    run: Path, *command: str, data: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """A command as labctl has the container run it, with the zip where this test may write."""
    environment = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environment |= {
        "LABCTL_RUN_DIR": str(run),
        "LABCTL_LOG_DIR": str(run / "logs"),
        "LABCTL_RUN_ID": "profile-1",
        "LABCTL_PROFILER": pack_profiler(),
        **settings,
    }
    if data:
        environment["LABCTL_DATA_DIR"] = str(data.parent)
    script = WRAP.replace("/tmp/labctl-profiler.zip", str(run / "profiler.zip"))
    return subprocess.run(
        ["sh", "-c", script, NAME, *command],
        cwd=run,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_the_sample_project_is_profiled_and_ended_after_its_steps(
    tmp_path: Path, small: Path
) -> None:
    command = (sys.executable, "-B", str(TEMPLATE / "train.py"), "--epochs", "500")
    done = profiled(tmp_path, *command, data=small)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "logs" / "profile"
    found = read_profile(directory)
    assert (found.steps, found.run, found.gpu_busy) == (5, "profile-1", None)
    assert found.step_us > 0
    assert {"data", "optimizer", "backward", "forward"} <= {
        name for name, share in found.phases.items() if share > 0
    }
    assert any("convolution" in row.name for row in found.operations)
    trace = json.loads(gzip.decompress((directory / "trace.json.gz").read_bytes()))
    assert any(one.get("name", "").startswith("ProfilerStep#") for one in trace["traceEvents"])
    page = (directory / "index.html").read_text()
    assert "PROFILE_AS_JSON" not in page
    inlined = page.partition('id="profile">')[2].partition("</script>")[0]
    assert json.loads(inlined)["step_us"] == found.step_us
    assert not (directory / "note.json").exists()
    assert not list(directory.glob(".*"))
    steps = profile.STEP_LINE.findall(done.stderr.encode())
    assert steps == [(b"%d" % step, b"15") for step in range(1, 16)]


@pytest.mark.long
def test_of_several_optimizers_the_first_ones_steps_count(tmp_path: Path) -> None:
    script = tmp_path / "few.py"
    script.write_text(FEW.format(name="SGD"))
    settings = {"LABCTL_PROFILE_STEPS": "2", "LABCTL_PROFILE_WARMUP": "3"}
    done = profiled(tmp_path, sys.executable, str(script), "5", **settings)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert read_profile(tmp_path / "logs" / "profile").steps == 2


@pytest.mark.long
def test_too_few_steps_are_told_and_the_program_left_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "few.py"
    script.write_text(FEW.format(name="Adam"))
    done = profiled(tmp_path, sys.executable, str(script), "4")
    assert (done.returncode, done.stdout) == (0, "went on to its end\n"), done.stderr
    note = json.loads((tmp_path / "logs" / "profile" / "note.json").read_text())
    assert note == {"why": "the program made 4 optimizer steps; 15 are needed", "steps": 4}


def test_a_program_without_pytorch_pays_and_leaves_nothing(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('the image has one, too')")
    command = (sys.executable, "-c", "import sys; print('torch' in sys.modules)")
    done = profiled(tmp_path, *command, PYTHONPATH=str(own))
    assert (done.returncode, done.stdout) == (0, "the image has one, too\nFalse\n"), done.stderr
    assert not (tmp_path / "logs").exists()
    failed = profiled(tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    assert failed.returncode == 3


def test_steps_are_counted_and_left_out_of_the_output() -> None:
    events: list[Event] = []
    tail = profile._OutputTail(events.append)
    tail.append(b"loading\nlabctl profile: step 1 of 15\nlabctl pro")
    tail.append(b"file: step 2 of 15\nlabctl profile: step 3 of 15\nout of memory\n")
    tail.append(b"labctl profile: step 15 of 15\n")
    steps = [(one.done, one.total, one.detail) for one in events if isinstance(one, Progress)]
    assert steps == [(1, 15, ""), (3, 15, ""), (15, 15, "writing the profile")]
    assert tail.text == b"loading\nout of memory\n"


def test_what_travels_is_small_and_always_the_same() -> None:
    assert pack_profiler() == pack_profiler()
    assert len(pack_profiler()) < 60_000  # Linux takes 128 KiB in one variable
    assert base64.b64decode(pack_profiler())[:2] == b"PK"


def test_a_command_that_makes_no_step_is_ended_in_time(tmp_path: Path) -> None:
    sleeping = (sys.executable, "-c", "import time; time.sleep(200)")
    done = profiled(tmp_path, *sleeping, LABCTL_PROFILE_WAIT_S="0.3")
    assert done.returncode == 0, done.stderr
    with pytest.raises(NotFoundError, match="nothing was profiled") as missing:
        read_profile(tmp_path / "logs" / "profile")
    assert missing.value.why == "the command made no optimizer step within 0.005 min"


def test_a_launcher_makes_no_step_itself_and_is_not_ended(tmp_path: Path) -> None:
    starting = "import time; time.sleep(1); print('went on to its end')"
    (tmp_path / "logs" / "profile").mkdir(parents=True)
    (tmp_path / "logs" / "profile" / STEPPED).touch()
    done = profiled(tmp_path, sys.executable, "-c", starting, LABCTL_PROFILE_WAIT_S="0.1")
    assert done.stdout == "went on to its end\n"
