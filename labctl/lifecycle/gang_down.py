"""Remove all servers of a lab that has several; nothing destroys the only copy of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from labctl.errors import BusyError, LabError, PolicyError
from labctl.events import Note, Question, report_wait
from labctl.lifecycle import down, gang, reconcile
from labctl.lifecycle.fleet import run_for_each
from labctl.model import Server
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.text import price_or_free_text

# Below the lab's directory: the files of the servers beside the first, each like a lab's.
SERVERS = ".labctl/servers"


def has_other_servers(context: LabContext) -> bool:
    """Whether the lab has servers beside the first one, or may have.

    If this machine did not create its server, the provider knows: `count` may have been lowered.
    """
    if gang.has_several_servers(context) or gang.list_surplus(context):
        return True
    is_own = context.state.list_events(lab_id=context.lab_id, kind="created", limit=1)
    if context.rank is not None or is_own:
        return False
    return bool(gang.list_surplus(context, _list_at_provider(context) or ()))


def down_all(
    context: LabContext, *, discard: bool, consent: down.Consent | None, wait_s: float
) -> down.DownResult:
    """Do what `down` does for each of the lab's servers, after one question about all of them.

    What is downloaded from the servers beside the first goes to `.labctl/servers/<rank>`. An
    error, which names the others, is raised after all servers have been tried. The first server
    goes last: what the servers share, such as a firewall, goes with it.
    """
    # `up` holds the same lock while it creates servers.
    with context.state.lock(f"{context.lab_id}-servers", "down", wait_s=wait_s):
        # An unreachable keeper is a refusal, so it must come before the question.
        reconcile.merge_keeper_records(context, required=not discard)
        listed = _list_at_provider(context)
        members = [_choose_directory(one) for one in gang.list_every_member(context, listed)]
        servers = _find_servers(members, listed, discard=discard, wait_s=wait_s)
        _require_consent(context, members, servers, discard, consent)
        # Before anything is saved, since the keeper would replace the first server that goes. If
        # saving fails then, `labctl down` is repeated.
        reconcile.release_keeper(context, discard=discard)

        def agree(one: LabContext, server: Server, running: list[str], loses: bool) -> None:
            """PolicyError for a server that was found only after the question."""
            if server.id not in {known.id for known in servers.values()}:
                raise PolicyError(
                    f"{server.alias} was not removed",
                    why=f"{server.id} appeared only after you agreed to remove the others",
                    hint="labctl down",
                )

        def down_one(one: LabContext) -> down.DownResult:
            return down.down(one, discard=discard, consent=agree, wait_s=wait_s)

        others = run_for_each(members[1:], down_one)
        outcomes = [*run_for_each(members[:1], down_one), *others]
    # What could not be saved on a server matters more than what the first one shares with it.
    if errors := [one.error for one in [*others, *outcomes[:1]] if one.error is not None]:
        errors[0].why = "\n".join(filter(None, [errors[0].why, *(one.what for one in errors[1:])]))
        raise errors[0]
    results = [outcome.value for outcome in outcomes if outcome.value is not None]
    if any(result.pulled_files for result in results[1:]):
        text = f"the files of the servers beside the first are in {SERVERS}"
        context.reporter.emit(Note(text=text))
    return _add_up(results)


def _list_at_provider(context: LabContext) -> list[Server] | None:
    """List the servers of the lab's provider; None if it does not answer.

    What is on record can be removed even then, such as the lease of a machine that is off.
    """
    try:
        with report_wait(context.reporter, f"checking {context.provider.name}"):
            return list(context.provider.servers())
    except LabError:
        return None


def _find_servers(
    members: Sequence[LabContext], listed: list[Server] | None, *, discard: bool, wait_s: float
) -> dict[str, Server]:
    """Find each member's server, by lab id: another machine may have created it.

    One that cannot be checked is as recorded; its `down` says why that is.
    """

    def find(one: LabContext) -> Server | None:
        with one.state.lock(one.lab_id, "down", wait_s=wait_s):
            found = down.find_server(one, discard, listed)
            return found or down.await_unconfirmed(one)

    servers = {}
    for one, outcome in zip(members, run_for_each(members, find), strict=True):
        if isinstance(outcome.error, BusyError):
            raise outcome.error
        recorded = one.state.get_lab_server(one.lab_id) if outcome.error else None
        if server := outcome.value or recorded:
            servers[one.lab_id] = server
    return servers


def _choose_directory(context: LabContext) -> LabContext:
    """Return the context with a directory of its own for the files of its server."""
    if not context.rank:
        return context
    root = context.config.root / SERVERS / str(context.rank)
    root.mkdir(parents=True, exist_ok=True)
    return msgspec.structs.replace(
        context,
        config=msgspec.structs.replace(context.config, root=root),
        shared_provider=context.provider,
        shared_connections=context.connections,
    )


def _require_consent(
    context: LabContext,
    members: Sequence[LabContext],
    servers: Mapping[str, Server],
    discard: bool,
    consent: down.Consent | None,
) -> None:
    """PolicyError unless all of these servers may be removed, before any of them is."""
    owners = [one for one in members if one.lab_id in servers]
    if not owners:
        return
    running = _list_running(context, owners, servers)
    is_lossy = discard and not all(adoption.is_fresh(one, servers[one.lab_id]) for one in owners)
    if consent is not None:
        consent(owners[0], servers[owners[0].lab_id], running, is_lossy)
    else:
        _ask_for_consent(context, list(servers.values()), running, is_lossy)


def _list_running(
    context: LabContext, owners: Sequence[LabContext], servers: Mapping[str, Server]
) -> list[str]:
    """List the lab's active runs, as the servers that answer say."""

    def refresh(one: LabContext) -> None:
        if servers[one.lab_id].state != "stopped":
            runs.refresh(one, servers[one.lab_id])

    with report_wait(context.reporter, f"reading the runs on {context.name}"):
        run_for_each(owners, refresh)
    active = [
        run.id
        for one in owners
        for run in context.state.list_runs(one.lab_id)
        if run.state in ("starting", "running") and run.server_id == servers[one.lab_id].id
    ]
    return list(dict.fromkeys(active))


