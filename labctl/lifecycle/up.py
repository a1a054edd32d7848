"""Get a server ready: the one that the lab has, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec

from labctl.errors import InterruptError, LabError, NotFoundError, PolicyError, UsageError
from labctl.errors.replies import describe_error
from labctl.events import BlockerNote, Note, report_part, report_wait
from labctl.lazy import lazy_imports
from labctl.lifecycle import disk_restore, gang, gang_creation, surplus
from labctl.lifecycle.status import record_watch
from labctl.model import Offer, Server, ServerFacts
from labctl.runs import images, provenance
from labctl.servers import (
    affordable_offers,
    attempts,
    candidates,
    chosen_need,
    deadlines,
    disk_retention,
    first_contact,
    gpus,
    guard,
    provider_choice,
)
from labctl.servers.adoption import adopt, is_leased
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_server_gpus_option
from labctl.servers.job_queue import has_job_queue
from labctl.servers.key_setup import call_with_key_setup
from labctl.servers.open_costs import explain_open_costs
from labctl.servers.prepare import check_login_node, prepare, probe
from labctl.servers.provider_traits import describe_provider
from labctl.servers.reachability import wait_until_reachable
from labctl.stores.lab_store import has_one_key, prepare_store, warn_before_start
from labctl.text import add_next
from labctl.transports import Transport

with lazy_imports(__name__):
    from labctl.sync import lab_files


def up(
    context: LabContext,
    listed: Sequence[Server] | None = None,
    *,
    explains_costs: bool = True,
    on_create: Callable[[Server], None] = lambda server: None,
) -> Server:
    """Get a ready server, the lab's own or a new one. Safe to repeat and to interrupt.

    If the lab has several servers, all of them are ready then; this returns the first. `listed` is
    the provider's list of servers, if the caller has just fetched it. Errors name what still costs
    money; with `explains_costs=False` they do not, for a caller that says it itself. `on_create` is
    called with a server that this call creates, before the server is ready.
    """
    surplus.warn_of_surplus(context)
    if gang.has_several_servers(context):
        with explain_open_costs(context, LabError) if explains_costs else nullcontext():
            return _up_several(context, on_create)
    with context.state.lock(context.lab_id, "up"):
        try:
            with explain_open_costs(context, LabError) if explains_costs else nullcontext():
                need = context.config.server.need
                context = provider_choice.use_recorded_provider(context, by_rule=True)
                with report_part(context.reporter, "boot"):
                    with report_wait(
                        context.reporter, f"checking {describe_provider(context.provider)}"
                    ):
                        server = call_with_key_setup(context, lambda: adopt(context, listed))
                    if server is not None:
                        context = provider_choice.select_provider(context, server.provider)
                        provider_choice.note_choice(context)
                    else:
                        warn_before_start(context)
                        gpus.warn_of_unknown_model(context)
                        image = images.find_wanted_image(context)
                        server = candidates.create_server(context, need, image)
                        context = provider_choice.select_provider(context, server.provider)
                        chosen_need.note_need(context, server)
                        on_create(server)
                with report_wait(context.reporter, f"checking {server.alias}"):
                    server = use_server(context, server)
                chosen_need.forget_missing_gpu(context, server)
                return server
        except KeyboardInterrupt:
            raise _make_interrupt_error(context) from None


def _up_several(context: LabContext, on_create: Callable[[Server], None]) -> Server:
    """Get all servers of the lab ready, side by side; return that of rank 0."""
    members = gang.build_members(context)

    def note_created(server: Server) -> None:
        chosen_need.note_need(context, server)
        on_create(server)

    with context.state.lock(f"{context.lab_id}-servers", "up"):
        try:
            provider_choice.note_choice(context)
            gang_creation.create_missing_servers(context, members, note_created)
            return gang.call_for_each(members, partial(up, explains_costs=False))[0]
        except KeyboardInterrupt:
            raise _make_interrupt_error(context) from None
        except LabError:
            # Servers that cannot be reached are removed side by side. Each may have left what they
            # share to another one that was still alive.
            attempts.remove_unused_resources(members[0])
            raise


def _make_interrupt_error(context: LabContext) -> InterruptError:
    has_several = gang.has_several_servers(context)
    what, verb, them = ("servers", "were", "them") if has_several else ("server", "was", "it")
    message = f"interrupted before the {what} {verb} ready"
    offers = _list_requested_offers(context)
    again = f"{context.subject.up}   # continues"
    if not offers:
        return InterruptError(message, why=f"no {what} {verb} requested", hint=again)
    is_free = not any(offer.price_usd_per_hour for offer in offers)
    state = "exist" if not is_leased(context) else "be leased"
    return InterruptError(
        message,
        why=f"the {what} may already {state}{'' if is_free else ' and cost money'}",
        hint=f"{again}\n{context.subject.down}   # instead, to remove {them}",
    )


def _list_requested_offers(context: LabContext) -> list[Offer]:
    """List the offers of the lab's recorded servers, and of the requests without a reply."""
    has_several = gang.has_several_servers(context)
    offers: list[Offer] = []
    for lab in gang.build_members(context) if has_several else [context]:
        offers += [attempt.offer for attempt in lab.state.list_open_attempts(lab.lab_id)]
        if server := lab.state.get_lab_server(lab.lab_id):
            offers.append(server.offer)
    return offers


