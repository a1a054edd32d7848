"""What labctl reads of a real GPU, against what nvidia-smi says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_card import MIB, NoteFigure, run_load

from labctl.agent.host.gpu_access import OPENED, PROBE
from labctl.agent.host.gpus import FIELDS, GpuProcess, Gpus, NvidiaSmi
from labctl.agent.host.nvml import Nvml
from labctl.agent.host.top import TopView
from labctl.agent.watchdog.activity import GPU_PERCENT, read_gpu_signs
from labctl.commands import probe
from labctl.wire.telemetry import GpuRecord

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card")]
READINGS = 200
# seconds over which the energy counter is compared with the power
ENERGY_S = 5.0
# The same bits by nvidia-smi's names.
THROTTLE_FIELDS = {
    "power": ("sw_power_cap",),
    "thermal": ("sw_thermal_slowdown", "hw_thermal_slowdown"),
    "hardware": ("hw_slowdown", "hw_power_brake_slowdown"),
}


@pytest.fixture(scope="module")
def nvml() -> Nvml:
    return Nvml()


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    with run_load() as process:
        yield process


def query(*fields: str) -> dict[str, str]:
    """What nvidia-smi itself prints of the first GPU."""
    words = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}"]
    words.append("--format=csv,noheader,nounits")
    row = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return dict(zip(fields, row.split(", "), strict=True))


def wait_until_idle(nvml: Nvml) -> GpuRecord:
    """The driver's averages still hold the work of a process that has just ended."""
    end = time.monotonic() + 30
    while True:
        reading = nvml.read()[0]
        if not reading.use_percent or time.monotonic() > end:
            return reading
        time.sleep(0.5)


def compare(reading: GpuRecord, said: dict[str, str], figure: NoteFigure, state: str) -> None:
    assert (reading.index, reading.uuid, reading.name) == (
        said["index"],
        said["uuid"],
        said["name"],
    )
    assert reading.memory_total_bytes is not None
    assert reading.memory_total_bytes // MIB == int(said["memory.total"])
    assert reading.memory_bytes is not None
    assert reading.memory_bytes / MIB == pytest.approx(int(said["memory.used"]), abs=64)
    assert reading.power_limit_w == pytest.approx(float(said["enforced.power.limit"]), abs=0.01)
    assert reading.sm_clock_max_mhz == float(said["clocks.max.sm"])
    assert reading.temperature_c == pytest.approx(float(said["temperature.gpu"]), abs=4)
    assert reading.use_percent == pytest.approx(float(said["utilization.gpu"]), abs=10)
    assert reading.power_w == pytest.approx(float(said["power.draw"]), rel=0.2)
    assert reading.sm_clock_mhz == pytest.approx(float(said["clocks.sm"]), rel=0.3)
    figure(f"{state}, labctl", reading._replace(uuid=""))
    figure(f"{state}, nvidia-smi", {**said, "uuid": ""})


QUERIED = tuple(name for name, _, _ in FIELDS[:-1])


def test_an_idle_card_is_read_as_nvidia_smi_reads_it(nvml: Nvml, figure: NoteFigure) -> None:
    reading = wait_until_idle(nvml)
    compare(reading, query(*QUERIED), figure, "idle")
    assert reading.use_percent == 0
    assert reading.throttle == ()


def test_a_busy_card_is_read_as_nvidia_smi_reads_it(
    nvml: Nvml, busy: subprocess.Popen[str], figure: NoteFigure
) -> None:
    reading = nvml.read()[0]
    compare(reading, query(*QUERIED), figure, "busy")
    assert reading.use_percent is not None
    assert reading.use_percent >= 90


