"""What else runs on the server while a run lives: the busiest programs, and those on its GPUs."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Collection, Mapping

from ...wire.telemetry import OtherProgramRecord
from .gpus import Gpus
from .host_usage import ProcessDescription, ProcessUsage

MOST_NAMED = 3


class OtherPrograms:
    """Readings of all processes; `list_beside` leaves out those of one run."""

    def __init__(self, psutil: Any, gpus: Gpus) -> None:
        self._usage = ProcessUsage(psutil)
        self._gpus = gpus
        self._processes: list[ProcessDescription] = []
        self._on_gpus: dict[int, set[str]] = {}

    def refresh(self) -> None:
        self._usage.refresh()
        self._on_gpus = {}
        for app in self._gpus.list_processes():
            self._on_gpus.setdefault(app.pid, set()).add(app.uuid)
        described = map(self._usage.describe, {*self._usage.busy, *self._on_gpus})
        self._processes = [process for process in described if process is not None]

    def list_beside(
        self, container: str, gpus: Collection[str], runs: Mapping[str, str]
    ) -> tuple[OtherProgramRecord, ...]:
        """List programs outside of a run; `container` is its container or session, as in `runs`."""
        cores: dict[tuple[str, str, str], float] = {}
        shared: dict[tuple[str, str, str], set[str]] = {}
        for process in self._processes:
            if process.belongs_to(container):
                continue
            name = PurePath(process.command.split()[0]).name if process.command.split() else "?"
            run = runs.get(process.container) or runs.get(process.session, "")
            key = (name, process.person, run)
            cores[key] = cores.get(key, 0.0) + process.cpu_cores
            used = self._on_gpus.get(process.pid, set()).intersection(gpus)
            shared[key] = shared.get(key, set()) | used
        busiest = sorted(cores, key=lambda key: cores[key], reverse=True)[:MOST_NAMED]
        named = [*busiest, *(key for key in cores if shared[key] and key not in busiest)]
        return tuple(
            OtherProgramRecord(*key, round(cores[key], 3), tuple(sorted(shared[key])))
            for key in named
        )
