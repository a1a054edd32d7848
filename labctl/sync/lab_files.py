"""Push a lab's code and data to its server, and pull code that was edited there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from labctl.model import FileEntry, Server, Value
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.sync import edits
from labctl.sync import push as transfer
from labctl.sync.edits import EditsResult
from labctl.sync.fetch import fetch_data
from labctl.sync.scan import HashIndex, scan_code, scan_data
from labctl.sync.transfer_lock import hold_transfers

# Target on the server, local directory, its files, and the index of their hashes.
Tree = tuple[str, Path, Sequence[FileEntry], HashIndex]


class PushedTree(Value, frozen=True):
    """The result of pushing one tree. `sent`, `removed` and `unchanged` count files."""

    target: str
    sent: int
    sent_bytes: int
    removed: int
    unchanged: int


def push(ground: LabContext, server: Server, *, force: bool) -> list[PushedTree]:
    """Push the lab's code and data directories; the server fetches data with an address."""
    config = ground.config
    inside = [data.path for data in config.data.values() if data.path and data.inside_lab]
    index = HashIndex(config.root, "code")
    code = scan_code(config.root, ground.reporter, data=inside, later=index)
    return [
        *_push_trees(ground, server, [("code", config.root, code, index)], force=force),
        *push_data(ground, server, force=force),
    ]


def push_data(ground: LabContext, server: Server, *, force: bool = False) -> list[PushedTree]:
    """Push only the data directories; the server fetches data with an address."""
    config, reporter = ground.config, ground.reporter
    trees = []
    for name, source in config.data.items():
        if source.path is not None:
            index = HashIndex(config.root, f"data/{name}")
            files = scan_data(config.root, name, source.path, reporter, later=index)
            trees.append((f"data/{name}", source.path, files, index))
    pushed = _push_trees(ground, server, trees, force=force) if trees else []
    urls = {name: source.url for name, source in config.data.items() if source.url}
    if urls:
        fetch_data(ground.open_agent(server), config.name, ground.lab_id, urls, reporter)
    return pushed


def _push_trees(
    ground: LabContext, server: Server, trees: Sequence[Tree], *, force: bool
) -> list[PushedTree]:
    with hold_transfers(ground.config.root, "push", ground.reporter):
        remote = ground.open_agent(server)
        return [_push_tree(ground, remote, tree, force=force) for tree in trees]


def _push_tree(ground: LabContext, remote: AgentClient, tree: Tree, *, force: bool) -> PushedTree:
    target, root, files, index = tree
    result = transfer.push(
        remote,
        ground.config.name,
        ground.lab_id,
        target,
        root,
        files,
        ground.reporter,
        force=force,
        index=index,
    )
    return PushedTree(
        target=target,
        sent=result.sent,
        sent_bytes=result.bytes,
        removed=result.removed,
        unchanged=result.unchanged,
    )


def save_edits(ground: LabContext, server: Server) -> EditsResult:
    """Save files that were edited on the server to `<lab>/server-edits/`."""
    return _run_edits(ground, server, edits.pull_edits)


def pull_code(ground: LabContext, server: Server) -> list[str]:
    """Copy files that were edited on the server into the lab; return the paths of all of them."""
    result = _run_edits(ground, server, edits.pull_code)
    return [*result.brought, *(f"{result.directory}/{name}" for name in result.saved)]


def _run_edits(ground: LabContext, server: Server, flow: Callable[..., EditsResult]) -> EditsResult:
    return flow(
        ground.open_agent(server),
        ground.config.name,
        ground.lab_id,
        ground.config.root,
        reporter=ground.reporter,
    )
