"""A run on all servers of a lab: claimed on each, then started, and cancelled on all of them.

The part on the server of rank 0 is the run that users see. It is created first and chooses the port
at which the processes meet, so that a repeated start uses the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from labctl.errors import LabError, UsageError
from labctl.lifecycle import gang, restore
from labctl.lifecycle.fleet import run_for_each
from labctl.model import Run, Server
from labctl.runs import first_run, run_specs, runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.sync import lab_files
from labctl.sync.transfer_lock import share_transfers
from labctl.wire.runs import (
    FIND_ADDRESS,
    FindAddressReply,
    GangMember,
    RunSpec,
    StartRunReply,
)
from labctl.wire.verbs import Empty

# seconds between SIGTERM and SIGKILL: the others can save nothing, since they wait for one another
GRACE_S = 10
# Creates, or finds, a server's part of a run.
CreatePart = Callable[[LabContext, Server, RunSpec, GangMember], GangMember]


def require_one_server(context: LabContext, what: str, instead: str) -> None:
    """UsageError if the lab has several servers, and `what` can only use one."""
    if gang.has_several_servers(context):
        raise UsageError(
            f"{what} needs a lab with one server",
            why="lab.yaml has `count:` under `server`",
            hint=instead,
        )


def require_supported(context: LabContext, *, tty: bool, keeper: str, gpus: int) -> None:
    """UsageError for options of `labctl run` that only a run on one server can have."""
    recover = "labctl run --recover   # this machine must stay on"
    for option, is_set, instead in (
        ("-it", tty, "labctl run"),
        ("--keeper", bool(keeper), recover),
        ("--gpus", bool(gpus), f"write `launch: {{with: torchrun, per_server: {gpus}}}`"),
    ):
        if is_set:
            require_one_server(context, option, instead)


def start(
    context: LabContext,
    command: tuple[str, ...],
    run_id: str,
    *,
    push: bool,
    on_start: Callable[[Run, bool], None],
) -> Run:
    """Start the run on all servers exactly once, or find it; return the part of rank 0.

    Repeated after an interrupt at whatever moment, this completes the start.
    """
    members = gang.build_members(context)
    specs = gang.call_for_each(members, partial(_build_spec, command=command, run_id=run_id))
    restore.keep_code(members[0], specs[0])
    by_id = {spec.lab_id: spec for spec in specs}
    if push:
        with share_transfers():
            gang.call_for_each(members, lambda one: _push(one, by_id[one.lab_id]))
    replies: dict[str, StartRunReply] = {}

    def create(one: LabContext, server: Server, spec: RunSpec, member: GangMember) -> GangMember:
        reply = replies[one.lab_id] = runs.create_held(one, server, spec, member)
        return reply.member or member

    run = start_parts(members, by_id, create)
    on_start(run, replies[members[0].lab_id].found)
    return run


def _build_spec(context: LabContext, command: tuple[str, ...], run_id: str) -> RunSpec:
    server = context.get_server()
    adoption.renew(context, server)
    return run_specs.build_spec(context, server, command, run_id, tty=False)


def _push(context: LabContext, spec: RunSpec) -> None:
    server = context.get_server()
    if first_run.has_run_on_server(context, server, spec.image):
        lab_files.push(context, server, force=False)
    else:
        first_run.push_with_image(context, server, spec.image)


def start_parts(
    members: Sequence[LabContext], specs: dict[str, RunSpec], create: CreatePart
) -> Run:
    """Create the next attempt on every server, then start all of them; return that of rank 0.

    `specs` are by lab id. Nothing starts before all of them exist.
    """
    first, *others = members
    addresses = gang.call_for_each(members, find_address)
    meeting = GangMember(0, len(members), addresses[0].address, addresses[0].port)

    def create_part(one: LabContext, meeting: GangMember) -> GangMember:
        rank = one.rank or 0
        part = meeting._replace(rank=rank, interface=addresses[rank].interface)
        return create(one, one.get_server(), specs[one.lab_id], part)

    # A part of rank 0 that exists already has its port.
    meeting = create_part(first, meeting)
    if others:
        gang.call_for_each(others, lambda one: create_part(one, meeting))
    run_id = specs[first.lab_id].id
    return gang.call_for_each(members, lambda one: runs.start_held(one, one.get_server(), run_id))[
        0
    ]


def find_address(context: LabContext) -> FindAddressReply:
    """Return the server's address in its own network, and a port that is free there."""
    return context.open_agent(context.get_server()).call(FIND_ADDRESS, Empty())


def cancel(members: Sequence[LabContext], run_id: str, grace_s: int) -> tuple[Run, bool]:
    """Cancel the run on all of these servers; return the part of rank 0, and whether it had ended.

    An error is raised after all servers have been tried.
    """

    def cancel_part(one: LabContext) -> tuple[Run, bool]:
        return runs.cancel(one, one.get_server(), run_id, grace_s)

    outcomes = run_for_each(members, cancel_part)
    results = []
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.value is not None
        results.append(outcome.value)
    return results[0]


def end_parts(members: Sequence[LabContext], run_id: str, reason: str) -> None:
    """End the parts of a run that has failed elsewhere, on the servers that answer."""

    def end(context: LabContext) -> None:
        server = context.state.get_lab_server(context.lab_id)
        with suppress(LabError):
            if server is not None:
                runs.cancel(context, server, run_id, GRACE_S, reason)

    run_for_each(members, end)
