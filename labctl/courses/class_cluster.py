"""The machines of a class that Slurm makes one cluster, and whether they fit together.

The controller is the class's shared server, where the accounts log in. The other machines only run
jobs; each is a lab of the course itself, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from labctl.commands import cluster_accounts
from labctl.commands.cluster_accounts import UidConflict
from labctl.commands.root import NO_ROOT, as_root
from labctl.config import CourseConfig
from labctl.courses.records.folder import CourseFolder
from labctl.errors import ConfigError, LabError, PolicyError
from labctl.lifecycle import up
from labctl.model import GpuNeed, Offer, Server
from labctl.providers import Provider
from labctl.servers import adoption, deadlines, end_server, guard
from labctl.servers.context import LabContext
from labctl.servers.named_machines import list_machine_names, open_machine, select_machine
from labctl.text import names_text
from labctl.transports import Transport

CHECK_S = 60.0
MOST_AT_ONCE = 8
NAMED = 8
CHECK_COMMAND = "labctl course plan"


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


class ClassCluster:
    """The machines of one course. `names` begins with the controller."""

    def __init__(self, folder: CourseFolder, course: LabContext, names: tuple[str, ...]) -> None:
        self.folder = folder
        self.course = course
        self.names = names

    @property
    def controller(self) -> str:
        return self.names[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.names[1:]

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
        slug = re.sub(r"[^a-z0-9]+", "-", node.lower()).strip("-")[:20].rstrip("-")
        config = msgspec.structs.replace(
            shared.config,
            name=f"{self.folder.config.name[:20].rstrip('-')}-node-{slug}",
            root=shared.config.root.parent / f"node-{slug}",
        )
        config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.narrow(shared.make_sibling(config, self.lab_id(node)), node)

    def bring_up_nodes(self, shared: LabContext) -> list[Server]:
        """Return a ready server for each node. LabError if one cannot be used."""
        contexts = [self.build_context(shared, node) for node in self.nodes]
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(up.up, contexts))

    def list_nodes(self, shared: LabContext) -> list[tuple[LabContext, Server]]:
        """List the nodes that are in use by this machine's records, with their contexts."""
        contexts = [self.build_context(shared, node) for node in self.nodes]
        records = [(each, each.state.get_lab_server(each.lab_id)) for each in contexts]
        return [(context, server) for context, server in records if server is not None]

    def extend_nodes(self, shared: LabContext, span_s: int) -> None:
        """Give the nodes as much more time as the controller gets."""
        for context, server in self.list_nodes(shared):
            watch = guard.extend(context, server, span_s)
            deadlines.move_timer(context, server, watch)

    def end_nodes(self, shared: LabContext) -> None:
        for node in self.nodes:
            context = self.build_context(shared, node)
            server = adoption.adopt(context)
            if server is not None:
                end_server.remove(context, server)

    def check(self) -> None:
        """LabError if a machine does not answer, or does not share the homes. Leaves nothing."""
        root = self._open_all()
        homes = self.folder.config.shared.homes if self.folder.config.shared else ""
        path = root[self.controller](cluster_accounts.build_creation(homes)).strip()
        try:
            check = cluster_accounts.build_check(path)
            apart = [node for node in self.nodes if root[node](check).strip() != "shared"]
        finally:
            root[self.controller](cluster_accounts.build_removal(path))
        if apart:
            raise PolicyError(
                f"{homes} on {names_text(apart, NAMED)} is not the {homes} of {self.controller}",
                why="a job must find its student's files on whichever machine it runs; a file that "
                f"{self.controller} wrote there was not found",
                hint=f"mount {homes} of {self.controller} there, for example by NFS, or set "
                f"shared.homes to a directory that they share\n{CHECK_COMMAND}",
            )

    def choose_uids(self, accounts: Sequence[str]) -> dict[str, int]:
        """Return each account's uid, the same on all machines. PolicyError on a conflict."""
        root = self._open_all()
        uids = {
            name: cluster_accounts.parse_uids(root[name](cluster_accounts.LIST_ACCOUNTS))
            for name in self.names
        }
        chosen, conflicts = cluster_accounts.choose_uids(accounts, uids)
        if conflicts:
            raise _make_conflict_error(conflicts[0])
        return chosen

    def _open_all(self) -> dict[str, Callable[[str], str]]:
        """Return, for each machine, a function that runs a script as root and returns its output.

        One machine after another: each may ask to confirm a host key.
        """
        provider = self.course.provider
        transports = {name: open_machine(provider, name) for name in self.names}
        return {
            name: partial(_run_as_root, name, transport) for name, transport in transports.items()
        }


def _run_as_root(name: str, transport: Transport, script: str) -> str:
    result = transport.run(as_root(script), timeout_s=CHECK_S, check=False)
    if result.code:
        why = result.stderr.strip()[-500:] or f"{script} exited with code {result.code}"
        if result.code == NO_ROOT:
            why = f"{why}\nthe account there must be root, or use sudo without a password"
        raise LabError(f"{name} cannot be a machine of the cluster", why=why, hint=CHECK_COMMAND)
    output: str = result.stdout
    return output


def _make_conflict_error(conflict: UidConflict) -> PolicyError:
    first, second = conflict.machines
    if conflict.holder:
        why = f"it has uid {conflict.uids[0]} on {first}, which {conflict.holder} has on {second}"
    else:
        why = f"it has uid {conflict.uids[0]} on {first}, and {conflict.uids[1]} on {second}"
    return PolicyError(
        f"{conflict.account} cannot have the same uid on {first} and {second}",
        why=f"{why}; files in shared homes belong to uids. Files outside of its home keep the old "
        "uid after usermod: find them with `find / -xdev -uid OLD` first",
        hint=f"usermod --uid UID {conflict.holder or conflict.account}   # on {second}\n"
        "labctl course up",
    )
