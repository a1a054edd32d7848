"""What the broker of a shared server decides, without an engine: bodies, names, images, leases."""

from __future__ import annotations

import grp
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.broker import broker, networks, query_filter, rules, settings
from labctl.agent.broker.account_containers import AccountContainer
from labctl.agent.broker.account_images import (
    build_own_reference,
    is_installed_by_staff,
    is_visible,
    list_candidates,
    pick_tag,
)
from labctl.agent.broker.calls import Calls
from labctl.agent.broker.gpu_leases import GpuIdentity, GpuLease, GpusBusy, lend_gpus, list_leases
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.mounts import open_owned_path
from labctl.agent.broker.query_filter import parse_filters, pick_parameters
from labctl.agent.broker.request_fields import RequestFields
from labctl.agent.broker.rules import (
    ENDS,
    GPUS,
    OWNER,
    AccountShare,
    BrokerAccount,
    build_container,
    parse_container_request,
    parse_exec_request,
)
from labctl.agent.host.engine_objects import (
    ContainerImageConfig,
    Image,
    MountTmpfsOptions,
    NewContainer,
    NewExec,
)
from labctl.agent.reply import Failure
from labctl.wire.codec import from_json, to_json

ALICE = BrokerAccount(71001, 71002, "lab-alice", "/home/lab-alice")
BOB = BrokerAccount(71003, 71003, "lab-bob", "/home/lab-bob")
SHARE = AccountShare(8 << 30, 2.0, 4096)
MOST = 1 << 30
CARDS = [GpuIdentity("GPU-a", "0", "T4"), GpuIdentity("GPU-b", "1", "GPU-b")]


def parse(body: dict[str, Any]) -> rules.ContainerRequest:
    return parse_container_request(ALICE, RequestFields(body))


def build(body: dict[str, Any], **more: Any) -> NewContainer:
    given: dict[str, Any] = {
        "image": "sha256:1",
        "mounts": [],
        "gpus": [],
        "gpu_groups": [],
        "labels": {},
        "share": SHARE,
        "network": "labctl-u71001",
        "parent": "/labctl/u71001",
    }
    return build_container(ALICE, parse(body), **{**given, **more})


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
    container = build(asked)
    assert container.User == "71001:71002"
    assert container.Image == "sha256:1"
    assert container.Cmd == ("sh",)
    assert container.Entrypoint is None
    assert container.Env == ("A=b", "NVIDIA_VISIBLE_DEVICES=void")
    # All of the broker's own are said: what is left open, the engine takes from the image.
    assert container.Labels == {
        "labctl.run": "r",
        **dict.fromkeys(rules.OWN_LABELS, ""),
        OWNER: "71001",
    }
    host = container.HostConfig
    assert host.SecurityOpt == ("no-new-privileges",)
    assert host.CapDrop == ("ALL",)
    assert host.ReadonlyRootfs is True
    assert host.Memory == host.MemorySwap == host.ShmSize == 8 << 30
    assert host.NanoCpus == 2 * 10**9
    assert host.PidsLimit == 4096
    assert set(host.Tmpfs or ()) == {"/tmp", "/var/tmp"}
    assert host.LogConfig
    assert host.LogConfig.Type == "json-file"
    assert host.NetworkMode == "labctl-u71001"
    assert host.DeviceRequests == ()


def test_a_lease_is_all_that_gives_a_gpu() -> None:
    host = {"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]], "Driver": ""}]}
    assert parse({"HostConfig": host}).gpus == ["*"]
    container = build({"HostConfig": host}, gpus=["GPU-a"], gpu_groups=["999"])
    assert container.Env == ("NVIDIA_VISIBLE_DEVICES=GPU-a",)
    assert container.HostConfig.DeviceRequests[0].DeviceIDs == ("GPU-a",)
    assert container.HostConfig.GroupAdd == ("999",)


@pytest.mark.parametrize(("host", "init"), [({}, False), ({"Init": True}, True)])
def test_the_engines_settings_add_no_init(host: dict[str, Any], init: bool) -> None:
    sent = to_json(build({"HostConfig": host}), drop_defaults=True)
    assert sent["HostConfig"]["Init"] is init


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
        {"HostConfig": {"RestartPolicy": "always"}},
        {"HostConfig": {"DeviceRequests": [None]}},
        {"HostConfig": {"DeviceRequests": {"Driver": "x"}}},
        {"HostConfig": {"Memory": True}},
        {"StopTimeout": "1"},
        {"Cmd": {"sh": 1}},
        {"Entrypoint": [1]},
        {"Env": {"A": "b"}},
        {"WorkingDir": "x" * 5000},
        {"Hostname": ["x"]},
        {"User": 71001},
    ],
)
def test_what_is_not_known_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(HttpRefusal):
        parse(asked)


def test_a_command_inside_runs_as_the_account() -> None:
    fields = RequestFields({"Cmd": ["id"], "Env": ["NVIDIA_VISIBLE_DEVICES=all"]})
    assert parse_exec_request(ALICE, fields) == NewExec(("id",), User="71001:71002")
    for forged in ({"User": "0"}, {"User": "71003"}, {"Privileged": True}):
        with pytest.raises(HttpRefusal):
            parse_exec_request(ALICE, RequestFields({"Cmd": ["id"], **forged}))


