"""Configured machines: which is claimed, who is told, and what is never done."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from labctl.commands.lease import Holder
from labctl.errors import CapacityError, ConnectError, HostKeyError, ProviderError, UsageError
from labctl.errors.subject import COURSE, LAB, Subject
from labctl.model import CreateServerRequest, Endpoint, GpuNeed, Need, Offer
from labctl.providers import ProviderContext
from labctl.providers.static import HostEntry, StaticProvider, StaticSettings
from labctl.transports import Result
from labctl.transports.fake import FakeTransport

KEY = "ssh-ed25519 AAAA"
FREE = "state free\nleft 0\nowner \n"
T4 = "gpu GPU-1, 15360, 550.54, Tesla T4\n"
A100 = "gpu GPU-2, 81920, 550.54, NVIDIA A100-SXM4-80GB\n" * 2


def held(state: str, token: str, owner: str = "bob", lab: str = "letters") -> str:
    holder = Holder(token=token, lab=lab, lab_id="b0b", owner=owner, created_at=5.0)
    fields = msgspec.json.encode(holder).decode()[1:]
    return f'state {state}\nleft 7200\nowner {{"boot_id":"x","expires_s":9,{fields}\n'


class Pool:
    """Machines that answer by script; `endpoints` is how each was reached."""

    def __init__(self) -> None:
        self.machines: dict[str, FakeTransport] = {}
        self.endpoints: list[Endpoint] = []
        self.notes: list[str] = []
        self.aliases: dict[str, Endpoint] = {}

    def add(
        self, host: str, shown: str, claimed: str | Callable[[str, bytes], Result] = ""
    ) -> None:
        fake = FakeTransport(Endpoint(host=host)).reply("action=show", shown)
        answer = Result(code=0, stdout=claimed) if isinstance(claimed, str) else claimed
        fake.reply("action=claim", answer).reply("action=(release|renew)", FREE)
        self.machines[host] = fake

    def provider(self, *hosts: str | HostEntry, **defaults: str | int) -> StaticProvider:
        def unexpected(*_: object) -> str:
            raise AssertionError("not for this provider")

        def connect(endpoint: Endpoint) -> FakeTransport:
            self.endpoints.append(endpoint)
            return self.machines[endpoint.host]

        def settle(endpoint: Endpoint) -> Endpoint:
            if endpoint.host not in self.machines:
                raise ConnectError(f"{endpoint.host} is away", why="off", hint="wait")
            return msgspec.structs.replace(endpoint, host_key=endpoint.host_key or KEY)

        around = ProviderContext(
            data_dir=Path("/nowhere"),
            owner="alice",
            connect=connect,
            settle_host_key=settle,
            progress=unexpected,
            note=self.notes.append,
            resolve_alias=lambda name: self.aliases.get(name, Endpoint(host=name, user="local")),
        )
        return StaticProvider(
            StaticSettings(hosts=hosts or tuple(self.machines), **defaults), around
        )


def wins(line: str, _: bytes) -> Result:
    """The machine that gives its lease to whoever asks."""
    found = re.search(r"token=([0-9a-f]+)", line)
    assert found is not None
    return Result(code=0, stdout=held("mine", found[1], "alice", "digits"))


def request(need: Need | None = None, token: str = "c0ffee") -> CreateServerRequest:
    return CreateServerRequest(
        lab="digits", lab_id="a11ce", token=token, public_key="ssh-ed25519 X", identity="/lab/key",
        need=need or Need(),
    )  # fmt: skip


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_free_machines_in_their_order(pool: Pool) -> None:
    pool.add("gpu1", held("held", "aa"))
    pool.add("gpu2", FREE + T4)
    pool.add("gpu3", FREE)
    offers = pool.provider().offers(Need())
    assert [(o.type, o.gpu_name, o.gpu_count) for o in offers] == [
        ("gpu2", "Tesla T4", 1),
        ("gpu3", "", 0),
    ]
    assert {o.price_usd_per_hour for o in offers} == {0.0}


@pytest.mark.parametrize(
    ("gpu", "hosts"),
    [
        (GpuNeed(), ["cpu", "t4", "a100"]),
        (GpuNeed(kind="none"), ["cpu", "t4", "a100"]),
        (GpuNeed(kind="any", count=1), ["t4", "a100"]),
        (GpuNeed(kind="t4", count=1), ["t4"]),
        (GpuNeed(kind="A100", count=2), ["a100"]),
        (GpuNeed(kind="A100", count=3), []),
        (GpuNeed(kind="A10", count=1), []),
        (GpuNeed(kind="any", count=1, min_memory_bytes=24 * 1024**3), ["a100"]),
    ],
)
def test_only_what_satisfies_the_need(pool: Pool, gpu: GpuNeed, hosts: list[str]) -> None:
    for name, gpus in (("cpu", ""), ("t4", T4), ("a100", A100)):
        pool.add(name, FREE + gpus)
    assert [offer.type for offer in pool.provider().offers(Need(gpu=gpu))] == hosts


def test_claiming_the_offered_machine(pool: Pool) -> None:
    pool.add("gpu1", FREE, wins)
    pool.add("gpu2", FREE, wins)
    provider = pool.provider(user="carol", identity="/carols/key")
    server = provider.create(provider.offers(Need())[1], request())
    assert server.id == "static-gpu2-c0ffee"
    assert (server.lab, server.state, server.offer.type) == ("digits", "running", "gpu2")
    assert server.endpoint == Endpoint(
        host="gpu2", user="carol", identity="/carols/key", host_key=KEY
    )
    assert not [line for line in pool.machines["gpu1"].lines if "action=claim" in line]


def test_a_machine_lost_to_another_leads_to_the_next(pool: Pool) -> None:
    pool.add("gpu1", FREE, held("held", "aa"))
    pool.add("gpu2", FREE, wins)
    provider = pool.provider()
    assert provider.create(provider.offers(Need())[0], request()).offer.type == "gpu2"


def test_a_claim_of_the_same_attempt_is_found_wherever_it_is(pool: Pool) -> None:
    pool.add("gpu1", FREE, wins)
    pool.add("gpu2", held("mine", "c0ffee", "alice", "digits"))
    provider = pool.provider()
    assert provider.create(provider.offers(Need())[0], request()).id == "static-gpu2-c0ffee"
    assert not [line for line in pool.machines["gpu1"].lines if "action=claim" in line]


def test_where_all_are_busy_each_holder_is_named(pool: Pool) -> None:
    pool.add("gpu1", held("held", "aa", "bob", "letters"), held("held", "aa", "bob", "letters"))
    pool.add("gpu2", held("held", "bb", "dan", "words"), held("held", "bb", "dan", "words"))
    provider = pool.provider()
    offer = Offer(provider="static", type="gpu1")
    for act in (lambda: provider.offers(Need()), lambda: provider.create(offer, request())):
        with pytest.raises(CapacityError) as caught:
            act()
        assert caught.value.exit_code == 75
        assert re.search(r"gpu1: held by bob for letters until 20\d\d-.* UTC", caught.value.why)
        assert "gpu2: held by dan for words" in caught.value.why
        assert "labctl down" in caught.value.hint


def test_where_no_lease_can_be_kept_the_administrators_deed_is_named(pool: Pool) -> None:
    broken = "state broken\nerror cannot make /var/tmp/labctl-leases\n"
    pool.add("gpu1", FREE, broken)
    provider = pool.provider()
    with pytest.raises(ProviderError) as caught:
        provider.create(provider.offers(Need())[0], request())
    assert "cannot make" in caught.value.why
    assert "sudo mkdir -m 1777 /var/tmp/labctl-leases" in caught.value.hint


def test_machines_that_are_away_do_not_spoil_the_others(pool: Pool) -> None:
    pool.add("gpu2", FREE)
    provider = pool.provider("gpu1", "gpu2")
    assert [offer.type for offer in provider.offers(Need())] == ["gpu2"]
    assert pool.notes == [
        "1 machine cannot be used now: gpu1\n  next: labctl doctor\n        (says why)"
    ]
    assert [(check.name, check.ok, check.next) for check in provider.check()] == [
        ("gpu1", False, "wait"),
        ("gpu2", True, ""),
    ]
    assert provider.servers() == []
    for act in (lambda p: p.offers(Need()), StaticProvider.servers):
        with pytest.raises(ConnectError, match="gpu1 is away"):
            act(pool.provider("gpu1"))


@pytest.mark.parametrize(
    ("subject", "check", "again"),
    [
        (LAB, "labctl doctor", "labctl up"),
        (COURSE, "labctl course check", "labctl course up"),
    ],
)
def test_a_check_does_not_name_itself_as_the_next_command(
    pool: Pool, subject: Subject, check: str, again: str
) -> None:
    pool.add("gpu1", "Welcome to the lab!\n")
    provider = pool.provider()
    provider.context = msgspec.structs.replace(provider.context, subject=subject)
    with pytest.raises(ProviderError) as caught:
        provider.offers(Need())
    caught.value.subject = subject
    assert caught.value.hint == check
    (shown,) = provider.check()
    assert "its lease cannot be read" in shown.detail
    assert shown.next == again


def test_a_machine_that_is_away_is_not_called_gone(pool: Pool) -> None:
    provider = pool.provider("gpu1", "gpu2")
    for act in (provider.find, provider.terminate):
        with pytest.raises(ConnectError):
            act("static-gpu1-c0ffee")
    assert provider.find("static-gpu9-c0ffee") is None
    provider.terminate("static-gpu9-c0ffee")


def test_a_wrong_host_key_stops_everything(pool: Pool) -> None:
    pool.add("gpu1", FREE)
    pool.machines["gpu2"] = FakeTransport().reply("", HostKeyError("another key"))
    with pytest.raises(HostKeyError):
        pool.provider().offers(Need())


def test_only_this_owners_servers_and_claims(pool: Pool) -> None:
    pool.add("gpu1", held("held", "aa", "bob"))
    pool.add("gpu2", held("held", "bb", "alice", "mine"))
    provider = pool.provider()
    assert [(s.id, s.lab) for s in provider.servers()] == [("static-gpu2-bb", "mine")]
    assert provider.find("static-gpu1-cc") is None


def test_terminate_only_releases(pool: Pool) -> None:
    pool.add("gpu1", held("mine", "c0ffee", "alice"))
    pool.add("gpu2", FREE)
    pool.provider().terminate("static-gpu1-c0ffee")
    [line] = pool.machines["gpu1"].lines
    assert line.startswith("action=release; token=c0ffee; ")
    assert pool.machines["gpu2"].lines == []
    assert not re.search(r"shutdown|poweroff|reboot|halt|authorized_keys", line)


@pytest.mark.parametrize(
    ("entry", "way"),
    [
        ("gpu1", Endpoint(host="gpu1", user="local")),
        ("bob@gpu1:2200", Endpoint(host="gpu1", user="bob", port=2200)),
        ("[2001:db8::1]:2200", Endpoint(host="2001:db8::1", user="local", port=2200)),
        (
            HostEntry(host="gpu1", user="bob", port=22, identity="/k", jump="bastion"),
            Endpoint(host="gpu1", user="bob", identity="/k", jump="bastion"),
        ),
        (
            HostEntry(alias="known"),
            Endpoint(host="10.0.0.5", port=2222, user="carol", identity="/c", host_key="ssh-rsa C"),
        ),
        ("known", Endpoint(host="10.0.0.5", port=2222, user="carol", identity="/c",
                           host_key="ssh-rsa C")),
        (
            HostEntry(alias="known", user="bob", port=22),
            Endpoint(host="10.0.0.5", user="bob", identity="/c"),
        ),
    ],
)  # fmt: skip
def test_the_way_to_a_machine(pool: Pool, entry: str | HostEntry, way: Endpoint) -> None:
    pool.aliases["known"] = Endpoint(
        host="10.0.0.5", port=2222, user="carol", identity="/c", host_key="ssh-rsa C"
    )
    pool.add(way.host, FREE)
    pool.provider(entry).offers(Need())
    pinned = way if way.host_key else msgspec.structs.replace(way, host_key=KEY)
    assert pool.endpoints == [pinned]


def test_defaults_of_the_section(pool: Pool) -> None:
    pool.add("gpu1", FREE)
    pool.provider("gpu1", user="u", port=23, identity="/i", jump="j").offers(Need())
    expected = Endpoint(host="gpu1", user="u", port=23, identity="/i", jump="j", host_key=KEY)
    assert pool.endpoints == [expected]


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ("-oProxyCommand=id",),
        ("a b",),
        ("a,b",),
        ("gpu1", "gpu1"),
        (HostEntry(),),
        (HostEntry(alias="-F/x"),),
    ],
)
def test_hosts_that_make_no_sense(pool: Pool, hosts: tuple[str | HostEntry, ...]) -> None:
    provider = pool.provider("placeholder")
    provider.settings = StaticSettings(hosts=hosts)
    with pytest.raises(UsageError):
        provider.offers(Need())


@pytest.mark.parametrize("bad", [HostEntry(host="h", user="-l"), HostEntry(host="h", port=70000)])
def test_users_and_ports_that_make_no_sense(pool: Pool, bad: HostEntry) -> None:
    with pytest.raises(UsageError):
        pool.provider(bad).offers(Need())
