"""Servers between which a firewall passes ssh from this machine and one UDP port: WireGuard."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from sshd_container import Sshd
from test_gang import TRAIN, list_servers
from wireguard_machine import build_image, filter_packets, machine, read

pytestmark = pytest.mark.engine

LOCAL = """\
lab: wired
server: {provider: local, count: 2, executor: process}
run: python3 train.py
launch: {restarts: 1, silence: 10s}
"""
STATIC = """\
lab: campus
server:
  provider: static
  count: 2
  executor: process
  static: {{hosts: [{hosts}]}}
env: {{PYTHONPATH: {site}}}
run: python3 train.py 2
launch: {{silence: 10s}}
"""
# Where the machines have PyTorch, which is this machine's.
SITE = "/opt/site"
# A training of two ranks, each on its own server: all parameters must become the same.
GLOO = """\
import os
import torch
from torch import distributed as dist, nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
step = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    step.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    step.step()
total = sum(each.sum() for each in model.parameters()).reshape(1)
others = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(others, total.detach())
assert torch.equal(others[0], others[1])
if rank == 0:
    print("trained on", len(others), "over", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""
OVER_TUNNEL = re.compile(r"rank 0 of 2 over (labctl[0-9a-f]{6}) from step")


def list_interfaces(name: str) -> list[str]:
    return re.findall(r"\blabctl[0-9a-f]{6}\b", read(name, "ls /sys/class/net"))


def rewrite(lab: LabDirectory, old: str, new: str) -> None:
    file = lab.root / "lab.yaml"
    file.write_text(file.read_text().replace(old, new))
    lab.labctl("trust", "--yes")


@pytest.fixture(scope="module")
def machines(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """Two lab machines behind their firewalls, with WireGuard and this machine's PyTorch."""
    image = build_image(server_image)
    key = tmp_path_factory.mktemp("key") / "key"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    site = Path(torch.origin).parents[1]
    with ExitStack() as stack:
        boxes = [
            stack.enter_context(machine(image, key, ["-v", f"{site}:{SITE}:ro"])) for _ in range(2)
        ]
        for box in boxes:
            filter_packets(box.name)
        yield boxes


@pytest.fixture
def campus(machines: list[Sshd], tmp_path: Path, base_image: str) -> Iterator[LabDirectory]:
    lab = make_lab(tmp_path, "campus", base_image)
    (lab.root / "Dockerfile").unlink()
    hosts = ", ".join(
        f"{{host: 127.0.0.1, port: {box.port}, user: student, identity: {box.key}}}"
        for box in machines
    )
    (lab.root / "lab.yaml").write_text(STATIC.format(hosts=hosts, site=SITE))
    (lab.root / "train.py").write_text(TRAIN)
    known_hosts = Path(lab.environ["HOME"]) / ".ssh" / "known_hosts"
    known_hosts.parent.mkdir()
    lines = [f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in machines]
    known_hosts.write_text("".join(lines))
    lab.environ["LABCTL_YES"] = "1"
    lab.labctl("up", "--yes")
    try:
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard", code=None)


@pytest.mark.long
def test_machines_without_a_private_network_train_over_wireguard_and_down_removes_it(
    campus: LabDirectory, machines: list[Sshd]
) -> None:
    forwarding = [read(box.name, "sysctl net.ipv4.ip_forward") for box in machines]
    done = campus.labctl("run", "--id", "first")
    found = OVER_TUNNEL.match(done.stdout)
    assert found is not None, done.stdout
    interface = found[1]
    assert "the servers have no private network in common; using WireGuard" in done.stderr
    for box in machines:
        peers = read(box.name, f"wg show {interface} allowed-ips").splitlines()
        assert len(peers) == 1
        assert peers[0].endswith("/32")
        modes = read(box.name, "stat -c '%a %U' /var/lib/labctl/wireguard/*")
        assert modes == "600 root"
    assert [read(box.name, "sysctl net.ipv4.ip_forward") for box in machines] == forwarding
    campus.labctl("down", "--yes", "--discard")
    for box in machines:
        assert list_interfaces(box.name) == []
        assert "wireguard" not in read(box.name, "ls /var/lib/labctl")


@pytest.mark.long
def test_torchrun_trains_with_gloo_through_the_tunnel_again_and_after_a_restart(
    campus: LabDirectory, machines: list[Sshd]
) -> None:
    rewrite(campus, "{silence", "{with: torchrun, silence")
    (campus.root / "gloo.py").write_text(GLOO)
    words = ("--", "python3", "gloo.py")
    assert "trained on 2 over labctl" in campus.labctl("run", "--id", "gloo", *words).stdout
    keys = [read(box.name, "wg show all public-key") for box in machines]
    read(machines[1].name, "ip link delete $(wg show interfaces)")  # what a reboot leaves
    assert "trained on 2 over labctl" in campus.labctl("run", "--id", "again", *words).stdout
    assert [read(box.name, "wg show all public-key") for box in machines] == keys


@pytest.mark.long
def test_a_run_does_not_start_where_nothing_passes_and_the_port_to_open_is_named(
    campus: LabDirectory, machines: list[Sshd]
) -> None:
    for box in machines:
        read(box.name, "iptables -I OUTPUT -p udp --dport 51820 -j DROP")
    try:
        error = campus.labctl("run", "--id", "shut", code=255).stderr
    finally:
        for box in machines:
            read(box.name, "iptables -D OUTPUT 1")
    assert "campus cannot reach campus-1 at 172." in error
    assert re.search(r"campus-1 cannot reach campus over WireGuard: no answer at 172\.", error)
    assert "sudo ufw allow 51820/udp" in error
    assert campus.json("status")["runs"] == []
    for box in machines:
        read(box.name, "iptables -A INPUT -i labctl+ -j DROP")
    try:
        error = campus.labctl("run", "--id", "filtered", code=255).stderr
    finally:
        for box in machines:
            read(box.name, "iptables -D INPUT -i labctl+ -j DROP")
    assert re.search(r"sudo ufw allow in on labctl[0-9a-f]{6}\n", error)


@pytest.mark.long
def test_private_never_uses_wireguard_and_names_the_addresses(
    campus: LabDirectory, machines: list[Sshd]
) -> None:
    rewrite(campus, "count: 2", "count: 2\n  network: private")
    error = campus.labctl("run", "--id", "private", code=255).stderr
    assert "campus cannot reach campus-1 at 172." in error
    assert "write `network: auto`" in error
    assert [list_interfaces(box.name) for box in machines] == [[], []]


@pytest.mark.long
def test_without_sudo_the_error_names_the_server_and_what_it_lacks(
    campus: LabDirectory, machines: list[Sshd]
) -> None:
    read(machines[0].name, "mv /etc/sudoers.d/student /root/student")
    try:
        error = campus.labctl("run", "--id", "refused", code=255).stderr
    finally:
        read(machines[0].name, "mv /root/student /etc/sudoers.d/student")
    assert re.search(r"campus(-1)?: WireGuard needs root, or sudo without a password", error)


@pytest.mark.long
def test_a_replaced_server_gets_the_packages_and_the_others_get_its_key(
    tmp_path: Path, base_image: str, server_image: str
) -> None:
    lab = make_lab(tmp_path, "wired", base_image)
    (lab.root / "Dockerfile").unlink()
    (lab.root / "lab.yaml").write_text(LOCAL)
    (lab.root / "train.py").write_text(TRAIN)
    try:
        lab.labctl("up", "--yes")
        first, second = list_servers(lab)
        filter_packets(first)
        filter_packets(second)
        words = ("run", "--recover", "--id", "lost", "--", "python3", "train.py", "100")
        process = lab.start(*words)
        process.said("step 5\n")
        (old,) = read(first, "wg show all peers").split()[1:]
        subprocess.run(["docker", "rm", "-f", "-v", second], capture_output=True, check=True)
        log = process.end().stdout
        assert log.endswith("step 100\n")
        assert len(OVER_TUNNEL.findall(log)) == 2
        assert list_servers(lab)[1] != second
        (new,) = read(first, "wg show all peers").split()[1:]
        assert new != old
    finally:
        lab.labctl("down", "--yes", "--discard")
