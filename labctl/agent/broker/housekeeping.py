"""Regular tasks of the broker: services' sockets, unused binds, ended leases, ended jobs.

Each task is independent: a failure for one container is reported and does not affect the others.
Nothing here may prevent a lease from ending.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator

from ...wire.runs import GPU_LEASE
from ..host import engine
from ..host.engine_objects import CreatedObject, ExecState, NewExec, StartExec
from ..host.paths import read_boottime_s
from ..reply import Failure
from . import mounts, slurm_jobs
from .account_containers import AccountContainer, list_rows, read_containers
from .claims import ENDED_KEPT, Claims
from .gpu_leases import list_leases
from .networks import MOST_CARRIED, PLACE, ServiceRelay
from .rules import GPUS, SOCKET
from .settings import BrokerSettings

NEVER_STARTED_S = 600.0
GRACE_S = 60
NOTE_S = 5.0
NOTE = 'printf \'{"by":"%s","at":%s}\' "$1" "$(date +%s)" > /lab/run/.labctl/limit.json'


class Problems:
    """The failures of one round: a stable key for each, and its full text."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Record any exception raised inside, and continue."""
        try:
            yield
        except Exception as error:
            key = f"{what}: {type(error).__name__}"
            self.lines[key] = f"{what} failed: {describe_error(error)}"


def describe_error(error: Exception) -> str:
    why = f": {error.report.why}" if isinstance(error, Failure) else ""
    return f"{type(error).__name__}: {error}{why}"