def _ask_for_consent(
    context: LabContext, servers: Sequence[Server], running: Sequence[str], is_lossy: bool
) -> None:
    verb = "is" if len(running) == 1 else "are"
    live = f"{', '.join(running)} {verb} still running and would be canceled; " if running else ""
    lost = "Results that were not pulled will be LOST. " if is_lossy else ""
    action = "end the leases of" if adoption.is_leased(context) else "remove the servers"
    names = ", ".join(server.alias for server in servers)
    question = f"{lost}{live}{action} {names} ({servers[0].provider})?"
    if not context.reporter.confirm(Question(question=question)):
        price = sum(server.offer.price_usd_per_hour for server in servers)
        raise PolicyError(
            "nothing was removed",
            why=f"{names} are still running ({price_or_free_text(price)} in total)",
            hint="labctl pull   # downloads new results and keeps the servers",
        )


def _add_up(results: Sequence[down.DownResult]) -> down.DownResult:
    return down.DownResult(
        removed=", ".join(result.removed for result in results if result.removed),
        dropped=", ".join(result.dropped for result in results if result.dropped),
        has_other_key=any(result.has_other_key for result in results),
        pulled_files=sum(result.pulled_files for result in results),
        saved_edits=sum(result.saved_edits for result in results),
        home_files=sum(result.home_files for result in results),
        home_directories=tuple(name for result in results for name in result.home_directories),
        servers_left=tuple(server for result in results for server in result.servers_left),
        leftovers=tuple({one.id: one for result in results for one in result.leftovers}.values()),
        unchecked="\n".join(filter(None, (result.unchecked for result in results))),
        failures={name: why for result in results for name, why in result.failures.items()},
    )
