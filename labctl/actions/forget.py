"""Giving up on what nobody can ask about any more, such as servers of a closed account."""

from __future__ import annotations

from labctl.actions import Decision, accounts, disks
from labctl.actions.bills import still_billing
from labctl.actions.ground import Ground
from labctl.errors import NotFoundError, PolicyError
from labctl.model import Server, Value
from labctl.state import Attempt


class Forgotten(Value, frozen=True):
    """What is no longer on record: ids of servers and of kept disks, and tokens of attempts."""

    servers: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()


def forget(ground: Ground) -> Forgotten:
    """Drop the lab's records of what these credentials do not show. Nothing is ended.

    PolicyError where the person says no, NotFoundError where there is nothing to forget. Servers
    of other providers stay on record.
    """
    with ground.state.exclusive(ground.lab_id, "down"):
        servers = [one for one in ground.state.servers(ground.lab_id) if _is_lost(ground, one)]
        attempts = [
            one for one in ground.state.open_attempts(ground.lab_id) if _is_elsewhere(ground, one)
        ]
        kept = [one for one in disks.on_record(ground.state, ground.lab_id) if one.missed_at]
        if not (servers or attempts or kept):
            raise NotFoundError(
                f"there is nothing of {ground.config.name} to forget",
                why=f"{ground.provider.name} shows all that is on record, or nothing is",
                hint="labctl down",
            )
        _agree(ground, len(servers) + len(attempts) + len(kept))
        for server in servers:
            ground.connections.close(server)
            ground.connections.forget(server.id)
            ground.state.drop_server(server.id)
            ground.state.record(accounts.FORGOTTEN, lab_id=server.lab_id, server_id=server.id)
        for attempt in attempts:
            ground.state.end_attempt(attempt.token, accounts.FORGOTTEN)
        for one in kept:
            disks.removed(ground, one.disk)
        return Forgotten(
            servers=tuple(one.id for one in servers),
            attempts=tuple(one.token for one in attempts),
            disks=tuple(one.disk.id for one in kept),
        )


def _is_lost(ground: Ground, server: Server) -> bool:
    """Whether nobody can say what became of it. What has ended in this account, `down` drops."""
    if server.provider != ground.provider.name:
        return False
    if accounts.is_elsewhere(ground, server.account):
        return True
    costs = bool(server.offer.price_usd_per_hour)
    attributed = accounts.is_attributed(ground, server.account, costs=costs)
    return not attributed and ground.provider.find(server.id) is None


def _is_elsewhere(ground: Ground, attempt: Attempt) -> bool:
    mine = attempt.provider == ground.provider.name
    return mine and accounts.is_elsewhere(ground, attempt.account)


def _agree(ground: Ground, count: int) -> None:
    what = "one record" if count == 1 else f"{count} records"
    asked = Decision(
        question=f"forget {what} of {ground.config.name} without ending anything?",
        detail="\n".join(
            ["What still exists goes on billing:", *still_billing(ground, ground.lab_id)]
        ),
    )
    if not ground.reporter.ask(asked):
        raise PolicyError(
            "nothing was forgotten", why="it was not agreed to", hint="labctl down --forget --yes"
        )
