"""Where trials run: on the lab's servers, and several side by side on one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from labctl.errors import NotFoundError, PolicyError
from labctl.events import SilentReporter
from labctl.lifecycle import gang, up
from labctl.lifecycle.sweeps.trials import Placement
from labctl.model import Run, Server
from labctl.runs import first_run, run_specs, runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_server_gpus_option
from labctl.sync import lab_files
from labctl.sync.transfer_lock import share_transfers


@dataclass(frozen=True)
class TrialServer:
    """One server of the lab. `gpus` has the value of `--gpus` for each of its places.

    `context` is about this server alone and quiet: trials start often. `loud` reports.
    """

    rank: int
    context: LabContext
    loud: LabContext
    server: Server
    gpus: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.server.alias

    @property
    def current(self) -> Server:
        """The server with its newest address, which changes when some servers restart."""
        return self.context.state.get_server(self.server.id) or self.server

    def start(self, placement: Placement, command: tuple[str, ...]) -> Run:
        """Start the trial's run exactly once, or find it."""
        context = self.context
        gpus = self.gpus[placement.place % len(self.gpus)]
        if gpus and context.config.launch.launcher:
            # torchrun starts a process for each GPU of the place, not of the server.
            launch = msgspec.structs.replace(context.config.launch, processes=gpus.count(",") + 1)
            config = msgspec.structs.replace(context.config, launch=launch)
            context = context.make_sibling(config, context.lab_id)
        server = self.current
        spec = run_specs.build_spec(context, server, command, placement.run, tty=False)
        if gpus:
            spec = spec._replace(gpus=gpus)
        return runs.start(
            context,
            server,
            spec,
            follow=False,
            on_start=lambda run, found: None,
            on_log=lambda block: None,
        )


def list_members(context: LabContext) -> list[LabContext]:
    """List the contexts of the lab's servers, each of which reports with its name."""
    return gang.build_members(context) if gang.has_several_servers(context) else [context]


def open_servers(context: LabContext, parallel: int) -> list[TrialServer]:
    """Open the lab's servers that exist; NotFoundError without any.

    PolicyError if so many trials need more GPUs than there are.
    """
    members = list_members(context)
    found = [
        (rank, member, server)
        for rank, member in enumerate(members)
        if (server := member.state.get_lab_server(member.lab_id)) and server.state != "stopped"
    ]
    if not found:
        context.get_server()  # raises NotFoundError with the reason
        raise NotFoundError(f"{context.name} has no server", hint=context.subject.up)
    count = max(1, math.ceil(parallel / len(found)))
    return [open_server(member, rank, server, count) for rank, member, server in found]


def open_server(loud: LabContext, rank: int, server: Server, count: int) -> TrialServer:
    """Open one server for `count` trials side by side."""
    adoption.renew(loud, server)
    # A trial is a run on one server, whatever lab.yaml says about the others.
    config = msgspec.structs.replace(
        loud.config, server=msgspec.structs.replace(loud.config.server, count=1)
    )
    quiet = loud.make_sibling(config, loud.lab_id, SilentReporter())
    return TrialServer(rank, quiet, loud, server, share_gpus(loud, server, count))


def share_gpus(context: LabContext, server: Server, count: int) -> tuple[str, ...]:
    """Return the GPUs of each of `count` places on a server; "" where the run decides.

    PolicyError if the server has GPUs, but fewer than places.
    """
    if count == 1 or context.config.submits_jobs:
        return ("",) * count
    if not choose_server_gpus_option(context, server):
        return ("",) * count
    gpus = context.load_facts(server).gpus
    if len(gpus) < count:
        raise PolicyError(
            f"{count} trials at a time on {server.alias} need as many GPUs",
            why=f"it has {len(gpus)}; trials that share a GPU may not fit into its memory",
            hint="labctl sweep --parallel N   # with N at most the number of GPUs",
        )
    return tuple(",".join(gpu.uuid for gpu in gpus[place::count]) for place in range(count))


def push_to_all(servers: Sequence[TrialServer]) -> None:
    """Push code, data and image to the servers, side by side."""
    by_id = {one.loud.lab_id: one for one in servers}

    def push(context: LabContext) -> None:
        push_to(by_id[context.lab_id])

    with share_transfers():
        gang.call_for_each([one.loud for one in servers], push)


def push_to(one: TrialServer) -> None:
    """Push code and data to a server; before the first run of an image, with the image."""
    context, server = one.loud, one.server
    image = run_specs.find_run_image(context)
    if not first_run.has_run_on_server(context, server, image):
        first_run.push_with_image(context, server, image)
        return
    lab_files.push(context, server, force=False)


def replace_server(one: TrialServer) -> TrialServer:
    """Start a server in place of one that is lost, and send code and data to it."""
    server = up.up(one.loud)
    new = open_server(one.loud, one.rank, server, len(one.gpus))
    push_to(new)
    return new
