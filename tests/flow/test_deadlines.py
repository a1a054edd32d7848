"""Deadlines: what a server with a price gets by itself, and which guards hold it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, DiskCloud, Recorded, World, world

from labctl.errors import CredentialsError, DeniedError, LabError, PolicyError, ThrottledError
from labctl.lifecycle import unsaved_server
from labctl.lifecycle import up as provision
from labctl.model import Boot, Endpoint, Need, Server
from labctl.servers import deadlines, guard
from labctl.servers.deadlines import DEFAULT_TTL_S, LEAST_S, MARGIN_S
from labctl.servers.plan import describe_plan
from labctl.wire.watchdog import WatchRecord

HOUR_S = 3600.0


class GuardedCloud(DiskCloud):
    """One with a first boot and a timer of its own, at half a dollar an hour."""

    missing_deadline_setup = ""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5
        self.boots: list[Boot] = []
        self.timers: dict[str, float] = {}
        self.denies = False

    def build_first_boot(self, boot: Boot) -> str:
        self.boots.append(boot)
        return f"first boot of {boot.lab}"

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        raise AssertionError("no key is changed here")

    def set_deadline(self, server_id: str, at: float) -> None:
        if self.denies:
            raise DeniedError("the account may not set timers")
        self.timers[server_id] = at


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(
        provision.first_contact, "replace_first_host_key", lambda context, *reached: reached
    )
    return world(tmp_path, GuardedCloud)


def cloud_of(lab: World) -> GuardedCloud:
    assert isinstance(lab.cloud, GuardedCloud)
    return lab.cloud


def up(lab: World, need: Need | None = None, reporter: Recorded | None = None) -> Server:
    return provision.up(lab.context(reporter, need or Need()))


@pytest.mark.parametrize(
    ("need", "hours"),
    [
        (Need(), 12),
        (Need(idle_s=1800), 12),
        (Need(ttl_s=7200), 2),
        (Need(budget_usd=2.0), 4),
        (Need(ttl_s=7200, budget_usd=2.0), 2),
        (Need(ttl_s=36_000, budget_usd=2.0), 4),
        (Need(max_ttl_s=10_800), 3),
    ],
)
def test_ttl_or_budget_or_the_default_holds_from_the_first_second(
    lab: World, need: Need, hours: int
) -> None:
    cloud = cloud_of(lab)
    server = up(lab, need)
    [boot] = cloud.boots
    assert boot.ttl_s == hours * HOUR_S + MARGIN_S
    assert cloud.timers[server.id] == pytest.approx(server.created_at + boot.ttl_s, abs=5)


def test_the_plan_tells_the_default_its_cost_and_the_guards(lab: World) -> None:
    reporter = Recorded()
    up(lab, reporter=reporter)
    [asked] = reporter.asked
    for words in (
        "it stops automatically after 12 h",
        "12 h is the default: --ttl or --budget changes it, --no-deadline removes it",
        "it costs at most $6.00",
        "guards: watchdog, first-boot timer, timer at cloud",
    ):
        assert words in asked.detail


def test_the_plan_tells_why_there_is_no_timer_at_the_provider(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_of(lab), "missing_deadline_setup", "no role is set")
    reporter = Recorded()
    up(lab, reporter=reporter)
    plan = reporter.asked[0].detail
    assert "guards: watchdog, first-boot timer\nno timer at cloud: no role is set" in plan


def test_a_free_server_has_no_deadline_that_nobody_asked_for(lab: World) -> None:
    cloud = cloud_of(lab)
    cloud.price = 0.0
    up(lab)
    assert ([one.ttl_s for one in cloud.boots], cloud.timers) == ([None], {})


def test_the_plan_of_a_free_server_names_labctl_down_only_without_a_limit(lab: World) -> None:
    (offer,) = lab.cloud.offers(Need())
    free = msgspec.structs.replace(offer, price_usd_per_hour=0.0)
    for need, limit in (
        (Need(idle_s=1800), "it stops automatically after 30 min without work"),
        (Need(), "it runs until labctl down"),
    ):
        text = describe_plan(lab.cloud, need, free, (), None)
        assert text.splitlines()[1:] == [limit]


class KeptCloud(Cloud):
    """One whose servers somebody else ends, as a course's keeper does."""

    def get_guarded_lab_id(self, server_id: str) -> str:
        raise AssertionError("there is no server yet")

    def extend_life(self, server_id: str, span_s: int) -> WatchRecord:
        return WatchRecord(alive=True, server_id=server_id, ttl_left_s=3600.0 + span_s)


def test_the_plan_of_a_server_that_a_keeper_ends_does_not_name_labctl_down(lab: World) -> None:
    (offer,) = lab.cloud.offers(Need())
    cloud = KeptCloud(lab.cloud.key)
    assert describe_plan(cloud, Need(), offer, (), None).splitlines()[1:] == [
        f"the {cloud.name} decides when it stops"
    ]
    others = [msgspec.structs.replace(offer, price_usd_per_hour=price) for price in (0.6, 0.7)]
    for count, text in ((1, "offer, up to $0.60/h"), (2, "2 offers in turn, up to $0.70/h")):
        last = describe_plan(cloud, Need(), offer, others[:count], None).splitlines()[-1]
        assert last == f"if it has no capacity, labctl tries the next {text}"
    limited = describe_plan(cloud, Need(ttl_s=3600, idle_s=600), offer, (), 5.0)
    text = "it stops automatically after 1 h, when $5.00 is spent, after 10 min without work"
    assert limited.splitlines()[1:] == [text]


def test_the_report_of_a_keeper_that_extends_is_not_read_again(tmp_path: Path) -> None:
    """An account on a shared server cannot read the watchdog's report itself."""
    lab = world(tmp_path, KeptCloud)
    context = lab.context()
    (offer,) = lab.cloud.offers(Need())
    server = Server(
        id="srv-1", provider="cloud", lab="digits", lab_id=LAB_ID, alias="digits",
        endpoint=Endpoint(host="192.0.2.1"), offer=offer, created_at=0.0, state="running",
    )  # fmt: skip
    watch = guard.extend(context, server, 1800)
    assert watch is not None
    assert watch.ttl_left_s == 5400.0


def test_no_deadline_is_told_with_its_cost_and_remembered_for_this_server(lab: World) -> None:
    cloud, reporter = cloud_of(lab), Recorded()
    server = up(lab, Need(deadline=False), reporter)
    assert ([one.ttl_s for one in cloud.boots], cloud.timers) == ([None], {})
    assert "it has no deadline: $12.00 a day, $360.00 a month" in reporter.asked[0].detail
    assert up(lab).id == server.id
    assert cloud.timers == {}
    assert deadlines.get_server_need(lab.context(), server).deadline is False
    cloud.terminate(server.id)
    assert up(lab).id != server.id
    assert cloud.boots[-1].ttl_s == DEFAULT_TTL_S + MARGIN_S


