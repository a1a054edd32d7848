"""What a recovery may spend without asking, since nobody may be there to be asked."""

from __future__ import annotations

import msgspec

from labctl.events import Decision, Event, Reporter
from labctl.model import Server
from labctl.servers.attempts import agreed_usd_per_hour
from labctl.servers.context import Ground

EVENT = "recoverable"


class _Agreed:
    """A Reporter whose person has agreed to prices before; all else is asked as ever."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def emit(self, event: Event) -> None:
        self._reporter.emit(event)

    def ask(self, decision: Decision) -> bool:
        return decision.about == "price" or self._reporter.ask(decision)


def agree(ground: Ground, server: Server, run_id: str) -> None:
    """Write down what another server for this run may cost: what this one's price allows."""
    most = agreed_usd_per_hour(server.offer)
    detail = {"most_usd_per_hour": most}
    ground.state.record(
        EVENT, lab_id=ground.lab_id, server_id=server.id, run_id=run_id, detail=detail
    )


def unasked(ground: Ground, run_id: str) -> Ground:
    """The ground on which another server is made for the run: dearer offers do not exist there.

    lab.yaml's own max_price, where it names one, is the limit. Where nothing was agreed to for this
    run, every price is asked about.
    """
    need = ground.config.server.need
    said = ground.state.events(lab_id=ground.lab_id, run_id=run_id, kind=EVENT, limit=1)
    most = need.max_price_usd_per_hour
    if most is None and said:
        most = said[0].detail.get("most_usd_per_hour")
    if most is None or not said:
        return ground
    need = msgspec.structs.replace(need, max_price_usd_per_hour=most)
    server = msgspec.structs.replace(ground.config.server, need=need)
    config = msgspec.structs.replace(ground.config, server=server)
    return ground.beside(config, ground.lab_id, reporter=_Agreed(ground.reporter))
