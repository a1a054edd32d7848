"""`labctl submit` and `labctl receive` as they are typed and read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.events import Question, SilentReporter
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Run, Server
from labctl.submissions import freshness, receipt
from labctl.submissions.assignment import Assignment, load_assignment
from labctl.submissions.bundle import inspect
from labctl.submissions.receiver import Receiver
from labctl.sync.starter import Starter, StarterFile, StarterRecord, write_record
from labctl.sync.starter_update import update_files
from labctl.wire.checkpoints import fingerprint_checkpoints

RUN = "1121-072825-af1b"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHost"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINwdlBzGkEoPMNBaem/o5zmNzgOo8n87sc2kupKaXHRT me@x"
AT = "ssh://drop@127.0.0.1:9"
Labctl = Callable[..., Any]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("id",)


def checkpoint(home: Path, step: int, accuracy: float) -> Path:
    place = home / "checkpoints" / f"step-{step:08}"
    place.mkdir(parents=True)
    content = b"\x10\0\0\0\0\0\0\0" + b"{}".ljust(16) + bytes(step)
    (place / "model.safetensors").write_bytes(content)
    listed = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = {
        "version": 1,
        "step": step,
        "metrics": {"val_accuracy": accuracy},
        "files": {"model.safetensors": listed},
    }
    (place / "manifest.json").write_text(json.dumps(body))
    return place


@pytest.fixture
def run(home: Path) -> Path:
    """A pulled run of the lab, and an assignment that is due in far time."""
    place = home / "digits" / "runs" / RUN
    for step, accuracy in ((40, 0.97), (80, 0.91)):
        checkpoint(place, step, accuracy)
    (place / "logs").mkdir()
    (place / "logs" / "run.log").write_text("epoch 1\n")
    record = Run(
        id=RUN, lab_id="l", server_id="s", state="exited", exit_code=0, created_at=9e9, seen_at=5.0
    )
    (place / "run.json").write_bytes(msgspec.json.encode(record))
    (home / "digits" / "train.py").write_text("print('training')\n")
    return place


@pytest.fixture
def assigned(home: Path, run: Path, labctl: Labctl) -> Callable[..., Assignment]:
    """`assigned("--late", "2d")`: hw3 with these options, beside lab.yaml."""

    def make(*words: str) -> Assignment:
        drop = str(home / "drop")
        assert labctl("receive", "init", drop).code == 0
        due = [] if "--due" in words else ["--due", "2099-01-01 12:00 UTC"]
        said = labctl(
            *("receive", "assignment", drop, "hw3", "--course", "ml", *due),
            *("--at", AT, "--host-key", HOST_KEY, *words),
        )
        assert said.code == 0, said.err
        file = home / "digits" / "assignment.yaml"
        file.write_text(said.out)
        return load_assignment(file)

    return make


def test_a_run_that_was_lost_with_its_server_names_one_that_can_be_submitted(
    assigned: Callable[..., Assignment], home: Path, labctl: Labctl
) -> None:
    assigned()
    why = "`labctl orphans` terminated it at 2026-11-29 10:31"
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    state, now = lab.context.state, time.time()
    state.record("terminated", lab_id=lab.id, server_id="gone", detail={"why": why})
    state.save_run(
        Run(id="night", lab_id=lab.id, server_id="gone", state="running", created_at=now)
    )
    alone = labctl("submit", "--dry-run")
    state.save_run(
        Run(id=RUN, lab_id=lab.id, server_id="gone", state="exited", created_at=now - 60)
    )
    said = labctl("submit", "--dry-run")
    (home / "digits" / "runs" / "night").mkdir()
    partial = labctl("submit", "--dry-run")
    state.close()
    for each in (alone, said, partial):
        assert each.code == 4
        assert "the results of run night are not on this machine" in each.err
        assert "they were on the server that ended, and no copy was saved" in each.err
        assert why in each.err
    assert "next: labctl run --up" in alone.err
    for each in (said, partial):
        assert f"next: labctl submit {RUN}\n        (the latest run whose results" in each.err


def test_a_refused_assignment_leaves_the_students_file_as_it_was(
    labctl: Labctl, home: Path
) -> None:
    drop, file = str(home / "drop"), home / "hw3.yaml"
    labctl("receive", "init", drop)
    words = ("receive", "assignment", drop, "hw3", "--out", str(file))
    refused = labctl(*words, "--at", str(home))
    assert refused.code == 2
    assert "  --at: " in refused.err
    assert "Students also use ssh where they share a machine or file system" in refused.err
    assert not file.exists()
    said = labctl(*words, "--at", AT, "--host-key", HOST_KEY)
    assert (said.code, said.out) == (0, "")
    assert said.err == (
        f"{file} is the file for your students. To let one submit:\n"
        f"  labctl receive admit {drop} STUDENT KEYFILE\n"
    )
    assert load_assignment(file).hand_in == AT
    before = file.read_bytes()
    assert labctl(*words, "--at", "s3:/x").code == 2
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (AT, ""),
        (
            "s3://my-course/drop",
            "Through a bucket, each student needs a file of their own:\n"
            "  labctl receive ticket DROP hw3 STUDENT --into ./tickets\n",
        ),
    ],
)
def test_the_next_step_after_an_assignment_is_that_of_its_destination(
    labctl: Labctl, home: Path, place: str, said: str
) -> None:
    drop = str(home / "drop")
    labctl("receive", "init", drop)
    words = ("receive", "assignment", drop, "hw3", "--at", place)
    key = ("--host-key", HOST_KEY) if place == AT else ()
    assert labctl(*words, *key).err == said.replace("DROP", drop)


def dry(labctl: Labctl, *words: str) -> Any:
    said = labctl("submit", "--dry-run", "--json", *words)
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_a_dry_run_says_the_rules_and_what_would_leave(
    labctl: Labctl, assigned: Callable[..., Assignment]
) -> None:
    assigned("--late", "2d", "--penalty", "10", "--max-size", "20MB")
    said = labctl("submit", "--dry-run")
    assert said.code == 0, said.err
    for words in (
        "ml hw3",
        "Thu 01 Jan 2099 12:00 UTC",
        "accepted until Sat 03 Jan 2099 12:00 UTC, 10% of the points off for each day or part",
        "at most 20 MB",
        AT,
        "step-00000040",
        "no secret",
    ):
        assert words in " ".join(said.out.split()), words


def test_the_manifest_names_everything_by_its_hash(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned()
    (run / "report.html").write_text("<h1>digits</h1>")
    body = dry(labctl)
    files = {one["path"]: one for one in body["manifest"]["files"]}
    assert set(files) == {
        "model/step-00000040/model.safetensors", "model/step-00000040/manifest.json",
        "logs/run.log", "report.html", "run.json", "code/lab.yaml", "code/train.py",
    }  # fmt: skip
    assert files["logs/run.log"]["sha256"] == hashlib.sha256(b"epoch 1\n").hexdigest()
    assert body["manifest"]["record"]["exit_code"] == 0
    assert "seen_at" not in body["manifest"]["record"]
    assert body["manifest"]["checkpoint"] == "step-00000040"
    other = dry(labctl, "--checkpoint", "step-00000080")["manifest"]
    assert "model/step-00000080/model.safetensors" in {one["path"] for one in other["files"]}


def test_a_part_that_is_not_required_does_not_read_as_a_fault(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned("--require", "logs")
    shutil.rmtree(run / "checkpoints")
    lines = [" ".join(line.split()) for line in labctl("submit", "--dry-run").out.splitlines()]
    assert "model - none, not required" in lines
    assert "evaluation - none, not required" in lines


def test_an_assignment_about_code_needs_no_run(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned("--require", "code")
    alone = dry(labctl, "--code-only")["manifest"]
    assert {one["path"] for one in alone["files"]} == {"code/lab.yaml", "code/train.py"}
    assert (alone["run"], alone["record"], alone["checkpoint"]) == ("", {}, "")
    assert dry(labctl)["manifest"]["run"] == RUN
    shutil.rmtree(run)
    assert dry(labctl)["manifest"] == alone
    said = labctl("submit", "--dry-run")
    assert "WITHOUT A RUN" in said.out
    assert "missing" not in said.out


def test_a_bundle_that_is_too_large_suggests_what_makes_it_smaller(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned("--require", "code", "--max-size", "1MB")
    (run.parents[1] / "data.bin").write_bytes(bytes(2 * 10**6))
    refused = labctl("submit", "--dry-run", "--code-only")
    assert refused.code == 3
    assert "the bundle is too large" in refused.err
    assert ".labignore" in refused.err
    assert "--checkpoint" not in refused.err
    (run.parents[1] / "data.bin").unlink()
    weights = run / "checkpoints" / "step-00000040" / "model.safetensors"
    weights.write_bytes(bytes(2 * 10**6))
    refused = labctl("submit", "--dry-run")
    assert "labctl submit --checkpoint NAME" in refused.err
    assert ".labignore" not in refused.err


def test_code_alone_is_refused_where_it_is_not_enough(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path, home: Path
) -> None:
    assigned("--require", "model", "--require", "code")
    refused = labctl("submit", "--dry-run", "--code-only")
    assert refused.code == 4
    assert "hw3 requires the model, which only a run has\n  next: labctl submit\n" in refused.err
    for words in ([RUN], ["--checkpoint", "step-00000040"], ["--fresh"]):
        refused = labctl("submit", "--code-only", *words)
        assert refused.code == 2
        assert "--code-only cannot be combined" in refused.err
    shutil.rmtree(run)
    refused = labctl("submit", "--dry-run")
    assert refused.code == 4
    assert "has no runs yet\n  next: labctl run --up\n" in refused.err
    (home / "digits" / "lab.yaml").write_text("lab: digits\n")
    refused = labctl("submit", "--dry-run")
    assert "has no runs yet\n  next: labctl run --up -- COMMAND\n" in refused.err


def test_a_system_that_cannot_confine_is_named(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, warned in (("x86_64", False), ("ppc64le", True)):
        monkeypatch.setattr("platform.machine", lambda name=machine: name)
        said = labctl("receive", "init", str(home / "drop"))
        assert said.code == 0
        assert ("run the receiver on Linux" in said.err) is (warned or sys.platform != "linux")


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal(
    labctl: Labctl,
    assigned: Callable[..., Assignment],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    assigned("--late", "2d", "--penalty", "10")
    monkeypatch.setenv("COLUMNS", str(width))
    for words in (("submit", "--dry-run"), ("submit", "--help"), ("receive", "--help")):
        said = labctl(*words)
        assert said.code == 0
        assert max(len(line.rstrip()) for line in said.out.splitlines()) <= width


def test_a_hostile_pickle_stays_here_with_the_reason(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned()
    (run / "checkpoints" / "model.pth").write_bytes(pickle.dumps(Evil(), 2))
    said = labctl("submit", "--dry-run", "--checkpoint", "model.pth")
    assert said.code == 3
    assert "model/model.pth: loading it would run 'posix.system'" in said.err
    assert "safetensors" in said.err
    assert ".labignore" not in said.err


def test_an_unsafe_file_in_the_code_is_left_out_of_it(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path, run: Path
) -> None:
    assigned()
    (home / "digits" / "old.pkl").write_bytes(pickle.dumps(Evil(), 2))
    said = labctl("submit", "--dry-run")
    assert said.code == 3
    assert "code/old.pkl: loading it would run 'posix.system'" in said.err
    assert "list files that you need not submit in .labignore" in said.err
    assert "--checkpoint" not in said.err
    (home / "digits" / ".labignore").write_text("old.pkl\n")
    assert labctl("submit", "--dry-run").code == 0


def test_an_unsafe_file_in_the_logs_suggests_to_submit_the_code(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned()
    (run / "logs" / "state.pkl").write_bytes(pickle.dumps(Evil(), 2))
    said = labctl("submit", "--dry-run")
    assert said.code == 3
    assert "logs/state.pkl" in said.err
    assert "labctl submit --code-only" in said.err
    assert "--checkpoint" not in said.err


def test_secrets_are_named_and_nothing_leaves(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path, run: Path
) -> None:
    assigned()
    value = "hf_" + "abcdEFGH12" * 4
    (home / "digits" / "train.py").write_text(f"import os\ntoken = '{value}'\n")
    said = labctl("submit", "--dry-run")
    assert said.code == 3
    assert "code/train.py, line 2: a Hugging Face token" in said.err
    assert value not in said.err + said.out
    assert labctl("submit", "--dry-run", "--allow", "code/train.py").code == 0

    named = labctl("submit", RUN, "--dry-run")
    assert f"labctl submit {RUN} --allow code/train.py\n" in named.err


def test_the_labs_own_secrets_are_found_in_the_logs(
    labctl: Labctl,
    assigned: Callable[..., Assignment],
    home: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assigned()
    (home / "digits" / "lab.yaml").write_text("lab: digits\nsecrets: [MY_TOKEN]\n")
    assert labctl("trust", "--yes").code == 0
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    (run / "logs" / "run.log").write_text("one\nlogged in with correct-horse-battery\n")
    said = labctl("submit", "--dry-run")
    assert said.code == 3
    assert "logs/run.log, line 2: the value of your secret MY_TOKEN" in said.err
    assert "revoke them, and run again without printing them" in said.err
    assert ".labignore" not in said.err
    assert "correct-horse" not in said.err + said.out


def test_ten_gigabytes_are_refused_before_one_of_them_is_read(
    labctl: Labctl,
    assigned: Callable[..., Assignment],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assigned()
    huge = run / "checkpoints" / "step-00000040" / "optimizer.safetensors"
    with huge.open("wb") as file:
        file.truncate(10 * 1024**3)
    huge.chmod(0)  # who reads it fails
    monkeypatch.setattr("labctl.sync.scan.hash_file", unread)
    said = labctl("submit", "--dry-run")
    assert said.code == 3
    assert "too large: 10,737,4" in said.err
    assert "accepts at most 500,000,000" in said.err
    assert "optimizer.safetensors" in said.err


def unread(path: Path, length: int | None = None) -> str:
    raise AssertionError(f"{path} was read")


def test_a_checkpoint_that_is_not_whole_is_not_handed_in(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned()
    file = run / "checkpoints" / "step-00000040" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    said = labctl("submit", "--dry-run")
    assert (said.code, "is incomplete: model.safetensors" in said.err) == (1, True)
    file.unlink()
    assert "incomplete" in labctl("submit", "--dry-run").err


def test_what_the_assignment_requires_is_named_with_the_command_for_it(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned("--require", "model", "--require", "report")
    said = labctl("submit", "--dry-run")
    assert said.code == 4
    assert "requires the report" in said.err
    assert f"next: labctl report {RUN}" in said.err
    said = labctl("submit", "--dry-run", "nothere")
    assert said.code == 4


def test_links_stay_here_and_are_told(
    labctl: Labctl, assigned: Callable[..., Assignment], run: Path
) -> None:
    assigned()
    (run / "logs" / "passwd").symlink_to("/etc/passwd")
    said = labctl("submit", "--dry-run")
    assert said.code == 0
    assert "skipped logs/passwd: it is a link" in said.out
    (run / "logs" / "a\nb").write_text("x")
    said = labctl("submit", "--dry-run")
    assert said.code == 1
    assert "is not allowed for a file" in said.err


def test_without_an_assignment_it_says_where_one_belongs(labctl: Labctl, run: Path) -> None:
    said = labctl("submit")
    assert said.code == 2
    assert "there is no assignment.yaml" in said.err
    assert "--assignment FILE" in said.err


def test_a_closed_assignment_is_said_before_anything_is_read(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    bucket = ("--due", "2020-01-01 12:00 UTC")
    assigned(*bucket)
    file = home / "digits" / "assignment.yaml"
    ticket = (
        'student: alice\nticket:\n  url: "https://b.example/"\n  expires: 2099-01-01T00:00:00Z\n'
        '  part_bytes: 1000\n  index: {"key": "k"}\n  parts: [{"key": "k"}]\n'
        '  receipts: "https://b.example/r"\n'
    )
    text = file.read_text().replace(f"host_key: {HOST_KEY}\n", "").replace(AT, "s3://bucket/drop")
    file.write_text(text + ticket)
    said = labctl("submit", "--yes")
    assert said.code == 3
    assert "closed on Wed 01 Jan 2020 12:00 UTC" in said.err
    assert "submit --receipts" in said.err


def test_a_receiver_that_is_not_there_is_no_riddle(
    labctl: Labctl, assigned: Callable[..., Assignment]
) -> None:
    assigned()
    said = labctl("submit", "--yes")
    assert said.code == 75
    assert "refuses connections to port 9" in said.err


@pytest.fixture
def handed(
    assigned: Callable[..., Assignment], home: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """(receipt, bundle) as a hand-in leaves them, the receiver called without an ssh."""
    from labctl.submissions import submit

    assigned()
    receiver = Receiver(home / "drop")

    @contextmanager
    def opened(*_: object) -> Iterator[Any]:
        yield Host(receiver)

    monkeypatch.setattr(submit, "open_receiver", opened)
    lab = Lab.load(home / "digits", record_only=True, reporter=Agreeing())
    done = lab.submit()
    return Path(done.receipt), Path(done.bundle)


class Agreeing(SilentReporter):
    def confirm(self, decision: Question) -> bool:
        return True


class Host:
    """The receiver without an ssh in between."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def hello(self) -> Any:
        return self.receiver.hello("hw3", "alice")

    def send(self, file: Any, sha256: str, size: int, on_bytes: Any) -> Any:
        about = ("hw3", "alice", sha256, size)
        begun = self.receiver.begin(*about)
        if not isinstance(begun, int):
            return begun
        self.receiver.write(*about, 0, file.read())
        on_bytes(size)
        return self.receiver.finish(*about)


