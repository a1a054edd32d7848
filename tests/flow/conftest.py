from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab_world import Labctl, Output, RunMachine, World, world

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.events import Reporter
from labctl.lab import Lab
from labctl.lifecycle import up
from labctl.model import Server
from labctl.servers import guard
from labctl.servers.context import LabContext


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """No watchdog is started here: the server is a directory of this machine, which it would end.

    Holds the budgets that servers were armed with.
    """
    armed: list[float | None] = []

    def arm(
        context: LabContext,
        server: Server,
        *,
        budget_left_usd: float | None,
        ceiling_s: int | None,
    ) -> None:
        armed.append(budget_left_usd)

    monkeypatch.setattr(guard, "arm", arm)
    return armed


@pytest.fixture
def lab(tmp_path: Path) -> World:
    """A lab whose provider can stop servers."""
    return world(tmp_path)


@pytest.fixture
def run_machine(lab: World) -> RunMachine:
    """The machine of `run_lab`."""
    return RunMachine(lab.machine.home)


@pytest.fixture
def run_lab(lab: World, run_machine: RunMachine) -> World:
    """A lab with a server that starts runs."""
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: 'true'\nimage: small:1\n")
    made = replace(lab, machine=run_machine)
    up.up(made.context())
    return made


@pytest.fixture
def labctl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labctl:
    """`labctl(lab, "logs", "-f")`: the command line, whose lab is on the lab's fake provider."""

    def call(lab: World, *words: str) -> Output:
        def load(*_: object, reporter: Reporter, **options: object) -> Lab:
            return Lab(lab.context(reporter))

        monkeypatch.setattr(Lab, "load", load)
        monkeypatch.setattr(sys, "argv", ["labctl", *words])
        capsys.readouterr()
        code = run_and_exit(cli)
        captured = capsys.readouterr()
        return Output(code=code, out=captured.out, err=captured.err)

    return call