def use_server(context: LabContext, server: Server) -> Server:
    """Get the lab's server ready for runs, and check that it has what the lab needs."""
    server = make_ready(context, server, loads_image=True)
    choose_server_gpus_option(context, server)
    _note_missing_data(context, server)
    return server


def _note_missing_data(context: LabContext, server: Server) -> None:
    """Warn if the server lacks a directory of `server:` data: it can be made there before a run."""
    if not context.config.server_data:
        return
    try:
        lab_files.check_server_data(context, server)
    except (NotFoundError, PolicyError, UsageError) as error:
        text = add_next(f"no run can start yet: {describe_error(error)}", error.hint)
        context.reporter.emit(BlockerNote(text=text, level="warning"))


def make_ready(context: LabContext, server: Server, *, loads_image: bool = False) -> Server:
    """Wait for the machine and its sshd, then install what labctl needs on it.

    With `loads_image`, start to load the lab's image as soon as the server has its Docker Engine.
    """
    deadlines.note_declined(context, server)
    with report_part(context.reporter, "boot"):
        server, transport = wait_until_reachable(context, server)
    with report_part(context.reporter, "prepare"):
        server, transport = first_contact.replace_first_host_key(context, server, transport)
        return _install(context, server, transport, loads_image=loads_image)


def _install(
    context: LabContext, server: Server, transport: Transport, *, loads_image: bool
) -> Server:
    """Install what labctl needs on a machine that can be reached, and arm its guards."""
    facts = _prepare(context, server, transport)
    context.save_facts(server, facts)
    context.state.save_server(server)
    if loads_image:
        _start_load(context, lambda: images.start_load(context, server))
    # The key for an SSH store would replace that of the server that this one is to replace.
    is_stored = not (context.moving == "next" and has_one_key(context))
    if is_stored:
        prepare_store(context, server)
    if loads_image and is_stored:
        _start_load(context, lambda: images.start_stored_load(context, server))
    need = context.config.server.need
    left = affordable_offers.budget_left_usd(context, need, but=server.id)
    watch = guard.arm(context, server, budget_left_usd=left, ceiling_s=need.max_ttl_s)
    record_watch(context, server, watch)
    for warning in (watch.cannot if watch else None) or ():
        context.reporter.emit(Note(text=warning, level="warning"))
    if text := deadlines.describe(context, server, watch):
        context.reporter.emit(Note(text=text))
    detail = msgspec.to_builtins(provenance.describe_machine(facts))
    detail["executor"] = context.config.server.executor
    context.state.record("ready", lab_id=context.lab_id, server_id=server.id, detail=detail)
    if not context.moving:
        disk_restore.restore(context, server)
    return server


def _prepare(context: LabContext, server: Server, transport: Transport) -> ServerFacts:
    """Install what is missing; on a login node, only find out what is there."""
    facts = probe(transport)
    if has_job_queue(context):
        check_login_node(facts, context.reporter)
        return facts
    return prepare(
        transport,
        server,
        facts,
        playbooks_dir=context.paths.data_dir / "playbooks",
        ssh_config=context.connections.config_path(server.id),
        reporter=context.reporter,
        boto3=_is_boto3_needed(context),
        docker=context.config.uses_containers,
        name=context.name,
    )


def _start_load(context: LabContext, start: Callable[[], None]) -> None:
    """Start to load the lab's image. A failure must not keep the guards from being armed."""
    try:
        start()
    except (LabError, OSError) as error:
        text = f"the image is not loaded in advance: {error}"
        context.reporter.emit(Note(text=text, level="warning"))


def _is_boto3_needed(context: LabContext) -> bool:
    """Whether the server needs boto3: it keeps its own disk at its end, or reads a bucket."""
    addresses = [context.config.store, *(source.url for source in context.config.data.values())]
    keeps_disk = disk_retention.can_server_keep(context.provider)
    return keeps_disk or any(address.startswith(("s3:", "gs:")) for address in addresses)
