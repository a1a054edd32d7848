"""A lab server with a watchdog, driven through the program on it as labctl drives it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_servers import READY_DEADLINE_S, LabServer, wait_for

from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.transports.openssh import OpenSshTransport
from labctl.wire.runs import (
    CANCEL_RUN,
    START_RUN,
    STATUS,
    CancelRunRequest,
    RunRecord,
    RunSpec,
    StartRunRequest,
    StatusRequest,
)
from labctl.wire.watchdog import (
    EXTEND,
    GUARD,
    WATCH,
    EndingRecord,
    ExtendRequest,
    GuardLimits,
    GuardRequest,
    WatchRecord,
    WatchRequest,
)

LAB = "watched"
LAB_ID = "77aa5500ee11"
PLACE = "/var/lib/labctl/watchdog"
FOREVER = "while :; do sleep 0.1; done"
# Shell: a run that takes two seconds over its checkpoint when it is asked to end.
CHECKPOINT = """\
trap 'sleep 1; cd /lab/run/checkpoints; mkdir last; echo weights > last/model; sleep 1
echo {} > last/manifest.json; echo saved; exit 0' TERM
echo begun; while :; do sleep 0.1; done"""


@dataclass
class Terminal:
    """An ssh with a terminal of its own, a keyboard, and what it shows."""

    popen: subprocess.Popen[bytes]
    keyboard: int
    shown: bytearray

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def said(self, text: str, deadline_s: float = READY_DEADLINE_S) -> None:
        wait_for(lambda: text.encode() in self.shown, deadline_s)


@dataclass
class WatchLab:
    server: LabServer
    folder: Path
    image: str
    about: dict[str, Any] = field(default_factory=lambda: {"lab": LAB, "lab_id": LAB_ID})

    @property
    def remote(self) -> AgentClient:
        """Anew each time, since a restarted server has another port."""
        found = self.server.found()
        path = Connections(self.folder / "ssh", None).write(found)
        return AgentClient(OpenSshTransport(path, found.id, found.endpoint, master=False))

    def guard(self, server_id: str, **words: Any) -> WatchRecord:
        """Arm it for a server called `server_id`: another one starts afresh."""
        ending = EndingRecord("poweroff", "stays", grace_s=10)._replace(**words.pop("ending", {}))
        request = GuardRequest(
            self.about["lab"],
            self.about["lab_id"],
            server_id,
            elapsed_s=words.pop("elapsed_s", 0.0),
            ending=ending,
            store=words.pop("store", ""),
            limits=GuardLimits(**words),
        )
        watch = self.remote.call(GUARD, request).watch
        assert watch
        assert watch.alive
        return watch

    def watch(self, decisions: int = 50) -> WatchRecord:
        watch = self.remote.call(WATCH, WatchRequest(self.about["lab_id"], decisions)).watch
        assert watch
        return watch

    def extend(self, span_s: float) -> WatchRecord:
        watch = self.remote.call(EXTEND, ExtendRequest(self.about["lab_id"], span_s)).watch
        assert watch
        return watch

    def start(self, run: str, shell: str) -> None:
        spec = RunSpec(
            id=run,
            command=("bash", "-c", shell),
            image=self.image,
            lab=self.about["lab"],
            lab_id=self.about["lab_id"],
            env={},
        )
        reply = self.remote.call(START_RUN, StartRunRequest(spec))
        assert reply.run is not None, reply
        assert reply.run.state == "running", reply

    def cancel(self, run: str) -> None:
        request = CancelRunRequest(self.about["lab"], self.about["lab_id"], run, grace_s=1)
        self.remote.call(CANCEL_RUN, request)

    def find_run(self, run: str) -> RunRecord:
        request = StatusRequest(self.about["lab"], self.about["lab_id"], (run,))
        (record,) = self.remote.call(STATUS, request).runs
        return record

    def log(self, run: str) -> str:
        place = f"/home/student/labctl/{self.about['lab']}/runs/{run}/logs/run.log"
        return self.server.sh(f"cat {place}")

    def busy(self, sentence: str, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until the watchdog gives `sentence` as a reason."""

        def told() -> bool:
            return any(sentence in each for each in self.watch(0).busy)

        wait_for(told, deadline_s)

    def quiet(self, deadline_s: float = READY_DEADLINE_S) -> None:
        wait_for(lambda: self.watch(0).idle_for_s > 2, deadline_s)

    def decisions(self) -> list[str]:
        """What was decided and why, as it lies on the server's disk, running or not."""
        words = ["docker", "cp", f"{self.server.server.id}:{PLACE}/decisions.jsonl", "-"]
        packed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
        unpacked = subprocess.run(["tar", "-xO"], input=packed, stdout=subprocess.PIPE, check=True)
        rows = [json.loads(row) for row in unpacked.stdout.splitlines()]
        return [f"{row['what']}: {row['why']}" for row in rows]

    def wait_for_power_off(self, deadline_s: float = READY_DEADLINE_S) -> None:
        wait_for(lambda: self.server.found().state == "stopped", deadline_s)

    def boot(self) -> None:
        """Switch it on again, and wait for the watchdog that armed it."""
        self.server.provider.start(self.server.server.id)
        self.server.wait_until_ready()

    @contextmanager
    def terminal(self, line: str = "") -> Iterator[Terminal]:
        outside, inside = pty.openpty()
        popen = subprocess.Popen(
            [*self.server.ssh_words("-tt"), line],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        terminal = Terminal(popen, outside, bytearray())
        reader = threading.Thread(target=_drain, args=(outside, terminal.shown), daemon=True)
        reader.start()
        try:
            yield terminal
        finally:
            popen.kill()
            popen.wait()
            reader.join(5)
            os.close(outside)


def _drain(source: int, kept: bytearray) -> None:
    while True:
        try:
            block = os.read(source, 65536)
        except OSError:
            return
        if not block:
            return
        kept.extend(block)
