"""The servers of a lab that has several: all of them in one zone, or none."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID, DiskCloud, Recorded, World, world

from labctl.config.member_ids import make_member_id
from labctl.errors import CapacityError, PolicyError, QuotaError
from labctl.lifecycle import down, gang_creation
from labctl.lifecycle.status import read_status
from labctl.model import CreateServerRequest, Endpoint, Need, Offer, Resource, Server
from labctl.servers import cost, gang
from labctl.servers.context import LabContext


class ZonedCloud(DiskCloud):
    """A cloud whose zones have room for so many servers."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.room = {"a": 9, "b": 9}
        self.most_at_once = 0
        self._counting = threading.Lock()

    def offers(self, need: Need) -> list[Offer]:
        return [
            Offer(provider=self.name, type=kind, zone=zone, price_usd_per_hour=self.price)
            for zone in self.room
            for kind in self.kinds
        ]

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        with self._counting:
            here = [one for one in self.machines.values() if one.offer.zone == offer.zone]
            self.most_at_once = max(self.most_at_once, len(self.machines))
            is_repeated = f"srv-{request.token}" in self.machines
            if len(here) >= self.room[offer.zone] and not is_repeated:
                raise CapacityError(f"no room in {offer.zone}")
            return super().create(offer, request)


@pytest.fixture
def lab(tmp_path: Path) -> World:
    made = world(tmp_path, ZonedCloud)
    made.cloud.settle_s = 0.0
    write_count(made, 4)
    return made


def write_count(lab: World, count: int) -> None:
    text = f"lab: digits\nrun: [python, train.py]\nserver: {{count: {count}}}\n"
    (lab.home / "lab" / "lab.yaml").write_text(text)


def create(lab: World, reporter: Recorded | None = None, need: Need | None = None) -> LabContext:
    context = lab.context(reporter, need)
    gang_creation.create_missing_servers(context, gang.build_members(context))
    return context


def list_zones(lab: World) -> list[str]:
    return sorted(server.offer.zone for server in lab.cloud.machines.values())


def test_all_servers_are_created_in_the_first_zone_after_one_question(lab: World) -> None:
    lab.cloud.price = 2.0
    reporter = Recorded()
    context = create(lab, reporter)
    assert list_zones(lab) == ["a"] * 4
    (question,) = [asked for asked in reporter.asked if asked.about == "price"]
    assert question.question == (
        "start 4 servers, each small in a on demand, for $8.00/h in total?"
    )
    assert "each of the 4 servers:" in question.detail
    aliases = [context.state.get_lab_server(make_member_id(LAB_ID, rank)) for rank in range(4)]
    assert [server and server.alias for server in aliases] == [
        *("digits", "digits-1", "digits-2", "digits-3")
    ]
    create(lab)
    assert len(lab.cloud.machines) == 4


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_zone_without_room_for_all_is_left_empty(lab: World, room: int) -> None:
    lab.cloud.room["a"] = room
    create(lab)
    assert list_zones(lab) == ["b"] * 4
    # Never two groups at once: those of the full zone have ended before the next one is tried.
    assert lab.cloud.most_at_once <= 4
    assert lab.cloud.calls.count("terminate") == room


def test_nothing_is_left_if_no_zone_has_room(lab: World) -> None:
    lab.cloud.room = {"a": 3, "b": 2}
    with pytest.raises(CapacityError) as caught:
        create(lab)
    assert str(caught.value) == "cloud has no zone with room for 4 servers of digits"
    assert caught.value.why == "not 4 x small in a\nnot 4 x small in b"
    assert not lab.cloud.machines
    assert not lab.context().state.list_servers()


def test_another_refusal_ends_those_that_were_created(lab: World) -> None:
    lab.cloud.create_errors = [QuotaError("the quota is 3 servers")]
    with pytest.raises(QuotaError):
        create(lab)
    assert not lab.cloud.machines


def test_a_lost_reply_leads_to_no_fifth_server(lab: World) -> None:
    lab.cloud.loses_reply = True
    create(lab)
    assert len(lab.cloud.machines) == 4
    assert len({server.lab_id for server in lab.cloud.machines.values()}) == 4


def test_a_missing_server_is_created_where_the_others_are(lab: World) -> None:
    lab.cloud.room["a"] = 0
    context = create(lab)
    lab.cloud.room["a"] = 9
    lost = context.state.get_lab_server(make_member_id(LAB_ID, 2))
    assert lost is not None
    lab.cloud.terminate(lost.id)
    create(lab)
    assert list_zones(lab) == ["b"] * 4
    lab.cloud.terminate(lost.id)
    lab.cloud.room["b"] = 3
    lab.cloud.terminate(next(iter(lab.cloud.machines)))
    with pytest.raises(CapacityError, match="has no room for 1 more x small in b"):
        create(lab)
    assert list_zones(lab) == ["b"] * 3


def test_a_missing_server_is_created_like_the_others(lab: World) -> None:
    lab.cloud.kinds = ["small", "large"]
    context = create(lab)
    lost = context.state.get_lab_server(make_member_id(LAB_ID, 2))
    assert lost is not None
    lab.cloud.terminate(lost.id)
    lab.cloud.kinds = ["large", "small"]
    create(lab)
    assert [server.offer.type for server in lab.cloud.machines.values()] == ["small"] * 4
    lab.cloud.terminate(next(iter(lab.cloud.machines)))
    lab.cloud.kinds = ["large"]
    with pytest.raises(CapacityError) as caught:
        create(lab)
    assert "other servers are small in a" in caught.value.why
    assert len(lab.cloud.machines) == 3