def test_energy_rises_as_power_times_time(
    nvml: Nvml, busy: subprocess.Popen[str], figure: NoteFigure
) -> None:
    readings, times = [], []
    end = time.monotonic() + ENERGY_S
    while time.monotonic() < end:
        readings.append(nvml.read()[0])
        times.append(time.monotonic())
        time.sleep(0.05)
    first, last = readings[0].energy_j, readings[-1].energy_j
    if first is None or last is None:
        pytest.skip("this GPU has no energy counter")
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    expected_j = sum(powers) / len(powers) * (times[-1] - times[0])
    figure("energy counter / (power x time)", (last - first) / expected_j)
    assert last - first == pytest.approx(expected_j, rel=0.15)


def test_what_holds_the_clock_down_is_what_nvidia_smi_names(
    nvml: Nvml, busy: subprocess.Popen[str], figure: NoteFigure
) -> None:
    names = [f"clocks_event_reasons.{n}" for names in THROTTLE_FIELDS.values() for n in names]
    for _ in range(10):  # the reasons may change between two readings
        before = nvml.read()[0].throttle
        said = query(*names)
        words = tuple(
            word
            for word, fields in THROTTLE_FIELDS.items()
            if any(said[f"clocks_event_reasons.{field}"] == "Active" for field in fields)
        )
        if before == nvml.read()[0].throttle:
            break
    assert before == words
    figure("busy, clock held down by", before)


def find_use(processes: list[GpuProcess], pid: int) -> GpuProcess:
    """The row of a process; a process in a container has another number outside."""
    rows = [process for process in processes if process.pid == pid]
    if not rows and processes:
        pytest.skip("the driver numbers processes as another namespace does")
    assert len(rows) == 1
    return rows[0]


