"""Which servers reach one another, and the network that WireGuard gets between them."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace

import pytest

from labctl.agent.host import wireguard
from labctl.agent.host.addresses import describe_address
from labctl.agent.host.peers import check_peers
from labctl.agent.reply import Failure
from labctl.cli.bandwidth import describe
from labctl.errors import LabError, UnreachableError
from labctl.events import Note
from labctl.insight.bandwidth import AllReduce, Bandwidth
from labctl.lifecycle import gang_wireguard
from labctl.lifecycle.gang_wireguard import choose_network, make_interface_name
from labctl.wire.networks import (
    CheckPeersRequest,
    ConnectWireGuardRequest,
    InspectWireGuardReply,
    PeerAddress,
    WireGuardPeer,
)


def find_places(count: int) -> list[PeerAddress]:
    ports = [describe_address("127.0.0.1", "lo").check_port for _ in range(count)]
    return [PeerAddress(rank, "127.0.0.1", port) for rank, port in enumerate(ports)]


def check_all(
    places: Sequence[PeerAddress], tokens: Sequence[str], seconds: float
) -> list[tuple[int, ...]]:
    """Have every server check all others at once; return which ones each has reached."""

    def check(own: PeerAddress, token: str) -> tuple[int, ...]:
        others = tuple(each for each in places if each is not own)
        return check_peers(CheckPeersRequest(own, others, token, seconds)).reached

    with ThreadPoolExecutor() as threads:
        return list(threads.map(check, places, tokens))


def test_servers_that_reach_one_another_say_so_long_before_the_time_is_over() -> None:
    assert check_all(find_places(3), ["t"] * 3, 60.0) == [(1, 2), (0, 2), (0, 1)]


def test_a_machine_that_only_has_the_address_of_another_server_is_not_that_server() -> None:
    assert check_all(find_places(2), ["one network", "another one"], 1.0) == [(), ()]


def test_a_server_that_reaches_itself_at_anothers_address_has_not_reached_it() -> None:
    """Behind two NATs, both servers may have the same private address."""
    own, other = find_places(2)
    same = other._replace(port=own.port)
    assert check_peers(CheckPeersRequest(own, (same,), "t", 1.0)).reached == ()


def test_a_service_that_says_nothing_does_not_delay_the_check() -> None:
    own, other = find_places(2)
    with socket.create_server((other.address, other.port)):
        timer = threading.Timer(30.0, os._exit, (99,))
        timer.start()
        try:
            assert check_peers(CheckPeersRequest(own, (other,), "t", 1.0)).reached == ()
        finally:
            timer.cancel()


def test_the_network_is_one_that_no_server_has_a_route_to() -> None:
    first = choose_network("0f1e2d3c4b5a", [InspectWireGuardReply(())])
    assert first.subnet_of(IPv4Network("10.0.0.0/8"))
    assert first == choose_network("0f1e2d3c4b5a", [InspectWireGuardReply(())])
    taken = [InspectWireGuardReply(()), InspectWireGuardReply((), routes=(f"{first[7]}/32",))]
    assert not choose_network("0f1e2d3c4b5a", taken).overlaps(first)
    campus = InspectWireGuardReply((), routes=("10.0.0.0/8", "172.16.0.0/12"))
    assert choose_network("0f1e2d3c4b5a", [campus]).subnet_of(IPv4Network("192.168.0.0/16"))
    vpn = InspectWireGuardReply((), routes=("0.0.0.0/1", "128.0.0.0/1"))
    assert choose_network("0f1e2d3c4b5a", [vpn]) == first
    private = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    everything = InspectWireGuardReply((), routes=private)
    with pytest.raises(LabError, match="no free network"):
        choose_network("0f1e2d3c4b5a", [everything])


def test_the_interface_has_a_name_that_linux_allows_and_that_differs_between_labs() -> None:
    names = {make_interface_name(lab_id) for lab_id in ("0f1e2d3c4b5a", "0f1e2d3c4b5b")}
    assert len(names) == 2
    assert all(len(name) == 12 for name in names)


FIRST_KEY, SECOND_KEY = "A" * 43 + "=", "B" * 43 + "="


@pytest.mark.parametrize(
    "peer",
    [
        WireGuardPeer(f"{FIRST_KEY}\n[Peer]\nPublicKey = {SECOND_KEY}", "10.1.2.2", ""),
        WireGuardPeer(FIRST_KEY, "10.1.2.0/24", ""),
        WireGuardPeer(FIRST_KEY, "10.1.2.2", "203.0.113.5:1\nAllowedIPs = 0.0.0.0/0"),
    ],
)
def test_another_server_cannot_write_the_configuration(peer: WireGuardPeer) -> None:
    request = ConnectWireGuardRequest("labctl0f1e2d", "10.1.2.1", 24, 51821, (peer,))
    with pytest.raises(Failure, match="another server sent"):
        wireguard._build_config(request, "secret")


def test_a_peer_may_use_one_address_and_the_key_is_readable_by_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wireguard, "KEYS", tmp_path / "keys")
    monkeypatch.setattr(wireguard, "_run", lambda *words, stdin="": "secret\n")
    key = wireguard._read_key("labctl0f1e2d")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys" / "labctl0f1e2d").stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["labctl0f1e2d"]
    peers = (
        WireGuardPeer(FIRST_KEY, "10.1.2.2", "203.0.113.5", 25),
        WireGuardPeer(SECOND_KEY, "10.1.2.3", ""),
    )
    request = ConnectWireGuardRequest("labctl0f1e2d", "10.1.2.1", 24, 51821, peers)
    assert wireguard._build_config(request, key).splitlines() == [
        *("[Interface]", "PrivateKey = secret", "ListenPort = 51821"),
        *("[Peer]", f"PublicKey = {FIRST_KEY}", "AllowedIPs = 10.1.2.2/32"),
        *("Endpoint = 203.0.113.5:51821", "PersistentKeepalive = 25"),
        *(
            "[Peer]",
            f"PublicKey = {SECOND_KEY}",
            "AllowedIPs = 10.1.2.3/32",
            "PersistentKeepalive = off",
        ),
    ]


def test_bandwidth_names_the_tunnel_and_what_limits_it() -> None:
    result = Bandwidth(
        rows=(AllReduce(bytes=1024, seconds=0.1, bus_bytes_per_s=1e8),),
        processes=2, servers=2, device="CPU", backend="gloo",
        interface="labctl0f1e2d", link_bits_per_s=1e7,
    )  # fmt: skip
    assert result.link_share is None
    assert describe(result) == (
        "2 processes (CPU, gloo) on 2 servers exchange 0.80 Gbit/s at best over labctl0f1e2d, "
        "through WireGuard. Its encryption uses the CPU and limits the bandwidth."
    )


def test_a_lab_that_had_no_tunnel_asks_no_server_about_one() -> None:
    def refuse(server: object) -> None:
        raise AssertionError("it was asked")

    state = SimpleNamespace(list_events=lambda **_: [])
    context = SimpleNamespace(rank=None, lab_id="0f1e2d3c4b5a", state=state, open_agent=refuse)
    gang_wireguard.remove(context, SimpleNamespace())  # type: ignore[arg-type]


def test_an_interface_that_may_stay_is_named() -> None:
    def refuse(server: object) -> None:
        raise UnreachableError("gpu1 does not answer")

    said: list[Note] = []
    state = SimpleNamespace(list_events=lambda **_: [object()])
    context = SimpleNamespace(
        rank=None, group="", lab_id="0f1e2d3c4b5a", state=state, open_agent=refuse,
        reporter=SimpleNamespace(emit=said.append),
    )  # fmt: skip
    gang_wireguard.remove(context, SimpleNamespace(alias="gpu1"))  # type: ignore[arg-type]
    name = gang_wireguard.make_interface_name("0f1e2d3c4b5a")
    assert [note.text for note in said] == [
        f"a WireGuard interface of this lab may stay on gpu1, {name}: gpu1 does not answer"
    ]
