"""Giving up on what nobody can ask about any more, such as servers of a closed account."""

from __future__ import annotations

from collections.abc import Iterable

from labctl.errors import NotFoundError, PolicyError
from labctl.events import Decision
from labctl.model import Server, Value
from labctl.servers import accounts, disks
from labctl.servers.context import Ground
from labctl.state import Attempt
from labctl.state.disks import KeptDisk, list_kept_disks


class Lost(Value, frozen=True):
    """Records of what the credentials in use do not show, and nobody knows to have ended."""

    servers: tuple[Server, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    disks: tuple[KeptDisk, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *(one.id for one in self.servers),
            *(f"attempt {one.token}" for one in self.attempts),
            *(one.disk.id for one in self.disks),
        )


def forget(ground: Ground) -> Lost:
    """Drop the lab's records of what these credentials do not show. Nothing is ended.

    PolicyError where the person says no, NotFoundError where there is nothing to forget. What
    other providers have stays on record.
    """
    with ground.state.exclusive(ground.lab_id, "down"):
        lost = find_lost(ground, [ground.lab_id])
        require_consent(ground, lost.names, "labctl down")
        drop(ground, lost)
        return lost


def find_lost(ground: Ground, lab_ids: Iterable[str]) -> Lost:
    """What of these labs nobody can tell the end of. What has ended in this account, `down` drops.

    Asks the provider about servers whose account is not on record.
    """
    state, name = ground.state, ground.provider.name
    labs = list(lab_ids)
    servers = [one for lab in labs for one in state.servers(lab) if one.provider == name]
    attempts = [one for lab in labs for one in state.open_attempts(lab) if one.provider == name]
    kept = [one for lab in labs for one in list_kept_disks(state, lab)]
    return Lost(
        servers=tuple(
            one
            for one in servers
            if is_lost(ground, one.id, one.account, one.offer.price_usd_per_hour)
        ),
        attempts=tuple(one for one in attempts if accounts.is_elsewhere(ground, one.account)),
        disks=tuple(
            one
            for one in kept
            if one.disk.provider == name
            and (one.missed_at or accounts.is_elsewhere(ground, one.disk.account))
        ),
    )


def is_lost(ground: Ground, server_id: str, account: str, usd_per_hour: float) -> bool:
    if accounts.is_elsewhere(ground, account):
        return True
    attributed = accounts.is_attributed(ground, account, costs=bool(usd_per_hour))
    return not attributed and ground.provider.find(server_id) is None


def require_consent(ground: Ground, names: Iterable[str], command: str) -> None:
    """NotFoundError where there are no names, PolicyError where the person says no."""
    listed = list(names)
    if not listed:
        raise NotFoundError(
            f"there is nothing of {ground.config.name} to forget",
            why=f"{ground.provider.name} can be asked about all that is on record",
            hint=command,
        )
    what = "one record" if len(listed) == 1 else f"{len(listed)} records"
    asked = Decision(
        question=f"forget {what} of {ground.config.name} without ending anything?",
        detail="\n".join(
            [*listed, "Whatever still exists keeps billing, and labctl never ends it."]
        ),
    )
    if not ground.reporter.ask(asked):
        raise PolicyError(
            "nothing was forgotten", why="it was not agreed to", hint=f"{command} --forget --yes"
        )


def drop(ground: Ground, lost: Lost) -> None:
    for server in lost.servers:
        ground.connections.close(server)
        ground.connections.forget(server.id)
        ground.state.drop_server(server.id)
        note_forgotten(ground, server.lab_id, server.id)
    for attempt in lost.attempts:
        ground.state.end_attempt(attempt.token, accounts.FORGOTTEN)
    for one in lost.disks:
        disks.removed(ground, one.disk)


def note_forgotten(ground: Ground, lab_id: str, server_id: str) -> None:
    """Write down that its absence counts as its end from now on."""
    ground.state.record(accounts.FORGOTTEN, lab_id=lab_id, server_id=server_id)
