"""The verb `top`: one line of JSON a second about the server, its GPUs, runs and processes.

It lives as long as somebody reads. Costs are kept low: files of the kernel's are read every second,
the engine is asked every LOOK_S, all processes are looked at as often.
"""

from __future__ import annotations

import json
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..reply import Failure, answer, finish
from . import engine
from .container_usage import Gauges
from .gpus import Gpu, Gpus, given
from .host_usage import Machine, Processes, load_psutil
from .paths import home, read_json

LOOK_S = 5.0
# Between the two readings that make the first sample.
FIRST_S = 0.5
PROGRESS = "logs/progress.json"


def top(request: dict[str, Any]) -> None:
    """Samples every "interval_s" (1), "count" of them, or until nobody reads any more."""
    interval_s = max(0.2, float(request.get("interval_s") or 1.0))
    left = int(request.get("count") or 0)
    answer({"now": time.time()})
    view = View()
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
        left -= 1
        if left == 0:
            finish({})
            return
        due = max(due + interval_s, time.monotonic())


class View:
    """All that is shown; what was read before is kept for rates and for what changes slowly."""

    def __init__(self) -> None:
        home().mkdir(exist_ok=True)
        psutil = load_psutil()
        self.machine = Machine(home(), psutil)
        self.gpus = Gpus()
        self.processes = Processes(psutil)
        self.runs: dict[str, Watched] = {}
        self.apps: list[dict[str, Any]] = []
        self.looked_s = -LOOK_S
        self.looks = 0

    def read(self) -> dict[str, Any]:
        now = time.monotonic()
        # The second look comes at once: only two tell how busy a process is.
        if now - self.looked_s >= LOOK_S or self.looks < 2:
            self.looked_s, self.looks = now, self.looks + 1
            self._look()
        gpus = self.gpus.read()
        return {
            "at": round(time.time(), 3),
            **self.machine.read(),
            "gpus": gpus,
            "runs": [row for one in self.runs.values() for row in one.rows(gpus, self.apps)],
            "processes": self._shown(),
        }

    def _look(self) -> None:
        with suppress(Failure, ValueError):
            found = [one["Id"] for one in json.loads(engine.ask("GET", "/containers/json"))]
            known = {key: one for key, one in self.runs.items() if key in found}
            for key in found:
                if key not in known:
                    with suppress(Failure, KeyError, ValueError):
                        inspected = json.loads(engine.ask("GET", f"/containers/{key}/json"))
                        known[key] = Watched(inspected, self.processes)
            self.runs = known
        self.processes.look()
        self.apps = self.gpus.processes()

    def _shown(self) -> list[dict[str, Any]]:
        """Who computes, on a GPU or a processor; the runs' own are told by their container."""
        on_gpus: dict[int, list[dict[str, Any]]] = {}
        for app in self.apps:
            uses: dict[str, Any] = {key: app[key] for key in ("uuid", "memory_bytes") if key in app}
            on_gpus.setdefault(app["pid"], []).append(uses)
        shown = []
        for pid in {**dict.fromkeys(on_gpus), **dict.fromkeys(self.processes.busy)}:
            found = self.processes.describe(pid)
            if not found:
                continue
            container = self.runs.get(found.pop("container"))
            whose = container.whose if container else {}
            shown.append({**found, **whose, "gpus": on_gpus.get(pid, [])})
        return shown


class Watched:
    """One container: a run of anybody's, a service, or another."""

    def __init__(self, container: dict[str, Any], processes: Processes) -> None:
        labels = container["Config"].get("Labels") or {}
        name = container["Name"].lstrip("/")
        self.gauges = Gauges(container)
        mounts = {one["Destination"]: one.get("Source", "") for one in container["Mounts"]}
        self.progress = Path(mounts["/lab/run"]) / PROGRESS if "/lab/run" in mounts else None
        self.whose = {
            key: value
            for key, value in (
                ("run", labels.get("labctl.run", "")),
                ("service", labels.get("labctl.service", "")),
                ("lab_id", labels.get("labctl.lab-id", "")),
                ("lab", container["Config"].get("Hostname", "") if "labctl.run" in labels else ""),
                ("person", processes.find_person(self.gauges.pid)),
                ("name", name),
            )
            if value
        }
        self.started_at = container["State"].get("StartedAt", "")

    def rows(self, gpus: list[Gpu], apps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One row, or none once it has ended."""
        found = self.gauges.read()
        if not found:
            return []
        own = given(gpus, self.gauges.container)
        row = {**self.whose, "started_at": self.started_at, **found}
        if own:
            row["gpus"] = [gpu.get("uuid", "") for gpu in own]
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
    except OSError:  # somebody else's
        return {}
