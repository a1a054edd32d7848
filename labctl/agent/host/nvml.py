"""GPUs through NVIDIA's own library, which nvidia-smi stands on, by NVIDIA's Python bindings.

One call costs microseconds. What a card does not report is absent. Once it is open, the library
keeps the driver awake.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Callable, Dict, Iterator

import pynvml
from pynvml import NVMLError

from .gpus import describe_throttling

Gpu = Dict[str, Any]


class Nvml:
    """All GPUs of this machine; NVMLError where no driver is loaded."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._cards: list[tuple[str, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(NVMLError):  # one that fell off the bus
                self._cards.append((str(index), pynvml.nvmlDeviceGetHandleByIndex(index)))

    def read(self) -> list[Gpu]:
        """Every card, and behind a partitioned one its instances, which name it as "parent"."""
        gpus = []
        for index, handle in self._cards:
            card = _read_card(index, handle)
            gpus.append(card)
            gpus += [_read_instance(card, place, one) for place, one in _list_instances(handle)]
        return gpus

    def processes(self) -> list[dict[str, Any]]:
        """Who computes on which GPU: {"uuid", "pid", "memory_bytes"}."""
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


def _read_instance(card: Gpu, place: int, instance: Any) -> Gpu:
    """A MIG instance has memory and processes of its own; the rest only its card reports."""
    readers: dict[str, Callable[[], Any]] = {
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(instance),
        "name": lambda: pynvml.nvmlDeviceGetName(instance),
    }
    place_of = {"index": f"{card['index']}:{place}", "parent": card.get("uuid", "")}
    return {**place_of, **_read_supported(readers), **_read_memory(instance)}


def _list_instances(card: Any) -> Iterator[tuple[int, Any]]:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(card)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(card) if current else 0
    except NVMLError:
        return
    for place in range(count):
        with suppress(NVMLError):  # places that are not taken
            yield place, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)


def _read_memory(gpu: Any) -> Gpu:
    try:
        # Version 2 counts as nvidia-smi does: `used` is without what the driver holds back.
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
