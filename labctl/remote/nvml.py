"""GPUs through NVIDIA's own library, which nvidia-smi stands on: one call costs microseconds.

Names, structures and numbers are those of NVIDIA's nvml.h (API reference, "NVML API"). What a card
does not tell is absent. Opening it keeps the driver awake; `close` lets it go.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_char, c_uint, c_ulonglong, c_void_p
from typing import Any, Callable, Dict, Iterator

LIBRARY = "libnvidia-ml.so.1"
CLOCK_SM, TEMPERATURE_GPU = 1, 0
UNKNOWN = 2**64 - 1
NAME_BYTES = 96
MOST_PROCESSES = 128
THROTTLES = ((0x04, "power"), (0x20 | 0x40, "thermal"), (0x08 | 0x80, "hardware"))
"""nvmlClocksEventReasons: the board's power cap; software and hardware heat limits; the board's
own protection and its power brake. That a clock rests, or somebody set it, is no throttling."""
Gpu = Dict[str, Any]


class _Use(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: `used` is without what the driver holds back, as nvidia-smi counts."""

    _fields_ = [("version", c_uint)] + [
        (name, c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


MEMORY_V2 = ctypes.sizeof(_Memory) | (2 << 24)


class NvmlError(Exception):
    """A call that failed, or that this driver does not have."""


def loaded() -> Any:
    """NVIDIA's library; NvmlError where there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NvmlError(str(error)) from None


class Nvml:
    """All GPUs of this machine. `library` is what `loaded` gives, or has the same functions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")
        self._cards: list[tuple[str, c_void_p]] = []
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        for index in range(count.value):
            card = c_void_p()
            with suppress(NvmlError):  # one that fell off the bus
                self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(card))
                self._cards.append((str(index), card))

    def close(self) -> None:
        with suppress(NvmlError):
            self._call("nvmlShutdown")

    def read(self) -> list[Gpu]:
        """Every card, and behind a partitioned one its instances, which name it as "parent"."""
        found = []
        for index, card in self._cards:
            whole = self._card(index, card)
            found.append(whole)
            found += [self._instance(whole, place, one) for place, one in self._instances(card)]
        return found

    def processes(self) -> list[dict[str, Any]]:
        """Who computes on which GPU: {"uuid", "pid", "memory_bytes"}."""
        found = []
        for _, card in self._cards:
            for one in [card] + [instance for _, instance in self._instances(card)]:
                with suppress(NvmlError):
                    uuid = self._text("nvmlDeviceGetUUID", one)
                    found += [{"uuid": uuid, **row} for row in self._computing(one)]
        return found

    def _card(self, index: str, card: c_void_p) -> Gpu:
        asked: dict[str, Callable[[], Any]] = {
            "uuid": lambda: self._text("nvmlDeviceGetUUID", card),
            "name": lambda: self._text("nvmlDeviceGetName", card),
            "use_percent": lambda: self._use(card),
            "power_w": lambda: self._number("nvmlDeviceGetPowerUsage", card) / 1000,
            "power_limit_w": lambda: self._number("nvmlDeviceGetEnforcedPowerLimit", card) / 1000,
            "temperature_c": lambda: self._number(
                "nvmlDeviceGetTemperature", card, c_uint(TEMPERATURE_GPU)
            ),
            "sm_clock_mhz": lambda: self._number("nvmlDeviceGetClockInfo", card, c_uint(CLOCK_SM)),
            "sm_clock_max_mhz": lambda: self._number(
                "nvmlDeviceGetMaxClockInfo", card, c_uint(CLOCK_SM)
            ),
            "throttle": lambda: throttles(self._reasons(card)),
            "energy_j": lambda: self._long("nvmlDeviceGetTotalEnergyConsumption", card) / 1000,
        }
        return {"index": index, **_told(asked), **self._memory(card)}

    def _instance(self, whole: Gpu, place: int, instance: c_void_p) -> Gpu:
        """A MIG instance has memory and processes of its own; the rest only its card tells."""
        asked: dict[str, Callable[[], Any]] = {
            "uuid": lambda: self._text("nvmlDeviceGetUUID", instance),
            "name": lambda: self._text("nvmlDeviceGetName", instance),
        }
        about = {"index": f"{whole['index']}:{place}", "parent": whole.get("uuid", "")}
        return {**about, **_told(asked), **self._memory(instance)}

    def _instances(self, card: c_void_p) -> Iterator[tuple[int, c_void_p]]:
        now, then, most = c_uint(), c_uint(), c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", card, byref(now), byref(then))
            if not now.value:
                return
            self._call("nvmlDeviceGetMaxMigDeviceCount", card, byref(most))
        except NvmlError:
            return
        for place in range(most.value):
            instance = c_void_p()
            with suppress(NvmlError):  # places that are not taken
                self._call(
                    "nvmlDeviceGetMigDeviceHandleByIndex", card, c_uint(place), byref(instance)
                )
                yield place, instance

    def _memory(self, card: c_void_p) -> Gpu:
        memory = _Memory(version=MEMORY_V2)
        try:
            self._call("nvmlDeviceGetMemoryInfo_v2", card, byref(memory))
            return {"memory_bytes": memory.used, "memory_total_bytes": memory.total}
        except NvmlError:
            before = (c_ulonglong * 3)()  # drivers before 510: total, free, used
        try:
            self._call("nvmlDeviceGetMemoryInfo", card, byref(before))
        except NvmlError:
            return {}
        return {"memory_bytes": before[2], "memory_total_bytes": before[0]}

    def _use(self, card: c_void_p) -> int:
        use = _Use()
        self._call("nvmlDeviceGetUtilizationRates", card, byref(use))
        return int(use.gpu)

    def _reasons(self, card: c_void_p) -> int:
        try:
            return self._long("nvmlDeviceGetCurrentClocksEventReasons", card)
        except NvmlError:
            return self._long("nvmlDeviceGetCurrentClocksThrottleReasons", card)

    def _computing(self, card: c_void_p) -> list[dict[str, Any]]:
        count, rows = c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        try:
            self._call("nvmlDeviceGetComputeRunningProcesses_v3", card, byref(count), rows)
        except NvmlError:
            self._call("nvmlDeviceGetComputeRunningProcesses_v2", card, byref(count), rows)
        found = []
        for row in rows[: min(count.value, MOST_PROCESSES)]:
            known = {} if row.used == UNKNOWN else {"memory_bytes": row.used}
            found.append({"pid": row.pid, **known})
        return found

    def _text(self, name: str, card: c_void_p) -> str:
        text = (c_char * NAME_BYTES)()
        self._call(name, card, text, c_uint(NAME_BYTES))
        return text.value.decode(errors="replace")

    def _number(self, name: str, card: c_void_p, *words: Any) -> int:
        number = c_uint()
        self._call(name, card, *words, byref(number))
        return number.value

    def _long(self, name: str, card: c_void_p) -> int:
        number = c_ulonglong()
        self._call(name, card, byref(number))
        return number.value

    def _call(self, name: str, *words: Any) -> None:
        try:
            code = getattr(self._library, name)(*words)
        except AttributeError:
            raise NvmlError(f"this driver has no {name}") from None
        if code:
            raise NvmlError(f"{name}: error {code}")


def throttles(reasons: int) -> list[str]:
    return [word for bits, word in THROTTLES if reasons & bits]


def _told(asked: dict[str, Callable[[], Any]]) -> Gpu:
    found = {}
    for key, ask in asked.items():
        with suppress(NvmlError):
            found[key] = ask()
    return found
