"""NVIDIA's library as C sees it: functions that write through pointers, for cards that are told.

Each function is a real C callback, so that what NVIDIA's Python bindings hand over is what a driver
would get.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from labctl.agent.host.nvml import Nvml

NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 3, 6, 7


@dataclass
class Card:
    """`numbers` answers the functions that give one number; what is not in it is not supported."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    memory: tuple[int, int] = (0, 0)
    use: int | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[int, int]] = field(default_factory=list)
    instances: dict[int, Card] = field(default_factory=dict)


class StandIn:
    """`missing` are functions that this driver does not have."""

    def __init__(self, cards: list[Card], missing: tuple[str, ...] = (), code: int = 0) -> None:
        self.cards = cards
        self.missing = missing
        self.code = code
        self.called: list[str] = []
        self.handles: dict[int, Card] = {}
        for card in cards:
            for one in (card, *card.instances.values()):
                self.handles[0x1000 + len(self.handles)] = one

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        types, result_of = self._functions(name)

        def called(*words: Any) -> int:
            self.called.append(name)
            return int(result_of(*words))

        function = ctypes.CFUNCTYPE(c_int, *types)(called)
        self.__dict__[name] = function  # it must outlive the call
        return function

    def _functions(self, name: str) -> tuple[tuple[Any, ...], Any]:
        known: dict[str, tuple[tuple[Any, ...], Any]] = {
            "nvmlInitWithFlags": ((c_uint,), lambda flags: self.code),
            "nvmlShutdown": ((), lambda: 0),
            "nvmlDeviceGetCount_v2": ((c_void_p,), lambda out: _put(out, len(self.cards))),
            "nvmlDeviceGetHandleByIndex_v2": ((c_uint, c_void_p), self._by_index),
            "nvmlDeviceGetUUID": ((c_void_p, c_void_p, c_uint), self._text("uuid")),
            "nvmlDeviceGetName": ((c_void_p, c_void_p, c_uint), self._text("name")),
            "nvmlDeviceGetUtilizationRates": ((c_void_p, c_void_p), self._use),
            "nvmlDeviceGetMemoryInfo_v2": ((c_void_p, c_void_p), self._memory2),
            "nvmlDeviceGetMemoryInfo": ((c_void_p, c_void_p), self._memory),
            "nvmlDeviceGetMigMode": ((c_void_p, c_void_p, c_void_p), self._mig),
            "nvmlDeviceGetMaxMigDeviceCount": ((c_void_p, c_void_p), lambda _, out: _put(out, 7)),
            "nvmlDeviceGetMigDeviceHandleByIndex": (
                (c_void_p, c_uint, c_void_p),
                self._instance,
            ),
            "nvmlDeviceGetComputeRunningProcesses_v3": (
                (c_void_p, c_void_p, c_void_p),
                self._running,
            ),
            "nvmlDeviceGetComputeRunningProcesses_v2": (
                (c_void_p, c_void_p, c_void_p),
                self._running,
            ),
        }
        chosen = ("Temperature", "ClockInfo")
        words = (c_uint,) if any(word in name for word in chosen) else ()
        plain = ((c_void_p, *words, c_void_p), self._number(name))
        return known.get(name, plain)

    def _by_index(self, index: int, out: int) -> int:
        wanted = self.cards[index]
        return _put(out, next(key for key, one in self.handles.items() if one is wanted), c_void_p)

    def _text(self, key: str) -> Any:
        def give(handle: int, out: int, room: int) -> int:
            text = getattr(self.handles[handle], key).encode() + b"\0"
            assert len(text) <= room
            ctypes.memmove(out, text, len(text))
            return 0

        return give

    def _number(self, name: str) -> Any:
        def give(handle: int, *words: Any) -> int:
            value = self.handles[handle].numbers.get(name)
            long = "Energy" in name or "Clocks" in name
            kind = c_ulonglong if long else c_uint
            return NOT_SUPPORTED if value is None else _put(words[-1], value, kind)

        return give

    def _use(self, handle: int, out: int) -> int:
        use = self.handles[handle].use
        if use is None:
            return NOT_SUPPORTED
        return _put(out, use) or _put(out + 4, 99)

    def _memory2(self, handle: int, out: int) -> int:
        """version, padding, total, reserved, free, used; the version holds the size."""
        if c_uint.from_address(out).value != 40 | (2 << 24):
            return 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        used, total = self.handles[handle].memory
        rows = (c_ulonglong * 4).from_address(out + 8)
        rows[0], rows[1], rows[2], rows[3] = total, 7, total - used, used
        return 0

    def _memory(self, handle: int, out: int) -> int:
        used, total = self.handles[handle].memory
        rows = (c_ulonglong * 3).from_address(out)
        rows[0], rows[1], rows[2] = total, total - used, used
        return 0

    def _mig(self, handle: int, now: int, then: int) -> int:
        card = self.handles[handle]
        if card not in self.cards:
            return NOT_SUPPORTED
        return _put(now, int(bool(card.instances))) or _put(then, 0)

    def _instance(self, handle: int, place: int, out: int) -> int:
        found = self.handles[handle].instances.get(place)
        if found is None:
            return NOT_FOUND
        return _put(out, next(key for key, one in self.handles.items() if one is found), c_void_p)

    def _running(self, handle: int, count: int, out: int) -> int:
        """24 bytes a row: pid, padding, memory, GPU instance, compute instance."""
        rows = self.handles[handle].processes
        if c_uint.from_address(count).value < len(rows):
            c_uint.from_address(count).value = len(rows)
            return INSUFFICIENT_SIZE
        for place, (pid, used) in enumerate(rows):
            c_uint.from_address(out + 24 * place).value = pid
            c_ulonglong.from_address(out + 24 * place + 8).value = used
        return _put(count, len(rows))


@pytest.fixture
def open_standin(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], Nvml]:
    """Nvml on a stand-in, as if that were the library that is installed."""

    def open_it(standin: StandIn) -> Nvml:
        monkeypatch.setattr(pynvml, "nvmlLib", standin)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return Nvml()

    return open_it


def _put(out: int, value: int, kind: Any = c_uint) -> int:
    kind.from_address(out).value = value
    return 0
