"""Remove all servers of a lab that has several; nothing destroys the only copy of their files."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.errors import PolicyError
from labctl.events import Note, Question
from labctl.lifecycle import down, gang
from labctl.lifecycle.fleet import run_for_each
from labctl.model import Server
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.text import names_text, price_or_free_text

# Below the lab's directory: the files of the servers beside the first, each like a lab's.
SERVERS = ".labctl/servers"


def down_all(
    context: LabContext, *, discard: bool, consent: down.Consent | None, wait_s: float
) -> down.DownResult:
    """Do what `down` does for each of the lab's servers, after one question about all of them.

    What is downloaded from the servers beside the first goes to `.labctl/servers/<rank>`. The
    first error is raised after all servers have been tried. The first server goes last: what the
    servers share, such as a firewall, goes with it.
    """
    members = [_choose_directory(one) for one in gang.list_every_member(context)]
    if consent is None:
        _ask_for_consent(context, members, discard)
    elif server := context.state.get_lab_server(context.lab_id):
        consent(members[0], server, _list_active(context), discard)

    def agree(one: LabContext, server: Server, running: list[str], loses_results: bool) -> None:
        """All servers were agreed to before."""

    def down_one(one: LabContext) -> down.DownResult:
        return down.down(one, discard=discard, consent=agree, wait_s=wait_s)

    others = run_for_each(members[1:], down_one)
    outcomes = [*run_for_each(members[:1], down_one), *others]
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    results = [outcome.value for outcome in outcomes if outcome.value is not None]
    if any(result.pulled_files for result in results[1:]):
        text = f"the files of the servers beside the first are in {SERVERS}"
        context.reporter.emit(Note(text=text))
    return _add_up(results)


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


def _ask_for_consent(context: LabContext, members: Sequence[LabContext], discard: bool) -> None:
    servers = [server for one in members for server in context.state.list_servers(one.lab_id)]
    if not servers:
        return
    running = _list_active(context)
    verb = "is" if len(running) == 1 else "are"
    live = f"{', '.join(running)} {verb} still running and would be canceled; " if running else ""
    is_lossy = discard and not all(adoption.is_fresh(context, server) for server in servers)
    lost = "Results that were not pulled will be LOST. " if is_lossy else ""
    action = "end the leases of" if adoption.is_leased(context) else "remove the servers"
    names = names_text([server.alias for server in servers], 5)
    question = f"{lost}{live}{action} {names} ({servers[0].provider})?"
    if not context.reporter.confirm(Question(question=question)):
        price = sum(server.offer.price_usd_per_hour for server in servers)
        raise PolicyError(
            "nothing was removed",
            why=f"{names} are still running ({price_or_free_text(price)} in total)",
            hint="labctl down --yes",
        )


def _list_active(context: LabContext) -> list[str]:
    """List the lab's active runs, as last recorded."""
    every = context.state.list_runs(context.lab_id)
    return [run.id for run in every if run.state in ("starting", "running")]


def _add_up(results: Sequence[down.DownResult]) -> down.DownResult:
    return down.DownResult(
        removed=", ".join(result.removed for result in results if result.removed),
        dropped=", ".join(result.dropped for result in results if result.dropped),
        has_other_key=any(result.has_other_key for result in results),
        pulled_files=sum(result.pulled_files for result in results),
        saved_edits=sum(result.saved_edits for result in results),
        home_files=sum(result.home_files for result in results),
        servers_left=tuple(server for result in results for server in result.servers_left),
        leftovers=tuple({one.id: one for result in results for one in result.leftovers}.values()),
        unchecked="\n".join(filter(None, (result.unchecked for result in results))),
    )
