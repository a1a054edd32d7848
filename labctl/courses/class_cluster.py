"""The machines of a class that Slurm makes one cluster, and whether they fit together.

The controller is the class's shared server, where the accounts log in. The other machines only run
jobs; each is a lab of the course itself, too.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Collection, Sequence
from functools import partial

import msgspec

from labctl.commands.root import NO_ROOT_EXIT_CODE, as_root
from labctl.config import CourseConfig
from labctl.courses.cluster_session import CHECK_COMMAND, ClusterSession, RunAsRoot
from labctl.courses.records.folder import CourseFolder
from labctl.courses.seat_accounts import SeatAccounts
from labctl.errors import ConfigError, HostKeyError, LabError
from labctl.errors.replies import describe_error
from labctl.events import Note
from labctl.lifecycle import up
from labctl.lifecycle.fleet import run_for_each
from labctl.model import GpuNeed, Offer, Server
from labctl.providers import Provider
from labctl.servers import adoption, deadlines, end_server, guard
from labctl.servers.context import LabContext
from labctl.servers.named_machines import list_machine_names, open_machine, select_machine
from labctl.text import add_next, names_text
from labctl.transports import Transport
from labctl.wire.watchdog import WatchRecord

CHECK_S = 60.0
# Seconds that the server on another machine may end before that on the controller.
END_TOLERANCE_S = 60
MOST_AT_ONCE = 8
NAMED = 8
MOST_SLUG = 20


def list_cluster_machines(config: CourseConfig, provider: Provider) -> tuple[str, ...]:
    """Return the names of the cluster's machines, the controller first; () without a controller.

    ConfigError if course.yaml names none of the machines. Contacts nobody.
    """
    controller = config.shared.controller if config.shared else ""
    if not controller:
        return ()
    names = list_machine_names(provider)
    if not names:
        raise ConfigError(
            "shared.controller in course.yaml needs machines with names",
            why=f"provider {provider.name} creates its servers itself",
            hint="name existing machines in course.yaml:\n"
            "server: {provider: static, static: {hosts: [gpu1.lab.example, gpu2.lab.example]}}",
        )
    if controller not in names:
        raise ConfigError(
            f"shared.controller in course.yaml is {controller}, which is not one of the machines",
            why=f"server.{provider.name}.hosts names {names_text(names, NAMED)}",
            hint=f"{CHECK_COMMAND}   # after you set shared.controller to one of them",
        )
    return (controller, *(name for name in names if name != controller))


def choose_gpus(controller: Offer, others: Sequence[Offer]) -> Offer:
    """Return the controller's offer with the GPUs of the machine that has most of them.

    A job runs on any of the machines, and a controller may have no GPU.
    """
    most = max([controller, *others], key=lambda offer: offer.gpu_count)
    return msgspec.structs.replace(
        controller,
        gpu_name=most.gpu_name,
        gpu_count=most.gpu_count,
        gpu_memory_bytes=most.gpu_memory_bytes,
    )


def shorten_machine_name(machine: str) -> str:
    """Return the part of a lab's name that tells a machine apart from all others of its course."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    if len(slug) <= MOST_SLUG:
        return slug
    digest = hashlib.sha256(machine.encode()).hexdigest()[:8]
    return f"{slug[: MOST_SLUG - 9].rstrip('-')}-{digest}"


