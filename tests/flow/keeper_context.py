"""A laptop and a keeper's machine, each with a home of its own, that share one cloud.

What goes over ssh between them is called in this process: the command line's own code, with the
other machine's environment. The cloud and the server are those of lab_world.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab_world import LAB_ID, Cloud, Recorded, Wires, World, unreachable

from labctl.cli.groups import cli
from labctl.config import Paths, find_paths
from labctl.errors import LabError
from labctl.lifecycle import keeper_host, kept_labs, recovery_lock, restore, up
from labctl.lifecycle.export_lab import export_lab
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.model import Endpoint, Run, Server
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.kept_labs import ImportedLab
from labctl.wire.runs import RunSpec

HOST = "login.example"
NAME = f"digits-{LAB_ID}"


@dataclass
class Pair:
    """`lab` is the laptop's; `home` the keeper's. `error` cuts the way between them."""

    lab: World
    home: Path
    monkeypatch: pytest.MonkeyPatch
    error: LabError | None = None
    said: list[str] = field(default_factory=list)

    @property
    def cloud(self) -> Cloud:
        return self.lab.cloud

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": str(self.home)}

    @property
    def places(self) -> Paths:
        return find_paths(self.environ)

    @property
    def state(self) -> State:
        return State(self.places.database)

    @property
    def ward(self) -> Path:
        return kept_labs.lab_directory(self.places, NAME)

    def kept(self) -> LabContext:
        """The lab as the keeper has it."""
        one = kept_labs.find_kept_lab(self.places, NAME)
        return kept_labs.make_context(one, self.places, self.state, Recorded(), self.environ)

    def server(self) -> Server:
        (server,) = self.cloud.machines.values()
        return server

    def started(self, run_id: str = "night", state: str = "running") -> Run:
        """A run on record at the laptop, as `labctl run --recover` leaves it."""
        context = self.lab.context()
        server = context.state.get_lab_server(LAB_ID)
        assert server is not None
        spec = RunSpec(run_id, "digits", LAB_ID, command=("true",), image="img", env={})
        restore.keep_code(context, spec)
        run = Run(id=run_id, lab_id=LAB_ID, server_id=server.id, state=state, seen_at=1.0)
        context.state.save_run(run)
        return run

    def hand_over(self, run_id: str = "night", reporter: Recorded | None = None) -> ImportedLab:
        context = self.lab.context(reporter)
        return export_lab(context, KeeperHost(context, HOST), context.get_server(), run_id)

    def transport(self, server_id: str = "") -> FakeTransport:
        return FakeTransport().reply("labctl keep", self._answer)

    def _answer(self, line: str, stdin: bytes) -> Result:
        if self.error is not None:
            raise self.error
        words = shlex.split(line.partition("exec ")[2])[1:]
        self.said.append(" ".join(words))
        with self.monkeypatch.context() as patch:
            patch.setenv("HOME", str(self.home))
            done = CliRunner().invoke(cli, words, input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(code=done.exit_code, stdout=done.stdout, stderr=done.stderr)


def pair(lab: World, home: Path, monkeypatch: pytest.MonkeyPatch, *, has_run: bool = True) -> Pair:
    """A lab with a server and a run, and a machine with a keeper that knows nothing of it yet."""
    home.mkdir(exist_ok=True)
    made = Pair(lab, home, monkeypatch)
    own = kept_labs.make_context

    def context(*words: Any, **named: Any) -> LabContext:
        found = own(*words, **named)
        found.__dict__["provider"] = lab.cloud
        found.__dict__["connections"] = Wires(found.paths, lab.machine)
        return found

    monkeypatch.setattr(kept_labs, "make_context", context)
    monkeypatch.setattr(keeper_host.KeeperHost, "endpoint", Endpoint(host="127.0.0.1"))
    monkeypatch.setattr(keeper_host.KeeperHost, "_transport", property(lambda _: made.transport()))
    up.up(lab.context())
    if has_run:
        made.started()
    return made


def handed_to(lab: World) -> str:
    return recovery_lock.find_keeper(lab.context())


def cut() -> LabError:
    return unreachable()
