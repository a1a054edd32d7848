"""GPUs through NVML, the library below nvidia-smi, by NVIDIA's Python bindings.

Most calls take microseconds. On an H200 the energy counter takes 4 ms and the maximum clock 1.6 ms,
so what never changes is read once. Values that a card does not report are None. While it is open,
the library keeps the driver awake.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Callable, Iterator, TypeVar

import pynvml
from pynvml import NVMLError

from ...wire.telemetry import GpuRecord
from .gpus import GpuProcess, describe_throttling

Value = TypeVar("Value")


class Nvml:
    """All GPUs of this machine. NVMLError if no driver is loaded."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._cards: list[tuple[GpuRecord, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(NVMLError):  # a card that fell off the bus
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._cards.append((_read_constants(str(index), handle), handle))

    def read(self) -> list[GpuRecord]:
        """Read every card, and after a partitioned one its MIG instances."""
        gpus = []
        for constants, handle in self._cards:
            card = _read_card(constants, handle)
            gpus.append(card)
            gpus += [
                _read_instance(card, slot, instance) for slot, instance in _list_instances(handle)
            ]
        return gpus

    def list_processes(self) -> list[GpuProcess]:
        """List the compute processes of each GPU."""
        processes = []
        for _, card in self._cards:
            for gpu in [card] + [instance for _, instance in _list_instances(card)]:
                with suppress(NVMLError):
                    uuid = pynvml.nvmlDeviceGetUUID(gpu)
                    processes += [
                        GpuProcess(uuid, process.pid, process.usedGpuMemory)
                        for process in _list_processes(gpu)
                    ]
        return processes


def _read_constants(index: str, card: Any) -> GpuRecord:
    return GpuRecord(
        index=index,
        uuid=_read_supported(lambda: pynvml.nvmlDeviceGetUUID(card)) or "",
        name=_read_supported(lambda: pynvml.nvmlDeviceGetName(card)) or "",
        sm_clock_max_mhz=_read_supported(
            lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM)
        ),
    )


def _read_card(constants: GpuRecord, card: Any) -> GpuRecord:
    used_bytes, total_bytes = _read_memory(card)
    power_mw = _read_supported(lambda: pynvml.nvmlDeviceGetPowerUsage(card))
    power_limit_mw = _read_supported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(card))
    energy_mj = _read_supported(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card))
    return constants._replace(
        use_percent=_read_supported(lambda: pynvml.nvmlDeviceGetUtilizationRates(card).gpu),
        memory_bytes=used_bytes,
        memory_total_bytes=total_bytes,
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if power_limit_mw is None else power_limit_mw / 1000,
        temperature_c=_read_supported(
            lambda: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)
        ),
        sm_clock_mhz=_read_supported(
            lambda: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)
        ),
        throttle=_read_supported(lambda: describe_throttling(_read_clock_reasons(card))),
        energy_j=None if energy_mj is None else energy_mj / 1000,
    )


def _read_instance(card: GpuRecord, slot: int, instance: Any) -> GpuRecord:
    """Read a MIG instance's own memory; only its card reports the rest."""
    used_bytes, total_bytes = _read_memory(instance)
    return GpuRecord(
        index=f"{card.index}:{slot}",
        uuid=_read_supported(lambda: pynvml.nvmlDeviceGetUUID(instance)) or "",
        name=_read_supported(lambda: pynvml.nvmlDeviceGetName(instance)) or "",
        parent=card.uuid,
        memory_bytes=used_bytes,
        memory_total_bytes=total_bytes,
    )


def _list_instances(card: Any) -> Iterator[tuple[int, Any]]:
    try:
        is_partitioned, _ = pynvml.nvmlDeviceGetMigMode(card)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(card) if is_partitioned else 0
    except NVMLError:
        return
    for slot in range(count):
        with suppress(NVMLError):  # empty slots
            yield slot, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot)


def _read_memory(gpu: Any) -> tuple[int | None, int | None]:
    """Return the bytes in use, and in total."""
    try:
        # Version 2 counts as nvidia-smi does: `used` excludes memory reserved by the driver.
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    except NVMLError:  # drivers before 510
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        except NVMLError:
            return None, None
    return memory.used, memory.total


def _read_clock_reasons(card: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except NVMLError:  # drivers before 535
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _list_processes(gpu: Any) -> Any:
    """Return the library's own list of compute processes."""
    try:
        return pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    except NVMLError:  # drivers before 510
        return pynvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu)


def _read_supported(read: Callable[[], Value]) -> Value | None:
    """Return what the library reads; None if the card or the driver does not support it."""
    try:
        return read()
    except NVMLError:
        return None
