"""A store that an earlier labctl mirrored to: runs come back from it, on a server and at home."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from frozen import DIGITS, Frozen, Student
from shell_store import shell_store
from store_bed import DirectStore

from labctl.agent.mirror import mirror, store
from labctl.agent.mirror import restore as store_restore
from labctl.lifecycle import restore
from labctl.runs import saved_copies
from labctl.wire.mirrors import MirrorPassRequest, RestoreRunRequest

PREFIX = f"digits-{DIGITS}"
ABOUT = {"lab": "digits", "lab_id": DIGITS}


@pytest.fixture
def directory(frozen: Frozen) -> Path:
    """The lab's directory in the store, in an account of an SSH server."""
    frozen.unpack("store")
    (frozen.root / "account").mkdir()
    (frozen.root / "store").rename(frozen.root / "account" / "labs")
    return frozen.root / "account" / "labs" / PREFIX


def hash_outputs(folder: Path) -> dict[str, str]:
    files = [one for part in ("checkpoints", "logs") for one in (folder / part).rglob("*")]
    return {
        str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in files
        if one.is_file()
    }


def test_a_run_is_pulled_from_it(
    frozen: Frozen, student: Student, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = shell_store(frozen.root, PREFIX)
    monkeypatch.setattr(saved_copies, "open_lab_store", lambda context: opened)
    pulled = saved_copies.pull_from_store(student.context(), "failed")
    assert pulled.complete
    assert hash_outputs(student.home / "digits" / "runs" / "failed") == hash_outputs(
        student.machine.home / "labctl" / "digits" / "runs" / "failed"
    )


def test_what_a_run_was_is_read_for_its_recovery(
    frozen: Frozen, student: Student, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = shell_store(frozen.root, PREFIX)
    monkeypatch.setattr(restore, "open_lab_store", lambda context: opened)
    lab = student.home / "digits" / "lab.yaml"
    lab.write_text(lab.read_text() + "store: ssh://me@store/~/labs\n")
    found = restore.read_saved_run(student.context(), "night")
    assert found.spec.command == ("python", "train.py", "0")
    assert found.run is not None
    assert found.run.state == "running"


def test_another_server_makes_the_run_from_it_and_mirrors_on(
    frozen: Frozen, student: Student, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = student.machine.home / "labctl" / "digits" / "runs" / "first"
    before = hash_outputs(there)
    code = (there / "code" / "train.py").read_bytes()
    new = frozen.root / "another"
    (new / "labctl" / "digits" / ".labctl").mkdir(parents=True)
    (new / "labctl" / "digits" / ".labctl" / "id").write_text(DIGITS)
    config = new / "labctl" / "digits" / ".labctl" / store.CONFIG
    config.write_text(json.dumps({"url": "ssh://student@store/labs"}))
    monkeypatch.setenv("HOME", str(new))
    monkeypatch.setenv("DOCKER_HOST", student.machine.docker_host)
    for module in (store, mirror, store_restore):
        monkeypatch.setattr(module, "open_store", lambda *_: DirectStore(directory))
    done = store_restore.restore(RestoreRunRequest(**ABOUT, run="first"))
    run = new / "labctl" / "digits" / "runs" / "first"
    assert done.left_out == ()
    assert hash_outputs(run) == before
    assert (run / "code" / "train.py").read_bytes() == code
    assert mirror.mirror_now(MirrorPassRequest(**ABOUT)).failed == ()
