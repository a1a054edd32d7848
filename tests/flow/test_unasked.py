"""A recovery's server may cost what was agreed to before, and nobody is asked about that again."""

from __future__ import annotations

import pytest
from lab_world import LAB_ID, Recorded, World

from labctl.errors import NoOfferError, PolicyError
from labctl.lifecycle import spending_policy, up
from labctl.model import GpuNeed, Need, Offer, Run, Server
from labctl.servers import attempts, guard, price_consent
from labctl.servers.chosen_need import choose_need
from labctl.wire.codec import to_json
from labctl.wire.watchdog import GuardLimits

RUN = "night"


def ready(lab: World, price: float) -> None:
    lab.cloud.price = price
    context = lab.context(Recorded())
    spending_policy.record_price_limit(
        context, attempts.create_server(context, context.config.server.need), RUN
    )


def again(lab: World, price: float) -> tuple[Server, Recorded]:
    """Another server for the run, and what was asked meanwhile."""
    lab.cloud.price = price
    reporter = Recorded(answers=[False])
    context = spending_policy.make_recovery_context(lab.context(reporter), RUN)
    return attempts.create_server(context, context.config.server.need), reporter


def test_about_the_same_price_is_not_asked_about(lab: World) -> None:
    ready(lab, 0.40)
    server, reporter = again(lab, 0.49)
    assert server.offer.price_usd_per_hour == 0.49
    assert reporter.asked == []


def test_a_dearer_one_is_not_made(lab: World) -> None:
    ready(lab, 0.40)
    before = len(lab.cloud.machines)
    with pytest.raises(NoOfferError):
        again(lab, 0.51)
    assert len(lab.cloud.machines) == before


def test_the_limits_of_an_earlier_up_hold_for_a_recovery_too(lab: World) -> None:
    """`labctl up --ttl 8h --budget 5 --idle 30m` names them; `labctl run --recover` does not."""
    ready(lab, 0.40)
    server = next(iter(lab.cloud.machines.values()))
    given = GuardLimits(ttl_s=28800.0, idle_s=1800.0, budget_usd=4.2, budget_whole_usd=5.0)
    detail = {"limits": to_json(given)}
    state = lab.context().state
    state.record(guard.EVENT, lab_id=LAB_ID, server_id=server.id, detail=detail)
    state.save_run(Run(id=RUN, lab_id=LAB_ID, server_id=server.id, state="lost"))
    need = spending_policy.make_recovery_context(lab.context(), RUN).config.server.need
    assert (need.ttl_s, need.idle_s, need.budget_usd) == (28800, 1800, 5.0)
    own = lab.context(need=Need(ttl_s=60))
    need = spending_policy.make_recovery_context(own, RUN).config.server.need
    assert (need.ttl_s, need.idle_s, need.budget_usd) == (60, 1800, None)
    # A run without --recover, whose price is asked about.
    state.save_run(Run(id="plain", lab_id=LAB_ID, server_id=server.id, state="lost"))
    need = spending_policy.make_recovery_context(lab.context(), "plain").config.server.need
    assert (need.ttl_s, need.budget_usd, need.max_price_usd_per_hour) == (28800, 5.0, None)


def test_what_nobody_agreed_to_is_asked_about(lab: World) -> None:
    with pytest.raises(PolicyError, match="nothing was started"):
        again(lab, 0.40)


def test_the_price_on_demand_is_agreed_to_with_a_spot_machine() -> None:
    offer = Offer(
        provider="cloud", type="s", price_usd_per_hour=0.1, on_demand_usd_per_hour=0.4, spot=True
    )
    assert price_consent.max_confirmed_usd_per_hour(offer) == 0.4
    assert (
        price_consent.max_confirmed_usd_per_hour(Offer(provider="local", type="container")) is None
    )


def test_what_the_options_of_up_asked_for_holds_for_every_recovery(lab: World) -> None:
    """`labctl up --gpu none --spot only --max-price 0.6`, then two recoveries."""
    lab.cloud.price = 0.4
    wanted = Need(gpu=GpuNeed(kind="none"), spot="only", max_price_usd_per_hour=0.6)
    first = lab.context(Recorded())
    first = first.make_sibling(choose_need(first.config, wanted), LAB_ID, reporter=Recorded())
    server = up.up(first)
    for _ in range(2):
        run = Run(id=RUN, lab_id=LAB_ID, server_id=server.id, state="lost")
        first.state.save_run(run)
        spending_policy.record_price_limit(first, server, RUN)
        context = spending_policy.make_recovery_context(lab.context(Recorded()), RUN)
        need = context.config.server.need
        assert (need.gpu.kind, need.spot, need.max_price_usd_per_hour) == ("none", "only", 0.6)
        lab.cloud.terminate(server.id)
        server = up.up(context)
