"""A run on two servers whose parts are real processes of this machine, and a keeper of it.

Beside what lab_world replaces, the servers are one machine with two labs. Each has a port of its
own, and so can be out of reach alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from gang_keeper_bed import SECOND_ID, check
from keeper_context import HOST, NAME, Pair, cut, pair
from lab_world import LAB_ID, DiskCloud, Machine, World, world

from labctl.config import schema, trust
from labctl.keeper.recovery_worker import recover_lab
from labctl.lab import Lab
from labctl.lifecycle import gang_outcome, gang_watch, kept_labs, recovery_wait
from labctl.model import Offer, Server
from labctl.transports import Result

DEADLINE_S = 60.0
NAMES = ("digits", "digits-1")
LAB_YAML = """\
lab: digits
server: {count: 2, executor: process}
run: [python3, train.py]
launch: {restarts: 1, silence: 1s, stall: 3s}
"""
# Prints steps, until the directory of signals says that the run is done or that a rank fails.
TRAIN = """\
import os, sys, time
from pathlib import Path

signals, rank = Path(sys.argv[1]), os.environ["RANK"]
print("begin", flush=True)
with (signals / f"begun-{rank}").open("a") as begun:
    print(os.getpid(), file=begun)
while not (signals / "done").exists():
    if (signals / f"fail-{rank}").exists():
        (signals / f"fail-{rank}").unlink()
        sys.exit(7)
    print("step", flush=True)
    time.sleep(0.05)
"""


class PortCloud(DiskCloud):
    """A cloud whose servers listen at ports of their own; those without a listener are dead."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.settle_s = 0.0
        self.listeners: dict[str, socket.socket] = {}

    def add(self, server_id: str, lab: str, lab_id: str, offer: Offer | None = None) -> Server:
        server = super().add(server_id, lab, lab_id, offer)
        self.listeners[server_id] = socket.create_server(("127.0.0.1", 0))
        port = self.listeners[server_id].getsockname()[1]
        endpoint = msgspec.structs.replace(server.endpoint, port=port)
        self.change(server_id, endpoint=endpoint)
        return self.machines[server_id]


class CutMachine(Machine):
    """Its wire is cut after so many calls of a verb, as that of a laptop that is closed."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.cut_after: list[str] = []

    def _answer(self, line: str, stdin: bytes) -> Result:
        result = super()._answer(line, stdin)
        verb = line.split()[-1]
        if verb in self.cut_after:
            self.cut_after.remove(verb)
            if not self.cut_after:
                self.error = cut()
        return result


@dataclass
class Gang:
    """The lab of `two`, its run `night`, and the directory through which that is told to end."""

    two: Pair
    signals: Path
    machine: CutMachine
    reasons: list[str] = field(default_factory=list)

    @property
    def cloud(self) -> PortCloud:
        assert isinstance(self.two.cloud, PortCloud)
        return self.two.cloud

    def start(self, *, keeper: str = HOST) -> None:
        """Start the run as `labctl run --recover --keeper HOST --detach`, or without a keeper."""
        lab = Lab(self.two.lab.context())
        command = ["python3", "train.py", str(self.signals)]
        lab.run(command, id="night", recover=bool(keeper), keeper=keeper)
        self.await_begin(1)

    def signal(self, name: str) -> None:
        (self.signals / name).touch()

    def list_begun(self, rank: int) -> list[int]:
        """List the processes of a rank, one for each attempt."""
        path = self.signals / f"begun-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def await_begin(self, attempt: int) -> None:
        wait_until(lambda: all(len(self.list_begun(rank)) == attempt for rank in (0, 1)))

    def is_alive(self, rank: int) -> bool:
        """Whether the process of the rank's last attempt is there."""
        stat = Path(f"/proc/{self.list_begun(rank)[-1]}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def server(self, rank: int) -> Server:
        """The server that the keeper has on record."""
        lab_id = SECOND_ID if rank else LAB_ID
        server = self.two.state.get_lab_server(lab_id)
        assert server is not None
        return server

    def unplug(self, rank: int) -> None:
        """Nobody reaches the server any more, and its provider calls it running."""
        server = self.server(rank)
        self.machine.silent.add(server.id)
        self.cloud.listeners[server.id].close()

    def plug_in(self, rank: int) -> None:
        """The server is reached again."""
        server = self.server(rank)
        self.machine.silent.discard(server.id)
        address = ("127.0.0.1", server.endpoint.port)
        self.cloud.listeners[server.id] = socket.create_server(address)

    def lose(self, rank: int) -> None:
        """The server is gone, with its processes and its disk."""
        kill_session(self.list_begun(rank)[-1])
        shutil.rmtree(self.directory(rank))
        self.unplug(rank)
        self.cloud.terminate(self.server(rank).id)

    def directory(self, rank: int) -> Path:
        """The lab's directory on the server."""
        return self.machine.home / "labctl" / NAMES[rank]

    def record(self, rank: int) -> dict[str, Any]:
        """What the server knows of the last attempt of its ended part."""
        path = self.directory(rank) / "runs/night/.labctl/record.json"
        body: dict[str, Any] = json.loads(path.read_text())
        return body

    def check(self) -> str:
        return check(self.two)

    def recover(self) -> None:
        """Do what the keeper's worker does."""
        recover_lab(self.two.kept(), kept_labs.find_kept_lab(self.two.places, NAME), pause=pause)

    @contextmanager
    def recovering(self) -> Iterator[Thread]:
        """A recovery in a thread, with the keeper's lock, that waits for a server by now."""

        def recover() -> None:
            with kept_labs.lock_kept_lab(self.two.places, NAME, "keep"):
                self.recover()

        thread = Thread(target=recover, daemon=True)
        thread.start()
        wait_until(lambda: self.doing().startswith("waiting until every server answers"))
        yield thread
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    def doing(self) -> str:
        """What the keeper's recovery does at the moment."""
        activity = recovery_wait.read_activity(self.two.places, NAME)
        return activity.doing if activity else ""

    def list_restarts(self, kind: str = gang_outcome.RESTARTED) -> list[str]:
        """List why the run was started again, by the keeper's ledger."""
        events = self.two.state.list_events(lab_id=LAB_ID, run_id="night", kind=kind)
        return [event.detail["told"] for event in events]


def pause(seconds: float) -> None:
    time.sleep(min(seconds, 0.1))


def wait_until(condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def make_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    """A lab with two servers. Waits are short, and all processes end with the block."""
    monkeypatch.setattr(schema, "MIN_SILENCE_S", 1)
    monkeypatch.setattr(schema, "MIN_STALL_S", 1)
    monkeypatch.setattr(gang_watch, "CONFIRM_S", 0.2)
    bare = world(tmp_path, PortCloud)
    machine = CutMachine(bare.machine.home)
    lab: World = replace(bare, machine=machine)
    root = lab.home / "lab"
    (root / "lab.yaml").write_text(LAB_YAML)
    (root / "train.py").write_text(TRAIN)
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(json.dumps({"id": LAB_ID}))
    trust(lab.places, lab.context().config)
    signals = tmp_path / "signals"
    signals.mkdir()
    made = Gang(pair(lab, tmp_path / "keeper", monkeypatch, has_run=False), signals, machine)
    try:
        yield made
    finally:
        for rank in (0, 1):
            for process in made.list_begun(rank):
                kill_session(process)
        for listener in made.cloud.listeners.values():
            listener.close()


def kill_session(process: int) -> None:
    """End a process and the entry script that waits for it, if it is still that process."""
    try:
        if b"train.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.killpg(os.getpgid(process), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass
