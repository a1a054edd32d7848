"""Pulls through the real program, run by this machine: what travels, and what is made of it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from directory_server import KILLED_PROGRAMS, DirectoryServer, rsyncs, slow_down, wait_until

from labctl.agent.files import outputs
from labctl.errors import BusyError, DiskFullError, PolicyError, TransferError, UsageError
from labctl.events import Event, Note, Progress, Reporter, SilentReporter
from labctl.model import Run
from labctl.servers.agent import AgentClient
from labctl.sync import downloads, durability
from labctl.sync.edits import pull_edits
from labctl.sync.local_results import PARTIAL
from labctl.sync.pull import (
    PulledRun,
    list_left_files,
    list_new_checkpoints,
    pull,
    verify,
)
from labctl.sync.scan import file_identity
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.files import (
    HASHES,
    MANIFEST,
    FilePart,
    ManifestReply,
    ManifestRequest,
    PartsRequest,
)
from labctl.wire.verbs import LabRequest, Verb

LAB = ("digits", "0f1e2d3c4b5a")
MIB = 1024**2
LARGE = outputs.QUICK_BYTES + 2 * MIB + 17  # more than is hashed before it is asked for
MANY_BYTES = 64 * MIB


@pytest.fixture(params=["rsync", "no rsync"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> DirectoryServer:
    return DirectoryServer(tmp_path / "the server's", has_rsync=request.param == "rsync")


@pytest.fixture
def with_rsync(tmp_path: Path) -> DirectoryServer:
    return DirectoryServer(tmp_path / "the server's")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run on the server that has ended, without any files."""
    root = tmp_path / "the server's" / "labctl" / LAB[0]
    run = root / "runs" / "r1"
    (run / ".labctl").mkdir(parents=True)
    (root / ".labctl").mkdir()
    (root / ".labctl" / "id").write_text(LAB[1])
    (run / ".labctl" / "spec.json").write_text('{"outputs": ["checkpoints", "logs"]}')
    (run / ".labctl" / "record.json").write_text('{"id": "r1", "state": "exited"}')
    return run


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    return tmp_path / "lab"


def bring(server: DirectoryServer, lab: Path, reporter: Reporter | None = None) -> PulledRun:
    return pull(AgentClient(server), *LAB, ["r1"], lab, reporter=reporter or SilentReporter()).runs[
        0
    ]


def put(run: Path, name: str, content: bytes) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".labctl" not in path.parts
    }


def noted(run: Path) -> dict[str, list[Any]]:
    known: dict[str, list[Any]] = json.loads((run / ".labctl" / "hashes.json").read_text())
    return known


