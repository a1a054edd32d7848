"""GPUs through NVML, the library below nvidia-smi, by NVIDIA's Python bindings.

One call takes microseconds. Values that a card does not report are absent. While it is open, the
library keeps the driver awake.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Callable, Dict, Iterator

import pynvml
from pynvml import NVMLError

from .gpus import describe_throttling

Gpu = Dict[str, Any]


class Nvml:
    """All GPUs of this machine. NVMLError if no driver is loaded."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._cards: list[tuple[str, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(NVMLError):  # a card that fell off the bus
                self._cards.append((str(index), pynvml.nvmlDeviceGetHandleByIndex(index)))

    def read(self) -> list[Gpu]:
        """Read every card, and after a partitioned one its MIG instances (with "parent")."""
        gpus = []
        for index, handle in self._cards:
            card = _read_card(index, handle)
            gpus.append(card)
            gpus += [
                _read_instance(card, slot, instance) for slot, instance in _list_instances(handle)
            ]
        return gpus

    def list_processes(self) -> list[dict[str, Any]]:
        """List the compute processes: {"uuid", "pid", "memory_bytes"} of each GPU."""
        rows = []
        for _, card in self._cards:
            for gpu in [card] + [instance for _, instance in _list_instances(card)]:
                with suppress(NVMLError):
                    uuid = pynvml.nvmlDeviceGetUUID(gpu)
                    rows += [{"uuid": uuid, **row} for row in _list_processes(gpu)]
        return rows


def _read_card(index: str, card: Any) -> Gpu:
    readers: dict[str, Callable[[], Any]] = {
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(card),
        "name": lambda: pynvml.nvmlDeviceGetName(card),
        "use_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(card).gpu,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
        "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM),
        "throttle": lambda: describe_throttling(_read_clock_reasons(card)),
        "energy_j": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000,
    }
    return {"index": index, **_read_supported(readers), **_read_memory(card)}


def _read_instance(card: Gpu, slot: int, instance: Any) -> Gpu:
    """Read a MIG instance's own memory; only its card reports the rest."""
    readers: dict[str, Callable[[], Any]] = {
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(instance),
        "name": lambda: pynvml.nvmlDeviceGetName(instance),
    }
    location = {"index": f"{card['index']}:{slot}", "parent": card.get("uuid", "")}
    return {**location, **_read_supported(readers), **_read_memory(instance)}


def _list_instances(card: Any) -> Iterator[tuple[int, Any]]:
    try:
        is_partitioned, _ = pynvml.nvmlDeviceGetMigMode(card)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(card) if is_partitioned else 0
    except NVMLError:
        return
    for slot in range(count):
        with suppress(NVMLError):  # empty slots
            yield slot, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot)


def _read_memory(gpu: Any) -> Gpu:
    try:
        # Version 2 counts as nvidia-smi does: `used` excludes memory reserved by the driver.
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    except NVMLError:  # drivers before 510
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        except NVMLError:
            return {}
    return {"memory_bytes": memory.used, "memory_total_bytes": memory.total}


def _read_clock_reasons(card: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except NVMLError:  # drivers before 535
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _list_processes(gpu: Any) -> list[dict[str, Any]]:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    except NVMLError:  # drivers before 510
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu)
    rows = []
    for process in processes:
        used = process.usedGpuMemory
        rows.append({"pid": process.pid, **({} if used is None else {"memory_bytes": used})})
    return rows


def _read_supported(readers: dict[str, Callable[[], Any]]) -> Gpu:
    values = {}
    for key, read in readers.items():
        with suppress(NVMLError):
            values[key] = read()
    return values
