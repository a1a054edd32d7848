"""auto and fallback: one server, at the first provider that has one."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID
from market_bed import MarketWires, MarketWorld, make_market

from labctl import providers
from labctl.cli.down_output import find_exit_code
from labctl.commands.lease import Holder
from labctl.config import list_trust_questions
from labctl.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    CredentialsError,
    InterruptError,
    LabError,
    LinkLostError,
    PolicyError,
    QuotaError,
)
from labctl.events import Question, Step
from labctl.keeper import recovery_worker
from labctl.lifecycle import recover, spending_policy
from labctl.lifecycle.down import down
from labctl.model import Endpoint, GpuNeed, Need, Offer, Resource, Server
from labctl.providers import auto
from labctl.servers import affordable_offers, attempts, leftovers, market
from labctl.servers.provider_choice import select_provider
from labctl.transports.fake import FakeTransport


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarketWorld:
    for name in ("alpha", "beta"):
        monkeypatch.setitem(providers.BUILT_IN, name, f"market_bed:{name.capitalize()}")
    monkeypatch.setattr(auto, "list_provider_names", lambda: ["alpha", "auto", "beta"])
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.2)
    return make_market(tmp_path)


def _ask(lab: MarketWorld) -> list[str]:
    return [question.question for question in lab.reporter.asked if question.about == "price"]


def test_the_cheapest_is_taken_and_later_commands_use_its_provider(clouds: MarketWorld) -> None:
    server = clouds.up()
    assert (server.provider, clouds.list_servers()) == ("beta", ["beta small"])
    assert "beta small on demand, $0.40/h: the cheapest of 2 offers" in clouds.reporter.said
    assert _ask(clouds)[0].startswith("start beta small on demand for $0.40/h")
    context = clouds.context()
    assert (context.provider.name, context.config.server.candidates) == ("beta", ("auto",))
    assert clouds.up().id == server.id
    assert down(clouds.context(), discard=False).removed == server.id
    assert clouds.list_servers() == []
    assert clouds.context().provider.name == "auto"


@pytest.mark.parametrize("error", [CapacityError, QuotaError, CredentialsError])
def test_a_provider_that_refuses_is_followed_by_the_next(
    clouds: MarketWorld, error: type[LabError]
) -> None:
    clouds.beta.create_error = error("not here")
    assert clouds.up().provider == "alpha"
    assert clouds.list_servers() == ["alpha small"]
    assert clouds.state.list_open_attempts() == []
    questions = _ask(clouds)
    assert [text.split()[1] for text in questions] == ["beta", "alpha"], "each price is confirmed"


def test_a_request_with_an_unknown_outcome_ends_the_search(clouds: MarketWorld) -> None:
    clouds.beta.create_errors = [BusyError("no reply")] * 99
    with pytest.raises(BusyError):
        clouds.up()
    assert clouds.list_servers() == []
    assert [attempt.provider for attempt in clouds.state.list_open_attempts()] == ["beta"]
    clouds.beta.create_errors.clear()
    clouds.alpha.price = 0.1  # another one is cheaper by now; the request is repeated all the same
    assert clouds.up().provider == "beta"
    assert clouds.list_servers() == ["beta small"]


def test_a_lost_reply_makes_one_server(clouds: MarketWorld) -> None:
    clouds.beta.loses_reply = True
    with pytest.raises(LinkLostError):
        clouds.up()
    assert clouds.list_servers() == ["beta small"]
    clouds.alpha.price = 0.1
    assert clouds.up().provider == "beta"
    assert clouds.list_servers() == ["beta small"]


def test_a_wait_for_all_providers_says_so(clouds: MarketWorld) -> None:
    clouds.load().up()
    waits = [one.name for one in clouds.reporter.events if isinstance(one, Step)]
    assert "checking all providers" in waits
    assert "looking for a server (all providers)" in waits


def test_a_user_who_declines_starts_nothing_elsewhere(clouds: MarketWorld) -> None:
    lab = clouds.load()
    clouds.reporter.answers = [True, False]
    with pytest.raises(PolicyError, match="nothing was started"):
        lab.up()
    assert clouds.list_servers() == []


def test_costs_that_nothing_ends_are_passed_over_if_nobody_agrees(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(clouds.beta), "ends_billing", frozenset(), raising=False)
    lab = clouds.load()
    clouds.reporter.answers = [True, True, False, True]
    lab.up()
    assert clouds.list_servers() == ["alpha small"]
    kinds = [one.about for one in clouds.reporter.asked]
    assert kinds[1:] == ["price", "billing", "price"]
    assert "nothing was started at beta: its costs were not confirmed" in clouds.reporter.said


def test_a_typed_cost_is_no_consent_to_a_much_dearer_offer(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maximum price allows dearer offers, but nobody has typed what theirs would cost."""
    monkeypatch.setattr(type(clouds.beta), "ends_billing", frozenset(), raising=False)
    prices = {"small": 0.4, "alike": 0.45, "huge": 9.0}
    clouds.beta.list_offers = lambda need: [
        Offer(provider="beta", type=kind, price_usd_per_hour=price)
        for kind, price in prices.items()
    ]
    clouds.beta.create_errors = [CapacityError("no room"), CapacityError("no room")]
    clouds.write("{provider: beta, max_price: 10}")
    clouds.up()
    asked = [one.typed for one in clouds.reporter.asked if one.about == "billing"]
    assert asked == ["288.00", "6480.00"]


