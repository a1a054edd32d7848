"""Consent to the costs of a server that no guard at its provider ends."""

from __future__ import annotations

from labctl.errors import UnguardedCostError
from labctl.events import Question
from labctl.providers import Provider
from labctl.servers import deadlines
from labctl.servers.context import LabContext
from labctl.servers.cost import HOUR_S
from labctl.text import dollars_text, duration_text

KEEPER_ENDS_IT = (
    "with `store:` in lab.yaml, a keeper ends it 10 min after it has powered itself off: "
    "labctl run --recover --keeper HOST"
)


def has_billing_guard(provider: Provider) -> bool:
    """Whether something ends a server's costs in time without labctl on the user's machine."""
    return deadlines.is_guarded_elsewhere(provider) or deadlines.can_end_billing(provider)


def confirm_unguarded_cost(context: LabContext, price_usd_per_hour: float) -> None:
    """Have the user type the monthly cost if none of the provider's guards ends billing.

    UnguardedCostError if the user does not.
    """
    provider = context.provider
    if has_billing_guard(provider):
        return
    price, down = price_usd_per_hour, context.subject.end_all
    worst, typed = deadlines.worst_cost(price), deadlines.month_usd(price)
    text = f"no guard at {provider.name} stops these costs: {worst}, until {down}"
    if span := deadlines.ttl_s(context.config.server.need, price):
        planned = dollars_text(price * span / HOUR_S)
        text += f"\nif you run {down} by the deadline, in {duration_text(span)}: {planned}"
    if context.subject.kind == "lab":
        text += f"\n{KEEPER_ENDS_IT}"
    question = f"to start it anyway, type {typed}"
    if not context.reporter.confirm(
        Question(question=question, detail=text, about="billing", typed=typed)
    ):
        raise UnguardedCostError(
            f"nothing was started at {provider.name}: its costs were not confirmed",
            why=text,
            hint=f"{context.subject.up}   # in a terminal, to type the cost",
        )
