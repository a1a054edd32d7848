"""Get a server ready: the one that the lab has, or a new one."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.errors import InterruptError, LabError
from labctl.events import Note
from labctl.lifecycle import disk_restore
from labctl.model import Server
from labctl.providers import Keep
from labctl.runs import provenance
from labctl.servers import attempts, deadlines, first_contact, guard
from labctl.servers.adoption import adopt
from labctl.servers.context import Ground
from labctl.servers.open_costs import told_what_bills
from labctl.servers.prepare import gpu_for, prepare, probe
from labctl.servers.reachability import reach
from labctl.stores.lab_store import prepare_store


def up(ground: Ground, listed: Sequence[Server] | None = None) -> Server:
    """Get a ready server, the lab's own or a new one. Safe to repeat and to interrupt.

    `listed` is the provider's list of servers, if the caller has just fetched it.
    """
    with ground.state.exclusive(ground.lab_id, "up"):
        try:
            with told_what_bills(ground, LabError):
                need = ground.config.server.need
                server = adopt(ground, listed) or attempts.make(ground, need)
                server = make_ready(ground, server)
                gpu_for(need, ground.facts(server), ground.reporter)
                return server
        except KeyboardInterrupt:
            raise InterruptError(
                "interrupted while the server was being created",
                why="the server may already exist and bill",
                hint="labctl up to continue, or labctl down to remove it",
            ) from None


def make_ready(ground: Ground, server: Server) -> Server:
    """Wait for the machine and its sshd, then install what labctl needs on it."""
    deadlines.note_declined(ground, server)
    server, transport = reach(ground, server)
    server = first_contact.settle(ground, server, transport)
    facts = prepare(
        transport,
        server,
        probe(transport),
        playbooks_dir=ground.paths.data_dir / "playbooks",
        ssh_config=ground.connections.config_path(server.id),
        reporter=ground.reporter,
        boto3=_needs_boto3(ground),
    )
    ground.keep_facts(server, facts)
    ground.state.save_server(server)
    prepare_store(ground, server)
    need = ground.config.server.need
    left = attempts.budget_left_usd(ground, need, but=server.id)
    watch = guard.arm(ground, server, budget_left_usd=left, ceiling_s=need.max_ttl_s)
    for warning in watch.get("cannot") or ():
        ground.reporter.emit(Note(text=warning, level="warning"))
    if text := deadlines.describe(ground, server, watch):
        ground.reporter.emit(Note(text=text))
    detail = provenance.machine(facts)
    ground.state.record("ready", lab_id=ground.lab_id, server_id=server.id, detail=detail)
    disk_restore.restore(ground, server)
    return server


def _needs_boto3(ground: Ground) -> bool:
    """Whether the server needs boto3: it keeps its own disk at its end, or uses S3."""
    provider = ground.provider
    keeps = isinstance(provider, Keep) and provider.keeps_itself
    addresses = [ground.config.store, *(source.url for source in ground.config.data.values())]
    return keeps or any(address.startswith("s3:") for address in addresses)