class ClassCluster:
    """The machines of one course. `names` begins with the controller."""

    def __init__(self, folder: CourseFolder, course: LabContext, names: tuple[str, ...]) -> None:
        self.folder = folder
        self.course = course
        self.names = names
        self._ready: dict[str, Server] = {}

    @property
    def controller(self) -> str:
        return self.names[0]

    @property
    def other_machines(self) -> tuple[str, ...]:
        return self.names[1:]

    @property
    def homes(self) -> str:
        return self.folder.config.shared.homes if self.folder.config.shared else ""

    def lab_id(self, machine: str) -> str:
        return hashlib.sha256(f"{self.folder.id} machine {machine}".encode()).hexdigest()[:12]

    def list_lab_ids(self) -> set[str]:
        return {self.lab_id(machine) for machine in self.other_machines}

    def narrow(self, context: LabContext, name: str) -> LabContext:
        """Return a context whose provider has only this machine, whatever GPUs it has."""
        server = context.config.server
        need = msgspec.structs.replace(server.need, gpu=GpuNeed())
        config = msgspec.structs.replace(
            context.config, server=msgspec.structs.replace(server, need=need)
        )
        narrowed = context.make_sibling(config, context.lab_id)
        return narrowed.replace_provider(select_machine(self.course.provider, name))

    def build_context(self, shared: LabContext, machine: str) -> LabContext:
        """Build the context of another machine's server from that of the controller's."""
        slug = shorten_machine_name(machine)
        config = msgspec.structs.replace(
            shared.config,
            name=f"{self.folder.config.name[:20].rstrip('-')}-node-{slug}",
            root=shared.config.root.parent / f"node-{slug}",
        )
        config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.narrow(shared.make_sibling(config, self.lab_id(machine)), machine)

    def bring_up_others(self, shared: LabContext, session: ClusterSession) -> list[Server]:
        """Return a ready server on each other machine that answers; set aside those that fail.

        HostKeyError if one has another host key: it may be another machine.
        """
        missing = [name for name in session.other_machines if name not in self._ready]
        contexts = [self.build_context(shared, name) for name in missing]
        outcomes = run_for_each(contexts, up.up, at_once=MOST_AT_ONCE)
        for name, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome.error, HostKeyError):
                raise outcome.error
            if outcome.error is not None:
                session.set_aside(name, outcome.error)
            elif outcome.value is not None:
                self._ready[name] = outcome.value
        return [self._ready[name] for name in session.other_machines]

    def forget_others(self) -> None:
        """Have `bring_up_others` look at all other machines again."""
        self._ready.clear()

    def list_others(self, shared: LabContext) -> list[tuple[LabContext, Server]]:
        """List the servers on other machines by local records, with their contexts."""
        contexts = [self.build_context(shared, name) for name in self.other_machines]
        records = [(each, each.state.get_lab_server(each.lab_id)) for each in contexts]
        return [(context, server) for context, server in records if server is not None]

    def extend_others(
        self, shared: LabContext, watch: WatchRecord | None, machines: Collection[str]
    ) -> None:
        """Let no server on these machines end before the controller's.

        `watch` is what the watchdog of the controller's server reported. Safe to repeat. Names
        the machines for which that fails.
        """
        if watch is None or watch.ttl_left_s is None:
            return
        ends_at = time.monotonic() + watch.ttl_left_s
        for context, server in self.list_others(shared):
            if server.offer.type not in machines:
                continue
            try:
                own = guard.read_watchdog(context, server)
                left_s = own.ttl_left_s if own else None
                if left_s is None:
                    continue
                missing_s = math.ceil(ends_at - time.monotonic() - left_s)
                if missing_s > END_TOLERANCE_S:
                    extended = guard.extend(context, server, missing_s)
                    deadlines.move_timer(context, server, extended)
            except HostKeyError:
                raise
            except LabError as error:
                name = server.offer.type
                text = f"{name} still ends at its earlier time ({describe_error(error)})"
                again = f"labctl course up   # extends it, after you repaired {name}"
                shared.reporter.emit(Note(text=add_next(text, again), level="warning"))

    def end_others(self, shared: LabContext) -> None:
        for name in self.other_machines:
            context = self.build_context(shared, name)
            server = adoption.adopt(context)
            if server is not None:
                end_server.remove(context, server)

    def check(self) -> list[str]:
        """LabError if a machine does not answer, or does not share the homes. Leaves nothing.

        Returns the nodes that Slurm has, and course.yaml no longer.
        """
        session = self.connect()
        for error in session.failures.values():
            raise error
        return session.removed_nodes

    def connect(self) -> ClusterSession:
        """Log in to all machines, and check that they share the homes, the same as before.

        Another machine than the controller may fail: the session says why. One machine after
        another, since each may ask to confirm a host key.
        """
        session = ClusterSession(self.controller)
        for name in self.names:
            session.add(name, partial(self._open, name))
        accounts = SeatAccounts(self.folder.private).list_all()
        present = [each.account for each in accounts if each.state in ("there", "leaving")]
        session.require_homes(present, self.homes)
        session.check_homes(self.homes)
        return session

    def _open(self, name: str) -> RunAsRoot:
        return partial(_run_as_root, name, open_machine(self.course.provider, name))


def _run_as_root(name: str, transport: Transport, script: str) -> str:
    result = transport.run(as_root(script), timeout_s=CHECK_S, check=False)
    if result.code:
        why = result.stderr.strip()[-500:] or f"{script} exited with code {result.code}"
        if result.code == NO_ROOT_EXIT_CODE:
            why = f"{why}\nthe account there must be root, or use sudo without a password"
        raise LabError(f"{name} cannot be a machine of the cluster", why=why, hint=CHECK_COMMAND)
    output: str = result.stdout
    return output