class InterruptedTerminal(io.StringIO):
    """A terminal at which somebody presses Ctrl-C instead of an answer."""

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        raise KeyboardInterrupt


def test_ctrl_c_at_the_question_submits_nothing_and_says_so(
    assigned: Callable[..., Assignment],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from labctl.submissions import submit

    assigned()
    receiver = Receiver(home / "drop")
    monkeypatch.setattr(submit, "open_receiver", lambda *_: nullcontext(Host(receiver)))
    monkeypatch.setattr(sys, "stdin", InterruptedTerminal())
    monkeypatch.setattr(sys, "argv", ["labctl", "submit", "--checkpoint", "step-00000080"])
    assert run_and_exit(cli) == 130
    error = capsys.readouterr().err
    assert "submit hw3 to" in error
    assert error.endswith(
        "labctl: interrupted; nothing was submitted\n"
        "  next: labctl submit --checkpoint step-00000080\n"
    )
    assert receiver.students("hw3") == []


def test_a_receipt_is_verified_without_a_network(
    labctl: Labctl, handed: tuple[Path, Path], home: Path
) -> None:
    path, bundle = handed
    with bundle.open("rb") as file:
        assert inspect(file)[0].student == "alice"
    said = labctl("submit", "--verify")
    assert said.code == 0, said.err
    assert "signature: valid" in said.out
    assert "your file is the accepted one" in said.out
    found = json.loads(labctl("submit", "--verify", str(path), "--json").out)["verified"]
    assert (found["receipt"]["student"], found["bundle"]) == ("alice", "same")
    bundle.unlink()
    assert "not on this machine" in labctl("submit", "--verify").out


def test_an_edited_receipt_is_refused(labctl: Labctl, handed: tuple[Path, Path]) -> None:
    path, _ = handed
    path.write_text(path.read_text().replace('"late_s": 0', '"late_s": -9'))
    said = labctl("submit", "--verify")
    assert said.code == 3
    assert "changed after it was signed" in said.err


def test_a_bundle_changed_after_signing_is_told(labctl: Labctl, handed: tuple[Path, Path]) -> None:
    _, bundle = handed
    data = bytearray(bundle.read_bytes())
    data[-2000] ^= 1
    bundle.write_bytes(bytes(data))
    said = labctl("submit", "--verify")
    assert said.code == 3
    assert "CHANGED after it was signed" in said.out


@pytest.mark.parametrize("words", [("list",), ("check",), ("extend", "alice", "1d")])
def test_the_instructor_of_a_mistyped_assignment_sees_those_that_exist(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path, words: tuple[str, ...]
) -> None:
    drop = str(home / "drop")
    assigned()
    command, *rest = words
    said = labctl("receive", command, drop, "hw4", *rest)
    assert said.code == 4
    assert f"there is no assignment hw4 in {drop}\n" in said.err
    assert "this receiver has hw3" in said.err
    assert f"next: labctl receive list {drop} hw3\n" in said.err


def test_a_submission_that_is_not_there_names_the_list(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    drop = str(home / "drop")
    assigned()
    said = labctl("receive", "open", drop, "hw3", "bob", "--into", str(home / "bob"))
    assert said.code == 4
    assert f"next: labctl receive list {drop} hw3\n" in said.err


def test_the_instructor_sees_checks_and_opens_it(
    labctl: Labctl, handed: tuple[Path, Path], home: Path
) -> None:
    drop = str(home / "drop")
    assert "alice" in labctl("receive", "list", drop, "hw3").out
    (one,) = json.loads(labctl("receive", "list", drop, "hw3", "--json").out)["submissions"]
    assert (one["student"], one["number"]) == ("alice", 1)
    assert "submissions: 1; mismatches: 0" in labctl("receive", "check", drop, "hw3").out
    into = home / "opened"
    assert labctl("receive", "open", drop, "hw3", "alice", "--into", str(into)).code == 0
    assert (into / "code" / "train.py").read_text() == "print('training')\n"
    inside = Receiver(home / "drop").find_bundle("hw3", "alice")
    inside.chmod(0o600)
    inside.write_bytes(inside.read_bytes()[:-1] + b"\1")
    said = labctl("receive", "check", drop, "hw3")
    assert (said.code, "changed after it was signed" in said.out) == (1, True)
    assert labctl("receive", "open", drop, "hw3", "bob", "--into", str(into)).code == 4


def test_a_key_is_let_in_to_hand_in_and_for_nothing_else(labctl: Labctl, home: Path) -> None:
    drop, keys = str(home / "drop"), home / ".ssh" / "authorized_keys"
    labctl("receive", "init", drop)
    keys.parent.mkdir()
    keys.write_text("ssh-ed25519 AAAAown me@laptop\n")
    said = labctl("receive", "admit", drop, "alice", "-", stdin=KEY)
    assert said.code == 0, said.err
    own, line = keys.read_text().splitlines()
    assert own == "ssh-ed25519 AAAAown me@laptop"
    assert line.startswith('restrict,command="')
    assert f"receive serve {drop} alice" in line
    assert line.endswith(f"{KEY.split()[1]} labctl-submit:alice")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    # Again it stands there once; another's name does not get it.
    labctl("receive", "admit", drop, "alice", "-", stdin=KEY)
    assert len(keys.read_text().splitlines()) == 2
    said = labctl("receive", "admit", drop, "bob", "-", stdin=KEY)
    assert (said.code, "belongs to another student" in said.err) == (3, True)
    assert labctl("receive", "expel", "alice").code == 0
    assert keys.read_text().splitlines() == [own]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "hello",
        f'command="sh" {KEY}',
        f"{KEY}\n{KEY}",
        "ssh-ed25519 AAAA",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        f"no-pty {KEY}",
    ],
)
def test_what_is_no_public_key_is_not_let_in(labctl: Labctl, home: Path, key: str) -> None:
    labctl("receive", "init", str(home / "drop"))
    said = labctl("receive", "admit", str(home / "drop"), "alice", "-", stdin=key)
    assert (said.code, "not a public key" in said.err) == (2, True)
    assert not (home / ".ssh" / "authorized_keys").exists()


