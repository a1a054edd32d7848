"""What is taken from an earlier server's disk, once it is mounted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.agent.files import disk_import
from labctl.agent.files.disk_import import DiskImport
from labctl.agent.reply import Failure
from labctl.agent.runs.run_state import inspect_run
from labctl.wire.boot_id import read_boot_token
from labctl.wire.files import RestoreDiskReply

Take = Callable[[], RestoreDiskReply]
DISK = "nvme-Amazon_Elastic_Block_Store_vol0abc"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A lab on an earlier server, with a run whose end nobody saw."""
    lab = tmp_path / "old"
    own = lab / "runs" / "night" / ".labctl"
    own.mkdir(parents=True)
    (own / "spec.json").write_text('{"outputs": ["checkpoints"]}')
    attempt = {"container": "night-1", "boot": "another:1", "started_at": 1.0}
    (own / "attempt-1").write_text(json.dumps(attempt))
    (lab / "runs" / "night" / "checkpoints").mkdir()
    (lab / "runs" / "night" / "checkpoints" / "model").write_text("weights")
    (lab / "code").mkdir()
    (lab / ".labctl").mkdir()
    return lab


@pytest.fixture
def take(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Take:
    """Take it to `here`, as often as it is called."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here" / ".labctl").mkdir(parents=True)
    return lambda: DiskImport(old, tmp_path / "here", os.getuid(), os.getgid()).import_lab_files(
        DISK
    )


def push(lab: Path, **files: str) -> None:
    """As a push leaves a lab's code."""
    record = {}
    for name, text in files.items():
        path = lab / "code" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        found = path.stat()
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        record[path.name] = [sha256, found.st_size, found.st_mtime_ns]
    (lab / ".labctl" / ".pushed-code.json").write_text(json.dumps(record))


def test_a_run_that_was_never_seen_to_end_is_told_as_ended_with_its_server(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.agent.host.engine.inspect_containers", lambda names: {})
    assert take().runs == ("night",)
    found = inspect_run(tmp_path / "here" / "runs" / "night", {})
    assert found.state == "lost"
    assert found.summary.startswith("lost: the server ended while it ran")
    # One that went on here, and was cut short here, is another matter.
    again = tmp_path / "here" / "runs" / "night" / ".labctl"
    (again / "record.json").unlink()
    attempt = {"container": "night-2", "boot": f"{read_boot_token()}0", "started_at": 2.0}
    (again / "attempt-2").write_text(json.dumps(attempt))
    assert "restarted" in inspect_run(tmp_path / "here" / "runs" / "night", {}).summary


def test_what_is_here_already_stays_as_it_is(take: Take, tmp_path: Path) -> None:
    first = take()
    assert first.files == 3
    model = tmp_path / "here" / "runs" / "night" / "checkpoints" / "model"
    model.write_text("better")
    assert take() == RestoreDiskReply((), 0, 0, ())
    assert model.read_text() == "better"


def test_half_a_run_of_a_killed_call_is_begun_anew(take: Take, tmp_path: Path) -> None:
    half = tmp_path / "here" / "runs" / ".restoring-night" / "checkpoints"
    half.mkdir(parents=True)
    (half / "torn").write_text("we")
    assert take().runs == ("night",)
    runs = tmp_path / "here" / "runs"
    assert [path.name for path in runs.iterdir()] == ["night"]
    assert [path.name for path in (runs / "night" / "checkpoints").iterdir()] == ["model"]


def test_links_lead_nowhere_and_only_plain_files_come(
    take: Take, old: Path, tmp_path: Path
) -> None:
    run = old / "runs" / "night"
    (run / "link").symlink_to("/etc/passwd")
    (old / "runs" / "other").symlink_to("/etc")
    (old / "runs" / "sly").mkdir()
    (old / "runs" / "sly" / ".labctl").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    (run / "program").write_text("#!/bin/sh")
    (run / "program").chmod(0o4755)
    assert take().runs == ("night",)
    here = tmp_path / "here" / "runs" / "night"
    assert (here / "link").is_symlink()
    assert not (tmp_path / "restored.json").exists()
    assert not (here / "pipe").exists()
    assert (here / "program").stat().st_mode & 0o7777 == 0o755


def test_without_room_nothing_comes(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_import, "count_free_bytes", lambda path: disk_import.RESERVE_BYTES)
    with pytest.raises(Failure) as refused:
        take()
    assert refused.value.report.kind == "disk"
    assert not (tmp_path / "here" / "runs").exists()


def test_code_that_was_edited_there_comes_and_what_was_edited_here_stays(
    take: Take, old: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    push(old, same="1", theirs="1", both="1", gone="1")
    push(here, same="2", theirs="2", both="2")
    for lab, names in ((old, ("theirs", "both", "gone", "new")), (here, ("both",))):
        for name in names:
            (lab / "code" / f"{name}.py").write_text(f"{name} of {lab.name}")
    expected = ["both.py.from-vol0abc", "gone.py", "new.py", "theirs.py"]
    assert sorted(take().edits) == expected
    code = {path.name: path.read_text() for path in (here / "code").iterdir()}
    assert code == {
        "same.py": "2",
        "theirs.py": "theirs of old",
        "both.py": "both of here",
        "both.py.from-vol0abc": "both of old",
        "gone.py": "gone of old",
        "new.py": "new of old",
    }
    record = json.loads((here / ".labctl" / ".pushed-code.json").read_text())
    assert record["gone.py"][0] == hashlib.sha256(b"1").hexdigest()
    assert take().edits == ()
