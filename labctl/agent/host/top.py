"""The verb `top`: a JSON line each second about the server, its GPUs, runs and processes.

It ends when the reader is gone. To keep its cost low, it reads kernel files each second, but
queries the engine and all processes only every LOOK_S seconds.
"""

from __future__ import annotations

import json
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..reply import Failure, send_closing_reply, send_reply
from . import engine
from .container_usage import ContainerUsage
from .engine_objects import Container
from .gpus import Gpu, Gpus, select_given
from .host_usage import HostUsage, ProcessUsage, load_psutil
from .paths import labctl_home, read_json

LOOK_S = 5.0
# seconds between the two readings that make the first sample
FIRST_S = 0.5
PROGRESS = "logs/progress.json"


def top(request: dict[str, Any]) -> None:
    """Write samples every "interval_s" (1), "count" of them, or until the reader is gone."""
    interval_s = max(0.2, float(request.get("interval_s") or 1.0))
    remaining = int(request.get("count") or 0)
    send_reply({"now": time.time()})
    view = TopView()
    view.read()
    reader = select.poll()
    reader.register(1, 0)
    due = time.monotonic() + FIRST_S
    while True:
        wait_ms = max(0.0, due - time.monotonic()) * 1000
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in reader.poll(wait_ms)):
            return
        sys.stdout.buffer.write(json.dumps(view.read(), separators=(",", ":")).encode() + b"\n")
        sys.stdout.buffer.flush()
        remaining -= 1
        if remaining == 0:
            send_closing_reply({})
            return
        due = max(due + interval_s, time.monotonic())


class TopView:
    """All values of a sample; earlier readings are kept for rates and for slow changes."""

    def __init__(self) -> None:
        labctl_home().mkdir(exist_ok=True)
        psutil = load_psutil()
        self.machine = HostUsage(labctl_home(), psutil)
        self.gpus = Gpus()
        self.processes = ProcessUsage(psutil)
        self.runs: dict[str, TopContainer] = {}
        self.apps: list[dict[str, Any]] = []
        self.refreshed_s = -LOOK_S
        self.refreshes = 0

    def read(self) -> dict[str, Any]:
        now = time.monotonic()
        # The second refresh follows at once: only two show how busy a process is.
        if now - self.refreshed_s >= LOOK_S or self.refreshes < 2:
            self.refreshed_s, self.refreshes = now, self.refreshes + 1
            self._refresh()
        gpus = self.gpus.read()
        return {
            "at": round(time.time(), 3),
            **self.machine.read(),
            "gpus": gpus,
            "runs": [
                row
                for container in self.runs.values()
                for row in container.build_rows(gpus, self.apps)
            ],
            "processes": self._list_processes(),
        }

    def _refresh(self) -> None:
        with suppress(Failure, ValueError):
            container_ids = [container.Id for container in engine.list_containers()]
            runs = {
                container_id: container
                for container_id, container in self.runs.items()
                if container_id in container_ids
            }
            for container_id in container_ids:
                if container_id not in runs:
                    inspected = engine.inspect_container(container_id)
                    if inspected:
                        runs[container_id] = TopContainer(inspected, self.processes)
            self.runs = runs
        self.processes.refresh()
        self.apps = self.gpus.list_processes()

    def _list_processes(self) -> list[dict[str, Any]]:
        """List processes that use a GPU or a CPU; those of runs refer to their container."""
        on_gpus: dict[int, list[dict[str, Any]]] = {}
        for app in self.apps:
            uses: dict[str, Any] = {key: app[key] for key in ("uuid", "memory_bytes") if key in app}
            on_gpus.setdefault(app["pid"], []).append(uses)
        rows = []
        for pid in {**dict.fromkeys(on_gpus), **dict.fromkeys(self.processes.busy)}:
            row = self.processes.describe(pid)
            if not row:
                continue
            container = self.runs.get(row.pop("container"))
            owner = container.owner_fields if container else {}
            rows.append({**row, **owner, "gpus": on_gpus.get(pid, [])})
        return rows


class TopContainer:
    """A container: anybody's run, a service, or another one."""

    def __init__(self, container: Container, processes: ProcessUsage) -> None:
        labels = container.labels
        name = container.Name.lstrip("/")
        self.gauges = ContainerUsage(container)
        directory = container.sources.get("/lab/run")
        self.progress = Path(directory) / PROGRESS if directory else None
        self.owner_fields = {
            key: value
            for key, value in (
                ("run", labels.get("labctl.run", "")),
                ("service", labels.get("labctl.service", "")),
                ("lab_id", labels.get("labctl.lab-id", "")),
                ("lab", container.Config.Hostname if "labctl.run" in labels else ""),
                ("person", processes.find_person(self.gauges.pid)),
                ("name", name),
            )
            if value
        }
        self.started_at = container.State.StartedAt

    def build_rows(self, gpus: list[Gpu], apps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one row, or none once the container has ended."""
        usage = self.gauges.read()
        if not usage:
            return []
        own_gpus = select_given(gpus, self.gauges.container)
        row = {**self.owner_fields, "started_at": self.started_at, **usage}
        if own_gpus:
            row["gpus"] = [gpu.get("uuid", "") for gpu in own_gpus]
        steps = read_json_or_none(self.progress)
        row.update({key: steps[key] for key in ("step", "total_steps") if _is_number(steps, key)})
        return [row]


def _is_number(body: dict[str, Any], key: str) -> bool:
    return isinstance(body.get(key), (int, float)) and not isinstance(body.get(key), bool)


def read_json_or_none(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return read_json(path)
    except OSError:  # another user's file
        return {}
