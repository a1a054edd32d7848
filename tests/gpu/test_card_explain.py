"""What `labctl explain` says of trainings on a real GPU, from telemetry recorded beside them.

The recorder's own code measures a process instead of a container, since Docker is not needed here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from gpu_card import HERE, NoteFigure
from template_project import TEMPLATE

from labctl.agent.host.container_usage import ContainerUsageReader
from labctl.agent.host.engine_objects import (
    Container,
    ContainerHostConfig,
    ContainerState,
    DeviceRequest,
    MountPoint,
)
from labctl.agent.host.gpus import Gpus
from labctl.agent.host.host_usage import HostUsageReader
from labctl.agent.host.other_programs import OtherPrograms
from labctl.agent.host.telemetry import NAME, RecordedRun, append_line
from labctl.estimate.pace import StepCount, compute_pace, predict_time
from labctl.insight.explain.diagnosis import Diagnosis, diagnose
from labctl.insight.explain.evidence import RunData
from labctl.insight.explanation import OPTION
from labctl.insight.scalars import read_scalars
from labctl.insight.telemetry import read_samples
from labctl.model import Run
from labctl.wire.telemetry import ContainerUsageRecord, TelemetryRecord

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card")]
# The recorder writes every 10 s.
EVERY_S = 1.0
PICTURES, PIXELS = 150, 900
# Steps far too small for a GPU, on data that is there already.
SMALL = """
import os, time, torch
from torch.utils.tensorboard import SummaryWriter
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(8, 64, device="cuda")
writer = SummaryWriter(os.environ["LABCTL_LOG_DIR"])
began, step = time.monotonic(), 0
while time.monotonic() - began < 15:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % 500 == 0:
        writer.add_scalar("train/loss", loss.item(), step)
        writer.add_scalar("speed/data_wait_share", 0.0, step)
