"""How often `labctl run` goes to the server and back: on a real network each one is waited for."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab_world import LAB_ID, Machine, World, world

import labctl
from labctl.agent import reply
from labctl.cli.groups import cli
from labctl.lab import Lab
from labctl.lifecycle import up
from labctl.transports import Result
from labctl.wire.images import FIND_IMAGES

MOST = 3
PACKAGE = Path(labctl.__file__).parent
DONE = {"lab_id": LAB_ID, "image": "small:1", "state": "exited", "exit_code": 0, "told": "done"}


def list_files_on_the_stack() -> tuple[str, ...]:
    """The files of labctl that wait for this call to return, the outermost first."""
    files: dict[str, None] = {}
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            files[str(path.relative_to(PACKAGE))] = None
    return tuple(reversed(files))


class Counted(Machine):
    """The server's files are real; its Docker Engine is a script that runs whatever it is told."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.runs = 0
        self.routes: set[tuple[str, ...]] = set()

    def _answer(self, line: str, stdin: bytes) -> Result:
        self.routes.add(list_files_on_the_stack())
        if line.split()[-1] not in ("run", FIND_IMAGES.name):
            return super()._answer(line, stdin)
        self.lines.append(line)
        if line.split()[-1] == FIND_IMAGES.name:
            return Result(code=0, stdout=reply.encode_line({"ids": {"small:1": "1"}}).decode())
        self.runs += 1
        run = {**DONE, "id": f"run-{self.runs}"}
        began = reply.encode_line({"run": run, "found": False})
        return Result(
            code=0, stdout=began.decode(), stderr=reply.encode_line({"run": run}).decode()
        )

    def trips(self) -> int:
        """Since the last time that this was asked."""
        count = len(self.lines)
        self.lines.clear()
        return count


@pytest.fixture
def ready(tmp_path: Path) -> tuple[World, Counted]:
    """A lab whose server has its image, its program and its code already."""
    made = world(tmp_path)
    (made.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: 'true'\nimage: small:1\n")
    (made.home / "lab" / "train.py").write_text("print('epoch 1')\n")
    machine = Counted(tmp_path / "machine")
    made = replace(made, machine=machine)
    up.up(made.context())
    _run(made, "first")
    assert machine.trips() > MOST, "so much does the first one take"
    return made, machine


def _run(lab: World, run_id: str) -> None:
    """As a new process would."""
    found = Lab(lab.context()).run(id=run_id, follow=True)
    assert found.last_known.exit_code == 0


def test_a_run_of_unchanged_code_takes_at_most_three(ready: tuple[World, Counted]) -> None:
    lab, machine = ready
    _run(lab, "second")
    assert machine.runs == 2
    assert machine.trips() <= MOST


def test_a_run_of_changed_code_sends_it_along(ready: tuple[World, Counted]) -> None:
    lab, machine = ready
    changed = lab.home / "lab" / "train.py"
    changed.write_text("print('epoch 1 of 2')\n")
    os.utime(changed, (1, 1))
    _run(lab, "second")
    assert machine.trips() == 2, "one to push, one to start"
    assert (machine.home / "labctl/digits/code/train.py").read_text() == changed.read_text()


def test_the_files_between_the_command_line_and_the_server(
    ready: tuple[World, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, machine = ready
    machine.routes.clear()
    monkeypatch.setattr(Lab, "load", lambda *_, **__: Lab(lab.context()))
    assert cli.main(["run", "--id", "second"], standalone_mode=False) == 0
    wire = ("transports/__init__.py", "transports/fake.py")
    # The group of all commands calls this one, and handles Ctrl-C.
    command = ("cli/groups.py", "cli/runs.py", "lab.py")
    assert machine.routes == {
        (*command, "sync/lab_files.py", "sync/push.py", "servers/agent.py", *wire),
        (*command, "runs/runs.py", "servers/agent.py", *wire),
    }
