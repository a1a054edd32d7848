"""A student's home and server of before: read, followed, pulled and gone on with."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frozen import DIGITS, FACES, VOICES, EngineSocket, Frozen, Student
from lab_world import Recorded
from test_frozen_reports import find_changes

from labctl.insight.explanation import explain
from labctl.lab import Lab, LabRun
from labctl.lifecycle import reconcile, up
from labctl.lifecycle.status import read_status
from labctl.runs import runs
from labctl.servers.agent import AgentClient
from labctl.state import State
from labctl.state.disks import list_kept_disks
from labctl.sync import lab_files
from labctl.wire.runs import STATUS, StatusRequest

KINDS = {
    "account", "adopted", "attempt", "code", "created", "dead", "deadline", "disk-held", "down",
    "extended", "forgotten", "gone", "guarded", "handed", "host-key", "kept", "kept-missed",
    "no-deadline", "ready", "reclaimed", "recoverable", "recovered", "removed", "restored",
    "restored-saved", "started", "stopped", "store", "swept", "taken-back", "terminated",
    "terminating", "watch", "zone-left",
}  # fmt: skip


def find_run(student: Student, run_id: str) -> Path:
    return student.machine.home / "labctl" / "digits" / "runs" / run_id


def hash_outputs(folder: Path) -> dict[str, str]:
    """Path below `folder` -> sha256, of what a run may leave."""
    outputs = [one for part in ("checkpoints", "logs") for one in (folder / part).rglob("*")]
    return {
        str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in outputs
        if one.is_file()
    }


# The state


def test_every_row_of_the_state_is_read(student: Student) -> None:
    with State(student.places.database) as state:
        assert state.was_rebuilt == ""
        assert {one.kind for one in state.list_events()} == KINDS
        (server,) = state.list_servers()
        assert (server.provider, server.account, server.state) == ("aws", "123456789012", "running")
        assert (server.offer.price_usd_per_hour, server.offer.spot) == (0.25, True)
        assert [one.id for one in state.list_runs(DIGITS)] == [
            "first",
            "failed",
            "stopped",
            "night",
        ]
        (forward,) = state.list_forwards(server.id)
        assert (forward.service, forward.local_port) == ("tensorboard", 6006)
        (attempt,) = state.list_open_attempts()
        assert (attempt.lab_id, attempt.account) == (VOICES, "123456789012")
        assert [one.disk.id for one in list_kept_disks(state, FACES)] == ["vol-0one.eu-central-1"]


def test_what_is_written_today_stands_beside_it(student: Student) -> None:
    with State(student.places.database) as state:
        before = state.list_events()
        server = state.list_servers()[0]
        state.save_server(msgspec.structs.replace(server, state="stopped"))
        state.record("stopped", lab_id=DIGITS, server_id=server.id)
        assert state.list_events()[:-1] == before
        assert [one.state for one in state.list_servers()] == ["stopped"]


def test_an_interrupted_up_asks_for_the_very_same_server(
    student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = student.context("voices", VOICES)
    (attempt,) = context.state.list_open_attempts(VOICES)
    at = attempt.created_at + 60.0
    monkeypatch.setattr("time.time", lambda: at)
    monkeypatch.setattr(up, "make_ready", lambda context, server, **_: server)
    up.up(context)
    assert student.cloud.tried == [(attempt.offer.type, attempt.token)]
    assert context.state.list_open_attempts(VOICES) == []


def test_a_database_that_knew_no_accounts(frozen: Frozen) -> None:
    path = frozen.restore_database("state.schema-1.sql", frozen.root / "old" / "labctl.db")
    with State(path, read_only=True) as unchanged:
        assert len(unchanged.list_servers()) == 1
    with State(path) as state:
        assert state.was_rebuilt == ""
        (server,) = state.list_servers()
        assert (server.id, server.account) == ("i-old", "")
        (attempt,) = state.list_open_attempts()
        assert (attempt.token, attempt.account) == ("t1", "")
        assert [one.state for one in state.list_runs()] == ["exited", "cancelled"]
        kinds = [one.kind for one in state.list_events()]
        assert kinds == ["created", "ready", "terminated", "adopted"]


def test_a_database_of_a_newer_labctl_is_put_aside_and_it_says_what_to_type(
    student: Student,
) -> None:
    with sqlite3.connect(student.places.database) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    reporter = Recorded()
    environ = {"HOME": str(student.home)}
    lab = Lab.load(student.home / "digits", reporter=reporter, environ=environ, record_only=True)
    assert lab.id == DIGITS
    assert "was of a newer labctl (schema 99" in reporter.said
    assert "labctl status --refresh" in reporter.said
    (aside,) = student.places.state_dir.glob("labctl.db.broken-*")
    with sqlite3.connect(aside) as db:
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (4,)
    db.close()


# The server


@pytest.fixture
def lab(student: Student) -> Lab:
    return Lab(student.context())


def test_runs_are_what_they_were_and_the_one_that_lives_lives(lab: Lab, student: Student) -> None:
    said = lab.status(refresh=True)
    assert said.reachable is True
    told = {one.id: (one.state, one.exit_code, one.summary) for one in said.runs}
    assert told == {
        "first": ("exited", 0, "done"),
        "failed": ("exited", 3, "failed with exit code 3"),
        "stopped": ("cancelled", 143, "cancelled; the command ended with 143"),
        "night": ("running", None, ""),
    }
    night = next(one for one in said.runs if one.id == "night")
    assert night.progress == {"step": 1.0, "total_steps": 1000.0, "loss": 2.3}


def test_a_run_whose_container_is_gone_is_lost(lab: Lab, engine: EngineSocket) -> None:
    engine.answers = lambda method, path, body: None
    runs_ = {one.id: one for one in lab.status(refresh=True).runs}
    assert runs_["night"].state == "lost"
    assert runs_["night"].summary.startswith("lost: ")
    assert runs_["stopped"].state == "cancelled"


def test_a_log_is_followed_to_its_end(lab: Lab) -> None:
    got = bytearray()
    run = LabRun(lab, runs.find_run(lab.context, "failed")).wait(got.extend)
    assert (run.state, run.exit_code) == ("exited", 3)
    assert got.decode().splitlines()[-1] == "ValueError: bad luck"


def test_half_a_pull_is_gone_on_with(lab: Lab, student: Student) -> None:
    partial = student.home / "digits" / "runs" / "failed" / ".labctl-partial"
    assert any(one.is_file() for one in partial.rglob("*"))
    (pulled,) = lab.pull("failed")
    assert pulled.complete
    home = student.home / "digits" / "runs" / "failed"
    assert hash_outputs(home) == hash_outputs(find_run(student, "failed"))
    assert not partial.exists()


def test_what_was_pulled_before_does_not_come_again(lab: Lab, student: Student) -> None:
    (pulled,) = lab.pull("first")
    assert (pulled.files, pulled.complete) == (0, True)


def test_a_whole_checkpoint_of_the_run_that_lives_comes(lab: Lab, student: Student) -> None:
    (pulled,) = lab.pull("night")
    assert not pulled.complete
    got = student.home / "digits" / "runs" / "night" / "checkpoints" / "step-00000001"
    assert sorted(one.name for one in got.iterdir()) == [
        "manifest.json", "model.safetensors", "state.json",
    ]  # fmt: skip


def test_edits_on_the_server_are_seen_against_what_was_pushed(lab: Lab, student: Student) -> None:
    (student.machine.home / "labctl/digits/code/later.py").write_text("print('since')\n")
    result = lab_files.save_edits(lab.context, lab.context.get_server())
    assert "later.py" in result.saved
    assert "train.py" not in result.saved


def test_a_push_sends_only_what_was_changed(lab: Lab, student: Student) -> None:
    (student.home / "digits" / "new.py").write_text("print('new')\n")
    (code,) = lab.push(force=True)
    assert code.unchanged >= 2
    assert (student.machine.home / "labctl/digits/code/new.py").read_text() == "print('new')\n"


def test_a_run_is_explained_from_what_it_left(lab: Lab, frozen: Frozen) -> None:
    before = frozen.value("json/explain.json")
    now = msgspec.json.decode(
        msgspec.json.encode(explain(lab.context, reconcile.fetch_logs(lab.context, "first")))
    )
    for explanation in (before, now):
        explanation["run"].pop("seen_at")
    assert list(find_changes(drop_sentences(before), drop_sentences(now))) == []
    assert before["read"]["samples"] == 30


def drop_sentences(value: Any) -> Any:
    """Without sentences for people, whose wording may change: a rule's name never does."""
    if isinstance(value, dict):
        sentences = ("what", "why", "next", "said", "title")
        return {key: drop_sentences(one) for key, one in value.items() if key not in sentences}
    return [drop_sentences(one) for one in value] if isinstance(value, list) else value