def test_where_no_guard_ends_billing_the_cost_has_to_be_typed(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = cloud_of(lab)
    monkeypatch.setattr(cloud, "ends_billing", frozenset())
    reporter = Recorded(answers=[True, False])
    with pytest.raises(PolicyError, match="nothing was started") as caught:
        up(lab, reporter=reporter)
    assert "no guard at cloud stops these costs: $12.00 a day" in caught.value.why
    assert "if you run labctl down by the deadline, in 12 h: $6.00" in caught.value.why
    assert "labctl run --recover --keeper HOST" in caught.value.why
    assert [one.typed for one in reporter.asked] == ["", "360.00"]
    assert cloud.tried == []
    up(lab, reporter=Recorded())
    assert len(cloud.tried) == 1


@pytest.mark.parametrize(
    ("declared", "lacks", "ends"),
    [
        ({"shutdown"}, "", True),
        ({"timer"}, "", True),
        ({"timer"}, "no role", False),
        (set(), "", False),
    ],
)
def test_a_guard_counts_only_where_the_provider_says_that_it_ends_billing(
    lab: World,
    monkeypatch: pytest.MonkeyPatch,
    declared: set[str],
    lacks: str,
    ends: bool,
) -> None:
    cloud = cloud_of(lab)
    monkeypatch.setattr(cloud, "ends_billing", frozenset(declared))
    monkeypatch.setattr(cloud, "missing_deadline_setup", lacks)
    assert deadlines.can_end_billing(cloud) is ends


def test_a_provider_that_declares_nothing_has_no_guard_that_counts(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Cloud, "ends_billing")
    assert not deadlines.can_end_billing(cloud_of(lab))


def test_the_timer_at_the_provider_follows_the_watchdog(lab: World) -> None:
    cloud, server = cloud_of(lab), up(lab)
    context = lab.context()
    first = cloud.timers[server.id]
    deadlines.move_timer(context, server, WatchRecord(ttl_left_s=DEFAULT_TTL_S + 30.0))
    assert cloud.timers[server.id] == first  # close enough
    watch = WatchRecord(ttl_left_s=20 * HOUR_S, budget_left_s=18 * HOUR_S)
    deadlines.move_timer(context, server, watch)
    assert cloud.timers[server.id] == pytest.approx(time.time() + 18 * HOUR_S + MARGIN_S, abs=5)
    deadlines.move_timer(context, server, WatchRecord(ttl_left_s=-50.0))
    assert cloud.timers[server.id] == pytest.approx(time.time() + LEAST_S, abs=5)
    deadlines.move_timer(context, server, WatchRecord(ttl_left_s=None))
    assert cloud.timers[server.id] > time.time() + 365 * 86400


def test_a_watchdog_moves_no_timer_beyond_what_is_known_here(lab: World) -> None:
    need = Need(ttl_s=7200, max_ttl_s=14_400, budget_usd=1.5)
    cloud, server = cloud_of(lab), up(lab, need)
    context = lab.context(need=need)
    for said in (1e12, float("inf"), float("nan")):
        forged = WatchRecord(ttl_left_s=said, budget_left_s=said)
        deadlines.move_timer(context, server, forged)
        assert cloud.timers[server.id] <= time.time() + 3 * HOUR_S + MARGIN_S
    latest = time.time() + HOUR_S
    deadlines.move_timer(context, server, WatchRecord(ttl_left_s=1e12), latest_at=latest)
    assert cloud.timers[server.id] == pytest.approx(latest + MARGIN_S)


def test_a_refused_timer_is_said_and_not_counted(lab: World) -> None:
    cloud, reporter = cloud_of(lab), Recorded()
    cloud.denies = True
    server = up(lab, reporter=reporter)
    assert "nothing at cloud ends the server if it hangs: the account may not" in reporter.said
    watch = WatchRecord(alive=True, timer=True, ttl_left_s=5 * HOUR_S)
    said = deadlines.describe(lab.context(), server, watch)
    assert said == "digits ends in 5 h at the latest; armed: watchdog, first-boot timer"
    cloud.denies = False
    deadlines.move_timer(lab.context(), server, watch)
    said = deadlines.describe(lab.context(), server, watch)
    assert said.endswith("armed: watchdog, first-boot timer, timer at cloud")


def test_a_missing_setting_of_the_timer_is_named_in_the_plan_alone(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, reporter = cloud_of(lab), Recorded()
    cloud.denies = True
    monkeypatch.setattr(cloud, "missing_deadline_setup", "no role is set")
    up(lab, reporter=reporter)
    assert "no timer at cloud: no role is set" in reporter.asked[0].detail
    assert "nothing at cloud ends the server" not in reporter.said


@pytest.mark.parametrize("error", [ThrottledError("too often"), CredentialsError("expired")])
def test_a_timer_that_stays_behind_is_told_with_its_time(
    lab: World, monkeypatch: pytest.MonkeyPatch, error: LabError
) -> None:
    """The watchdog was extended already, so that the command must not be typed again."""
    cloud, reporter, server = cloud_of(lab), Recorded(), up(lab)

    def fails(server_id: str, at: float) -> None:
        raise error

    monkeypatch.setattr(cloud, "set_deadline", fails)
    deadlines.move_timer(lab.context(reporter), server, WatchRecord(ttl_left_s=20 * HOUR_S))
    assert f"the timer at cloud was not moved: {error.what}" in reporter.said
    text = "it ends the server in 12 h 2 min without saving results\n  next: labctl up"
    assert text in reporter.said
    monkeypatch.undo()
    deadlines.move_timer(lab.context(), server, WatchRecord(ttl_left_s=20 * HOUR_S))
    assert cloud.timers[server.id] == pytest.approx(time.time() + 20 * HOUR_S + MARGIN_S, abs=5)


def test_a_server_that_is_off_for_its_disks_sake_is_spared_by_the_timer(lab: World) -> None:
    cloud, server = cloud_of(lab), up(lab)
    told = unsaved_server.stop_and_keep_disk(
        lab.context(), server, LabError("it cannot be saved"), home_is_saved=True
    )
    assert "the server was stopped and its disk kept" in told.why
    assert cloud.timers[server.id] > time.time() + 29 * 86400


def test_a_request_of_an_earlier_version_reads_as_one_with_a_deadline() -> None:
    assert msgspec.json.decode(b'{"ttl_s": 60}', type=Need).deadline
