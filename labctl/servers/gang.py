"""The servers of a lab that has several: each is a lab of its own beside the first one.

The server of rank 0 is the lab's. The others have lab ids that are derived from it, so that they
are created, guarded, found again and ended exactly as it is. They share its key pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.config import LabConfig
from labctl.config.member_ids import MOST_SERVERS, make_member_id
from labctl.errors import UsageError
from labctl.model import Server
from labctl.servers.accounts import ENDED
from labctl.servers.context import LabContext

# characters of a lab's name, of which a server's is made
MOST_NAME = 36


def has_several_servers(context: LabContext) -> bool:
    """Whether the context is that of a lab with several servers, and not that of one of them."""
    return context.config.server.count > 1 and context.rank is None


def build_member(context: LabContext, rank: int) -> LabContext:
    """Return the context of one of the lab's servers. Its budget is an equal part of the lab's."""
    config = context.config
    need, count = config.server.need, config.server.count
    if need.budget_usd is not None:
        need = msgspec.structs.replace(need, budget_usd=need.budget_usd / count)
    member = msgspec.structs.replace(
        config,
        name=make_member_name(config, rank),
        server=msgspec.structs.replace(config.server, need=need),
    )
    lab_id = make_member_id(context.lab_id, rank)
    sibling = context.make_sibling(member, lab_id)
    group = context.group or context.lab_id
    return msgspec.structs.replace(sibling, group=group, group_name=config.name, rank=rank)


def make_member_name(config: LabConfig, rank: int) -> str:
    """Return the name of a server: that of the lab for rank 0, otherwise the rank follows it."""
    return f"{config.name[:MOST_NAME].rstrip('-')}-{rank}" if rank else config.name


def build_members(context: LabContext) -> list[LabContext]:
    """Build a context for each server that lab.yaml asks for, in the order of their ranks."""
    return [build_member(context, rank) for rank in range(context.config.server.count)]


def list_surplus(context: LabContext, listed: Sequence[Server] = ()) -> list[LabContext]:
    """List the servers beyond the number in lab.yaml, which may have been lowered.

    They are on record, or in `listed`, the provider's list. A context of one server has none.
    """
    if context.rank is not None:
        return []
    shown = {server.lab_id for server in listed if server.state not in ENDED}
    ranks = range(context.config.server.count, MOST_SERVERS)
    return [
        build_member(context, rank)
        for rank in ranks
        if make_member_id(context.lab_id, rank) in shown or _is_recorded(context, rank)
    ]


def _is_recorded(context: LabContext, rank: int) -> bool:
    """Whether the server is on record, or an interrupted request may have created it."""
    lab_id = make_member_id(context.lab_id, rank)
    return bool(context.state.list_servers(lab_id) or context.state.list_open_attempts(lab_id))


def list_servers(context: LabContext) -> list[Server]:
    """List the lab's recorded servers, the first one first; NotFoundError without the first."""
    others = [context.state.get_lab_server(one.lab_id) for one in build_members(context)[1:]]
    return [context.get_server(), *(server for server in others if server is not None)]


def sum_prices(context: LabContext) -> float:
    """Sum the prices per hour of the lab's recorded servers, in US dollars."""
    members = [context, *build_members(context)[1:], *list_surplus(context)]
    servers = [context.state.get_lab_server(one.lab_id) for one in members]
    return sum(server.offer.price_usd_per_hour for server in servers if server is not None)


def select_run_server(context: LabContext, run_id: str) -> LabContext:
    """Return the context of the server that alone has a run, as one beside the first may have.

    Otherwise this is `context`: for a run on all servers, or on the first, or of unknown name.
    """
    if not run_id or not has_several_servers(context):
        return context
    if context.state.get_run(context.lab_id, run_id) is not None:
        return context
    members = build_members(context)[1:]
    found = (one for one in members if one.state.get_run(one.lab_id, run_id) is not None)
    return next(found, context)


def select_server(context: LabContext, rank: int) -> LabContext:
    """Return the context of the server with this rank; UsageError if lab.yaml has fewer."""
    count = context.config.server.count
    if rank < count:
        return build_member(context, rank) if count > 1 else context
    what = f"{context.name} has no server {rank}"
    why = "it has one server" if count == 1 else f"its servers have the numbers 0 to {count - 1}"
    raise UsageError(what, why=why, hint="labctl status")
