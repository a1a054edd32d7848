"""The files of a student's server that the keeper downloads: which, how many, and no others."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.courses.submission_worker import _download
from labctl.errors import PolicyError, TransferError
from labctl.events import SilentReporter
from labctl.servers.agent import AgentClient
from labctl.sync import selected_files
from labctl.sync.selected_files import fetch_code, list_code
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.verbs import LabRequest

LAB = LabRequest("digits", "0f1e2d3c4b5a")
RUN = "1124-101010-abcd"


class Machine:
    """A server's account, with the real agent behind a transport."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lab = home / "labctl" / LAB.lab
        (self.lab / ".labctl").mkdir(parents=True)
        (self.lab / ".labctl" / "id").write_text(LAB.lab_id)

    def put(self, name: str, content: str = "x") -> Path:
        file = self.lab / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return file

    def answer(self, line: str, stdin: bytes) -> Result:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
        }
        done = subprocess.run(
            ["sh", "-c", line], input=stdin, capture_output=True, env=environment, check=False
        )
        out, err = done.stdout.decode(errors="surrogateescape"), done.stderr.decode()
        return Result(code=done.returncode, stdout=out, stderr=err)

    def open_agent(self) -> AgentClient:
        return AgentClient(FakeTransport().reply("", self.answer))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_code_is_downloaded(machine: Machine, tmp_path: Path) -> None:
    for name in (
        "train.py", "src/model.py", ".git/config", "src/.git/hooks/pre-commit", "runs/x/a.bin",
        ".labctl/id", "env/pyvenv.cfg", "env/lib/torch.py", "__pycache__/a.pyc", "data/large.bin",
        "notes/keep.txt", "notes/drop.txt", ".labctl-partial", "two\nlines.py", "assignment.yaml",
    ):  # fmt: skip
        machine.put(f"code/{name}")
    machine.put("code/.gitignore", "data/\n")
    machine.put("code/notes/.labignore", "drop.txt\n")
    (machine.lab / "code" / "link.py").symlink_to("/etc/passwd")
    (machine.lab / "code" / "folder").symlink_to("/etc")
    target = tmp_path / "target"
    code = list_code(machine.open_agent(), LAB, target, SilentReporter())
    fetch_code(code, 10_000)
    kept = {"train.py", "src/model.py", ".gitignore", "notes/.labignore", "notes/keep.txt"}
    assert names(target) == kept
    (sentence,) = code.describe_skipped()
    for text in (r"two\nlines.py: a control character", "link.py: it is a link", "folder: it is"):
        assert text in sentence


def test_nothing_is_transferred_that_is_too_large(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.put("code/train.py", "x" * 600)
    machine.put("code/big.bin", "x" * 600)
    target = tmp_path / "target"
    code = list_code(machine.open_agent(), LAB, target, SilentReporter())
    with pytest.raises(PolicyError, match="too large"):
        fetch_code(code, 1000)
    assert names(target) == set()
    monkeypatch.setattr(selected_files, "MOST_FILES", 1)
    with pytest.raises(PolicyError, match="2 files"):
        fetch_code(code, 10_000)


@pytest.mark.parametrize("change", ["grows", "becomes a link", "is deleted"])
def test_a_file_that_changes_before_it_is_copied_is_refused(
    machine: Machine, tmp_path: Path, change: str
) -> None:
    file = machine.put("code/train.py", "x" * 100)
    other = tmp_path / "other"
    other.write_text("o" * 100)
    target = tmp_path / "target"
    code = list_code(machine.open_agent(), LAB, target, SilentReporter())
    file.unlink()
    if change == "grows":
        file.write_text("x" * 200)
    elif change == "becomes a link":
        file.symlink_to(other)
    with pytest.raises(TransferError):
        fetch_code(code, 10_000)
    assert not [path for path in target.rglob("*") if path.is_symlink()]


def checkpoint(machine: Machine, name: str, accuracy: float) -> None:
    place = f"runs/{RUN}/checkpoints/{name}"
    weights = machine.put(f"{place}/model.bin", name)
    file = {"size": weights.stat().st_size, "sha256": hashlib.sha256(name.encode()).hexdigest()}
    manifest = {"files": {"model.bin": file}, "metrics": {"val_accuracy": accuracy}}
    machine.put(f"{place}/manifest.json", json.dumps(manifest))


def test_of_a_run_the_best_checkpoint_is_downloaded(machine: Machine, tmp_path: Path) -> None:
    machine.put("code/train.py")
    machine.put(f"runs/{RUN}/.labctl/spec.json", '{"outputs": ["checkpoints"]}')
    machine.put(f"runs/{RUN}/.labctl/record.json", '{"id": "r1", "state": "exited"}')
    machine.put(f"runs/{RUN}/logs/run.log")
    machine.put(f"runs/{RUN}/big/other.bin")
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        checkpoint(machine, f"step-{number}", accuracy)
    lab: Any = SimpleNamespace(
        config=SimpleNamespace(name=LAB.lab),
        lab_id=LAB.lab_id,
        reporter=SilentReporter(),
        open_agent=lambda server: machine.open_agent(),
    )
    run: Any = SimpleNamespace(id=RUN)
    target = tmp_path / "target"
    target.mkdir()
    chosen, _ = _download(lab, None, run, target, 10_000)  # type: ignore[arg-type]
    assert chosen == "step-1"
    assert names(target / "runs" / RUN) == {
        "logs/run.log", "checkpoints/step-1/model.bin", "checkpoints/step-1/manifest.json",
    }  # fmt: skip