def test_a_process_is_listed_with_its_memory(
    nvml: Nvml, busy: subprocess.Popen[str], figure: NoteFigure
) -> None:
    row = find_use(nvml.list_processes(), busy.pid)
    assert row.uuid == nvml.read()[0].uuid
    assert row.memory_bytes is not None
    assert row.memory_bytes > 3 * 8192 * 8192 * 2
    used = nvml.read()[0].memory_bytes
    assert used is not None
    assert row.memory_bytes <= used
    figure("memory of the process, of the card", (row.memory_bytes // MIB, used // MIB))


def test_the_cost_of_a_reading(nvml: Nvml, figure: NoteFigure) -> None:
    """No bound: the figure goes to the documentation."""
    for name, read in (("reading", nvml.read), ("list of processes", nvml.list_processes)):
        read()
        cpu_s, wall_s = time.thread_time(), time.monotonic()
        for _ in range(READINGS):
            read()
        figure(f"NVML, one {name}, CPU ms", (time.thread_time() - cpu_s) / READINGS * 1e3)
        figure(f"NVML, one {name}, wall ms", (time.monotonic() - wall_s) / READINGS * 1e3)


OPENING = """
import time
import psutil
from labctl.agent.host.gpus import Gpus
process = psutil.Process()
memory, cpu_s, wall_s = process.memory_info().rss, time.thread_time(), time.time()
Gpus().read()
print((process.memory_info().rss - memory) / 2**20)
print((time.thread_time() - cpu_s) * 1e3, (time.time() - wall_s) * 1e3)
"""


def test_the_first_reading_opens_the_library(figure: NoteFigure) -> None:
    words = [sys.executable, "-c", OPENING]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    memory_mib, cpu_ms, wall_ms = map(float, done.stdout.split())
    figure("NVML, opened and first reading, CPU ms", cpu_ms)
    figure("NVML, opened and first reading, wall ms", wall_ms)
    figure("NVML, opened and first reading, MiB", memory_mib)
    assert memory_mib > 0


def no_library() -> None:
    """As `open_nvml` on a machine without NVIDIA's library."""


def test_nvidia_smi_alone_gives_the_same(
    nvml: Nvml, busy: subprocess.Popen[str], figure: NoteFigure
) -> None:
    gpus = Gpus(no_library)
    children = os.times()
    (reading, *_) = gpus.read(wait=True)
    after = os.times()
    cost_s = after.children_user + after.children_system
    cost_s -= children.children_user + children.children_system
    figure("nvidia-smi, one reading with processes, CPU ms", cost_s * 1e3)
    assert isinstance(gpus._tool, NvidiaSmi)
    assert gpus._tool.fields is FIELDS, "the driver refused the name of a field"
    by_library = nvml.read()[0]
    for field in ("index", "uuid", "name", "sm_clock_max_mhz"):
        assert getattr(reading, field) == getattr(by_library, field)
    for field in ("memory_bytes", "memory_total_bytes"):
        assert getattr(reading, field) == pytest.approx(getattr(by_library, field), abs=64 * MIB)
    for field in ("power_w", "sm_clock_mhz", "use_percent", "power_limit_w"):
        assert getattr(reading, field) == pytest.approx(getattr(by_library, field), rel=0.2)
    assert reading.throttle is not None
    assert reading.energy_j is None
    row = find_use(gpus.list_processes(), busy.pid)
    expected = find_use(nvml.list_processes(), busy.pid)
    assert row.uuid == expected.uuid
    assert row.memory_bytes == pytest.approx(expected.memory_bytes, abs=MIB)


def test_an_idle_card_is_idle_to_the_watchdog(nvml: Nvml) -> None:
    wait_until_idle(nvml)
    assert read_gpu_signs() == []


def test_a_busy_card_is_work_to_the_watchdog(busy: subprocess.Popen[str]) -> None:
    signs = read_gpu_signs()
    assert signs is not None
    assert [sign.gpu_percent is not None and sign.gpu_percent > GPU_PERCENT for sign in signs] == [
        True
    ]
    assert "GPU 0 is at" in signs[0].text


HOLDING = "import torch; x = torch.ones(2**28, device='cuda'); print('held', flush=True); input()"


def test_memory_that_is_only_held_is_no_work_to_the_watchdog(nvml: Nvml) -> None:
    words = [sys.executable, "-c", HOLDING]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        reading = wait_until_idle(nvml)
        assert reading.memory_bytes is not None
        assert reading.memory_bytes > 2**30
        assert read_gpu_signs() == []
        holder.communicate("\n")


def test_top_lists_the_card_and_the_process_on_it(
    busy: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: NoteFigure
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    view = TopView()
    view.read()
    time.sleep(1.0)
    sample = view.read()
    assert sample.gpus[0].use_percent is not None
    assert sample.gpus[0].use_percent >= 90
    rows = [row for row in sample.processes if row.pid == busy.pid]
    if not rows:
        find_use(view.gpus.list_processes(), busy.pid)
    assert "matrix_load.py" in rows[0].command
    (use,) = rows[0].gpus
    assert use.uuid == sample.gpus[0].uuid
    assert use.memory_bytes is not None
    figure("top, the process", rows[0])


def test_the_device_files_open() -> None:
    """What labctl runs in a container to see whether it still has its GPUs."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no device files here (WSL)")
    done = subprocess.run(["/bin/sh", "-c", PROBE], check=False)
    assert done.returncode == OPENED


def test_the_probe_of_a_server_finds_the_card(nvml: Nvml, figure: NoteFigure) -> None:
    shell: dict[str, Any] = {"input": probe.SCRIPT, "capture_output": True, "text": True}
    done = subprocess.run(["sh", "-s"], check=True, **shell)
    facts = probe.parse(done.stdout, done.stderr)
    reading = nvml.read()[0]
    assert facts.gpus[0].uuid == reading.uuid
    assert facts.gpus[0].name == reading.name
    assert facts.gpus[0].memory_bytes == (reading.memory_total_bytes or 0) // MIB * MIB
    assert facts.gpus[0].driver == query("driver_version")["driver_version"]
    if not shutil.which("nvidia-container-cli") and not Path("/etc/cdi").exists():
        assert "nvidia runtime" in {missing.name for missing in probe.list_missing(facts)}
    figure("the server's probe", facts.gpus)