def test_who_has_ended_starts_nothing_with_the_groups_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    assert broker.find_account(os.getuid(), group).uid == os.getuid()
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid + 1])
    with pytest.raises(HttpRefusal, match="no longer has access"):
        broker.find_account(os.getuid(), group)
    for uid, name in ((2**31 - 7, group), (os.getuid(), "no-such-group")):
        with pytest.raises(HttpRefusal, match="no account"):
            broker.find_account(uid, name)


def test_names_and_images_are_ones_own() -> None:
    assert rules.build_own_name(ALICE, "hw3-r-1") == "u71001.hw3-r-1"
    assert rules.strip_own_prefix(ALICE, "/u71001.hw3-r-1") == "/hw3-r-1"
    for bad in ("../x", "", "a b", "-x", "x" * 200, "x\n"):
        with pytest.raises(HttpRefusal):
            rules.build_own_name(ALICE, bad)
    assert build_own_reference(ALICE, "labctl/hw3:abc") == "labctl-u71001/labctl/hw3:abc"
    assert build_own_reference(ALICE, "host:5000/x") == "labctl-u71001/host-5000/x:latest"
    assert list_candidates(ALICE, "a:1") == ["labctl-u71001/a:1", "a:1"]
    assert list_candidates(ALICE, "sha256:" + "0" * 64) == ["sha256:" + "0" * 64]
    pinned = f"a/b:1@sha256:{'0' * 64}"
    assert list_candidates(ALICE, pinned) == [pinned]
    others = ("labctl-u71003/x:1", "docker.io/labctl-u71003/x:1", "labctl-u71001/x")
    unclear = ("a:", "a:1:", "h:5000/a:1:", "a:1:2", "a//b", "a/../b", "a/", "a@", "a@b", "a:é")
    for bad in (*others, *unclear, f"{pinned}:", "../x", "X", "", "a\n", "a" * 400):
        with pytest.raises(HttpRefusal):
            list_candidates(ALICE, bad)


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        ({"RepoTags": ["pytorch:2"]}, True),
        ({"RepoTags": ["labctl-u71001/a:1"]}, True),
        ({"RepoTags": ["labctl-u71003/a:1"]}, False),
        ({"RepoTags": ["labctl-u71003/a:1", "a:1"]}, True),
        ({"RepoTags": ["labctl-u710011/a:1"]}, False),
        ({"RepoTags": [], "RepoDigests": ["a@sha256:1"]}, True),
        ({"RepoTags": [], "RepoDigests": []}, False),
        ({"RepoTags": None, "Config": {"Labels": {OWNER: "71001"}}}, True),
    ],
)
def test_anothers_image_is_not_seen(found: dict[str, Any], seen: bool) -> None:
    assert is_visible(ALICE, from_json(Image, {"Id": "i", **found})) is seen


def test_what_staff_gave_is_replaced_by_no_registrys() -> None:
    assert is_installed_by_staff(Image("i", ("course/image:1",)))
    assert not is_installed_by_staff(Image("i", ("a:1",), ("a@sha256:1",)))
    assert not is_installed_by_staff(None)
    for asked, tag in ((("a", ""), "latest"), (("a", "1"), "1"), (("h:5000/a:1", ""), "")):
        assert pick_tag(*asked) == tag
    with pytest.raises(HttpRefusal, match="one tag"):
        pick_tag("a:1", "2")
    assert pick_tag("a", f"sha256:{'0' * 64}").startswith("sha256:")
    for tag in ("1/../../b", "1:", "\n", "a&fromSrc=b", "é"):
        with pytest.raises(HttpRefusal, match="neither"):
            pick_tag("a", tag)


def declare_volumes(*volumes: str) -> Image:
    return Image("i", Config=ContainerImageConfig(Volumes={path: {} for path in volumes}))


def test_volumes_of_an_image_are_memory() -> None:
    """The engine would make them on its disk, where nothing bounds them."""
    image = declare_volumes("/data", "/lab/code", "/tmp")
    (one,) = rules.build_volume_mounts(image, [rules.BindMount("/x", "/lab/code", False)], SHARE)
    assert (one.Type, one.Target) == ("tmpfs", "/data")
    assert one.TmpfsOptions == MountTmpfsOptions(SizeBytes=1 << 30, Mode=0o1777)
    assert rules.build_volume_mounts(Image("i"), [], SHARE) == []
    for volumes in (["data"], [f"/{number}" for number in range(100)]):
        with pytest.raises(HttpRefusal, match="volumes"):
            rules.build_volume_mounts(declare_volumes(*volumes), [], SHARE)


def test_one_accounts_connections_are_not_the_brokers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(networks, "PLACE", run)
    near, far = socket.socketpair()
    monkeypatch.setattr(networks, "connect_to_container", lambda container, port: near.dup())
    place = run / str(os.getuid()) / "a.sock"
    slots = threading.BoundedSemaphore(2)
    relay = networks.ServiceRelay(os.getuid(), place, "c", 1, slots)
    links = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for link in links:
        link.connect(str(place))
    assert links[2].recv(1) == b"", "the third is hung up on"
    for one in (*links, near, far):
        one.close()
    relay.close()


