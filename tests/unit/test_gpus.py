"""What is read of GPUs: through NVIDIA's library, and through nvidia-smi where that is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml_standin import Card, StandIn, open_standin
from pynvml import NVMLError

from labctl.agent.host import gpus as gpus_module
from labctl.agent.host.engine_objects import Container, ContainerHostConfig, DeviceRequest
from labctl.agent.host.gpus import (
    FIELDS,
    GpuProcess,
    Gpus,
    ReadingInterval,
    describe_throttling,
    open_nvml,
    parse_row,
    select_given,
)
from labctl.agent.host.nvml import Nvml
from labctl.wire.telemetry import GpuRecord

__all__ = ["open_standin"]
Opener = Callable[[StandIn], Nvml]
UNKNOWN = 2**64 - 1
BUSY = Card(
    uuid="GPU-one",
    name="Tesla T4",
    memory=(1_500_000_000, 16_000_000_000),
    use=87,
    numbers={
        "nvmlDeviceGetPowerUsage": 61_200,
        "nvmlDeviceGetEnforcedPowerLimit": 70_000,
        "nvmlDeviceGetTemperature": 71,
        "nvmlDeviceGetClockInfo": 1500,
        "nvmlDeviceGetMaxClockInfo": 1590,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x20 | 0x01,
        "nvmlDeviceGetTotalEnergyConsumption": 12_345_600,
    },
    processes=[(41, 1_400_000_000), (42, UNKNOWN)],
)
SILENT = Card(uuid="GPU-two", name="Tesla M60")
PARTED = Card(
    uuid="GPU-three",
    memory=(10, 40),
    numbers={"nvmlDeviceGetTemperature": 40},
    instances={
        0: Card(uuid="MIG-a", name="A100 MIG 1g.5gb", memory=(1, 5), processes=[(7, 1)]),
        3: Card(uuid="MIG-b", name="A100 MIG 2g.10gb", memory=(2, 10)),
    },
)


def test_a_card_tells_what_it_measures(open_standin: Opener) -> None:
    (found,) = open_standin(StandIn([BUSY])).read()
    assert found == GpuRecord(
        index="0",
        uuid="GPU-one",
        name="Tesla T4",
        use_percent=87,
        memory_bytes=1_500_000_000,
        memory_total_bytes=16_000_000_000,
        power_w=61.2,
        power_limit_w=70.0,
        temperature_c=71,
        sm_clock_mhz=1500,
        sm_clock_max_mhz=1590,
        throttle=("thermal",),
        energy_j=12345.6,
    )


def test_what_never_changes_is_read_once(open_standin: Opener) -> None:
    """The maximum clock alone takes 1.6 ms of an H200's driver."""
    driver = StandIn([BUSY])
    library = open_standin(driver)
    assert library.read() == library.read()
    once = ("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMaxClockInfo")
    assert [driver.called.count(name) for name in once] == [1, 1, 1]
    assert driver.called.count("nvmlDeviceGetPowerUsage") == 2


def test_what_a_card_does_not_measure_is_absent(open_standin: Opener) -> None:
    (found,) = open_standin(StandIn([SILENT])).read()
    assert found == GpuRecord(
        index="0", uuid="GPU-two", name="Tesla M60", memory_bytes=0, memory_total_bytes=0
    )


def test_an_earlier_driver_is_asked_in_its_own_words(open_standin: Opener) -> None:
    missing = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetCurrentClocksEventReasons",
    )
    card = Card(
        uuid="GPU-old",
        memory=(3, 8),
        numbers={"nvmlDeviceGetCurrentClocksThrottleReasons": 0x04},
        processes=[(5, 2)],
    )
    library = open_standin(StandIn([card], missing))
    (found,) = library.read()
    assert (found.memory_bytes, found.memory_total_bytes) == (3, 8)
    assert found.throttle == ("power",)
    assert library.list_processes() == [GpuProcess("GPU-old", 5, 2)]


def test_instances_stand_behind_their_card(open_standin: Opener) -> None:
    library = open_standin(StandIn([SILENT, PARTED]))
    found = library.read()
    assert [gpu.index for gpu in found] == ["0", "1", "1:0", "1:3"]
    assert [gpu.parent for gpu in found[2:]] == ["GPU-three", "GPU-three"]
    assert found[2].memory_total_bytes == 5
    assert found[2].use_percent is None
    assert library.list_processes() == [GpuProcess("MIG-a", 7, 1)]


def test_processes_whose_memory_is_not_told_are_named(open_standin: Opener) -> None:
    assert open_standin(StandIn([BUSY])).list_processes() == [
        GpuProcess("GPU-one", 41, 1_400_000_000),
        GpuProcess("GPU-one", 42),
    ]


