"""What the broker of a shared server decides, without an engine: bodies, names, images, leases."""

from __future__ import annotations

import bz2
import grp
import gzip
import io
import json
import lzma
import os
import socket
import tarfile
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.remote import (
    broker,
    broker_archive,
    broker_http,
    broker_net,
    broker_settings,
)
from labctl.remote import broker_rules as rules
from labctl.remote.broker_archive import retagged
from labctl.remote.broker_containers import Container
from labctl.remote.broker_gpus import Busy, Lease, leases, lend
from labctl.remote.broker_http import Refusal, pass_on, read_request
from labctl.remote.broker_images import candidates, given, own_reference, tag_of, visible
from labctl.remote.broker_mounts import opened
from labctl.remote.broker_rules import ENDS, GPUS, OWNER, Account, Share, body, exec_body, wish
from labctl.remote.reply import Failure

ALICE = Account(1001, 1002, "lab-alice", "/home/lab-alice")
BOB = Account(1003, 1003, "lab-bob", "/home/lab-bob")
SHARE = Share(8 << 30, 2.0, 4096)
MOST = 1 << 30
CARDS = [{"uuid": "GPU-a", "index": "0", "name": "T4"}, {"uuid": "GPU-b", "index": "1"}]


def made(asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "image": "sha256:1",
        "mounts": [],
        "gpus": [],
        "gpu_groups": [],
        "labels": {},
        "share": SHARE,
        "network": "labctl-u1001",
        "parent": "/labctl/u1001",
    }
    return body(ALICE, asked, **{**given, **more})


def test_a_container_is_made_anew_whatever_is_asked() -> None:
    asked = {
        "Image": "other",
        "Cmd": ["sh"],
        "Env": ["A=b", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES_X=1", "broken"],
        "Labels": {"labctl.run": "r", OWNER: "0", GPUS: "GPU-a", "other": "x"},
        "HostConfig": {
            "SecurityOpt": ["seccomp=unconfined"],
            "ReadonlyRootfs": False,
            "Memory": 1 << 60,
            "NanoCpus": 10**12,
            "PidsLimit": -1,
            "ShmSize": 1 << 60,
            "Tmpfs": {"/": "size=1t"},
            "LogConfig": {"Type": "syslog"},
        },
    }
    wish(ALICE, asked)
    found = made(asked)
    assert found["User"] == "1001:1002"
    assert found["Image"] == "sha256:1"
    assert found["Env"] == ["A=b", "NVIDIA_VISIBLE_DEVICES=void"]
    # All of the broker's own are said: what is left open, the engine takes from the image.
    assert found["Labels"] == {
        "labctl.run": "r",
        **dict.fromkeys(rules.OWN_LABELS, ""),
        OWNER: "1001",
    }
    host = found["HostConfig"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["CapDrop"] == ["ALL"]
    assert host["ReadonlyRootfs"] is True
    assert host["Memory"] == host["MemorySwap"] == host["ShmSize"] == 8 << 30
    assert host["NanoCpus"] == 2 * 10**9
    assert host["PidsLimit"] == 4096
    assert set(host["Tmpfs"]) == {"/tmp", "/var/tmp"}
    assert host["LogConfig"]["Type"] == "json-file"
    assert host["NetworkMode"] == "labctl-u1001"
    assert host["DeviceRequests"] == []


def test_a_lease_is_all_that_gives_a_gpu() -> None:
    host = {"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]], "Driver": ""}]}
    assert wish(ALICE, {"HostConfig": host}).gpus == ["*"]
    found = made({"HostConfig": host}, gpus=["GPU-a"], gpu_groups=["999"])
    assert found["Env"] == ["NVIDIA_VISIBLE_DEVICES=GPU-a"]
    assert found["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == ["GPU-a"]
    assert found["HostConfig"]["GroupAdd"] == ["999"]


@pytest.mark.parametrize(
    "asked",
    [
        {"Cmd": "x", "HostConfig": [1]},
        {"HostConfig": {"Mounts": "all"}},
        {"HostConfig": {"Mounts": [None]}},
        {"Labels": ["x"]},
        {"HostConfig": {"NewField": True}},
        {"NewField": True},
        {"HostConfig": {"IpcMode": "container:x"}},
    ],
)
def test_what_is_not_known_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        wish(ALICE, asked)


def test_a_command_inside_runs_as_the_account() -> None:
    assert exec_body(ALICE, {"Cmd": ["id"], "Env": ["NVIDIA_VISIBLE_DEVICES=all"]}) == {
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "Tty": False,
        "User": "1001:1002",
        "Env": [],
        "Cmd": ["id"],
    }
    for forged in ({"User": "0"}, {"User": "1003"}, {"Privileged": True}):
        with pytest.raises(Refusal):
            exec_body(ALICE, {"Cmd": ["id"], **forged})


def test_who_has_ended_starts_nothing_with_the_groups_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    assert broker.account_of(os.getuid(), group).uid == os.getuid()
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid + 1])
    with pytest.raises(Refusal, match="any more"):
        broker.account_of(os.getuid(), group)
    for uid, name in ((2**31 - 7, group), (os.getuid(), "no-such-group")):
        with pytest.raises(Refusal, match="no account"):
            broker.account_of(uid, name)


def test_names_and_images_are_ones_own() -> None:
    assert rules.own_name(ALICE, "hw3-r-1") == "u1001.hw3-r-1"
    assert rules.shown_name(ALICE, "/u1001.hw3-r-1") == "/hw3-r-1"
    for bad in ("../x", "", "a b", "-x", "x" * 200, "x\n"):
        with pytest.raises(Refusal):
            rules.own_name(ALICE, bad)
    assert own_reference(ALICE, "labctl/hw3:abc") == "labctl-u1001/labctl/hw3:abc"
    assert own_reference(ALICE, "host:5000/x") == "labctl-u1001/host-5000/x:latest"
    assert candidates(ALICE, "a:1") == ["labctl-u1001/a:1", "a:1"]
    assert candidates(ALICE, "sha256:" + "0" * 64) == ["sha256:" + "0" * 64]
    others = ("labctl-u1003/x:1", "docker.io/labctl-u1003/x:1", "labctl-u1001/x")
    for bad in (*others, "../x", "X", "", "a\n"):
        with pytest.raises(Refusal):
            candidates(ALICE, bad)


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        ({"RepoTags": ["pytorch:2"]}, True),
        ({"RepoTags": ["labctl-u1001/a:1"]}, True),
        ({"RepoTags": ["labctl-u1003/a:1"]}, False),
        ({"RepoTags": ["labctl-u1003/a:1", "a:1"]}, True),
        ({"RepoTags": ["labctl-u10011/a:1"]}, False),
        ({"RepoTags": [], "RepoDigests": ["a@sha256:1"]}, True),
        ({"RepoTags": [], "RepoDigests": []}, False),
        ({"RepoTags": None, "Config": {"Labels": {OWNER: "1001"}}}, True),
    ],
)
def test_anothers_image_is_not_seen(found: dict[str, Any], seen: bool) -> None:
    assert visible(ALICE, found) is seen