@pytest.mark.parametrize("student", ["../alice", "a b", 'a"b', "$(id)", "Alice", "-x"])
def test_a_students_name_is_a_name(labctl: Labctl, home: Path, student: str) -> None:
    labctl("receive", "init", str(home / "drop"))
    said = labctl("receive", "admit", str(home / "drop"), "--", student, "-", stdin=KEY)
    assert said.code == 2
    assert not (home / ".ssh" / "authorized_keys").exists()


def test_an_assignment_that_makes_no_sense_says_all_of_it(labctl: Labctl, home: Path) -> None:
    drop = str(home / "drop")
    labctl("receive", "init", drop)
    said = labctl(
        *("receive", "assignment", drop, "hw3", "--due", "2026-11-28 23:59 UTC"),
        *("--late", "sometimes", "--max-size", "lots", "--at", "ftp://x", "--penalty", "300"),
    )
    assert said.code == 2
    for word in ("--late:", "--max-size:", "--at:", "--penalty:"):
        assert word in said.err, word
    words = ("receive", "assignment", drop, "hw3", "--at", AT)
    assert "not a time with a zone" in labctl(*words, "--due", "tomorrow").err
    assert labctl(*words).code == 75
    assert labctl("receive", "list", drop, "hw3").code == 4


def test_the_command_after_init_makes_an_assignment(labctl: Labctl, home: Path) -> None:
    drop = str(home / "the drop")
    suggested = labctl("receive", "init", drop).out.partition("next: labctl ")[2]
    words = [*shlex.split(suggested), "--host-key", HOST_KEY]
    words[words.index("--out") + 1] = str(home / "hw1.yaml")
    assert labctl(*words).code == 0
    assert load_assignment(home / "hw1.yaml").hand_in.startswith("ssh://")