def test_the_keeper_of_before_keeps_no_more(lab: Lab) -> None:
    assert lab.keeper == ""
    assert reconcile.merge_keeper_records(lab.context) == ""


# The program on the server


def test_an_earlier_program_reads_what_todays_writes(
    frozen: Frozen, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog, a mirror and a recorder outlive the client that started them."""
    read_status(student.context(), refresh=True)  # today's program records and hashes
    agent = frozen.unpack_agent()
    request = {"lab": "digits", "lab_id": DIGITS}
    said = ask(agent, "status", request, student)
    assert {one["id"]: one["state"] for one in said["runs"]} == {
        "first": "exited", "failed": "exited", "stopped": "cancelled", "night": "running",
    }  # fmt: skip
    found = ask(agent, "manifest", {**request, "runs": ["failed"], "outputs": [], "all": False},
                  student)  # fmt: skip
    assert found["runs"]["failed"]["ended"]


def ask(agent: Path, verb: str, request: dict[str, object], student: Student) -> dict[str, object]:
    line = f"exec python3 -I -S {agent}/__main__.py {verb}"
    done = student.machine._answer(line, msgspec.json.encode(request) + b"\n")
    assert done.code == 0, done.stderr
    found: dict[str, Any] = msgspec.json.decode(done.stdout.partition("\x1elabctl ")[2])
    return found


def test_programs_of_two_versions_lie_side_by_side(frozen: Frozen, student: Student) -> None:
    agent = frozen.unpack_agent()
    (student.machine.home / ".cache").unlink()
    there = student.machine.home / ".cache" / "labctl" / agent.name
    there.parent.mkdir(parents=True)
    agent.rename(there)
    remote = AgentClient(student.machine.transport())
    remote.install()
    assert there.is_dir()
    assert remote.call(STATUS, StatusRequest("digits", DIGITS)).runs


def test_what_ssh_was_told_is_what_ssh_understands(student: Student) -> None:
    config = student.places.ssh_dir / student.server().id / "config"
    done = subprocess.run(
        ["ssh", "-G", "-F", str(config), "digits"], capture_output=True, text=True, check=True
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert (said["hostname"], said["port"], said["user"]) == ("127.0.0.1", "2222", "student")
    assert Path(said["identityfile"]).is_file()
    before = config.read_text()
    student.context().connections.write(student.server())
    assert select_settings(config.read_text()) >= select_settings(before)


def select_settings(text: str) -> set[str]:
    """Lines but for what may be made better at any time."""
    kept = ("Host ", "HostName", "Port", "User ", "HostKeyAlias", "IdentityFile", "StrictHost")
    return {line.strip() for line in text.splitlines() if line.strip().startswith(kept)}
