"""A small real sshd in a container, with odd login shells and iptables of its own.

Its fixtures are in sshd_fixtures.py: `pytest_plugins = ["sshd_fixtures"]` in a test module.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labctl.model import Endpoint, Offer, Server
from labctl.servers.host_keys import ensure_key_pair

IMAGE = "labctl-test-sshd"
DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        openssh-server iptables fish csh rsync curl ca-certificates procps \\
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
RUN mkdir -p /run/sshd \\
    && useradd -m -s /bin/bash student \\
    && useradd -m -s /usr/bin/fish fishy \\
    && useradd -m -s /bin/csh cshy \\
    && useradd -m -s /bin/bash noisy \\
    && { echo 'echo "Welcome to the lab!"'; echo 'echo "Be kind." >&2'; } > /tmp/banner \\
    && cat /tmp/banner /home/noisy/.bashrc > /tmp/bashrc && cp /tmp/bashrc /home/noisy/.bashrc
"""
TMUX_IMAGE = f"{IMAGE}-tmux"
TMUX_DOCKERFILE = f"""
FROM {IMAGE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends tmux \\
    && rm -rf /var/lib/apt/lists/*
"""
USERS = ("student", "fishy", "cshy", "noisy")
# A key of one kind: a new RSA key takes up to three seconds of a processor.
NEW_HOST_KEY = (
    "rm -f /etc/ssh/ssh_host_* && ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key"
)


def docker(*words: str, stdin: str = "") -> str:
    """Standard output of `docker ...`; a failure shows what it said."""
    done = subprocess.run(
        ["docker", *words], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Sshd:
    """One container. `key` is the private key that every user in it accepts."""

    name: str
    key: Path

    @property
    def port(self) -> int:
        return int(docker("port", self.name, "22/tcp").splitlines()[0].rpartition(":")[2])

    @property
    def host_key(self) -> str:
        text = self.sh("cat /etc/ssh/ssh_host_ed25519_key.pub")
        return " ".join(text.split()[:2])

    def endpoint(self, user: str = "student", **other: str) -> Endpoint:
        fields = {
            "host": "127.0.0.1",
            "identity": str(self.key),
            "host_key": self.host_key,
            **other,
        }
        return Endpoint(port=self.port, user=user, **fields)

    def server(self, server_id: str = "box-1", alias: str = "digits", **other: str) -> Server:
        return Server(
            id=server_id,
            provider="local",
            lab=alias,
            lab_id="lab-1",
            alias=alias,
            endpoint=self.endpoint(**other),
            offer=Offer(provider="local", type="container"),
            created_at=0.0,
        )

    def sh(self, line: str, *, user: str = "root") -> str:
        return docker("exec", "-u", user, self.name, "sh", "-c", line)

    def start_sshd(self, *options: str) -> None:
        """Start sshd and wait until it greets."""
        words = " ".join(f"-o {option}" for option in options)
        self.sh(f"/usr/sbin/sshd {words}")
        wait_for(lambda: greets(self.port))

    def stop_sshd(self) -> None:
        """End the listener and every session."""
        self.sh("pkill -9 -x sshd || true")
        wait_for(lambda: not self.sh("pgrep -x -r R,S,D sshd || true"))

    def new_host_key(self) -> None:
        self.sh(NEW_HOST_KEY)

    def accept(self, public: str, users: Sequence[str]) -> None:
        """Accept a key for these users, and have a host key of its own."""
        lines = [NEW_HOST_KEY]
        for user in users:
            folder = f"/home/{user}/.ssh"
            lines += [
                f"mkdir -p {folder}",
                f"echo '{public}' > {folder}/authorized_keys",
                f"chown -R {user} {folder}",
            ]
        self.sh(" && ".join(lines))

    def black_hole(self) -> None:
        """From now on no packet of any SSH connection passes, and nobody is told."""
        self.sh("iptables -I INPUT -p tcp --dport 22 -j DROP")
        self.sh("iptables -I OUTPUT -p tcp --sport 22 -j DROP")

    def mend(self) -> None:
        self.sh("iptables -F")


def greets(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as wire:
            return wire.recv(4) == b"SSH-"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Until `condition` holds; an assertion after `timeout_s`.

    A look may start processes, so the pause is twice as long as a look took.
    """
    end = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < end, f"not within {timeout_s} s"
        time.sleep(min(0.5, max(0.02, 2 * (now - began))))


def base_image() -> str:
    """What images of tests stand on: the variable's, one made here by debootstrap, or the hub's."""
    if chosen := os.environ.get("LABCTL_BASE_IMAGE"):
        return chosen
    made_here = "labctl-base:bookworm"
    return made_here if docker("images", "-q", made_here) else "debian:bookworm-slim"


def build(tag: str, dockerfile: str) -> str:
    """The image `tag`; its BASE is `base_image()`.

    One process at a time: the next one finds the layers instead of making them once more.
    """
    with (Path(tempfile.gettempdir()) / f"{tag}.{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = ("build", "-q", "-t", tag, "--build-arg", f"BASE={base_image()}", "-")
        docker(*words, stdin=dockerfile)
    return tag


def build_image() -> str:
    return build(IMAGE, DOCKERFILE)


def build_tmux_image() -> str:
    build_image()
    return build(TMUX_IMAGE, TMUX_DOCKERFILE)


def start(image: str, key: Path, *words: str) -> Sshd:
    name = f"labctl-test-sshd-{uuid.uuid4().hex[:8]}"
    docker(
        *("run", "-d", "--init", "--name", name, "--cap-add", "NET_ADMIN"),
        *("-p", "127.0.0.1::22", *words, image, "sleep", "infinity"),
    )
    box = Sshd(name, key)
    box.accept(ensure_key_pair(key), USERS)
    box.start_sshd()
    return box