def test_filters_are_known_and_read_in_one_way_only() -> None:
    both = '{"label": {"a=b": true}, "status": ["exited"], "since": ["x"], "name": null}'
    assert parse_filters(both) == {"label": ["a=b"], "status": ["exited"]}
    for bad in ('{"label": ["a"], "Label": ["b"]}', '{"label": [1]}', "[]", "{", '{"id": [["x"]]}'):
        with pytest.raises(HttpRefusal, match="filters"):
            parse_filters(bad)


def test_only_known_parameters_go_on() -> None:
    assert pick_parameters("top", {"ps_args": "-eo args"}) == {}
    assert pick_parameters("logs", {"tail": "5", "x": "1"}) == {"tail": "5"}
    paths = [
        path
        for methods, path, handler in broker.ROUTES
        if handler in (Calls.pass_to_container, Calls.pass_to_exec)
    ]
    actions = {word for path in paths for word in re.findall(r"[a-z]+", path.rpartition("/")[2])}
    assert actions <= query_filter.PARAMETERS.keys()


def _lend(account: BrokerAccount, wanted: list[str], *held: GpuLease, most: int = 1) -> Any:
    return lend_gpus(account, wanted, CARDS, list(held), {}, most, 1000.0, 400.0)


def test_gpus_go_to_whoever_comes_first_and_for_a_time() -> None:
    bobs = GpuLease("GPU-a", BOB.uid, "c", 700.0)
    assert _lend(ALICE, ["*"]) == (["GPU-a"], 1000.0)
    assert _lend(ALICE, ["1"]) == (["GPU-b"], 1000.0)
    assert _lend(ALICE, ["*"], bobs) == (["GPU-b"], 1000.0)
    assert _lend(ALICE, ["*"], bobs, most=2) == (["GPU-b"], 1000.0)
    with pytest.raises(
        HttpRefusal, match=r"in use by uid 71003 for at most 5 min, until \d\d:\d\d"
    ):
        _lend(ALICE, ["GPU-a"], bobs)
    with pytest.raises(HttpRefusal, match="no GPU is free"):
        _lend(ALICE, ["*"], bobs, GpuLease("GPU-b", 71004, "d", 500.0))
    with pytest.raises(HttpRefusal, match="it has no GPU GPU-x"):
        _lend(ALICE, ["GPU-x"])
    with pytest.raises(HttpRefusal, match="at most 1 GPU"):
        _lend(ALICE, ["GPU-a", "GPU-b"])
    with pytest.raises(HttpRefusal, match="it has no GPU"):
        lend_gpus(ALICE, ["*"], [], [], {}, 1, 1.0, 0.0)


def test_an_account_shares_its_own_lease_but_makes_it_no_longer() -> None:
    own = GpuLease("GPU-b", ALICE.uid, "c", 600.0)
    assert _lend(ALICE, ["*"], own) == (["GPU-b"], 600.0)
    assert _lend(ALICE, ["GPU-b"], own) == (["GPU-b"], 600.0)
    assert _lend(ALICE, ["*"], own, most=2) == (["GPU-a"], 1000.0)
    with pytest.raises(HttpRefusal, match="at most 1 GPU"):
        _lend(ALICE, ["GPU-a"], own)
    over = own._replace(ends_s=400.0)
    assert _lend(ALICE, ["*"], over) == (["GPU-a"], 1000.0)
    with pytest.raises(GpusBusy, match="for at most 0 min"):
        _lend(ALICE, ["GPU-b"], over)


def test_leases_are_what_containers_bear() -> None:
    labels = {GPUS: "GPU-a,GPU-b", ENDS: "70", OWNER: "71001"}
    going = AccountContainer("c", "x", "running", 1.0, 71001, labels)
    assert [one.uuid for one in list_leases([going])] == ["GPU-a", "GPU-b"]
    assert list_leases([going._replace(state="exited"), going._replace(labels={})]) == []
    assert [
        one.ends_s for one in list_leases([going._replace(labels={**labels, ENDS: "nan"})])
    ] == [
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
        "/dev/shm/labctl-71003/x",
        "",
    ):
        with pytest.raises(HttpRefusal):
            open_owned_path(ALICE, path)


def test_settings_are_roots_alone(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    assert settings.load(path).share.memory_bytes > 0
    path.write_text('{"accounts": 4, "cpus": 1.5}')
    path.chmod(0o644)
    assert settings.load(path).share.cpus <= 1.5
    assert (
        settings.load(path).share.memory_bytes * 4
        < settings.load(tmp_path / "none").share.memory_bytes * 8.1
    )
    path.write_text('{"gpu": 1}')
    with pytest.raises(Failure, match="unknown settings: gpu"):
        settings.load(path)
    path.write_text("{}")
    path.chmod(0o666)
    with pytest.raises(Failure, match="can be changed by accounts other"):
        settings.load(path)