def test_large_files_are_hashed_on_their_way_and_never_again(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(there, "checkpoints/empty", b"")
    put(there, "logs/small.txt", b"text")
    asked = ManifestRequest(*LAB, quick=True)
    first = AgentClient(server).call(MANIFEST, asked).runs["r1"].files
    assert {name: bool(sha256) for name, _, sha256, _ in first} == {
        "checkpoints/a.bin": False,
        "checkpoints/empty": True,
        "logs/small.txt": True,
    }
    told: list[Progress] = []

    def hear(event: Event) -> None:
        if isinstance(event, Progress):
            told.append(event)

    brought = bring(server, lab, OnEvent(hear))
    assert (brought.files, brought.bytes, brought.complete) == (3, LARGE + 4, True)
    assert (told[-1].done, told[-1].total) == (LARGE + 4, LARGE + 4)
    assert tree(lab / "runs" / "r1") == tree(there)
    sha256 = hashlib.sha256((there / "checkpoints/a.bin").read_bytes()).hexdigest()
    assert noted(there)["checkpoints/a.bin"][2] == sha256
    again = bring(server, lab)
    assert (again.files, again.bytes, again.complete) == (0, 0, True)
    assert verify(AgentClient(server), *LAB, [], lab) == ()


def test_files_outside_the_outputs_are_listed_until_they_are_here(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(there, "code/model.pth", os.urandom(LARGE))
    put(there, "code/train.py", b"sent")
    (there / ".labctl" / "code.json").write_text('["train.py"]')
    bring(server, lab)
    source = (AgentClient(server), *LAB, "r1", lab)
    assert [(file.path, file.size) for file in list_left_files(*source)] == [
        ("code/model.pth", LARGE)
    ]
    pull(AgentClient(server), *LAB, ["r1"], lab, reporter=SilentReporter(), everything=True)
    assert list_left_files(*source) == ()


def test_checkpoints_that_are_newer_than_the_last_pull_are_listed(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    checkpoint(there, b"one", b"one")
    source = (AgentClient(server), *LAB, "r1", lab)
    assert list_new_checkpoints(*source) == ("s1",)
    bring(server, lab)
    assert list_new_checkpoints(*source) == ()
    put(there, "checkpoints/best.pth", os.urandom(LARGE))
    assert list_new_checkpoints(*source) == ("best.pth",)


def test_the_record_beside_the_files_is_not_newer_than_they_are(
    with_rsync: DirectoryServer, there: Path, lab: Path
) -> None:
    def bring_record(state: Literal["running", "exited"], only: tuple[str, ...] = ()) -> Run:
        record = Run(id="r1", lab_id=LAB[1], server_id="s", state=state)
        pull(
            AgentClient(with_rsync),
            *LAB,
            ["r1"],
            lab,
            reporter=SilentReporter(),
            only=only,
            records=[record],
        )
        return msgspec.json.decode((lab / "runs" / "r1" / "run.json").read_bytes(), type=Run)

    put(there, "logs/run.log", b"one")
    assert bring_record("running").state == "running"
    put(there, "checkpoints/a", b"new")
    assert bring_record("exited", only=("logs",)).state == "running"
    assert bring_record("exited").state == "exited"


def test_a_file_of_the_same_size_is_compared_and_only_what_differs_is_sent(
    with_rsync: DirectoryServer, there: Path, lab: Path
) -> None:
    """As where another client's pull made the record, or the run wrote the same again."""
    put(there, "checkpoints/a.bin", content := os.urandom(LARGE))
    put(lab / "runs" / "r1", "checkpoints/a.bin", content)
    assert bring(with_rsync, lab).bytes == 0
    put(there, "checkpoints/a.bin", content[:-5] + b"other")
    os.utime(there / "checkpoints/a.bin", (5.0, 5.0))
    assert 0 < bring(with_rsync, lab).bytes < MIB
    assert tree(lab / "runs" / "r1") == tree(there)


def test_the_bar_of_an_empty_log_does_not_stay_on_the_screen(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    totals: list[float] = []

    class Bars(SilentReporter):
        def emit(self, event: Event) -> None:
            if isinstance(event, Progress):
                totals.append(event.total)

    put(there, "logs/run.log", b"")
    assert bring(server, lab, Bars()).files == 1
    assert 0 not in totals


def test_a_log_that_grows_is_continued(with_rsync: DirectoryServer, there: Path, lab: Path) -> None:
    (there / ".labctl" / "record.json").unlink()
    put(there, "logs/run.log", os.urandom(200_000))
    assert bring(with_rsync, lab).bytes == 200_000
    with (there / "logs" / "run.log").open("ab") as log:
        log.write(b"epoch 2\n")
    assert 8 <= bring(with_rsync, lab).bytes < 2_000
    assert tree(lab / "runs" / "r1") == tree(there)
    put(there, "logs/run.log", b"begun anew: another beginning, and longer than it was before\n")
    assert bring(with_rsync, lab).bytes == 61
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_log_that_grows_meanwhile_comes_as_far_as_it_was_promised(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    (there / ".labctl" / "record.json").unlink()
    put(there, "logs/run.log", b"epoch 1\n")

    def grow() -> None:
        with (there / "logs" / "run.log").open("ab") as log:
            log.write(b"epoch 2\n")

    server.before_transfer = grow
    assert not bring(server, lab).skipped
    assert (lab / "runs" / "r1" / "logs" / "run.log").read_bytes() == b"epoch 1\n"


def at_half(action: Callable[[], None]) -> Reporter:
    """Does it once, when half of what is pulled has come."""
    done: list[bool] = []

    def hear(event: Event) -> None:
        if not isinstance(event, Progress) or event.name != "pull r1" or done:
            return
        if event.total // 3 <= event.done < event.total:
            done.append(True)
            action()

    return OnEvent(hear)


@KILLED_PROGRAMS
def test_what_was_cut_goes_on_and_the_good_file_stays(
    with_rsync: DirectoryServer,
    there: Path,
    lab: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: None,
    side: str,
    number: signal.Signals,
) -> None:
    put(there, "checkpoints/a.bin", b"the good one")
    put(there, "checkpoints/first.bin", os.urandom(LARGE))
    assert bring(with_rsync, lab).complete
    put(there, "checkpoints/a.bin", os.urandom(MANY_BYTES))

    def kill() -> None:
        for pid in rsyncs(is_server=side == "there"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    with pytest.raises(TransferError, match="cut short") as caught:
        bring(with_rsync, lab, at_half(kill))
    assert "labctl pull r1   # " in caught.value.hint
    good = lab / "runs" / "r1" / "checkpoints" / "a.bin"
    assert good.read_bytes() == b"the good one"
    wait_until(lambda: not rsyncs())
    monkeypatch.undo()
    brought = bring(with_rsync, lab)
    assert 0 < brought.bytes < MANY_BYTES - MIB
    assert tree(lab / "runs" / "r1") == tree(there)


def test_what_has_come_whole_does_not_travel_again(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    checkpoint(there, content := os.urandom(LARGE), content)
    put(lab / "runs" / "r1" / PARTIAL, "checkpoints/s1/m.bin", content)
    put(there, "checkpoints/b.bin", b"more")
    assert bring(server, lab).bytes < MIB
    assert tree(lab / "runs" / "r1") == tree(there)


def test_an_interrupted_pull_leaves_no_rsync_behind(
    with_rsync: DirectoryServer, there: Path, lab: Path, slow: None
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(MANY_BYTES))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(with_rsync, lab, at_half(interrupt))
    wait_until(lambda: not rsyncs())
    assert tree(lab / "runs" / "r1" / "checkpoints") == {}


def test_a_server_that_sends_more_than_it_promised_is_cut_off(
    server: DirectoryServer, there: Path, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "SURPLUS_BYTES", MIB)
    put(there, "checkpoints/a.bin", os.urandom(10))

    def grow() -> None:
        put(there, "checkpoints/a.bin", os.urandom(4 * MIB))

    server.before_transfer = grow
    with pytest.raises(TransferError, match=r"more than it announced|arrived corrupted"):
        bring(server, lab)
    assert tree(lab / "runs" / "r1" / "checkpoints") == {}


def test_nothing_but_regular_files_of_one_name_stays_in_the_partial_directory(
    tmp_path: Path,
) -> None:
    partial, outside = tmp_path / "partial", tmp_path / "outside"
    outside.mkdir()
    (outside / "good").write_bytes(b"good")
    (partial / "a").mkdir(parents=True)
    (partial / "a" / "kept").write_bytes(b"1")
    (partial / "a" / "unwanted").write_bytes(b"1")
    (partial / "a" / "second").hardlink_to(outside / "good")
    (partial / "file-now").mkdir()
    (partial / "file-now" / "x").write_bytes(b"1")
    os.mkfifo(partial / "fifo")
    (partial / "out").symlink_to(outside)
    downloads._clear(partial, {"a/kept", "a/second", "file-now", "fifo", "out/x"})
    assert [str(p.relative_to(partial)) for p in sorted(partial.rglob("*"))] == ["a", "a/kept"]
    assert (outside / "good").read_bytes() == b"good"
    assert partial.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("directory", ["here", "", "::module", "/a\nb"])
def test_a_directory_that_a_server_names_is_one(
    server: DirectoryServer, there: Path, lab: Path, directory: str
) -> None:
    put(there, "checkpoints/a.bin", b"x")

    class Lying(AgentClient):
        def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
            reply = super().call(verb, request, **more)
            if verb is MANIFEST:
                return ManifestReply({"r1": reply.runs["r1"]._replace(directory=directory)})
            return reply

    with pytest.raises(PolicyError, match="invalid directory"):
        pull(Lying(server), *LAB, ["r1"], lab, reporter=SilentReporter())


def checkpoint(run: Path, content: bytes, named: bytes) -> None:
    listed = {"m.bin": {"size": len(named), "sha256": hashlib.sha256(named).hexdigest()}}
    put(run, "checkpoints/s1/m.bin", content)
    put(run, "checkpoints/s1/manifest.json", json.dumps({"files": listed}).encode())


def test_a_checkpoints_own_manifest_is_the_promise(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    checkpoint(there, content := os.urandom(LARGE), content)
    assert bring(server, lab).complete
    assert noted(there)["checkpoints/s1/m.bin"][2] == "", "it was not hashed there"
    assert tree(lab / "runs" / "r1") == tree(there)
    assert verify(AgentClient(server), *LAB, [], lab) == ()


def test_a_checkpoint_that_is_not_as_its_manifest_says_never_appears(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    checkpoint(there, os.urandom(LARGE), bytes(LARGE))
    brought = bring(server, lab)
    assert not brought.complete
    reasons = {one.path: one.reason for one in brought.skipped}
    assert reasons["checkpoints/s1/m.bin"] == "its manifest does not match m.bin"
    assert tree(lab / "runs" / "r1") == {}


def always_before(server: DirectoryServer, action: Callable[[], None]) -> None:
    """Have `action` done before the server looks, and again before anything travels."""
    server.before_transfer = action
    server.on_line = lambda line: action() if line.endswith(" manifest") else None


@pytest.mark.parametrize("live", [True, False])
def test_what_changes_after_the_server_named_it_is_not_taken_for_whole(
    server: DirectoryServer, there: Path, lab: Path, live: bool
) -> None:
    path = there / "checkpoints" / "a.bin"
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    os.utime(path, (1.0, 1.0))
    if live:
        (there / ".labctl" / "record.json").unlink()

    times = itertools.count(2)

    def rewrite() -> None:
        with path.open("r+b") as file:
            file.write(os.urandom(MIB))
        if live:
            os.utime(path, (1.0, float(next(times))))  # old enough to be looked at

    always_before(server, rewrite)
    if live:
        brought = bring(server, lab)
        assert [one.reason for one in brought.skipped] == ["changed during every download"]
    else:
        with pytest.raises(TransferError, match="arrived corrupted"):
            bring(server, lab)
    assert tree(lab / "runs" / "r1").keys() == set()


def test_a_link_there_is_not_followed(server: DirectoryServer, there: Path, lab: Path) -> None:
    put(there, "checkpoints/a.bin", os.urandom(10))
    secret = there.parent / "secret"
    secret.write_bytes(os.urandom(10))

    def swap() -> None:
        (there / "checkpoints" / "a.bin").unlink(missing_ok=True)
        (there / "checkpoints" / "a.bin").symlink_to(secret)

    server.before_transfer = swap
    assert bring(server, lab).files == 0
    assert tree(lab / "runs" / "r1") == {}


def test_files_with_odd_names_and_with_many_names_are_pulled(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    for name in ("-C", "#b", "\\141", "a*[b]", "two words", "ü" * 120):
        put(there, f"checkpoints/{name}", name.encode())
    for name in ("best", "last", "final"):
        (there / "checkpoints" / name).hardlink_to(there / "checkpoints" / "-C")
    brought = bring(server, lab)
    assert (brought.files, brought.complete) == (9, True)
    assert tree(lab / "runs" / "r1") == tree(there)


def test_control_characters_of_a_name_are_escaped_here(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    """A file that no terminal can name must not keep its server from ending."""
    for name in ("two\nlines.txt", "a\x1b[2J", "plain%0A.txt", "50%\n"):
        put(there, f"logs/{name}", name.encode())
    put(there, "logs/a\tb/c.txt", b"inside")
    listed = {"a\nb.bin": {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}
    put(there, "checkpoints/s1/a\nb.bin", b"x")
    put(there, "checkpoints/s1/manifest.json", json.dumps({"files": listed}).encode())
    assert bring(server, lab).complete
    files = tree(lab / "runs" / "r1")
    assert {name: files[f"logs/{name}"] for name in ("two%0Alines.txt", "a%1B[2J", "50%25%0A")} == {
        "two%0Alines.txt": b"two\nlines.txt",
        "a%1B[2J": b"a\x1b[2J",
        "50%25%0A": b"50%\n",
    }
    assert files["logs/a%09b/c.txt"] == b"inside"
    assert files["checkpoints/s1/a%0Ab.bin"] == b"x"
    assert verify(AgentClient(server), *LAB, [], lab) == ()
    assert bring(server, lab).files == 0


def test_code_is_saved_whatever_its_name(server: DirectoryServer, there: Path, lab: Path) -> None:
    code = there.parents[1] / "code"
    put(code, "two\nlines.py", b"print(1)")
    put(code, ".labctl-notes", b"3")
    put(code, "a\nb", b"1")
    put(code, "a%0Ab", b"2")
    remote = AgentClient(server)
    saved = pull_edits(remote, LabRequest(*LAB), lab, reporter=SilentReporter())
    assert sorted(saved.saved) == [".labctl-notes", "a%0Ab", "two%0Alines.py"]
    assert (Path(saved.directory) / "two%0Alines.py").read_bytes() == b"print(1)"
    assert saved.skipped == (r"a\nb: another file is named a%0Ab",)
    # What comes into the lab would be pushed again, under another name.
    brought = pull_edits(remote, LabRequest(*LAB), lab, reporter=SilentReporter(), merge=True)
    assert brought.brought == ("a%0Ab",)
    assert len(brought.skipped) == 3
    again = pull_edits(remote, LabRequest(*LAB), lab, reporter=SilentReporter())
    assert set(again.saved) == set(saved.saved) - {"a%0Ab"}, "what is here is not saved again"


def test_no_file_takes_the_name_of_another(server: DirectoryServer, there: Path, lab: Path) -> None:
    put(there, "logs/a\nb", b"1")
    put(there, "logs/a%0Ab", b"2")
    brought = bring(server, lab)
    assert tree(lab / "runs" / "r1") == {"logs/a%0Ab": b"2"}
    (skipped,) = brought.skipped
    assert (skipped.path, skipped.reason) == (r"logs/a\nb", "another file is named logs/a%0Ab")


@pytest.mark.parametrize(
    ("script", "why"),
    [("echo tar: unrecognized option >&2; exit 1", "unrecognized option"), (None, "not found")],
)
def test_a_server_without_rsync_and_a_usable_tar_is_told_what_to_install(
    tmp_path: Path, there: Path, lab: Path, script: str | None, why: str
) -> None:
    server = DirectoryServer(tmp_path / "the server's", has_rsync=False)
    put(there, "checkpoints/a.bin", b"x")
    tar = Path(server.path) / "tar"
    tar.unlink()
    if script is not None:
        tar.write_text(f"#!/bin/sh\n{script}\n")
        tar.chmod(0o755)
    with pytest.raises(TransferError, match="cut short") as caught:
        bring(server, lab)
    assert why in caught.value.why
    assert "install rsync or GNU tar" in caught.value.hint


def test_a_tar_that_is_killed_keeps_complete_files(tmp_path: Path, there: Path, lab: Path) -> None:
    """The next pull starts the file again that was being read, and no other."""
    server = DirectoryServer(tmp_path / "the server's", has_rsync=False)
    checkpoint(there, content := os.urandom(LARGE), content)
    put(there, "logs/z.log", b"text")
    tar = Path(server.path) / "tar"
    program = tar.readlink()
    tar.unlink()
    (Path(server.path) / "head").symlink_to("/usr/bin/head")
    tar.write_text(f'#!/bin/sh\n{program} "$@" | head -c {LARGE + 1600}\nkill -9 $$\n')
    tar.chmod(0o755)
    with pytest.raises(TransferError, match="cut short") as caught:
        bring(server, lab)
    assert "labctl pull r1   # " in caught.value.hint
    partial = lab / "runs" / "r1" / PARTIAL
    assert (partial / "checkpoints" / "s1" / "m.bin").read_bytes() == content
    tar.unlink()
    tar.symlink_to(program)
    assert bring(server, lab).bytes < MIB
    assert tree(lab / "runs" / "r1") == tree(there)


def test_nothing_is_asked_for_outside(server: DirectoryServer, there: Path) -> None:
    asked = PartsRequest(*LAB, run="r1", parts=(FilePart("../../../../etc/passwd", 5),))
    with pytest.raises(UsageError, match="leaves its directory"):
        AgentClient(server).call(HASHES, asked)


def test_a_short_disk_is_told_before_anything_comes(
    server: DirectoryServer, there: Path, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    monkeypatch.setattr("labctl.sync.downloads.RESERVE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="not enough disk space on this machine"):
        bring(server, lab)
    assert list((lab / "runs" / "r1").rglob("*.bin")) == []


def test_nothing_is_written_through_a_link_here(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    outside = lab.parent / "outside"
    outside.mkdir()
    home = lab / "runs" / "r1"
    home.mkdir(parents=True)
    (home / "checkpoints").symlink_to(outside)
    with pytest.raises(PolicyError, match="is a symbolic link"):
        bring(server, lab)
    (home / "checkpoints").unlink()
    (home / PARTIAL).mkdir()
    (home / PARTIAL / "checkpoints").symlink_to(outside)
    assert bring(server, lab).complete
    assert list(outside.iterdir()) == []


class OnEvent(SilentReporter):
    """A Reporter that hands every event on."""

    def __init__(self, hear: Callable[[Event], None]) -> None:
        self.emit = hear  # type: ignore[method-assign]


def arrived(event: Event) -> bool:
    """Whether the last byte of a pull has just come; nothing has its name yet."""
    return isinstance(event, Progress) and event.name == "pull r1" and event.done == event.total


def spoil(lab: Path, size: int) -> None:
    """Change a byte of each file of this size that is here, as a bad disk does."""
    for path in (lab / "runs").rglob("*"):
        if path.is_file() and path.stat().st_size == size:
            with path.open("r+b") as file:
                first = file.read(1)[0]
                file.seek(0)
                file.write(bytes([first ^ 1]))


def test_what_the_disk_has_made_of_it_counts_and_not_what_came(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    spoiled: list[int] = []

    def once(event: Event) -> None:
        if arrived(event) and not spoiled:
            spoiled.append(1)
            spoil(lab, LARGE)

    brought = bring(server, lab, OnEvent(once))
    assert spoiled
    assert (brought.files, brought.complete) == (1, True)
    assert brought.bytes >= LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_disk_that_spoils_it_each_time_is_told_and_nothing_gets_its_name(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))

    def always(event: Event) -> None:
        if arrived(event):
            spoil(lab, LARGE)

    with pytest.raises(TransferError, match="arrived corrupted"):
        bring(server, lab, OnEvent(always))
    assert tree(lab / "runs" / "r1" / "checkpoints") == {}
    assert not (there / ".labctl" / "pulled.json").exists()


def test_a_file_that_was_changed_here_is_brought_again(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    assert bring(server, lab).complete
    here = lab / "runs" / "r1" / "checkpoints" / "a.bin"
    before = here.stat()
    spoil(lab, LARGE)
    os.utime(here, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [one.path for one in verify(AgentClient(server), *LAB, [], lab)] == ["checkpoints/a.bin"]
    assert bring(server, lab).bytes > 0
    assert tree(lab / "runs" / "r1") == tree(there)


def test_what_an_earlier_version_noted_of_the_stream_is_not_believed(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", content := os.urandom(LARGE))
    put(lab / "runs" / "r1", "checkpoints/a.bin", os.urandom(LARGE))
    found = (lab / "runs" / "r1" / "checkpoints" / "a.bin").lstat()
    entry = [*file_identity(found), hashlib.sha256(content).hexdigest()]
    put(lab, ".labctl/index.json", json.dumps({"runs/r1": {"checkpoints/a.bin": entry}}).encode())
    assert [one.path for one in verify(AgentClient(server), *LAB, [], lab)] == ["checkpoints/a.bin"]
    assert bring(server, lab).bytes == LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_the_server_is_told_only_of_what_has_its_name_here(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    """Its watchdog saves the rest: a checkpoint waits as long as one of its files does."""
    put(there, "logs/run.log", b"text")
    put(there, "checkpoints/s1/a.bin", b"small")
    put(there, "checkpoints/s1/b.bin", os.urandom(LARGE))
    put(there, "checkpoints/s1/manifest.json", b'{"files": {}}')

    def rewrite() -> None:
        (there / "checkpoints" / "s1" / "b.bin").write_bytes(os.urandom(LARGE))

    always_before(server, rewrite)
    with pytest.raises(TransferError, match="arrived corrupted"):
        bring(server, lab)
    named = {path.name for path in (lab / "runs" / "r1").iterdir()}
    assert named == {"logs", PARTIAL}
    assert json.loads((there / ".labctl" / "pulled.json").read_text()).keys() == {"logs/run.log"}


def test_two_threads_pull_one_after_the_other(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    waits = threading.Event()
    notes: list[str] = []
    second: list[PulledRun] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
            waits.set()

    thread = threading.Thread(
        target=lambda: second.append(bring(DirectoryServer(server.home), lab, OnEvent(hear)))
    )

    def meanwhile() -> None:
        thread.start()
        assert waits.wait(60)

    server.before_transfer = meanwhile
    assert bring(server, lab).files == 1
    thread.join()
    assert f"pid {os.getpid()}" in notes[0]
    assert "`pull`" in notes[0]
    assert (second[0].files, second[0].complete) == (0, True)


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_it_is_on_the_disk_before_it_is_called_pulled(
    server: DirectoryServer,
    there: Path,
    lab: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_syncfs: bool,
) -> None:
    """The real calls, in their order: contents, names, and only then the server is told."""
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(there, "logs/run.log", b"text")
    done: list[str] = []
    home = lab / "runs" / "r1"
    real = durability._sync_filesystem, os.fsync, AgentClient.call

    def sync_filesystem(folder: Path) -> bool:
        if has_syncfs:
            done.append("syncfs")
            assert real[0](folder)
        return has_syncfs

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(os.path.relpath(name, home))
        real[1](descriptor)

    def call(self: AgentClient, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
        done.append(verb.name)
        return real[2](self, verb, request, **more)

    monkeypatch.setattr(durability, "_sync_filesystem", sync_filesystem)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(AgentClient, "call", call)
    bring(server, lab)
    contents = [f"{PARTIAL}/checkpoints/a.bin", f"{PARTIAL}/logs/run.log"]
    first = ["manifest", "hashes", *(["syncfs"] if has_syncfs else contents)]
    assert done[: len(first)] == first
    assert set(done[len(first) : -1]) == {"../..", "..", ".", "checkpoints", "logs"}
    assert done[-1] == "pulled"


def test_who_does_not_want_to_wait_is_told_for_whom(
    server: DirectoryServer, there: Path, lab: Path
) -> None:
    with (
        hold_transfers(lab, "push", SilentReporter()),
        pytest.raises(BusyError, match=rf"pid {os.getpid()}\) has been running `push`"),
    ):
        pull(AgentClient(server), *LAB, ["r1"], lab, reporter=SilentReporter(), wait_s=0.0)
    assert not (lab / "runs").exists()
