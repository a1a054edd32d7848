"""The verb `top`: a JSON line each second about the server, its GPUs, runs and processes.

It ends when the reader is gone. To keep its cost low, it reads kernel files each second, but
queries the engine and all processes only every REFRESH_S seconds.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path

from ...wire.codec import encode, to_json
from ...wire.telemetry import (
    TOP,
    ContainerOwnerRecord,
    GpuRecord,
    GpuUseRecord,
    TopContainerRecord,
    TopOpening,
    TopProcessRecord,
    TopRecord,
    TopRequest,
)
from ...wire.verbs import Empty
from ..program import PROGRAM
from ..reply import Failure, send_closing_reply, send_reply
from ..runs.slurm_commands import build_stream_words
from ..runs.slurm_executor import find_newest_job
from . import engine
from .container_usage import ContainerUsageReader
from .engine_objects import Container
from .gpus import GpuProcess, Gpus, select_given
from .host_usage import HostUsageReader, ProcessUsage, load_psutil
from .paths import labctl_home, read_json_number
from .session_usage import is_session, list_process_runs

REFRESH_S = 5.0
# seconds between the two readings that make the first sample
FIRST_S = 0.5
PROGRESS = "logs/progress.json"
# the name of a container in which `docker build` runs a step
BUILD = "image build"


def top(request: TopRequest) -> None:
    """Write samples until the reader is gone, or as many as requested."""
    if request.job_of:
        _relay_from_job(request)
        return
    interval_s = max(0.2, request.interval_s)
    remaining = request.samples
    send_reply(TopOpening(time.time()))
    view = TopView()
    view.read()
    reader = select.poll()
    reader.register(1, 0)
    due = time.monotonic() + FIRST_S
    while True:
        wait_ms = max(0.0, due - time.monotonic()) * 1000
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in reader.poll(wait_ms)):
            return
        sample = to_json(view.read(), drop_defaults=True)
        sys.stdout.buffer.write(json.dumps(sample, separators=(",", ":")).encode() + b"\n")
        sys.stdout.buffer.flush()
        remaining -= 1
        if remaining == 0:
            send_closing_reply(Empty())
            return
        due = max(due + interval_s, time.monotonic())


def _relay_from_job(request: TopRequest) -> None:
    """Run this verb on the machine of a lab's newest job, with the same output."""
    _, job_id = find_newest_job(request.job_of)
    program = [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py"), TOP.name]
    words = build_stream_words(job_id, program)
    line = encode(request._replace(job_of="")) + "\n"
    done = subprocess.run(words, input=line.encode(), check=False)
    if done.returncode < 0:
        raise Failure("server", "the job of the run ended", hint="labctl status --refresh")


class TopView:
    """All values of a sample; earlier readings are kept for rates and for slow changes."""

    def __init__(self) -> None:
        labctl_home().mkdir(exist_ok=True)
        psutil = load_psutil()
        self.machine = HostUsageReader(labctl_home(), psutil)
        self.gpus = Gpus()
        self.processes = ProcessUsage(psutil)
        self.runs: dict[str, TopContainer] = {}
        self.apps: list[GpuProcess] = []
        self.refreshed_s = -REFRESH_S
        self.refreshes = 0

    def read(self) -> TopRecord:
        now = time.monotonic()
        # The second refresh follows at once: only two show how busy a process is.
        if now - self.refreshed_s >= REFRESH_S or self.refreshes < 2:
            self.refreshed_s, self.refreshes = now, self.refreshes + 1
            self._refresh()
        gpus = self.gpus.read()
        rows = (container.build_row(gpus) for container in self.runs.values())
        return TopRecord(
            at=round(time.time(), 3),
            gpus=tuple(gpus),
            runs=tuple(row for row in rows if row is not None),
            processes=tuple(self._list_processes()),
            **self.machine.read()._asdict(),
        )

    def _refresh(self) -> None:
        self.runs = {**self._find_containers(), **self._find_process_runs()}
        self.processes.refresh()
        self.apps = self.gpus.list_processes()

    def _find_containers(self) -> dict[str, TopContainer]:
        """Return all containers by id; as before if the engine does not answer."""
        before = {id_: one for id_, one in self.runs.items() if not is_session(id_)}
        containers = {}
        try:
            for row in engine.list_containers():
                inspected = None if row.Id in before else engine.inspect_container(row.Id)
                if row.Id in before:
                    containers[row.Id] = before[row.Id]
                elif inspected:
                    containers[row.Id] = TopContainer(inspected, self.processes)
        except (Failure, ValueError):
            return before
        return containers

    def _find_process_runs(self) -> dict[str, TopContainer]:
        """Return the runs of this account without a container, by the names of their sessions."""
        return {
            run.container.Id: self.runs.get(run.container.Id)
            or TopContainer(run.container, self.processes, run.usage_reader)
            for run in list_process_runs()
        }

    def _list_processes(self) -> list[TopProcessRecord]:
        """List processes that use a GPU or a CPU; those of runs refer to them."""
        on_gpus: dict[int, list[GpuUseRecord]] = {}
        for app in self.apps:
            on_gpus.setdefault(app.pid, []).append(GpuUseRecord(app.uuid, app.memory_bytes))
        rows = []
        for pid in {**dict.fromkeys(on_gpus), **dict.fromkeys(self.processes.busy)}:
            process = self.processes.describe(pid)
            if process is None:
                continue
            container = self.runs.get(process.container) or self.runs.get(process.session)
            owner = container.owner if container else ContainerOwnerRecord()
            rows.append(
                TopProcessRecord(
                    pid=pid,
                    command=process.command,
                    cpu_cores=process.cpu_cores,
                    memory_bytes=process.memory_bytes,
                    gpus=tuple(on_gpus.get(pid, [])),
                    **owner._replace(person=owner.person or process.person)._asdict(),
                )
            )
        return rows


class TopContainer:
    """A container: anybody's run, a service, or another one.

    `reader` is for a run without a container, which is described as one.
    """

    def __init__(
        self,
        container: Container,
        processes: ProcessUsage,
        reader: ContainerUsageReader | None = None,
    ) -> None:
        labels = container.labels
        self.usage_reader = reader or ContainerUsageReader(container)
        directory = container.sources.get("/lab/run")
        self.progress = Path(directory) / PROGRESS if directory else None
        self.owner = ContainerOwnerRecord(
            name=BUILD if container.is_build_step else container.Name.lstrip("/"),
            run=labels.get("labctl.run", ""),
            service=labels.get("labctl.service", ""),
            lab=container.Config.Hostname if "labctl.run" in labels else "",
            lab_id=labels.get("labctl.lab-id", ""),
            person=processes.find_person(self.usage_reader.pid),
        )
        self.started_at = container.State.StartedAt

    def build_row(self, gpus: list[GpuRecord]) -> TopContainerRecord | None:
        """Measure the container; None once it has ended."""
        usage = self.usage_reader.read()
        if usage is None:
            return None
        return TopContainerRecord(
            started_at=self.started_at,
            gpus=tuple(gpu.uuid for gpu in select_given(gpus, self.usage_reader.container)),
            step=self._read_progress("step"),
            total_steps=self._read_progress("total_steps"),
            **self.owner._asdict(),
            **usage._asdict(),
        )

    def _read_progress(self, key: str) -> float | None:
        """Return a number that the run reports; None without it, or in another user's file."""
        try:
            return read_json_number(self.progress, key) if self.progress else None
        except OSError:
            return None
