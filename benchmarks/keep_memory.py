"""Memory of `labctl keep`: 300 rounds over 20 labs, whose servers answer from a script.

    python benchmarks/keep_memory.py [ROUNDS [LABS]]

Prints, as JSON, the resident memory after 20 rounds and after the last, in MB, and the processor
time of a look. Everything but the wire is real: configs, records, state, threads. Each lab's
server tells of one run that goes on; every tenth look at a lab fails, and is handed on.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import Paths, find_paths
from labctl.errors import LabError
from labctl.events import SilentReporter
from labctl.keeper.labs import Keeper
from labctl.lifecycle import kept_labs
from labctl.model import Endpoint, Offer, Run, Server
from labctl.servers.agent import MARK
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.transports import Result, Transport
from labctl.transports.fake import FakeTransport

WARM_UP = 20
LAB_YAML = "lab: {name}\nserver: {{provider: local}}\nstore: s3://bucket/labs\nrun: sh train.sh\n"


class Wire(Connections):
    """Real ssh files; the server at the other end is a script."""

    def __init__(self, places: Paths, lab_id: str) -> None:
        super().__init__(places.ssh_dir, None)
        self.lab_id = lab_id
        self.looks = 0

    def _transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        return FakeTransport().reply("", self._answer)

    def _answer(self, line: str, stdin: bytes) -> Result:
        self.looks += 1
        if self.looks % 10 == 0:
            return Result(code=1, stderr="no answer")
        run = {"id": "night", "lab_id": self.lab_id, "state": "running", "progress": {"step": 1.0}}
        reply = {"runs": [run], "disk": {"free_bytes": 1}, "watch": {"alive": True}}
        return Result(code=0, stdout=MARK.decode() + json.dumps(reply) + "\n")


def ward(places: Paths, state: State, number: int) -> str:
    """Create a lab that was handed over, with its server and run on record; return its name."""
    name, lab_id = f"lab-{number}", f"{number:012x}"
    one = kept_labs.KeptLab(
        lab=name,
        lab_id=lab_id,
        by="alice@laptop",
        at=time.time(),
        runs=("night",),
        files={f"code/file-{i}": (i, "0" * 64) for i in range(100)},
    )
    root = kept_labs.lab_directory(places, one.name)
    (root / ".labctl").mkdir(parents=True)
    (root / "lab.yaml").write_text(LAB_YAML.format(name=name))
    (root / ".labctl" / "lab.json").write_text(json.dumps({"id": lab_id}))
    (root / kept_labs.RECORD).write_bytes(msgspec.json.encode(one))
    server = Server(
        id=f"srv-{number}",
        provider="local",
        lab=name,
        lab_id=lab_id,
        alias=name,
        endpoint=Endpoint(host="127.0.0.1"),
        offer=Offer(provider="local", type="container"),
        created_at=time.time(),
        state="running",
    )
    state.save_server(server)
    state.save_run(Run(id="night", lab_id=lab_id, server_id=server.id, state="running"))
    return one.name


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measured(home: Path, rounds: int, labs: int) -> dict[str, Any]:
    environ = {"HOME": str(home)}
    places = find_paths(environ)
    state = State(places.database)
    names = [ward(places, state, number) for number in range(labs)]
    wires = {name: Wire(places, name.rpartition("-")[2]) for name in names}
    closer: list[str] = []

    def context(one: kept_labs.KeptLab) -> LabContext:
        made = kept_labs.make_context(
            one, places, state, SilentReporter(), environ, record_only=True
        )
        made.__dict__["connections"] = wires[one.name]
        return made

    def attend(name: str) -> None:
        closer.append(name)
        if len(closer) % 3 == 0:
            raise LabError("the provider refused", hint="labctl doctor")

    keeper = Keeper(places, state, environ, notify=lambda *_: None, attend=attend, context=context)
    before = resource.getrusage(resource.RUSAGE_SELF)
    early = 0.0
    looks = 0
    for number in range(rounds):
        keeper.make_all_due()
        while begun := keeper.tick():
            looks += len(begun)
            for thread in begun:
                thread.join()
        if number == min(WARM_UP, rounds - 1):
            early = rss_mb()
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "rounds": rounds,
        "labs": labs,
        "looks": looks,
        "closer_looks": len(closer),
        "rss_early_mb": round(early, 1),
        "rss_mb": round(rss_mb(), 1),
        "cpu_ms_per_look": round(1000 * spent_s / looks, 2),
        "boto3": "boto3" in sys.modules,
        "paramiko": "paramiko" in sys.modules,
    }


def main() -> None:
    rounds, labs = (int(word) for word in (sys.argv[1:] + ["300", "20"][len(sys.argv[1:]) :]))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), rounds, labs), indent=2))


if __name__ == "__main__":
    main()
