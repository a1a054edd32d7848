"""What every provider must do, whatever it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
from case import Case, wait_for

from labctl.errors import BusyError, NoOfferError
from labctl.model import GpuNeed, Need, Resource, Value
from labctl.providers import (
    ConsoleSource,
    Reclaimable,
    Stoppable,
    get_provider_class,
    list_provider_names,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", list_provider_names())
def test_class_bears_its_registered_name_and_has_default_settings(name: str) -> None:
    made = get_provider_class(name)
    assert made.name == name
    assert isinstance(made.settings_type(), Value)


def test_check_passes_where_the_provider_works(case: Case) -> None:
    """How much disk the machine of the tests has left is no fault of the provider."""
    checks = case.provider.check()
    assert checks
    assert [one for one in checks if not (one.ok or one.name == "disk for images")] == []


def test_offers_come_cheapest_first_and_bear_the_provider(case: Case) -> None:
    offers = case.provider.offers(case.need)
    assert offers
    assert {offer.provider for offer in offers} == {case.provider.name}
    prices = [offer.price_usd_per_hour for offer in offers]
    assert prices == sorted(prices)


def test_who_must_have_gpus_is_offered_nothing_without(case: Case) -> None:
    need = Need(gpu=GpuNeed(kind="any", count=1))
    with suppress(NoOfferError):
        assert [offer for offer in case.provider.offers(need) if offer.gpu_count < 1] == []


def test_created_server_tells_whose_it_is(case: Case) -> None:
    request = case.request("mine")
    server = case.create(request)
    assert (server.provider, server.lab, server.lab_id) == (
        case.provider.name,
        "mine",
        request.lab_id,
    )
    assert server.id
    assert server.alias
    assert server.state in ("starting", "running")


def test_every_server_names_the_account_of_the_credentials(case: Case) -> None:
    """Or none does, where the provider has no accounts."""
    account = case.provider.get_account().id
    assert case.provider.get_account().id == account
    server = case.create()
    assert server.account == account
    found = case.provider.find(server.id)
    assert found is not None
    assert found.account == account
    assert [one.account for one in case.ours()] == [account]


def test_server_can_be_logged_into_with_the_key_and_the_pinned_host_key(case: Case) -> None:
    case.log_in(case.running(case.create()))


def test_same_token_gives_the_same_server(case: Case) -> None:
    request = case.request()
    first = case.create(request)
    again = case.create(request)
    assert again.id == first.id
    assert [server.id for server in case.ours()] == [first.id]


def test_same_token_at_the_same_time_gives_one_server(case: Case) -> None:
    request = case.request()
    with ThreadPoolExecutor(2) as threads:
        ids = {server.id for server in threads.map(case.create, [request, request])}
    assert len(ids) == 1
    assert {server.id for server in case.ours()} == ids


def test_two_labs_have_two_servers(case: Case) -> None:
    one, two = case.create(), case.create()
    assert one.id != two.id
    assert {server.id for server in case.ours()} == {one.id, two.id}
    one, two = case.running(one), case.running(two)
    same = (one.endpoint.host, one.endpoint.port) == (two.endpoint.host, two.endpoint.port)
    assert same == case.shares_machine
    case.provider.terminate(one.id)
    case.gone(one.id)
    case.log_in(case.running(two))


def test_tags_alone_rebuild_what_is_known(case: Case) -> None:
    server = case.running(case.create(case.request("rebuilt")))
    [listed] = case.ours()
    same = ("id", "provider", "lab", "lab_id", "endpoint", "offer", "created_at")
    for name in same:
        assert getattr(listed, name) == getattr(server, name), name


def test_values_survive_json(case: Case) -> None:
    server = case.create()
    assert msgspec.json.decode(msgspec.json.encode(server), type=type(server)) == server


def test_find_knows_nothing_of_strangers(case: Case) -> None:
    assert case.provider.find("labctl-never-was") is None


def test_terminate_ends_it_and_may_be_repeated(case: Case) -> None:
    server = case.create()
    case.provider.terminate(server.id)
    case.gone(server.id)
    case.provider.terminate(server.id)
    assert case.ours() == []


def test_terminate_of_an_absent_server_succeeds(case: Case) -> None:
    case.provider.terminate("labctl-never-was")


def test_terminated_twice_at_once_succeeds(case: Case) -> None:
    server = case.running(case.create())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(case.provider.terminate, [server.id, server.id]))
    case.gone(server.id)


def test_leftover_is_listed_and_removed_for_good(case: Case) -> None:
    if case.leave_something is None:
        assert case.provider.leftovers() == []
        return
    left = case.leave_something()
    assert left in case.provider.leftovers()
    assert left.provider == case.provider.name
    if left.expires_at:
        assert left.account == case.provider.get_account().id
    case.provider.remove(left)
    assert left.id not in [found.id for found in case.provider.leftovers()]
    case.provider.remove(left)


def test_remove_of_an_absent_resource_succeeds(case: Case) -> None:
    for kind in ("cache", "container", "disk"):
        absent = Resource(provider=case.provider.name, kind=kind, id="labctl-never-was")
        case.provider.remove(absent)


def test_stopped_server_keeps_its_identity_and_starts_again(case: Case) -> None:
    if not isinstance(case.provider, Stoppable):
        pytest.skip("not Stoppable")
    server = case.running(case.create())
    case.provider.stop(server.id)
    stopped = case.provider.find(server.id)
    assert stopped is not None
    assert stopped.state == "stopped"

    def starts() -> bool:
        try:
            case.provider.start(server.id)
        except BusyError:
            # It is still on its way down.
            return False
        return True

    wait_for(starts)
    started = case.running(server)
    assert started.endpoint.host_key == server.endpoint.host_key
    case.log_in(started)


def test_a_server_taken_back_without_notice_is_gone(case: Case) -> None:
    if not isinstance(case.provider, Reclaimable):
        pytest.skip(f"servers of {case.provider.name} are never taken back")
    server = case.running(case.create())
    assert case.provider.reclaim(server.id, 120) is False  # notices come from elsewhere
    found = case.provider.find(server.id)
    assert found is not None
    assert found.state == "running"
    assert case.provider.reclaim(server.id, 0) is True
    case.gone(server.id)


def test_console_shows_the_boot(case: Case) -> None:
    if not isinstance(case.provider, ConsoleSource):
        pytest.skip("has no ConsoleSource")
    server = case.running(case.create())
    case.log_in(server)
    assert case.provider.read_console(server.id).strip()