def test_an_interrupted_request_that_cannot_be_repeated_waits_for_the_list(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a cloud creates a machine for each request, a list that lags must not cause another."""
    monkeypatch.setattr(type(clouds.beta), "creates_by_list", True, raising=False)
    clouds.beta.settle_s = 60.0
    clouds.beta.interrupt_after_create = True
    with pytest.raises(InterruptError):
        clouds.up()
    clouds.beta.interrupt_after_create = False
    list_all, calls = clouds.beta.servers, iter(range(3))
    monkeypatch.setattr(clouds.beta, "servers", lambda: list_all() if next(calls, 9) == 9 else [])
    server = clouds.up()
    assert (server.id, len(clouds.beta.tried)) == (next(iter(clouds.beta.machines)), 1)
    assert clouds.state.list_open_attempts(LAB_ID) == []


def test_a_recovery_stays_near_a_typed_cost_whatever_the_maximum_price(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds.write("{provider: auto, max_price: 10}")
    server = clouds.up()
    context = clouds.context()
    spending_policy.record_price_limit(context, server, "night")
    need = spending_policy.make_recovery_context(context, "night").config.server.need
    assert need.max_price_usd_per_hour == 10
    monkeypatch.setattr(type(clouds.beta), "ends_billing", frozenset(), raising=False)
    spending_policy.record_price_limit(context, server, "night")
    need = spending_policy.make_recovery_context(context, "night").config.server.need
    assert need.max_price_usd_per_hour == 0.5


def test_a_recovery_needs_new_consent_to_costs_that_nothing_ends(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = clouds.up()
    context = clouds.context()
    spending_policy.record_price_limit(context, server, "night")
    reporter = spending_policy.make_recovery_context(context, "night").reporter
    monthly = Question(question="type $300", detail="", about="billing", typed="$300")
    clouds.reporters[-1].answers = [False]
    assert not reporter.confirm(monthly)
    monkeypatch.setattr(type(clouds.beta), "ends_billing", frozenset(), raising=False)
    spending_policy.record_price_limit(context, server, "night")
    reporter = spending_policy.make_recovery_context(context, "night").reporter
    assert reporter.confirm(monthly), "the user typed the cost of the lost server"


def test_a_provider_that_fails_or_is_slow_is_one_line(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "OFFERS_S", 0.3)

    def list_late(need: Need) -> list[Offer]:
        time.sleep(2)
        return []

    clouds.alpha.list_offers = list_late
    context = clouds.context()
    listing = market.list_market(context, Need())
    assert listing is not None
    assert [row.offer.provider for row in listing.offers] == ["beta"]
    assert "no reply within" in listing.failures["alpha"]
    clouds.alpha.list_offers = lambda need: 1 / 0  # type: ignore[assignment, return-value]
    assert clouds.up().provider == "beta"


def test_rows_have_the_price_of_work_and_the_boots_of_this_machine(clouds: MarketWorld) -> None:
    clouds.up()
    offer = Offer(
        provider="alpha", type="big", gpu_name="T4", gpu_count=2, gpu_memory_bytes=16 * 1024**3,
        price_usd_per_hour=1.3, region="north",
    )  # fmt: skip
    clouds.alpha.list_offers = lambda need: [offer]
    context = select_provider(clouds.context(), "auto")
    listing = market.list_market(context, Need())
    assert listing is not None
    rows = {row.offer.provider: row for row in listing.offers}
    assert rows["alpha"].usd_per_pflop_hour == pytest.approx(1.3 / 0.13)
    assert rows["beta"].usd_per_pflop_hour is None
    assert rows["beta"].boot_s is not None
    assert rows["alpha"].boot_s is None
    assert (rows["alpha"].timer, rows["alpha"].is_live) == ("no", True)


def test_without_credentials_only_a_catalog_is_shown(clouds: MarketWorld) -> None:
    class Cataloged:
        def list_catalog_offers(self, need: Need) -> list[Offer]:
            return [Offer(provider="alpha", type="small", price_usd_per_hour=0.1, priced_at=1.0)]

    kind = type("Alpha", (type(clouds.alpha), Cataloged), {"check_credentials": lambda self: None})
    clouds.alpha.__class__ = kind
    clouds.alpha.has_credentials = False
    context = clouds.context()
    listing = market.list_market(context, Need())
    assert listing is not None
    assert [(row.offer.provider, row.is_live) for row in listing.offers] == [
        ("alpha", False),
        ("beta", True),
    ]
    assert clouds.up().provider == "beta", "nobody can create a server from a catalog"


def test_fallback_tries_providers_in_order(clouds: MarketWorld) -> None:
    clouds.write("{provider: alpha, fallback: [beta]}")
    assert clouds.up().provider == "alpha", "beta is cheaper, and comes second"
    down(clouds.context(), discard=True)
    clouds.alpha.create_error = QuotaError("no quota")
    server = clouds.up()
    assert (server.provider, clouds.list_servers()) == ("beta", ["beta small"])
    assert "alpha: no quota; trying beta" in clouds.reporter.said
    context = clouds.context()
    assert context.provider.name == "beta", "later commands"
    assert context.config.server.candidates == ("alpha", "beta")
    down(context, discard=True)
    assert clouds.list_servers() == []
    clouds.alpha.create_error = None
    assert clouds.up().provider == "alpha"


def test_fallback_passes_over_machines_that_others_hold(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder(token="aa", lab="letters", lab_id="b0b", owner="bob", created_at=5.0)
    owner = msgspec.json.encode(holder).decode()[1:]
    state = f'state held\nleft 7200\nowner {{"boot_id":"x","expires_s":9,{owner}\n'
    machine = FakeTransport(Endpoint(host="gpu1", host_key="k")).reply("action=show", state)
    monkeypatch.setattr(MarketWires, "connect", lambda wires, endpoint: machine)
    monkeypatch.setattr(MarketWires, "settle_host_key", lambda wires, endpoint, user: endpoint)
    clouds.write("{provider: static, static: {hosts: [gpu1]}, fallback: [beta]}")
    assert clouds.up().provider == "beta"
    assert "static: the machine is in use: gpu1: held by bob for letters" in clouds.reporter.said
    down(clouds.context(), discard=True)
    clouds.beta.create_error = CapacityError("beta is full")
    with pytest.raises(CapacityError, match="static or beta") as caught:
        clouds.up()
    assert "held by bob" in caught.value.why


def test_fallback_that_fails_everywhere_names_each_reason(clouds: MarketWorld) -> None:
    clouds.write("{provider: alpha, fallback: [beta]}")
    clouds.alpha.create_error = CapacityError("alpha is full")
    clouds.beta.create_error = QuotaError("beta has no quota")
    with pytest.raises(CapacityError, match="alpha or beta") as caught:
        clouds.up()
    assert "no small" in caught.value.why
    assert "beta has no quota" in caught.value.why


def test_fallback_waits_for_a_request_with_an_unknown_outcome(clouds: MarketWorld) -> None:
    clouds.write("{provider: alpha, fallback: [beta]}")
    clouds.alpha.create_errors = [BusyError("no reply")] * 99
    with pytest.raises(BusyError):
        clouds.up()
    assert clouds.list_servers() == []
    clouds.alpha.create_errors = [CredentialsError("expired")]
    with pytest.raises(CredentialsError):  # says nothing of the earlier request
        clouds.up()
    assert clouds.list_servers() == []


def test_a_stranger_cannot_have_a_fallback_use_its_settings_unapproved(clouds: MarketWorld) -> None:
    clouds.write("{provider: local, fallback: [aws], aws: {ami: ami-12345678}}")
    (question,) = list_trust_questions(clouds.load().config)
    assert "use a server from local or aws, a shared or paid machine" in question
    assert "ami" in question
    clouds.write("{provider: auto, aws: {ami: ami-12345678}}")
    (question,) = list_trust_questions(clouds.load().config)
    assert "use a server from auto" in question
    assert "ami" in question


def test_an_option_selects_one_provider_alone(clouds: MarketWorld) -> None:
    clouds.write("{provider: alpha, fallback: [beta]}")
    clouds.alpha.create_error = CapacityError("full")
    with pytest.raises(CapacityError):
        clouds.up(provider="alpha")
    assert clouds.list_servers() == []


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("{provider: alpha, fallback: [nowhere]}", "no provider called"),
        ("{provider: alpha, fallback: [slurm]}", "cannot replace"),
        ("{provider: auto, count: 2}", "come from one provider"),
        ("{provider: alpha, fallback: [beta], count: 2}", "come from one provider"),
    ],
)
def test_what_cannot_work_is_said_at_once(clouds: MarketWorld, section: str, text: str) -> None:
    clouds.write(section)
    with pytest.raises(ConfigError) as caught:
        clouds.load()
    assert any(text in problem.message for problem in caught.value.problems)


def test_without_records_the_server_is_found_where_it_is(clouds: MarketWorld) -> None:
    clouds.write("{provider: alpha, fallback: [beta]}")
    clouds.alpha.create_error = QuotaError("no quota")
    server = clouds.up()
    clouds.places.database.unlink()
    clouds.alpha.create_error = None
    assert clouds.up().id == server.id
    clouds.write("{provider: auto}")
    clouds.places.database.unlink()
    assert clouds.up().id == server.id
    assert clouds.list_servers() == ["beta small"]


def test_a_machine_type_rules_out_the_others(clouds: MarketWorld) -> None:
    clouds.alpha.kinds = ["small", "large"]
    assert clouds.up(type="large").offer.type == "large"
    assert clouds.list_servers() == ["alpha large"]


def test_a_recovery_takes_another_provider_by_the_same_rule(clouds: MarketWorld) -> None:
    server = clouds.up()
    assert server.provider == "beta"
    context = clouds.context()
    del clouds.beta.machines[server.id]
    clouds.beta.create_error = CapacityError("none left")
    again = recover.up.up(recover.make_recovery_context(context, "night"))
    assert again.provider == "alpha"
    assert clouds.list_servers() == ["alpha small"]
    assert clouds.context().provider.name == "alpha"
    assert [one.id for one in clouds.state.list_servers(LAB_ID)] == [again.id]
    left = Resource(provider="beta", kind="key", id="key-1", lab_id=LAB_ID)
    clouds.beta.left.append(left)
    assert down(clouds.context(), discard=True).leftovers == ()
    assert clouds.beta.left == [], "what the lab left at its earlier provider goes too"


def test_gpu_need_reaches_every_provider(clouds: MarketWorld) -> None:
    gpu = GpuNeed(kind="any", count=1)
    with pytest.raises(LabError, match="no provider has a server") as caught:
        affordable_offers.list_affordable_offers(clouds.context(), Need(gpu=gpu))
    assert "alpha: no offer fits" in caught.value.why


def _leave_key(clouds: MarketWorld) -> Resource:
    left = Resource(provider="beta", kind="key", id="key-1", lab_id=LAB_ID)
    clouds.beta.left.append(left)
    return left


def test_orphans_of_a_provider_that_fails_are_one_line_and_the_others_are_listed(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = clouds.up()
    left = _leave_key(clouds)

    def fail() -> list[Server]:
        raise CredentialsError("the key has expired", why="HTTP 401")

    monkeypatch.setattr(clouds.alpha, "servers", fail)
    context = select_provider(clouds.context(), "auto")
    listed = leftovers.find_orphans(context)
    assert listed.failures == {"alpha": "the key has expired: HTTP 401"}
    assert ([one.id for one in listed.servers], listed.resources) == ([server.id], (left,))
    rest = leftovers.end_orphans(context, listed, kept_too=False)
    assert (rest.servers, rest.resources, clouds.list_servers()) == ((), (), [])
    assert rest.failures == listed.failures
    assert len(clouds.reporter.asked) == 1


def test_orphans_names_a_provider_whose_credentials_are_gone(clouds: MarketWorld) -> None:
    clouds.up()
    clouds.beta.__class__ = type(
        "Beta", (type(clouds.beta),), {"check_credentials": lambda self: None}
    )
    clouds.beta.has_credentials = False
    listed = leftovers.find_orphans(select_provider(clouds.context(), "auto"))
    assert (listed.servers, listed.failures) == ((), {"beta": auto.NO_CREDENTIALS})


@pytest.mark.parametrize("has_state", [True, False])
def test_down_says_which_provider_it_could_not_ask(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch, *, has_state: bool
) -> None:
    """Without a server on record, what the lab left is looked for at every provider."""
    clouds.up()
    down(clouds.context(), discard=True)
    if not has_state:
        clouds.places.database.unlink()
    _leave_key(clouds)

    def fail() -> list[Server]:
        raise BusyError("the cloud is down")

    monkeypatch.setattr(clouds.alpha, "servers", fail)
    result = down(clouds.context(), discard=False)
    assert (result.failures, clouds.beta.left) == ({"alpha": "the cloud is down"}, [])
    assert (result.removed, result.leftovers) == ("", ())
    assert find_exit_code(result) == 75
    assert clouds.up().provider == "beta", "one that fails keeps nobody from a server elsewhere"


def test_a_keeper_does_not_call_a_lab_swept_while_one_provider_cannot_be_asked(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds.up()
    down(clouds.context(), discard=True)
    _leave_key(clouds)

    def fail() -> list[Server]:
        raise BusyError("the cloud is down")

    with monkeypatch.context() as broken:
        broken.setattr(clouds.alpha, "servers", fail)
        with pytest.raises(BusyError, match="left at alpha is not known"):
            recovery_worker.sweep(clouds.context())
    assert clouds.beta.left == []
    swept = {"lab_id": LAB_ID, "kind": recovery_worker.SWEPT}
    assert not clouds.state.list_events(**swept)
    recovery_worker.sweep(clouds.context())
    assert clouds.state.list_events(**swept)
