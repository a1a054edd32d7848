"""A lab whose store is a directory on a real sshd with a small disk; an agent has the key."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab_directory import LabDirectory, make_lab
from lab_servers import wait_for
from sshd_container import Sshd, build, build_image, docker, start

from labctl.lab import Lab
from labctl.servers.context import LabContext
from labctl.wire.watchdog import WATCH, MirrorStateRecord, WatchRequest

STORE_DOCKERFILE = """
ARG BASE
FROM {base}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 \\
    && rm -rf /var/lib/apt/lists/*
"""
DISK = "/home/student/labs:size={size},uid=1000,gid=1000,mode=700"
MIRROR = "mirror: 2s\n"
# Shell: a checkpoint every 0.3 s, by rename, of which three are kept, until the test says go.
TRAIN = """\
mkdir -p /lab/run/checkpoints; cd /lab/run/checkpoints; n=0
until [ -e /lab/run/go ]; do
  n=$((n+1)); d=step-$(printf %08d $n); mkdir .new
  head -c ${SIZE:-20000} /dev/urandom > .new/model
  sum=$(sha256sum < .new/model | cut -d' ' -f1)
  printf '{"step":%d,"files":{"model":{"size":%d,"sha256":"%s"}}}' \
    $n ${SIZE:-20000} $sum > .new/manifest.json
  mv .new $d; echo "step $n"
  [ $n -gt 3 ] && rm -rf step-$(printf %08d $((n-3)))
  sleep 0.3
done
echo over"""


def build_store_image() -> str:
    return build("labctl-test-store", STORE_DOCKERFILE.format(base=build_image()))


class StoreBox:
    """The machine with the store: the account student has it below ~/labs."""

    def __init__(self, box: Sshd) -> None:
        self.box = box
        self.address = docker(
            *("inspect", "-f", "{{.NetworkSettings.Networks.bridge.IPAddress}}", box.name)
        ).strip()

    @property
    def url(self) -> str:
        return f"ssh://student@{self.address}/~/labs"

    def sh(self, line: str) -> str:
        return self.box.sh(line, user="student")

    def read(self, place: str) -> dict[str, Any]:
        text = self.sh(f"cat ~/labs/{place} 2>/dev/null || echo '{{}}'")
        found: dict[str, Any] = json.loads(text)
        return found

    def hashes(self, place: str) -> dict[str, str]:
        """Path below the place -> sha256 of every file there."""
        said = self.sh(f"cd ~/labs/{place} && find . -type f -exec sha256sum {{}} +")
        return {row.split("  ./", 1)[1]: row.split()[0] for row in said.splitlines()}


class StoreLab:
    def __init__(self, lab: LabDirectory, store: StoreBox) -> None:
        self.lab = lab
        self.store = store

    @property
    def context(self) -> LabContext:
        return Lab.load(self.lab.root, environ=self.lab.environ).context

    @property
    def prefix(self) -> str:
        context = self.context
        return f"{context.config.name}-{context.lab_id}"

    def mirror(self) -> MirrorStateRecord:
        """The mirror's state in the watchdog's report."""
        context = self.context
        request = WatchRequest(context.lab_id)
        watch = context.open_agent(context.get_server()).call(WATCH, request).watch
        return (watch.mirror if watch else None) or MirrorStateRecord()

    def shown(
        self, condition: Callable[[MirrorStateRecord], bool], within_s: float = 45
    ) -> MirrorStateRecord:
        """The mirror's state once it is so."""
        seen: list[MirrorStateRecord] = []

        def so() -> bool:
            seen.append(self.mirror())
            return condition(seen[-1])

        wait_for(so, within_s)
        return seen[-1]

    def index(self, run: str) -> dict[str, list[Any]]:
        found = self.store.read(f"{self.prefix}/runs/{run}/index.json")
        return dict(found.get("files", {}))

    def run_hashes(self, run: str) -> dict[str, str]:
        """The run's files on the server, but for what labctl keeps of it."""
        place = shlex.quote(self.lab.place(run))
        line = f"cd {place} && find . -path ./.labctl -prune -o -type f -exec sha256sum {{}} +"
        rows = self.lab.student(line).splitlines()
        return {row.split("  ./", 1)[1]: row.split()[0] for row in rows}

    def up(self) -> dict[str, Any]:
        said = self.lab.json("up", "--yes")
        self.lab.server_id = said["server"]["id"]
        return said


@contextmanager
def agent(key: Path) -> Iterator[str]:
    """An ssh-agent that has this key alone; where it listens."""
    socket = key.with_name("agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists)
        around = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", str(key)], env=around, check=True)
        yield str(socket)
    finally:
        process.kill()
        process.wait()


@contextmanager
def store_lab(folder: Path, base_image: str) -> Iterator[StoreLab]:
    """One lab with a server and its store; both are gone at the end."""
    with store_box(folder, "12m") as (store, socket):
        lab = make_lab(folder, "stored", base_image)
        text = (lab.root / "lab.yaml").read_text().replace("secrets: [E2E_TOKEN]\n", "")
        (lab.root / "lab.yaml").write_text(f"{text}store: {store.url}\n{MIRROR}")
        (lab.root / "train.sh").write_text(TRAIN)
        lab.environ["SSH_AUTH_SOCK"] = socket
        made = StoreLab(lab, store)
        try:
            made.up()
            yield made
        finally:
            lab.labctl("down", "--yes", "--discard")


@contextmanager
def store_box(folder: Path, size: str) -> Iterator[tuple[StoreBox, str]]:
    """A machine with a store's disk of this size, and the agent that has the key to it."""
    box = start(build_store_image(), folder / "id_ed25519", "--tmpfs", DISK.format(size=size))
    try:
        with agent(box.key) as socket:
            yield StoreBox(box), socket
    finally:
        docker("rm", "-f", "-v", box.name)
