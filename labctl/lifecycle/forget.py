"""Drop records that no credentials can check any more, such as servers of a closed account."""

from __future__ import annotations

from collections.abc import Iterable

from labctl.config.member_ids import list_lab_ids
from labctl.errors import NotFoundError, PolicyError
from labctl.events import Question
from labctl.model import Server, Value
from labctl.servers import accounts, disks
from labctl.servers.context import LabContext
from labctl.state import Attempt
from labctl.state.disks import KeptDisk, list_kept_disks


class UnconfirmedRecords(Value, frozen=True):
    """Records of resources that the current credentials do not show and that may still exist."""

    servers: tuple[Server, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    disks: tuple[KeptDisk, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *(record.id for record in self.servers),
            *(f"attempt {record.token}" for record in self.attempts),
            *(record.disk.id for record in self.disks),
        )


def forget(context: LabContext) -> UnconfirmedRecords:
    """Drop the lab's records of what these credentials do not show, without ending anything.

    PolicyError if the user declines, NotFoundError if there is nothing to forget. Records of other
    providers stay.
    """
    with context.state.lock(context.lab_id, "down"):
        lost = find_lost(context, list_lab_ids(context.lab_id))
        require_consent(context, lost.names, "labctl down")
        drop(context, lost)
        return lost


def find_lost(context: LabContext, lab_ids: Iterable[str]) -> UnconfirmedRecords:
    """Return records of these labs whose end cannot be confirmed with these credentials.

    Asks the provider about servers whose account is not on record. Resources that ended in this
    account are not included: `down` drops those.
    """
    state, name = context.state, context.provider.name
    labs = list(lab_ids)
    servers = [
        server for lab in labs for server in state.list_servers(lab) if server.provider == name
    ]
    attempts = [
        attempt
        for lab in labs
        for attempt in state.list_open_attempts(lab)
        if attempt.provider == name
    ]
    kept_disks = [kept for lab in labs for kept in list_kept_disks(state, lab)]
    return UnconfirmedRecords(
        servers=tuple(
            server
            for server in servers
            if is_lost(context, server.id, server.account, server.offer.price_usd_per_hour)
        ),
        attempts=tuple(
            attempt for attempt in attempts if accounts.is_elsewhere(context, attempt.account)
        ),
        disks=tuple(
            kept
            for kept in kept_disks
            if kept.disk.provider == name
            and (kept.missed_at or accounts.is_elsewhere(context, kept.disk.account))
        ),
    )


def is_lost(context: LabContext, server_id: str, account: str, usd_per_hour: float) -> bool:
    """Whether the server belongs to another account, or to none on record and is not found."""
    if accounts.is_elsewhere(context, account):
        return True
    attributed = accounts.is_attributed(context, account, costs=bool(usd_per_hour))
    return not attributed and context.provider.find(server_id) is None


def require_consent(context: LabContext, names: Iterable[str], command: str) -> None:
    """Ask before records are dropped; NotFoundError without names, PolicyError on a refusal."""
    listed = list(names)
    if not listed:
        raise NotFoundError(
            f"{context.config.name} has no records to forget",
            why=f"your {context.provider.name} credentials can check everything on record",
            hint=command,
        )
    what = "one record" if len(listed) == 1 else f"{len(listed)} records"
    decision = Question(
        question=f"forget {what} of {context.config.name} without ending anything?",
        detail="\n".join(
            [*listed, "Anything that still exists keeps billing, and labctl will never end it."]
        ),
    )
    if not context.reporter.confirm(decision):
        raise PolicyError("nothing was forgotten", why="you did not confirm")


def drop(context: LabContext, lost: UnconfirmedRecords) -> None:
    """Drop these records, and the connections and keys that go with them."""
    for server in lost.servers:
        context.connections.close(server)
        context.connections.forget(server.id)
        context.state.drop_server(server.id)
        note_forgotten(context, server.lab_id, server.id)
    for attempt in lost.attempts:
        context.state.end_attempt(attempt.token, accounts.FORGOTTEN)
    for kept in lost.disks:
        disks.record_removed(context, kept.disk)


def note_forgotten(context: LabContext, lab_id: str, server_id: str) -> None:
    """Record that from now on, the server's absence counts as its end."""
    context.state.record(accounts.FORGOTTEN, lab_id=lab_id, server_id=server_id)