def interrupt_after_two(lab: World) -> None:
    """Interrupt `up` after two of the requests, so that their replies are lost."""

    def interrupt(request: CreateServerRequest) -> None:
        if request.lab in ("digits-2", "digits-3"):
            raise KeyboardInterrupt

    lab.cloud.at_create = interrupt
    lab.cloud.interrupt_after_create = True
    with pytest.raises(KeyboardInterrupt):
        create(lab)
    lab.cloud.at_create = lambda request: None
    lab.cloud.interrupt_after_create = False
    # Only the attempts know of the servers: the provider does not list them yet.
    lab.cloud.invisible_finds = 1


def test_servers_of_an_interrupted_up_are_completed_and_reported(lab: World) -> None:
    interrupt_after_two(lab)
    created: list[Server] = []
    context = lab.context()
    gang_creation.create_missing_servers(context, gang.build_members(context), created.append)
    assert len(lab.cloud.machines) == 4
    assert len(list_zones(lab)) == 4
    assert {server.id for server in created} == set(lab.cloud.machines)


def test_those_of_an_interrupted_up_are_ended_if_their_zone_is_full(lab: World) -> None:
    interrupt_after_two(lab)
    for attempt in lab.context().state.list_open_attempts():
        if attempt.request.lab in ("digits-2", "digits-3"):
            lab.context().state.end_attempt(attempt.token, "refused")
    lab.cloud.room["a"] = 0
    lab.cloud.invisible_finds = 1
    create(lab)
    assert list_zones(lab) == ["b"] * 4


def test_those_of_an_interrupted_up_are_ended_if_no_zone_has_room(lab: World) -> None:
    interrupt_after_two(lab)
    lab.cloud.room = {"a": 2, "b": 3}
    with pytest.raises(CapacityError):
        create(lab)
    assert not lab.cloud.machines


def test_a_refused_price_creates_nothing(lab: World) -> None:
    lab.cloud.price = 2.0
    with pytest.raises(PolicyError, match="nothing was started"):
        create(lab, Recorded(answers=[False]))
    assert not lab.cloud.machines


def test_the_budget_is_that_of_all_servers(lab: World) -> None:
    lab.cloud.price = 2.0
    with pytest.raises(PolicyError, match="one hour costs"):
        create(lab, need=Need(budget_usd=7.9))
    assert not lab.cloud.machines
    create(lab, need=Need(budget_usd=8.1))
    assert len(lab.cloud.machines) == 4


def test_down_also_removes_servers_that_lab_yaml_no_longer_asks_for(lab: World) -> None:
    create(lab)
    write_count(lab, 1)
    reporter = Recorded()
    result = down.down(lab.context(reporter), discard=True)
    assert not lab.cloud.machines
    (question,) = reporter.asked
    names = "digits, digits-1, digits-2, digits-3"
    assert names in question.question
    assert len(result.removed.split(", ")) == 4


def test_a_declined_down_removes_none(lab: World) -> None:
    create(lab)
    with pytest.raises(PolicyError, match="nothing was removed"):
        down.down(lab.context(Recorded(answers=[False])), discard=True)
    assert len(lab.cloud.machines) == 4


def test_names_of_servers_stay_valid(lab: World) -> None:
    context = lab.context()
    config = msgspec.structs.replace(context.config, name="a" * 39)
    names = [gang.make_member_name(config, rank) for rank in (0, 1, 15)]
    assert names == ["a" * 39, "a" * 36 + "-1", "a" * 36 + "-15"]


class KeepingCloud(ZonedCloud):
    """One that also keeps disks."""

    can_keep_itself = False

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        return []

    def release_disk(self, server_id: str) -> None:
        pass

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        raise AssertionError("no disk is attached here")


@pytest.mark.parametrize("count", [4, 1])
def test_status_shows_the_kept_disk_of_every_server(tmp_path: Path, count: int) -> None:
    """Also that of a server which lab.yaml does not ask for anymore."""
    lab = world(tmp_path, KeepingCloud)
    lab.cloud.settle_s = 0.0
    write_count(lab, count)
    lab_id = make_member_id(LAB_ID, 1)
    disk = Resource(
        provider=lab.cloud.name,
        kind="volume",
        id="vol-1",
        lab_id=lab_id,
        expires_at=time.time() + 9_000,
        account=lab.cloud.account.id,
    )
    lab.cloud.left.append(disk)
    shown = read_status(lab.context(), refresh=True)
    assert [kept.disk.id for kept in shown.kept] == ["vol-1"]
    # A command that asks nobody knows it from the ledger.
    assert len(read_status(lab.context(), refresh=False).kept) == 1


def test_a_price_fits_into_the_rest_of_every_share_of_the_budget(lab: World) -> None:
    lab.cloud.price, context, need = 2.0, lab.context(), Need(budget_usd=12.0)
    # An earlier server in the place of the second: $2.67 of its share of $3.
    earlier = Server(
        id="srv-earlier",
        provider=lab.cloud.name,
        lab="digits-1",
        lab_id=make_member_id(LAB_ID, 1),
        alias="digits-1",
        endpoint=Endpoint(host="127.0.0.1"),
        offer=Offer(provider=lab.cloud.name, type="small", price_usd_per_hour=2.0),
        created_at=time.time() - 4_800.0,
    )
    cost.record_start(context.state, earlier)
    context.state.record("terminated", lab_id=earlier.lab_id, server_id=earlier.id)
    with pytest.raises(PolicyError, match=r"digits-1 has \$0.33 left; one hour costs"):
        create(lab, need=need)
    assert not lab.cloud.machines