def test_what_staff_gave_is_replaced_by_no_registrys() -> None:
    assert given({"RepoTags": ["course/image:1"], "RepoDigests": []})
    assert not given({"RepoTags": ["a:1"], "RepoDigests": ["a@sha256:1"]})
    assert not given(None)
    for asked, tag in ((("a", ""), "latest"), (("a", "1"), "1"), (("h:5000/a:1", ""), "")):
        assert tag_of(*asked) == tag
    with pytest.raises(Refusal, match="one tag"):
        tag_of("a:1", "2")


def _saved(members: dict[str, bytes], compression: str = "") -> bytes:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode=f"w:{compression}") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return text.getvalue()


def _pieces(content: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize(("size", "compression"), [(7, ""), (100_000, "gz"), (512, "")])
def test_what_is_sent_keeps_its_content_and_loses_its_name(size: int, compression: str) -> None:
    listed = [{"Config": "c.json", "RepoTags": ["pytorch:2"], "Layers": ["l/layer.tar"]}]
    layer = bytes(range(256)) * 1001
    members = {"l/layer.tar": layer, "repositories": b"{}", "index.json": b"{}", "c.json": b"{}"}
    content = _saved({**members, "manifest.json": json.dumps(listed).encode()}, compression)
    passed = b"".join(retagged(ALICE, _pieces(content, size), MOST))
    with tarfile.open(fileobj=io.BytesIO(passed)) as tar:
        assert tar.getnames() == ["l/layer.tar", "c.json", "manifest.json"]
        file, manifest = tar.extractfile("l/layer.tar"), tar.extractfile("manifest.json")
        assert file is not None
        assert file.read() == layer
        assert manifest is not None
        assert json.load(manifest)[0]["RepoTags"] == ["labctl-u1001/pytorch:2"]


@pytest.mark.parametrize(
    "members",
    [
        {"c.json": b"{}"},
        {"manifest.json": b"{"},
        {"manifest.json": b"[1]"},
        {"manifest.json": b'[{"RepoTags": null}]'},
        {"manifest.json": b'[{"RepoTags": ["labctl-u1003/x:1"]}]'},
    ],
)
def test_an_archive_that_is_none_of_docker_save_is_refused(members: dict[str, bytes]) -> None:
    with pytest.raises(Refusal):
        list(retagged(ALICE, iter([_saved(members)]), MOST))
    with pytest.raises(Refusal):
        list(retagged(ALICE, iter([_saved(members)[:300]]), MOST))


LISTED = json.dumps([{"Config": "c", "RepoTags": ["x:1"], "Layers": []}]).encode()
FORGED = json.dumps([{"Config": "c", "RepoTags": ["pytorch:2"], "Layers": []}]).encode()


def _archive(*members: tuple[str, bytes, bytes, str]) -> bytes:
    """(name, kind, content, link) one after the other, whatever they are."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, content, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(content), link
            tar.addfile(info, io.BytesIO(content))
    return text.getvalue()


def _plain_file(name: str, content: bytes) -> tuple[str, bytes, bytes, str]:
    return name, tarfile.REGTYPE, content, ""


@pytest.mark.parametrize(
    "more",
    [
        [_plain_file("manifest.json", FORGED)],
        [_plain_file("./manifest.json", FORGED)],
        [_plain_file("/manifest.json", FORGED)],
        [_plain_file("a/../manifest.json", FORGED)],
        [_plain_file("f", FORGED), ("manifest.json", tarfile.SYMTYPE, b"", "f")],
        [_plain_file("f", FORGED), ("manifest.json", tarfile.LNKTYPE, b"", "f")],
        [("d", tarfile.SYMTYPE, b"", "."), _plain_file("d/manifest.json", FORGED)],
        [("l/layer.tar", tarfile.SYMTYPE, b"", "../manifest.json")],
        [("dev", tarfile.CHRTYPE, b"", "")],
    ],
)
def test_nothing_takes_the_manifests_place(more: list[tuple[str, bytes, bytes, str]]) -> None:
    """Else an account's archive would be everybody's `pytorch:2`."""
    content = _archive(_plain_file("manifest.json", LISTED), *more)
    with pytest.raises(Refusal, match="that the shared server takes"):
        list(retagged(ALICE, iter([content]), MOST))


def test_a_layer_may_be_named_twice_and_names_may_be_long() -> None:
    twice = ("b/layer.tar", tarfile.SYMTYPE, b"", "../a/layer.tar")
    long = f"{'n' * 200}/layer.tar"
    named = [("a", tarfile.DIRTYPE, b"", ""), _plain_file("a/layer.tar", b"1"), twice]
    content = _archive(*named, _plain_file(long, b"2"), _plain_file("manifest.json", LISTED))
    passed = b"".join(retagged(ALICE, _pieces(content, 333), MOST))
    with tarfile.open(fileobj=io.BytesIO(passed)) as tar:
        assert tar.getnames() == ["a", "a/layer.tar", "b/layer.tar", long, "manifest.json"]
        assert tar.getmember("b/layer.tar").linkname == "../a/layer.tar"


def test_a_bomb_is_counted_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the archive is packed or a layer in it: neither memory nor disk is filled."""
    most = 8 * 1024**2
    bomb = gzip.compress(bytes(4 * most))
    whole = gzip.compress(_archive(_plain_file("l", bytes(4 * most))))
    behind = _archive(_plain_file("l/layer.tar", gzip.compress(b"small") + bomb))
    for content in (whole, _archive(_plain_file("l/layer.tar", bomb)), behind):
        tracemalloc.start()
        with pytest.raises(Refusal, match="more than the shared server takes"):
            deque(retagged(ALICE, _pieces(content, 4096), most), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < most // 2
        tracemalloc.stop()
    zstandard = (b"(\xb5/\xfd", b"P*M\x18\1\0\0\0x(\xb5/\xfd", b"_*M\x18")
    for other in (bz2.compress(whole), lzma.compress(whole), *zstandard):
        with pytest.raises(Refusal, match=r"gzip|no archive|breaks off"):
            list(retagged(ALICE, iter([other]), most))
        with pytest.raises(Refusal, match="cannot be looked into"):
            list(retagged(ALICE, _pieces(_archive(_plain_file("l", other)), 1), most))
    monkeypatch.setattr(broker_archive, "MOST_MEMBERS", 3)
    with pytest.raises(Refusal, match="more than 3 files"):
        list(retagged(ALICE, iter([_archive(*[_plain_file("x", b"")] * 5)]), most))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_any_length_is_not_taken_into_memory(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 40
    with pytest.raises(Refusal, match="too long"):
        list(retagged(ALICE, iter([info.tobuf(tarfile.GNU_FORMAT)]), MOST))


def test_volumes_of_an_image_are_memory() -> None:
    """The engine would make them on its disk, where nothing bounds them."""
    image = {"Config": {"Volumes": {"/data": {}, "/lab/code": {}, "/tmp": {}}}}
    (one,) = rules.covers(image, [rules.Bind("/x", "/lab/code", False)], SHARE)
    assert (one["Type"], one["Target"]) == ("tmpfs", "/data")
    assert one["TmpfsOptions"] == {"SizeBytes": 1 << 30, "Mode": 0o1777}
    assert rules.covers({"Config": None}, [], SHARE) == []
    for volumes in ({"data": {}}, {f"/{n}": {} for n in range(100)}):
        with pytest.raises(Refusal, match="volumes"):
            rules.covers({"Config": {"Volumes": volumes}}, [], SHARE)


def test_one_accounts_connections_are_not_the_brokers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(broker_net, "PLACE", run)
    near, far = socket.socketpair()
    monkeypatch.setattr(broker_net, "connected", lambda container, port: near.dup())
    place = run / str(os.getuid()) / "a.sock"
    slots = threading.BoundedSemaphore(2)
    relay = broker_net.Relay(os.getuid(), place, "c", 1, slots)
    links = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for link in links:
        link.connect(str(place))
    assert links[2].recv(1) == b"", "the third is hung up on"
    for one in (*links, near, far):
        one.close()
    relay.close()


def _lend(account: Account, wanted: list[str], *held: Lease, most: int = 1) -> Any:
    return lend(account, wanted, CARDS, list(held), {}, most, 1000.0, 400.0)


def test_gpus_go_to_whoever_comes_first_and_for_a_time() -> None:
    bobs = Lease("GPU-a", BOB.uid, "c", 700.0)
    assert _lend(ALICE, ["*"]) == (["GPU-a"], 1000.0)
    assert _lend(ALICE, ["1"]) == (["GPU-b"], 1000.0)
    assert _lend(ALICE, ["*"], bobs) == (["GPU-b"], 1000.0)
    assert _lend(ALICE, ["*"], bobs, most=2) == (["GPU-b"], 1000.0)
    with pytest.raises(Refusal, match=r"uid 1003's for 5 min at most, until \d\d:\d\d"):
        _lend(ALICE, ["GPU-a"], bobs)
    with pytest.raises(Refusal, match="no GPU is free"):
        _lend(ALICE, ["*"], bobs, Lease("GPU-b", 1004, "d", 500.0))
    with pytest.raises(Refusal, match="there is no GPU GPU-x"):
        _lend(ALICE, ["GPU-x"])
    with pytest.raises(Refusal, match="at most 1 GPU"):
        _lend(ALICE, ["GPU-a", "GPU-b"])
    with pytest.raises(Refusal, match="it has no GPU"):
        lend(ALICE, ["*"], [], [], {}, 1, 1.0, 0.0)


def test_an_account_shares_its_own_lease_but_makes_it_no_longer() -> None:
    own = Lease("GPU-b", ALICE.uid, "c", 600.0)
    assert _lend(ALICE, ["*"], own) == (["GPU-b"], 600.0)
    assert _lend(ALICE, ["GPU-b"], own) == (["GPU-b"], 600.0)
    assert _lend(ALICE, ["*"], own, most=2) == (["GPU-a"], 1000.0)
    with pytest.raises(Refusal, match="at most 1 GPU"):
        _lend(ALICE, ["GPU-a"], own)
    over = own._replace(ends_s=400.0)
    assert _lend(ALICE, ["*"], over) == (["GPU-a"], 1000.0)
    with pytest.raises(Busy, match="for 0 min at most"):
        _lend(ALICE, ["GPU-b"], over)


def test_leases_are_what_containers_bear() -> None:
    labels = {GPUS: "GPU-a,GPU-b", ENDS: "70", OWNER: "1001"}
    going = Container("c", "x", "running", 1.0, 1001, labels)
    assert [one.uuid for one in leases([going])] == ["GPU-a", "GPU-b"]
    assert leases([going._replace(state="exited"), going._replace(labels={})]) == []
    assert [one.ends_s for one in leases([going._replace(labels={**labels, ENDS: "nan"})])] == [
        0,
        0,
    ]


def test_only_plain_paths_below_ones_own_are_opened(tmp_path: Path) -> None:
    for path in (
        "/etc/passwd",
        "/home/lab-alice",
        "/home/lab-alice/labctlx",
        "/home/lab-alice/labctl/../x",
        "/home/lab-alice/labctl/./x",
        "/home/lab-alice/labctl//x",
        "/home/lab-alice/labctl/x\0",
        "/home/lab-bob/labctl/x",
        "/dev/shm/labctl-1003/x",
        "",
    ):
        with pytest.raises(Refusal):
            opened(ALICE, path)


def test_settings_are_roots_alone(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    assert broker_settings.load(path).share.memory_bytes > 0
    path.write_text('{"accounts": 4, "cpus": 1.5}')
    path.chmod(0o644)
    assert broker_settings.load(path).share.cpus <= 1.5
    assert (
        broker_settings.load(path).share.memory_bytes * 4
        < broker_settings.load(tmp_path / "none").share.memory_bytes * 8.1
    )
    path.write_text('{"gpu": 1}')
    with pytest.raises(Failure, match="not known: gpu"):
        broker_settings.load(path)
    path.write_text("{}")
    path.chmod(0o666)
    with pytest.raises(Failure, match="could be changed by others"):
        broker_settings.load(path)


@pytest.fixture
def talk() -> Iterator[Callable[[bytes], broker_http.Request | None]]:
    """A request as it comes off the wire, its sender gone afterwards."""
    ends: list[socket.socket] = []

    def said(text: bytes) -> broker_http.Request | None:
        here, there = socket.socketpair()
        ends.extend((here, there))
        there.sendall(text)
        there.shutdown(socket.SHUT_WR)
        return read_request(here)

    yield said
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "text",
    [
        b"GET /\r\n\r\n",
        b"GET / x y HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nshort",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 2_000_000,
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
def test_a_request_that_is_none_is_refused(text: bytes) -> None:
    def whole() -> None:
        here, there = socket.socketpair()
        with here, there:
            sender = threading.Thread(target=_sent, args=(there, text))
            sender.start()
            try:
                found = read_request(here)
                assert found is not None
                found.json()
            finally:
                here.close()
                sender.join()

    with pytest.raises(Refusal):
        whole()


def _sent(link: socket.socket, text: bytes) -> None:
    try:
        link.sendall(text)
        link.shutdown(socket.SHUT_WR)
    except OSError:
        return


def test_bodies_come_whole_in_every_form(
    talk: Callable[[bytes], broker_http.Request | None],
) -> None:
    counted = talk(
        b'POST /v1.41/a?b=c%20d HTTP/1.1\r\nContent-Length: 7\r\n\r\n{"a":1}GET / HTTP/1.1'
    )
    assert counted is not None
    assert (counted.path, counted.version, counted.query) == ("/a", "/v1.41", {"b": "c d"})
    assert counted.json() == {"a": 1}
    chunked = talk(
        b'POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;x\r\n":1}\r\n0\r\n\r\n'
    )
    assert chunked is not None
    assert chunked.json() == {"a": 1}
    assert talk(b"") is None


def test_a_client_never_reaches_the_engines_parser(tmp_path: Path) -> None:
    """An engine that does not switch to a stream hears of nothing behind the request."""
    heard = bytearray()
    place = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(place)
        engine.listen(1)

        def answer() -> None:
            link, _ = engine.accept()
            with link:
                while b"\r\n\r\n" not in heard:
                    heard.extend(link.recv(65536))
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                link.shutdown(socket.SHUT_WR)
                while block := link.recv(65536):
                    heard.extend(block)

        serving = threading.Thread(target=answer)
        serving.start()
        here, there = socket.socketpair()
        with here, there:
            there.sendall(
                b"POST /v1.41/exec/1/start HTTP/1.1\r\nUpgrade: tcp\r\nX: a\r\n\r\n"
                b"POST /containers/create HTTP/1.1\r\n\r\n"
            )
            asked = read_request(here)
            assert asked is not None
            assert pass_on(asked, place, "/exec/1/start", {"w": "1\r\nX: y"}) == 200
        serving.join()
    text = heard.decode()
    assert text.startswith("POST /v1.41/exec/1/start?w=1%0D%0AX%3A+y HTTP/1.1\r\nHost: docker\r\n")
    assert "create" not in text
    assert "X: a" not in text