@pytest.mark.parametrize("option", ["--receipts", "--grade"])
def test_a_receiver_that_does_not_answer_suggests_the_same_command(
    assigned: Callable[..., Assignment],
    labctl: Labctl,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    assigned("--at", "ssh://drop@127.0.0.1:1")
    words = ("submit", option, "--assignment", "assignment.yaml")
    monkeypatch.setattr(sys, "argv", ["labctl", *words])
    refused = labctl(*words)
    assert refused.code == 75
    assert f"next: labctl submit {option} --assignment assignment.yaml" in refused.err


def test_the_command_for_a_host_key_that_cannot_be_read_is_complete(
    labctl: Labctl, home: Path
) -> None:
    drop, file = str(home / "drop"), str(home / "hand in.yaml")
    labctl("receive", "init", drop)
    words = ("receive", "assignment", drop, "hw3", "--due", "2099-01-01 12:00 UTC", "--at", AT)
    said = labctl(*words, "--out", file)
    assert said.code == 75
    suggested = said.err.partition("next: ")[2].splitlines()[0]
    (home / "key.pub").write_text(f"{HOST_KEY} root@course\n")
    shell = suggested.replace("/etc/ssh/ssh_host_ed25519_key.pub", str(home / "key.pub"))
    with_arguments = shell.replace("labctl ", "printf '%s\\n' ", 1)
    typed = subprocess.run(["sh", "-c", with_arguments], capture_output=True, text=True, check=True)
    assert labctl(*typed.stdout.splitlines()).code == 0
    assert load_assignment(Path(file)).host_key == HOST_KEY


def test_an_extension_is_said_and_given(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    assigned()
    drop = str(home / "drop")
    said = labctl("receive", "extend", drop, "hw3", "alice", "3d")
    assert "due for alice on Sun 04 Jan 2099 12:00 UTC" in said.out
    assert labctl("receive", "extend", drop, "hw3", "alice", "soon").code == 2
    assert Receiver(home / "drop").extensions("hw3") == {"alice": 3 * 86400}


def test_the_key_for_the_instructor_is_made_once(labctl: Labctl, home: Path) -> None:
    first, again = labctl("submit", "--key"), labctl("submit", "--key")
    assert first.out == again.out
    assert first.out.startswith("ssh-ed25519 ")
    (private,) = (home / ".local/share/labctl/keys/submit").glob("id_ed25519")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_the_signing_key_is_told_by_its_public_half_alone(labctl: Labctl, home: Path) -> None:
    said = labctl("receive", "init", str(home / "drop"), "--json")
    public = json.loads(said.out)["receiver"]
    assert public == receipt.read_public_key(home / "drop" / "signing-key")
    assert (home / "drop" / "signing-key").read_text().strip() not in said.out + said.err


@pytest.fixture
def stale(home: Path, run: Path, assigned: Callable[..., Assignment]) -> Path:
    """The run as `pull`, `eval` and `report` in its middle left it here, and its end on record."""
    assigned()
    recorded = msgspec.json.decode((run / "run.json").read_bytes(), type=Run)
    running = msgspec.structs.replace(recorded, state="running", exit_code=None)
    (run / "run.json").write_bytes(msgspec.json.encode(running))
    lab = Lab.load(home / "digits", record_only=True)
    ended = msgspec.structs.replace(recorded, lab_id=lab.id, ended_at=time.time())
    lab.context.state.save_run(ended)
    (run / "report.html").write_text("<h1>digits</h1>")
    hour_ago = time.time() - 3600
    os.utime(run / "report.html", (hour_ago, hour_ago))
    write_evaluation(run / "evaluation.json", at=hour_ago - 60)
    return run


def write_evaluation(path: Path, at: float) -> None:
    body = {
        "checkpoint": "step-00000040", "classes": ["0", "1"], "confusion": [[1, 0], [0, 1]],
        "accuracy": 1.0, "items": 2, "at": at,
    }  # fmt: skip
    path.write_text(json.dumps(body))


def test_results_older_than_the_run_are_named_with_the_command_for_all_of_them(
    labctl: Labctl, stale: Path
) -> None:
    said = labctl("submit", "--dry-run")
    assert said.code == 0, said.err
    text = " ".join(said.out.split())
    assert re.search(rf"files on this machine \(.*\) were downloaded before run {RUN} ended", text)
    assert re.search(r"the evaluation \(.*\) is older than the checkpoint step-\d+ \(downl", text)
    assert re.search(r"the report \(.*\) is older than the evaluation \(", text)
    assert said.out.count("labctl submit --fresh") == 1
    assert len(dry(labctl)["stale"]) == 3
    other = labctl("submit", "--dry-run", RUN, "--checkpoint", "step-00000080").out
    assert "of the checkpoint step-00000040, but step-00000080" in " ".join(other.split())
    assert f"  labctl submit {RUN} --checkpoint step-00000080 --fresh\n" in other


def test_results_that_are_not_up_to_date_are_not_submitted_by_pressing_enter(
    labctl: Labctl, stale: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    from labctl.submissions import submit

    receiver = Receiver(home / "drop")

    @contextmanager
    def opened(*_: object) -> Iterator[Any]:
        yield Host(receiver)

    monkeypatch.setattr(submit, "open_receiver", opened)
    said = labctl("submit")
    assert said.code == 3
    assert "as they are, not up to date?" in said.err
    assert "next: labctl submit --fresh" in said.err
    said = labctl("submit", "--yes", "--json")
    assert said.code == 0, said.err
    assert len(json.loads(said.out)["handed_in"]["stale"]) == 3


def test_fresh_evaluates_and_reports_before_it_submits(
    labctl: Labctl, stale: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = msgspec.json.decode((stale / "run.json").read_bytes(), type=Run)
    final = msgspec.structs.replace(record, state="exited", exit_code=0, ended_at=time.time() + 9)
    (stale / "run.json").write_bytes(msgspec.json.encode(final))  # as `down` leaves it
    monkeypatch.setattr("labctl.submissions.freshness.can_evaluate_here", lambda root: True)
    body = (stale / "evaluation.json").read_text().replace("step-00000040", "step-00000080")
    (home / "digits" / "evaluate.py").write_text(
        "import json, os, pathlib\n"
        f"pathlib.Path(os.environ['LABCTL_EVALUATION']).write_text({body!r})\n"
        "print(json.dumps({'accuracy': 1.0, 'checkpoint': 'step-00000080'}))\n"
    )
    assert len(dry(labctl)["stale"]) == 2
    said = labctl("submit", "--fresh", "--dry-run", "--json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["stale"] == []
    assert result["manifest"]["checkpoint"] == "step-00000080"
    assert "<html" in (stale / "report.html").read_text()


def test_results_that_were_copied_or_evaluated_before_their_download_are_up_to_date(
    labctl: Labctl, stale: Path
) -> None:
    """What was evaluated and reported decides, and not when the files came to this machine."""
    (stale / "run.json").unlink()
    weights = next((stale / "checkpoints").glob("step-*40/*.safetensors"))
    evaluation = json.loads((stale / "evaluation.json").read_text())
    evaluation["checkpoint_fingerprints"] = fingerprint_checkpoints(stale / "checkpoints")
    (stale / "evaluation.json").write_text(json.dumps(evaluation))
    assert labctl("report", RUN).code == 0
    for file in stale.rglob("*"):
        file.chmod(0o700)
    assert dry(labctl)["stale"] == []

    os.utime(weights, (1e9, 1e9))
    assert "is older than the checkpoint step-00000040" in dry(labctl)["stale"][0]
    evaluation["checkpoint_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (stale / "evaluation.json").write_text(json.dumps(evaluation))
    assert not any(line.startswith("the evaluation (") for line in dry(labctl)["stale"])

    (stale / "checkpoints" / "step-00000120").mkdir()
    (stale / "checkpoints" / "step-00000120" / "model.safetensors").write_bytes(b"new")
    stale_results = dry(labctl)["stale"]
    assert "is older than the checkpoint step-00000120" in stale_results[0]
    assert "the report (" in stale_results[1]


def test_fresh_needs_the_server_for_files_that_are_not_final(labctl: Labctl, stale: Path) -> None:
    before = (stale / "report.html").read_text()
    said = labctl("submit", "--fresh", "--yes")
    assert said.code == 4
    assert "has no server" in said.err
    assert (stale / "report.html").read_text() == before


def test_a_submission_says_which_public_tests_fail_and_is_not_stopped_by_them(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    assigned()
    root = home / "digits"
    without = dry(labctl)["notes"]
    content = b"def test_good(): pass\ndef test_bad(): assert 1 == 2\n"
    file = StarterFile(path="tests/test_net.py", content=content)
    starter = Starter(assignment="hw3", source="", files=(file,), tests=(file.path,))
    update_files(root, None, starter)
    write_record(root, StarterRecord(sha256="0" * 64, starter=starter))
    note = "1 of 2 public tests fail: tests/test_net.py::test_bad"
    assert dry(labctl)["notes"] == [*without, note]
    (root / "tests" / "test_net.py").write_text("import os\nos._exit(3)\n")
    (text,) = set(dry(labctl)["notes"]) - {*without}
    assert text.startswith("the public tests did not run: the tests ended with exit code 3")
    (root / "tests" / "test_net.py").write_text("def test_good(): pass\n")
    assert dry(labctl)["notes"] == without
    (root / ".labctl" / "starter.json").write_text("damaged")
    (text,) = set(dry(labctl)["notes"]) - {*without}
    assert text.startswith("the public tests did not run")


@pytest.mark.parametrize(
    ("there", "command"),
    [
        (("step-00000080",), f"next: labctl pull {RUN}\n"),
        ((), "next: save the model in $LABCTL_CHECKPOINT_DIR in your code, then:\n"),
    ],
)
def test_a_model_that_was_never_pulled_is_looked_for_on_the_server(
    labctl: Labctl,
    stale: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    command: str,
) -> None:
    """`labctl explain` downloaded only the logs, after the run had ended."""
    shutil.rmtree(stale / "checkpoints")
    (stale / "evaluation.json").unlink()
    lab = Lab.load(home / "digits", record_only=True)
    run = lab.context.state.get_run(lab.id, RUN)
    assert run is not None
    (stale / "run.json").write_bytes(msgspec.json.encode(run))
    server = Server(
        id=run.server_id, provider="local", lab="digits", lab_id=lab.id, alias="digits",
        state="running", endpoint=Endpoint(host="127.0.0.1"), created_at=1.0,
        offer=Offer(provider="local", type="container"),
    )  # fmt: skip
    lab.context.state.save_server(server)
    monkeypatch.setattr(freshness.runs, "refresh", lambda context, server: None)
    monkeypatch.setattr(freshness.outputs, "list_new_checkpoints", lambda *_: there)
    said = labctl("submit", "--dry-run")
    assert said.code == 4
    assert command in said.err


def test_a_model_that_a_pull_left_out_is_explained(labctl: Labctl, stale: Path, home: Path) -> None:
    """The pull came while the run was writing its checkpoint."""
    for name in ("step-00000040", "step-00000080"):
        shutil.rmtree(stale / "checkpoints" / name)
    (stale / "evaluation.json").unlink()
    said = labctl("submit", "--dry-run")
    assert said.code == 4
    assert f"requires the model, but run {RUN} has none on this machine\n" in said.err
    assert "the files on this machine are not the final ones of the run\n" in said.err
    assert f"next: labctl pull {RUN}\n" in said.err
    lab = Lab.load(home / "digits", record_only=True)
    run = lab.context.state.get_run(lab.id, RUN)
    assert run is not None
    lab.context.state.save_run(msgspec.structs.replace(run, state="running", ended_at=None))
    said = labctl("submit", "--dry-run")
    assert "a pull leaves out files that it is still writing\n" in said.err
    assert f"next: labctl pull --follow {RUN}\n" in said.err


def test_a_latest_run_without_a_model_names_the_run_that_has_one(
    labctl: Labctl, stale: Path, home: Path
) -> None:
    lab = Lab.load(home / "digits", record_only=True)
    hello = Run(
        id="hello", lab_id=lab.id, server_id="s", state="exited", exit_code=0,
        created_at=9e9 + 60, ended_at=9e9 + 61,
    )  # fmt: skip
    lab.context.state.save_run(hello)
    place = stale.with_name("hello")
    (place / "logs").mkdir(parents=True)
    (place / "run.json").write_bytes(msgspec.json.encode(hello))
    said = labctl("submit", "--dry-run")
    assert said.code == 4
    assert "hw3 requires the model, but run hello has none on this machine\n" in said.err
    assert f"next: labctl submit {RUN}\n        (the latest run with a model)\n" in said.err


def test_times_are_those_of_the_time_zone_of_the_due_time(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    due = "Thu 01 Jan 2099 12:00 Europe/Berlin"
    assigned("--due", "2099-01-01 12:00 Europe/Berlin")
    assert due in labctl("submit", "--dry-run").out
    file = home / "digits" / "assignment.yaml"
    before = file.read_text()
    file.write_text(before.replace("zone: Europe/Berlin", "zone: Unknown/Here"))
    assert "Thu 01 Jan 2099 12:00 UTC+01:00" in labctl("submit", "--dry-run").out
    extended = labctl("receive", "extend", str(home / "drop"), "hw3", "alice", "3d")
    assert "due for alice on Sun 04 Jan 2099 12:00 Europe/Berlin" in extended.out


def test_code_with_both_versions_of_a_conflict_is_named(
    labctl: Labctl, assigned: Callable[..., Assignment], home: Path
) -> None:
    assigned()
    root = home / "digits"
    before = dry(labctl)["notes"]
    first, second = (
        Starter(
            assignment="hw3", source="", files=(StarterFile(path="net.py", content=text),), tests=()
        )
        for text in (b"a\n", b"c\n")
    )
    (root / "net.py").write_text("b\n")
    [change] = update_files(root, first, second)
    assert change.action == "conflict"
    (root / change.beside).replace(root / "net.py")
    assert dry(labctl)["notes"] == [*before, "with conflict marks of labctl join: net.py"]
    (root / "net.py").write_text("merged\n")
    assert dry(labctl)["notes"] == before
