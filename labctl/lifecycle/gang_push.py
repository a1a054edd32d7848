"""Send code and data to all servers of a lab: their processes must run the same code."""

from __future__ import annotations

import msgspec

from labctl.lifecycle import gang
from labctl.servers.context import LabContext
from labctl.sync import lab_files
from labctl.sync.push import PushedTree
from labctl.sync.transfer_lock import share_transfers


def push_to_all(context: LabContext, *, force: bool) -> list[PushedTree]:
    """Push to every server; NotFoundError, and nothing is sent, if one is missing.

    The target of a tree on a server beside the first begins with that server's name.
    """
    members = gang.build_members(context)
    for one in members:
        one.get_server()

    def push(one: LabContext) -> list[PushedTree]:
        trees = lab_files.push(one, one.get_server(), force=force)
        return [_name_server(one, tree) for tree in trees]

    with share_transfers():
        return [tree for trees in gang.call_for_each(members, push) for tree in trees]


def _name_server(context: LabContext, tree: PushedTree) -> PushedTree:
    if not context.rank:
        return tree
    return msgspec.structs.replace(tree, target=f"{context.config.name}:{tree.target}")
