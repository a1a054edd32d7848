"""SSH servers in containers on this machine, with ssh_configs and labs for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import NotDoneError, environment
from labctl import Lab
from labctl.commands.ssh import known_hosts_line
from labctl.config import ensure_lab_id, find_paths
from labctl.model import Endpoint, Offer, Server
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.prepare import probe
from labctl.state import State

IMAGE = "labctl-bench-sshd"
MADE_HERE = "labctl-base:bookworm"
DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        openssh-server rsync python3 tmux \\
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
RUN mkdir -p /run/sshd && useradd -m -s /bin/bash student
CMD ["sh", "-c", "ssh-keygen -q -A && exec /usr/sbin/sshd -D -e"]
"""
# ssh with its defaults, with the algorithms of labctl's ssh_config, and with the fastest login
ALGORITHMS = {
    "default": "",
    "labctl's ciphers": "    Ciphers ^aes128-gcm@openssh.com\n",
    "curve25519": ("    Ciphers ^aes128-gcm@openssh.com\n    KexAlgorithms curve25519-sha256\n"),
}
READY_S = 30.0


def docker(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(["docker", *words], input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotDoneError(f"docker {' '.join(words)}: {done.stderr.strip()[-600:]}")
    return done.stdout


@dataclass(frozen=True)
class Box:
    """A server. `name` is its host in every config, its id for labctl and its container's name."""

    name: str
    endpoint: Endpoint

    def sh(self, line: str) -> str:
        """Run `line` on the server as the user, not over SSH; return its output."""
        return docker("exec", "-u", "student", "-w", "/home/student", self.name, "sh", "-c", line)


@dataclass(frozen=True)
class Boxes:
    """Servers, and a home directory from which ssh, the peers and labctl reach them."""

    home: Path
    key: Path
    all: tuple[Box, ...]

    def config(self, algorithms: str) -> str:
        """Return the ssh_config with these algorithms (a key of ALGORITHMS)."""
        return str(self.home / f"ssh_config.{[*ALGORITHMS].index(algorithms)}")

    def ssh(self, algorithms: str, *options: str) -> tuple[str, ...]:
        """Return the argv up to the host's name."""
        return ("ssh", "-F", self.config(algorithms), *options)

    @property
    def connections(self) -> Connections:
        return self._connections(in_process=False)

    @property
    def in_process(self) -> Connections:
        """Return connections as programs have them: over fabric, inside this process."""
        return self._connections(in_process=True)

    def _connections(self, *, in_process: bool) -> Connections:
        places = find_paths({"HOME": str(self.home)})
        return Connections(places.ssh_dir, places.user_ssh_config, in_process=in_process)

    def server(self, box: Box, identity: str) -> Server:
        return Server(
            id=box.name,
            provider="static",
            lab=box.name,
            lab_id=identity,
            alias=f"lab-{box.name}",
            endpoint=box.endpoint,
            offer=Offer(provider="static", type="machine"),
            created_at=time.time(),
            state="running",
        )

    def lab(self, name: str, box: Box, text: str = "") -> Lab:
        """Create a lab whose server is `box`, as after `up`."""
        root = self.home / name
        root.mkdir()
        (root / "lab.yaml").write_text(f"lab: {name}\nrun: 'true'\n{text}")
        server = self.server(box, ensure_lab_id(root))
        lab = Lab.load(root, environ=environment(self.home))
        lab.context.state.save_server(server)
        lab.context.save_facts(server, probe(lab.context.connections.open(server)))
        return lab

    def end_masters(self) -> None:
        """Close all shared connections of labctl, its own and people's."""
        connections = self.connections
        for box in self.all:
            config = connections.config_path(box.name)
            if config.exists():
                connections.close(self.server(box, ""))
                words = ("ssh", "-F", str(config), "-O", "exit", f"lab-{box.name}")
                subprocess.run(words, capture_output=True, check=False)


@contextmanager
def boxes(home: Path, count: int, base: str) -> Iterator[Boxes]:
    """Run this many servers that accept a login, and remove them at the end."""
    home.mkdir(parents=True)
    (home / ".ssh").mkdir(mode=0o700)
    print(f"starting {count} SSH servers", file=sys.stderr)
    docker("build", "-q", "-t", IMAGE, "--build-arg", f"BASE={base}", "-", stdin=DOCKERFILE)
    key = home / "id_ed25519"
    public = ensure_key_pair(key)
    prefix = f"labctl-bench-{uuid.uuid4().hex[:6]}"
    names = [f"{prefix}-{number:02}" for number in range(count)]
    try:
        for name in names:
            docker("run", "-d", "--init", "--name", name, "-p", "127.0.0.1::22", IMAGE)
        made = Boxes(home, key, tuple(_ready(name, public, key) for name in names))
        describe(made)
        with State(find_paths({"HOME": str(home)}).database) as state:
            for number, box in enumerate(made.all):
                state.save_server(made.server(box, f"{number:012x}"))
        yield made
        made.end_masters()
    finally:
        subprocess.run(["docker", "rm", "-f", "-v", *names], capture_output=True, check=False)


def _ready(name: str, public: str, key: Path) -> Box:
    line = (
        "cd /home/student && mkdir -p .ssh && cat > .ssh/authorized_keys "
        "&& chown -R student .ssh && chmod 700 .ssh"
    )
    docker("exec", "-i", name, "sh", "-c", line, stdin=public + "\n")
    port = int(docker("port", name, "22/tcp").splitlines()[0].rpartition(":")[2])
    deadline = time.monotonic() + READY_S
    host_key = ""
    while not host_key:
        found = docker("exec", name, "sh", "-c", "cat /etc/ssh/*ed25519_key.pub 2>&- || true")
        host_key = " ".join(found.split()[:2])
        if not host_key and time.monotonic() > deadline:
            raise NotDoneError(f"{name} has no host key after {READY_S:g} s")
    endpoint = Endpoint(
        host="127.0.0.1", port=port, user="student", identity=str(key), host_key=host_key
    )
    box = Box(name, endpoint)
    Connections(key.parent / "probe-ssh", None).wait_for_ssh(_as_server(box), READY_S).close()
    return box


def _as_server(box: Box) -> Server:
    offer = Offer(provider="static", type="machine")
    return Server(
        id=box.name, provider="static", lab="x", lab_id="x", alias=box.name,
        endpoint=box.endpoint, offer=offer, created_at=0.0,
    )  # fmt: skip


def describe(made: Boxes) -> None:
    """Write an ssh_config for each set of algorithms, and the known hosts for the peers."""
    known = [
        known_hosts_line(f"[127.0.0.1]:{box.endpoint.port}", box.endpoint.host_key)
        for box in made.all
    ]
    (made.home / ".ssh" / "known_hosts").write_text("".join(known))
    for algorithms, more in ALGORITHMS.items():
        text = "".join(
            f"Host {box.name}\n    HostName 127.0.0.1\n    Port {box.endpoint.port}\n"
            for box in made.all
        )
        text += (
            f"Host *\n    User student\n    IdentityFile {made.key}\n    IdentitiesOnly yes\n"
            f"    BatchMode yes\n    UserKnownHostsFile {made.home}/.ssh/known_hosts\n{more}"
        )
        Path(made.config(algorithms)).write_text(text)


def base_image() -> str:
    """Return the image of the variable, of scripts/base-image, or of the hub."""
    if chosen := os.environ.get("LABCTL_BASE_IMAGE"):
        return chosen
    return MADE_HERE if docker("images", "-q", MADE_HERE).strip() else "debian:bookworm-slim"
