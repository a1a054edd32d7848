"""A lab machine in a container that has WireGuard's packages, and a firewall."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab_servers import inside
from sshd_container import Sshd, build, docker

from labctl.servers.host_keys import ensure_key_pair

IMAGE = "labctl-test-wireguard"
DOCKERFILE = """
FROM {server_image}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        wireguard-go wireguard-tools \\
    && rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd
"""


def build_image(server_image: str) -> str:
    return build(IMAGE, DOCKERFILE.format(server_image=server_image))


@contextmanager
def machine(image: str, key: Path, options: Sequence[str] = ()) -> Iterator[Sshd]:
    """A running one that `student` may log in to; `options` are further words for `docker run`."""
    box = Sshd(f"labctl-test-wireguard-{uuid.uuid4().hex[:8]}", key)
    docker(
        *("run", "-d", "--init", "--name", box.name, "-p", "127.0.0.1::22", *options),
        *("--cap-add", "NET_ADMIN", "--entrypoint", "sleep", image, "infinity"),
    )
    try:
        box.accept(ensure_key_pair(key), ["student"])
        box.start_sshd()
        yield box
    finally:
        docker("rm", "--force", "--volumes", box.name)


def filter_packets(name: str) -> None:
    """Let in what the machine asked for, connections from this machine, and the one UDP port."""
    rules = (
        "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        "-s $gateway -j ACCEPT",
        "-p udp --dport 51820 -j ACCEPT",
        "-j DROP",
    )
    lines = "; ".join(f"iptables -A INPUT -i eth0 {rule}" for rule in rules)
    route = "gateway=$(ip route | sed -n 's/default via \\([^ ]*\\).*/\\1/p')"
    read(name, f"set -e; {route}; {lines}")


def read(name: str, line: str) -> str:
    """The output of a shell line in a container, by root."""
    code, text = inside(name, line)
    assert code == 0, text
    return text.strip()