def test_a_driver_that_is_not_loaded_has_no_gpus(open_standin: Opener) -> None:
    with pytest.raises(NVMLError, match="Driver Not Loaded"):
        open_standin(StandIn([], code=9))


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x00, ()),
        (0x01 | 0x02 | 0x10 | 0x100, ()),
        (0x04, ("power",)),
        (0x40, ("thermal",)),
        (0x20 | 0x04, ("power", "thermal")),
        (0x08, ("hardware",)),
        (0x80, ("hardware",)),
    ],
)
def test_only_what_holds_a_clock_down_is_throttling(reasons: int, words: tuple[str, ...]) -> None:
    assert describe_throttling(reasons) == words


def no_library() -> None:
    """As `open_nvml` on a machine without NVIDIA's library."""


def test_a_library_is_used_where_its_driver_is_loaded(
    open_standin: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_standin(StandIn([BUSY]))
    monkeypatch.setattr(gpus_module.ctypes, "CDLL", lambda name: None)
    assert [gpu.uuid for gpu in Gpus().read()] == ["GPU-one"]
    with pytest.raises(NVMLError):
        open_standin(StandIn([], code=9))
    assert open_nvml() is None


def test_bindings_are_not_loaded_where_there_is_no_library() -> None:
    """A server without a GPU does not hold them in memory."""
    code = "import sys; from labctl.agent.host import gpus; gpus.LIBRARY = 'libnone.so.1'"
    code += "; print(gpus.open_nvml(), 'pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


def tool(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Gpus(no_library)


ROW = "0, GPU-one, Tesla T4, 87, 1480, 15360, 61.20, 70.00, 71, 1500, 1590"


def test_without_the_library_nvidia_smi_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""case $1 in
    *throttle*) echo "{ROW}, 0x0000000000000024" ;;
    --query-gpu*) exit 9 ;;
    *) echo "GPU-one, 41, 1400"; echo "GPU-one, 42, [N/A]" ;;
    esac"""
    asked = tool(tmp_path, script, monkeypatch)
    (found,) = asked.read(wait=True)
    assert (found.use_percent, found.memory_bytes) == (87.0, 1480 * 1024**2)
    assert found.throttle == ("power", "thermal")
    assert asked.list_processes() == [
        GpuProcess("GPU-one", 41, 1400 * 1024**2),
        GpuProcess("GPU-one", 42),
    ]


def test_a_field_that_a_driver_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'case $1 in *throttle*) exit 2 ;; --query-gpu*) echo "{ROW}" ;; esac'
    (found,) = tool(tmp_path, script, monkeypatch).read(wait=True)
    assert found.sm_clock_max_mhz == 1590
    assert found.throttle is None


@pytest.mark.parametrize("script", ["exit 9", "kill -9 $$", "echo Unable to determine; echo ,,,"])
def test_a_broken_nvidia_smi_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    found = tool(tmp_path, script, monkeypatch).read(wait=True)
    assert all(gpu.use_percent is None for gpu in found)


def test_a_machine_with_neither_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = Gpus(no_library)
    assert asked.read() == []
    assert asked.list_processes() == []


def test_figures_that_nvidia_smi_does_not_have_are_absent() -> None:
    row = "0, GPU-one, A100, [N/A], 3, 40960, [Not Supported], [N/A], 40, 210, 1410, 0x01"
    found = parse_row(row, FIELDS)
    assert found.use_percent is None
    assert found.power_w is None
    assert found.throttle == ()


def test_looks_that_cost_much_are_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gpus_module.time, "monotonic", lambda: now[0])
    pace = ReadingInterval()
    pace.record_cost(2.0)  # the driver woke up
    assert pace.is_due()
    pace.record_cost(0.03)
    now[0] += 5.9
    assert not pace.is_due()
    now[0] += 0.2
    assert pace.is_due()
    pace.record_cost(60.0)
    now[0] += 30.1
    assert pace.is_due()


ASKED = DeviceRequest(Capabilities=(("gpu",),))


@pytest.mark.parametrize(
    ("requests", "indices"),
    [
        (None, []),
        ((), []),
        ((ASKED._replace(Count=-1),), ["0", "1", "2", "2:0", "2:3"]),
        ((ASKED._replace(DeviceIDs=("GPU-two",)),), ["1"]),
        ((ASKED._replace(DeviceIDs=("0", "MIG-b")),), ["0", "2:3"]),
        ((ASKED._replace(DeviceIDs=("",)),), []),
        ((DeviceRequest(Capabilities=(("nvme",),), Count=-1),), []),
    ],
)
def test_a_container_was_given_these(
    requests: tuple[DeviceRequest, ...] | None, indices: list[str], open_standin: Opener
) -> None:
    container = Container(HostConfig=ContainerHostConfig(DeviceRequests=requests))
    gpus = open_standin(StandIn([BUSY, SILENT, PARTED])).read()
    assert [gpu.index for gpu in select_given(gpus, container)] == indices
