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
# Seconds that a node may end before the controller.
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


def choose_gpus(controller: Offer, nodes: Sequence[Offer]) -> Offer:
    """Return the controller's offer with the GPUs of the machine that has most of them.

    A job runs on any of the machines, and a controller may have no GPU.
    """
    most = max([controller, *nodes], key=lambda offer: offer.gpu_count)
    return msgspec.structs.replace(
        controller,
        gpu_name=most.gpu_name,
        gpu_count=most.gpu_count,
        gpu_memory_bytes=most.gpu_memory_bytes,
    )


def shorten_node_name(node: str) -> str:
    """Return the part of a lab's name that tells a node apart from all others of its course."""
    slug = re.sub(r"[^a-z0-9]+", "-", node.lower()).strip("-")
    if len(slug) <= MOST_SLUG:
        return slug
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
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
    def nodes(self) -> tuple[str, ...]:
        return self.names[1:]

    @property
    def homes(self) -> str:
        return self.folder.config.shared.homes if self.folder.config.shared else ""

    def lab_id(self, node: str) -> str:
        return hashlib.sha256(f"{self.folder.id} machine {node}".encode()).hexdigest()[:12]

    def list_lab_ids(self) -> set[str]:
        return {self.lab_id(node) for node in self.nodes}

    def narrow(self, context: LabContext, name: str) -> LabContext:
        """Return a context whose provider has only this machine, whatever GPUs it has."""
        server = context.config.server
        need = msgspec.structs.replace(server.need, gpu=GpuNeed())
        config = msgspec.structs.replace(
            context.config, server=msgspec.structs.replace(server, need=need)
        )
        narrowed = context.make_sibling(config, context.lab_id)
        return narrowed.replace_provider(select_machine(self.course.provider, name))

    def build_context(self, shared: LabContext, node: str) -> LabContext:
        """Build the context of a node from that of the controller."""
        slug = shorten_node_name(node)
        config = msgspec.structs.replace(
            shared.config,
            name=f"{self.folder.config.name[:20].rstrip('-')}-node-{slug}",
            root=shared.config.root.parent / f"node-{slug}",
        )
        config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.narrow(shared.make_sibling(config, self.lab_id(node)), node)

    def bring_up_nodes(self, shared: LabContext, session: ClusterSession) -> list[Server]:
        """Return a ready server for each node that answers; set aside those that fail.

        HostKeyError if one has another host key: it may be another machine.
        """
        missing = [node for node in session.nodes if node not in self._ready]
        contexts = [self.build_context(shared, node) for node in missing]
        outcomes = run_for_each(contexts, up.up, at_once=MOST_AT_ONCE)
        for node, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome.error, HostKeyError):
                raise outcome.error
            if outcome.error is not None:
                session.set_aside(node, outcome.error)
            elif outcome.value is not None:
                self._ready[node] = outcome.value
        return [self._ready[node] for node in session.nodes]

    def forget_nodes(self) -> None:
        """Have `bring_up_nodes` look at all nodes again."""
        self._ready.clear()

    def list_nodes(self, shared: LabContext) -> list[tuple[LabContext, Server]]:
        """List the nodes that are in use by this machine's records, with their contexts."""
        contexts = [self.build_context(shared, node) for node in self.nodes]
        records = [(each, each.state.get_lab_server(each.lab_id)) for each in contexts]
        return [(context, server) for context, server in records if server is not None]

    def extend_nodes(
        self, shared: LabContext, watch: WatchRecord | None, nodes: Collection[str]
    ) -> None:
        """Let none of these nodes end before the controller, whose watchdog reported `watch`.

        Safe to repeat. Names the nodes for which that fails.
        """
        if watch is None or watch.ttl_left_s is None:
            return
        ends_at = time.monotonic() + watch.ttl_left_s
        for context, server in self.list_nodes(shared):
            if server.offer.type not in nodes:
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

    def end_nodes(self, shared: LabContext) -> None:
        for node in self.nodes:
            context = self.build_context(shared, node)
            server = adoption.adopt(context)
            if server is not None:
                end_server.remove(context, server)

    def check(self) -> list[str]:
        """LabError if a machine does not answer, or does not share the homes. Leaves nothing.

        Returns the machines that Slurm has, and course.yaml no longer.
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