class Housekeeping:
    """The housekeeping. One thread calls `run_round`, any thread may call `ensure_relay`."""

    def __init__(
        self, settings: BrokerSettings, claims: Claims, report: Callable[[str], None]
    ) -> None:
        self.claims = claims
        self._settings = settings
        self._report = report
        self._relay_lock = threading.Lock()
        self._relays: dict[str, ServiceRelay] = {}
        self._slots: dict[int, threading.BoundedSemaphore] = {}
        self._ending: set[str] = set()
        self._failed_ends: dict[str, str] = {}
        self._created_since_s: dict[str, float] = {}
        self._reported: set[str] = set()

    def run_round(self) -> None:
        """Do everything that is due. Raises nothing: a failure is reported once while it lasts."""
        problems = Problems()
        with problems.guard("checking the containers"):
            began_s = time.monotonic()
            containers, unreadable = read_containers(list_rows())
            problems.lines.update(zip(unreadable, unreadable))
            self._end_leases(problems, containers)
            self._end_jobs(problems, containers)
            self._keep_relays(problems, containers)
            self._remove_ended(problems, containers)
            self._remove_unstarted(problems, containers)
            with problems.guard("releasing mounts"):
                self._release_mounts(containers, began_s)
            with problems.guard("updating the GPU queue"):
                self.claims.advance_queue(containers, began_s)
        for key in sorted(problems.lines.keys() - self._reported):
            self._report(problems.lines[key])
        self._reported = set(problems.lines)

    def ensure_relay(self, container: str, owner: int, labels: dict[str, str]) -> None:
        """Create the service's socket unless it exists."""
        with self._relay_lock:
            if not labels.get(SOCKET) or container in self._relays:
                return
            path = Path(labels[SOCKET])
            if path.parent != PLACE / str(owner):
                return  # not a path of this broker
            port = int(labels["labctl.service-port"])
            slots = self._slots.setdefault(owner, threading.BoundedSemaphore(MOST_CARRIED))
            self._relays[container] = ServiceRelay(owner, path, container, port, slots)

    def _keep_relays(self, problems: Problems, containers: list[AccountContainer]) -> None:
        running = [container for container in containers if container.state == "running"]
        with self._relay_lock:
            ended_ids = set(self._relays) - {container.id for container in running}
            closing = [self._relays.pop(ended_id) for ended_id in ended_ids]
        for relay in closing:
            with problems.guard(f"closing {relay.socket_path}"):
                relay.close()
        for container in running:
            with problems.guard(f"the socket of {container.name or container.id}"):
                self.ensure_relay(container.id, container.uid, container.labels)

    def _remove_ended(self, problems: Problems, containers: list[AccountContainer]) -> None:
        ended: dict[int, list[AccountContainer]] = {}
        for container in sorted(containers, key=lambda container: -container.created_s):
            if container.state in ("exited", "dead"):
                ended.setdefault(container.uid, []).append(container)
        for own_containers in ended.values():
            for old in own_containers[ENDED_KEPT:]:
                with problems.guard(f"removing {old.name or old.id}"):
                    engine.remove_container(old.id)

    def _remove_unstarted(self, problems: Problems, containers: list[AccountContainer]) -> None:
        """Remove containers that were never started, some time after this broker first saw them."""
        now_s = time.monotonic()
        created = [container for container in containers if container.state == "created"]
        since_s = self._created_since_s
        self._created_since_s = {
            container.id: since_s.get(container.id, now_s) for container in created
        }
        for container in created:
            has_gpu = bool(container.labels.get(GPUS))
            limit_s = self._settings.gpu_claim_s if has_gpu else NEVER_STARTED_S
            if now_s - self._created_since_s[container.id] > limit_s:
                with problems.guard(f"removing {container.name or container.id}"):
                    _remove_unless_started(container.id)

    def _release_mounts(self, containers: list[AccountContainer], began_s: float) -> None:
        waiting = {container.name for container in containers if container.state == "created"}
        with self.claims.lock:
            waiting |= self.claims.list_names_since(began_s)
            for name in mounts.list_held():
                if name not in waiting:
                    mounts.release(name)

    def _end_leases(self, problems: Problems, containers: list[AccountContainer]) -> None:
        now_s = read_boottime_s()
        ended_ids = {lease.container for lease in list_leases(containers) if lease.ends_s <= now_s}
        self._ending &= ended_ids
        for container in containers:
            if container.id in ended_ids - self._ending:
                with problems.guard(f"ending the lease of {container.name or container.id}"):
                    self._start_ending(container)
        self._failed_ends = {
            key: self._failed_ends[key] for key in ended_ids & set(self._failed_ends)
        }
        problems.lines.update(self._failed_ends)

    def _end_jobs(self, problems: Problems, containers: list[AccountContainer]) -> None:
        """Remove the containers of ended jobs. Slurm's epilog has done so, unless it failed.

        When Slurm begins to give out the GPUs, this ends the containers from before.
        """
        for container in containers:
            with problems.guard(f"ending the job of {container.name or container.id}"):
                needs_job = self._settings.needs_job
                if slurm_jobs.has_ended(container.labels, container.uid, needs_job=needs_job):
                    engine.remove_container(container.id)

    def _start_ending(self, container: AccountContainer) -> None:
        self._ending.add(container.id)
        try:
            threading.Thread(target=self._end_lease, args=(container,), daemon=True).start()
        except RuntimeError:  # no more threads
            self._ending.discard(container.id)
            raise

    def _end_lease(self, container: AccountContainer) -> None:
        """Stop the container, with GRACE_S to write a checkpoint.

        The reason is first written into the run's directory by a process of its own account. That
        may fail or hang; the lease ends all the same.
        """
        with suppress(Exception):
            if "labctl.run" in container.labels:
                _write_note(container)
        try:
            path = f"/containers/{container.id}/stop?t={GRACE_S}"
            engine.call("POST", path, timeout_s=GRACE_S + engine.ANSWER_S)
        except Exception as error:
            name = container.name or container.id
            problem = f"ending the lease of {name} failed: {describe_error(error)}"
            self._failed_ends[container.id] = problem
            self._ending.discard(container.id)  # so that the next round tries again


def _remove_unless_started(container: str) -> None:
    """Remove a container without force: the engine refuses if it has been started meanwhile."""
    try:
        engine.call("DELETE", f"/containers/{container}")
    except engine.EngineRequestError as refused:
        if refused.status not in (404, 409):
            raise


def _write_note(container: AccountContainer) -> None:
    command = NewExec(("/bin/sh", "-c", NOTE, "sh", GPU_LEASE), User=str(container.uid))
    path = f"/containers/{container.id}/exec"
    reply = json.loads(engine.call("POST", path, command, NOTE_S))
    exec_id = engine.convert_object(CreatedObject, reply).Id
    engine.call("POST", f"/exec/{exec_id}/start", StartExec(Detach=True), NOTE_S)
    deadline_s = time.monotonic() + NOTE_S
    while time.monotonic() < deadline_s:
        state = json.loads(engine.call("GET", f"/exec/{exec_id}/json", timeout_s=NOTE_S))
        if not engine.convert_object(ExecState, state).Running:
            return
        time.sleep(0.05)
