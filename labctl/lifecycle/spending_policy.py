"""The limits of servers that a recovery creates without asking, since no user may be there."""

from __future__ import annotations

import msgspec

from labctl.config import LabConfig
from labctl.events import AGREE_TO_COSTS, AGREE_TO_PRICES, PolicyReporter
from labctl.model import Need, Server
from labctl.servers import chosen_need, guard, provider_choice, unguarded_cost
from labctl.servers.context import LabContext
from labctl.servers.price_consent import max_confirmed_usd_per_hour
from labctl.servers.provider_choice import RECOVERABLE


def record_price_limit(context: LabContext, server: Server, run_id: str) -> None:
    """Record the price limit of another server for this run, derived from this server's price.

    Also record whether the user has agreed to costs that nothing at the provider ends.
    """
    provider = provider_choice.select_provider(context, server.provider).provider
    detail = {
        "most_usd_per_hour": max_confirmed_usd_per_hour(server.offer),
        "unguarded": not unguarded_cost.has_billing_guard(provider),
    }
    context.state.record(
        RECOVERABLE, lab_id=context.lab_id, server_id=server.id, run_id=run_id, detail=detail
    )


def make_recovery_context(context: LabContext, run_id: str) -> LabContext:
    """Return a context in which a server for the run is created without asking, up to a limit.

    The server gets the limits of the run's last one, and what options of `up` asked for it. The
    price limit is max_price, if set, else the recorded one, and the lower of both where nothing
    ended the costs of the run's server; dearer offers are left out. If no price limit was recorded
    for this run, labctl asks the user about every price. Costs that nothing at a provider ends need
    the user's consent again, unless the run's server had such costs too.
    """
    agreements = context.state.list_events(
        lab_id=context.lab_id, run_id=run_id, kind=RECOVERABLE, limit=1
    )
    config, need = _restore_server_options(context, run_id)
    config = provider_choice.restore_candidates(context, config)
    if agreements:
        detail, most = agreements[0].detail, need.max_price_usd_per_hour
        limit: float | None = detail.get("most_usd_per_hour")
        # A typed cost is that of the run's server: max_price is no consent to a higher one.
        if most is None or (limit is not None and detail.get("unguarded") and limit < most):
            need = msgspec.structs.replace(need, max_price_usd_per_hour=limit)
    server = msgspec.structs.replace(config.server, need=need)
    config = msgspec.structs.replace(config, server=server)
    reporter = context.reporter
    if agreements and need.max_price_usd_per_hour is not None:
        policy = AGREE_TO_COSTS if detail.get("unguarded") else AGREE_TO_PRICES
        reporter = PolicyReporter(reporter.emit, policy, reporter)
    return context.make_sibling(config, context.lab_id, reporter=reporter)


def _restore_server_options(context: LabContext, run_id: str) -> tuple[LabConfig, Need]:
    """Return the configuration, and the need with the limits of the run's last server."""
    run = context.state.get_run(context.lab_id, run_id)
    if run is None:
        return context.config, context.config.server.need
    config = chosen_need.restore_need(context, run.server_id)
    need = config.server.need
    restored = guard.restore_limits(context, need, run.server_id)
    if need.budget_usd is None and restored.budget_usd is not None and context.rank is None:
        # Each of several servers has an equal part.
        budget_usd = restored.budget_usd * config.server.count
        restored = msgspec.structs.replace(restored, budget_usd=budget_usd)
    return config, restored
