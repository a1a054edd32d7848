"""`labctl orphans --provider auto`: what labctl created at all providers."""

from __future__ import annotations

from pathlib import Path

import pytest
from market_bed import MarketWorld, make_market

from labctl import providers
from labctl.errors import CredentialsError
from labctl.providers import auto
from labctl.servers.context import LabContext
from labctl.servers.leftovers import end_orphans, find_orphans
from labctl.servers.provider_choice import select_provider


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarketWorld:
    for name in ("alpha", "beta"):
        monkeypatch.setitem(providers.BUILT_IN, name, f"market_bed:{name.capitalize()}")
    monkeypatch.setattr(auto, "list_provider_names", lambda: ["alpha", "auto", "beta"])
    market = make_market(tmp_path)
    market.alpha.add("srv-a", "letters", "token-a")
    market.beta.add("srv-b", "digits", "token-b")
    return market


def _open_market(clouds: MarketWorld) -> LabContext:
    return select_provider(clouds.context(), "auto")


def test_all_providers_are_searched_and_emptied(clouds: MarketWorld) -> None:
    context = _open_market(clouds)
    found = find_orphans(context)
    assert [(one.provider, one.id) for one in found.servers] == [
        ("alpha", "srv-a"),
        ("beta", "srv-b"),
    ]
    assert (found.asked, found.failures, found.is_billing) == (("alpha", "beta"), {}, True)
    left = end_orphans(context, found, kept_too=False)
    assert (left.servers, left.is_billing, clouds.list_servers()) == ((), False, [])


def test_a_provider_that_fails_hides_nothing_of_the_others(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise CredentialsError("the key has expired")

    monkeypatch.setattr(clouds.alpha, "servers", fail)
    found = find_orphans(_open_market(clouds))
    assert [one.id for one in found.servers] == ["srv-b"]
    assert (found.asked, list(found.failures)) == (("beta",), ["alpha"])
    assert found.failures["alpha"].startswith("the key has expired")


def test_a_server_on_record_without_credentials_is_not_called_gone(
    clouds: MarketWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds.beta.machines.clear()
    clouds.alpha.machines.clear()
    assert clouds.up().provider == "beta"
    monkeypatch.setattr(type(clouds.beta), "check_credentials", lambda self: None, raising=False)
    clouds.beta.has_credentials = False
    found = find_orphans(_open_market(clouds))
    assert (found.servers, found.asked, list(found.failures)) == ((), ("alpha",), ["beta"])