writer.close()
"""


class ProcessReader(ContainerUsageReader):
    """Reads a process and its children, which have no control group of their own."""

    def read(self) -> ContainerUsageRecord | None:
        try:
            first = psutil.Process(self.pid)
            family = [first, *first.children(recursive=True)]
            times = [process.cpu_times() for process in family]
            memory = sum(process.memory_info().rss for process in family)
        except psutil.Error:
            return None
        cpu_s = sum(each.user + each.system for each in times)
        return ContainerUsageRecord(
            cores=self.cores,
            cpu_cores=self._measure_cores(cpu_s),
            memory_bytes=memory,
            memory_limit_bytes=psutil.virtual_memory().total,
            processes=len(family),
        )


def record(run: Path, command: Sequence[str], data: Path | None = None) -> RunData:
    """Run a command to its end and record telemetry beside it, then load what explain reads."""
    logs = run / "logs"
    logs.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environment |= {"LABCTL_RUN_DIR": str(run), "LABCTL_LOG_DIR": str(logs)}
    if data:
        environment["LABCTL_DATA_DIR"] = str(data.parent)
    with (logs / "run.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=run, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    began = time.time()
    try:
        _record_beside(run, process)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (logs / "run.log").read_text()
    scripts = [path.read_text() for path in TEMPLATE.glob("*.py")]
    return RunData(
        run=Run(
            id="night",
            lab_id="lab",
            server_id="server",
            state="exited",
            exit_code=0,
            summary="done",
            command=("python", Path(command[2]).name, *command[3:]),
            started_at=began,
            ended_at=time.time(),
        ),
        samples=read_samples(logs / NAME),
        scalars=read_scalars(logs),
        log=(logs / "run.log").read_text(),
        options=frozenset(option for text in scripts for option in OPTION.findall(text)),
        now=time.time(),
    )


def _record_beside(run: Path, process: subprocess.Popen[bytes]) -> None:
    container = Container(
        Id="0" * 64,
        Name="/lab-night-1",
        State=ContainerState(Pid=process.pid),
        HostConfig=ContainerHostConfig(
            DeviceRequests=(DeviceRequest(Count=-1, Capabilities=(("gpu",),)),)
        ),
        Mounts=(MountPoint("/lab/run", str(run)),),
    )
    recorded = RecordedRun(container)
    recorded.usage_reader = ProcessReader(container)
    gpus, host = Gpus(), HostUsageReader(run, psutil)
    programs = OtherPrograms(psutil, gpus)
    while process.poll() is None:
        programs.refresh()
        line = recorded.build_line(gpus.read(wait=True), host.read(), programs, {"0" * 64: "night"})
        if line is not None:
            # The process itself counts as another program, since it is in no container.
            assert append_line(run / "logs", line._replace(others=()))
        time.sleep(EVERY_S)


def note(figure: NoteFigure, name: str, material: RunData) -> Diagnosis:
    diagnosis = diagnose(material)
    uses = [sample.gpus[0].use_percent for sample in material.samples]
    figure(f"{name}, use in percent", uses)
    last = material.samples[len(material.samples) // 2]
    figure(f"{name}, one sample", (last.cpu_cores, last.gpus))
    for finding in diagnosis.findings:
        evidence = [line.text for line in finding.evidence]
        text = f"{finding.level} {finding.rule}: {finding.what}. {finding.why}"
        figure(f"{name}, explain", f"{text} {evidence} -> {finding.next}")
    for unknown in diagnosis.unknown:
        figure(f"{name}, unknown", f"{unknown.rule}: {unknown.why}")
    return diagnosis


@pytest.fixture(scope="module")
def large_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that take longer to decode than the GPU takes to train on them."""
    import numpy
    from PIL import Image

    out = tmp_path_factory.mktemp("large") / "digits"
    random = numpy.random.default_rng(1)
    noise = random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=numpy.uint8)
    for part, count in (("train", PICTURES), ("val", 4), ("test", 4)):
        for label in ("left", "right"):
            folder = out / part / label
            folder.mkdir(parents=True)
            for number in range(count // 2):
                picture = Image.fromarray(numpy.roll(noise, number, axis=1))
                picture.save(folder / f"{number:03}.png", compress_level=1)
    return out


def test_a_training_that_waits_for_data(
    tmp_path: Path, large_pictures: Path, figure: NoteFigure
) -> None:
    words = ("--workers", "0", "--epochs", "5", "--log-every", "1", "--checkpoint-every", "1000")
    command = (sys.executable, "-B", str(TEMPLATE / "train.py"), *words)
    material = record(tmp_path / "run", command, large_pictures)
    diagnosis = note(figure, "starved", material)
    rules = {finding.rule: finding for finding in diagnosis.findings}
    assert "gpu-unused" not in rules, "it was used, if only a little"
    found = rules.get("gpu-idle") or rules["gpu-half-used"]
    assert "waits for data" in found.why
    assert "--workers" in found.next


def test_a_training_that_keeps_the_gpu_busy(tmp_path: Path, figure: NoteFigure) -> None:
    script = tmp_path / "busy.py"
    text = (HERE / "matrix_load.py").read_text()
    script.write_text(re.sub("while True:", "while time.monotonic() - began < 15:", text))
    material = record(tmp_path / "run", (sys.executable, "-B", str(script), "1"))
    rules = {finding.rule for finding in note(figure, "busy", material).findings}
    assert "gpu-good" in rules
    assert "gpu-low-power" not in rules


def test_a_training_with_too_small_steps(tmp_path: Path, figure: NoteFigure) -> None:
    """A kernel may run all the time even so: then its power gives it away."""
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    command = (sys.executable, "-B", str(script), "--batch-size", "8")
    diagnosis = note(figure, "small steps", record(tmp_path / "run", command))
    rules = {finding.rule: finding for finding in diagnosis.findings}
    low = [rules[rule] for rule in ("gpu-idle", "gpu-half-used", "gpu-fair") if rule in rules]
    assert "gpu-unused" not in rules
    assert "gpu-low-power" in rules or "too small" in low[0].why
    assert "data-in-time" in rules


def test_a_probe_predicts_the_sample_project(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, figure: NoteFigure
) -> None:
    """The first half of a training predicts the time of the whole."""
    run = tmp_path / "run"
    points: list[StepCount] = []

    append = append_line

    def poll(logs: Path, line: TelemetryRecord) -> bool:
        try:
            path = logs / "progress.json"
            progress = json.loads(path.read_text())
            points.append(StepCount(path.stat().st_mtime, progress["step"]))
        except OSError:
            pass  # it has not made a step
        return append(logs, line)

    monkeypatch.setattr(sys.modules[__name__], "append_line", poll)
    command = (sys.executable, "-B", str(TEMPLATE / "train.py"), "--epochs", "80")
    began = time.time()
    material = record(run, command, digits)
    took_s = time.time() - began
    note(figure, "sample project", material)
    total = json.loads((run / "logs" / "progress.json").read_text())["total_steps"]
    pace = compute_pace([point for point in points if point.step <= total / 2], began)
    assert pace is not None, points
    predicted = predict_time(pace, total)
    figure("probe, predicted from half (s)", (predicted.low_s, predicted.seconds, predicted.high_s))
    figure("probe, took (s)", took_s)
    assert took_s == pytest.approx(predicted.seconds, rel=0.5)
