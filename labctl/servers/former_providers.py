"""Providers that a lab has used before: what was left there goes when the lab ends."""

from __future__ import annotations

import msgspec

from labctl.model import Value
from labctl.servers import end_server
from labctl.servers.context import LabContext
from labctl.servers.end_server import Removal
from labctl.servers.members import ask_each, list_member_names

# Kind of the ledger's line about a former provider at which nothing of the lab is left.
SWEPT = "provider swept"


class FormerRemovals(Value, frozen=True):
    """What is still there at each provider, and why others could not be reached, by provider."""

    removals: tuple[Removal, ...] = ()
    failures: dict[str, str] = msgspec.field(default_factory=dict)


def sweep_former_providers(context: LabContext) -> FormerRemovals:
    """Remove what the lab has left at paid providers other than its present one.

    If the present one is a market, that includes all providers behind it. A later call
    repeats this for one that cannot be asked.
    """
    former = _list_former_providers(context)
    names = dict.fromkeys([*former, *list_member_names(context)])
    answers = ask_each(context, names, end_server.sweep)
    for name, removal in answers.by_provider.items():
        if name in former and not (removal.survivors or removal.leftovers):
            detail = {"provider": name}
            context.state.record(SWEPT, lab_id=context.lab_id, detail=detail)
    return FormerRemovals(removals=tuple(answers.by_provider.values()), failures=answers.failures)


def _list_former_providers(context: LabContext) -> list[str]:
    """List the other providers of the lab's paid servers, since they were last swept."""
    numbers: dict[str, int] = {}
    for kind in ("created", "adopted"):
        for line in context.state.list_events(lab_id=context.lab_id, kind=kind):
            if line.detail.get("price_usd_per_hour"):
                name = str(line.detail.get("provider", ""))
                numbers[name] = max(line.number, numbers.get(name, 0))
    for line in context.state.list_events(lab_id=context.lab_id, kind=SWEPT):
        name = str(line.detail["provider"])
        if line.number > numbers.get(name, 0):
            numbers.pop(name, None)
    return [name for name in numbers if name not in ("", context.provider.name)]
