"""Pulls through the real program, run by this machine: what travels, and what is made of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.actions import Event, Note, Progress, Reporter, Silent, durability
from labctl.actions.local_results import PARTIAL
from labctl.actions.pull import PulledRun, pull, verify
from labctl.actions.remote import Remote
from labctl.actions.scan import identity
from labctl.actions.transfers import hold_transfers
from labctl.errors import (
    BusyError,
    DiskFullError,
    LinkLostError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.model import Endpoint
from labctl.remote import outputs, parcel
from labctl.shell import Command
from labctl.transports import Body, Result, blocks

LAB = ("digits", "0f1e2d3c4b5a")
MIB = 1024**2
LARGE = outputs.QUICK_BYTES + 2 * MIB + 17
"""More than is hashed before it is asked for."""


class Shell:
    """A server whose commands a shell of this machine runs. After `cut` bytes the link is lost."""

    def __init__(self, home: Path) -> None:
        self.endpoint = Endpoint(host="here.example")
        self.home = home
        self.cut: int | None = None
        self.between: Callable[[], None] = lambda: None
        self.streamed = 0

    def run(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        done = self._do(line, stdin)
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    def stream(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        self.between()
        done = self._do(line, stdin)
        self.streamed = len(done.stdout)
        for piece in _pieces(done.stdout[: self.cut]):
            on_stdout(piece)
        if self.cut is not None:
            self.cut = None
            raise LinkLostError("the link is lost")
        if on_stderr is not None:
            on_stderr(done.stderr)
        return done.returncode

    def close(self) -> None:
        pass

    def _do(self, line: Command | str, stdin: Body) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["sh", "-c", str(line)],
            input=b"".join(blocks(stdin)),
            capture_output=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
            check=False,
        )


def _pieces(text: bytes) -> Iterator[bytes]:
    """In pieces of odd lengths, heads of blocks torn."""
    at, size = 0, 1
    while at < len(text):
        yield text[at : at + size]
        at, size = at + size, min(size * 3, 200_003)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "server")


@pytest.fixture
def there(shell: Shell) -> Path:
    """A run on the server that has ended, without any files."""
    root = shell.home / "labctl" / LAB[0]
    run = root / "runs" / "r1"
    (run / ".labctl").mkdir(parents=True)
    (root / ".labctl").mkdir()
    (root / ".labctl" / "id").write_text(LAB[1])
    (run / ".labctl" / "spec.json").write_text('{"outputs": ["checkpoints", "logs"]}')
    (run / ".labctl" / "record.json").write_text('{"state": "exited"}')
    return run


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    return tmp_path / "lab"


def bring(shell: Shell, lab: Path, reporter: Reporter | None = None) -> PulledRun:
    return pull(Remote(shell), *LAB, ["r1"], lab, reporter=reporter or Silent()).runs[0]


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
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(there, "checkpoints/empty", b"")
    put(there, "logs/small.txt", b"text")
    asked = {"lab": LAB[0], "lab_id": LAB[1], "quick": True}
    first = Remote(shell).call("manifest", asked)["runs"]["r1"]["files"]
    assert {name: bool(sha256) for name, _, sha256, _ in first} == {
        "checkpoints/a.bin": False,
        "checkpoints/empty": True,
        "logs/small.txt": True,
    }
    brought = bring(shell, lab)
    assert (brought.files, brought.bytes, brought.complete) == (3, LARGE + 4, True)
    assert tree(lab / "runs" / "r1") == tree(there)
    sha256 = hashlib.sha256((there / "checkpoints/a.bin").read_bytes()).hexdigest()
    assert noted(there)["checkpoints/a.bin"][2] == sha256
    again = bring(shell, lab)
    assert (again.files, again.bytes, again.complete) == (0, 0, True)
    assert verify(Remote(shell), *LAB, [], lab) == ()


def test_what_was_cut_goes_on_where_it_was(shell: Shell, there: Path, lab: Path) -> None:
    for name in "abc":
        put(there, f"checkpoints/{name}.bin", os.urandom(LARGE))
    shell.cut = 2 * LARGE
    with pytest.raises(LinkLostError) as caught:
        bring(shell, lab)
    assert "labctl pull" in caught.value.hint
    assert [path.name for path in (lab / "runs" / "r1").iterdir()] == [PARTIAL]
    brought = bring(shell, lab)
    assert LARGE < brought.bytes < LARGE + 2 * MIB
    assert shell.streamed < LARGE + 2 * MIB
    assert tree(lab / "runs" / "r1") == tree(there)


def test_what_lies_here_of_another_version_is_sent_anew(
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(lab / "runs" / "r1" / PARTIAL, "checkpoints/a.bin", os.urandom(LARGE + 5))
    assert bring(shell, lab).bytes == LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_file_of_the_same_size_is_compared_and_not_sent(
    shell: Shell, there: Path, lab: Path
) -> None:
    """As where another client's pull made the record, or the run wrote the same again."""
    put(there, "checkpoints/a.bin", content := os.urandom(LARGE))
    put(lab / "runs" / "r1", "checkpoints/a.bin", content)
    assert bring(shell, lab).bytes == 0
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    os.utime(there / "checkpoints/a.bin", (5.0, 5.0))
    assert bring(shell, lab).bytes == LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_cut_never_leaves_a_second_name_of_a_good_file_to_be_written_to(
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", content := os.urandom(LARGE))
    put(lab / "runs" / "r1", "checkpoints/a.bin", content)
    put(there, "checkpoints/b.bin", os.urandom(LARGE))
    shell.cut = MIB
    with pytest.raises(LinkLostError):
        bring(shell, lab)
    good = lab / "runs" / "r1" / "checkpoints" / "a.bin"
    put(there, "checkpoints/a.bin", content + b"more")
    shell.cut = MIB // 2
    with pytest.raises(LinkLostError):
        bring(shell, lab)
    assert good.read_bytes() == content
    assert bring(shell, lab).complete
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_log_that_grows_is_continued(shell: Shell, there: Path, lab: Path) -> None:
    (there / ".labctl" / "record.json").unlink()
    put(there, "logs/run.log", b"epoch 1\n" * 4)
    assert bring(shell, lab).bytes == 32
    with (there / "logs" / "run.log").open("ab") as log:
        log.write(b"epoch 2\n")
    assert bring(shell, lab).bytes == 8
    assert tree(lab / "runs" / "r1") == tree(there)
    put(there, "logs/run.log", b"begun anew: another beginning, and longer than it was before\n")
    assert bring(shell, lab).bytes == 61
    assert tree(lab / "runs" / "r1") == tree(there)


def checkpoint(run: Path, content: bytes, named: bytes) -> None:
    listed = {"m.bin": {"size": len(named), "sha256": hashlib.sha256(named).hexdigest()}}
    put(run, "checkpoints/s1/m.bin", content)
    put(run, "checkpoints/s1/manifest.json", json.dumps({"files": listed}).encode())


def test_a_checkpoints_own_manifest_is_the_promise(shell: Shell, there: Path, lab: Path) -> None:
    checkpoint(there, content := os.urandom(LARGE), content)
    assert bring(shell, lab).complete
    assert noted(there)["checkpoints/s1/m.bin"][2] == "", "it was not hashed there"
    assert tree(lab / "runs" / "r1") == tree(there)
    assert verify(Remote(shell), *LAB, [], lab) == ()


def test_a_checkpoint_that_is_not_as_its_manifest_says_never_appears(
    shell: Shell, there: Path, lab: Path
) -> None:
    checkpoint(there, os.urandom(LARGE), bytes(LARGE))
    brought = bring(shell, lab)
    assert not brought.complete
    reasons = {one.path: one.reason for one in brought.skipped}
    assert reasons["checkpoints/s1/m.bin"] == "its manifest does not match m.bin"
    assert tree(lab / "runs" / "r1") == {}


@pytest.mark.parametrize("live", [True, False])
def test_what_changes_after_the_server_named_it_is_not_taken_for_whole(
    shell: Shell, there: Path, lab: Path, live: bool
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

    shell.between = rewrite
    if live:
        brought = bring(shell, lab)
        assert [one.reason for one in brought.skipped] == ["changed each time while it was pulled"]
    else:
        with pytest.raises(TransferError, match="arrived different"):
            bring(shell, lab)
    assert tree(lab / "runs" / "r1").keys() == set()


class Answers(Shell):
    """A server that answers verb `send` as it likes."""

    reply: bytes
    closing: bytes

    def stream(
        self,
        line: Command | str,
        *,
        stdin: Body = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        on_stdout(self.reply)
        assert on_stderr is not None
        on_stderr(self.closing)
        return 0


def said(body: dict[str, Any]) -> bytes:
    return b"\x1elabctl " + json.dumps(body).encode() + b"\n"


def block(content: bytes) -> bytes:
    return b"".join(parcel.plain(content))


@pytest.mark.parametrize(
    ("begins", "stream", "closing"),
    [
        ({"from": [0]}, block(b"12345678, and more than was promised") + parcel.END, {}),
        ({"from": [0]}, block(b"1234"), {}),
        ({"from": [0]}, b"no stream at all", {}),
        ({"from": [4]}, block(b"5678") + parcel.END, {}),
        ({"from": [-2]}, parcel.END, {}),
        ({"from": [0, 0]}, block(b"12345678") + parcel.END, {}),
        ({"from": []}, parcel.END, {}),
        ({"from": [0]}, block(b"12345678") + parcel.END, {"sha256": []}),
    ],
)
def test_a_server_sends_no_more_and_no_less_than_it_promised(
    there: Path,
    lab: Path,
    tmp_path: Path,
    begins: dict[str, Any],
    stream: bytes,
    closing: dict[str, Any],
) -> None:
    put(there, "checkpoints/a.bin", b"12345678")
    shell = Answers(tmp_path / "server")
    shell.reply = said(begins) + stream
    shell.closing = said({"sha256": [""], **closing})
    with pytest.raises(TransferError, match="cut short"):
        bring(shell, lab)
    files = list((lab / "runs" / "r1").rglob("*.bin"))
    assert all(path.stat().st_size <= 8 for path in files)
    assert tree(lab / "runs" / "r1" / "checkpoints") == {}


def test_a_link_there_is_not_followed(shell: Shell, there: Path, lab: Path) -> None:
    put(there, "checkpoints/a.bin", os.urandom(10))
    secret = there.parent / "secret"
    secret.write_bytes(os.urandom(10))

    def swap() -> None:
        (there / "checkpoints" / "a.bin").unlink(missing_ok=True)
        (there / "checkpoints" / "a.bin").symlink_to(secret)

    shell.between = swap
    assert bring(shell, lab).files == 0
    assert tree(lab) == {}


def test_nothing_is_asked_for_outside(shell: Shell, there: Path) -> None:
    request = {"lab": LAB[0], "lab_id": LAB[1], "run": "r1"}
    parts = [["../../../../etc/passwd", 5, "", 0, ""]]
    got: list[Any] = []
    with pytest.raises(UsageError, match="leaves its directory"):
        Remote(shell).stream(
            "send", {**request, "parts": parts}, on_reply=got.append, on_bytes=got.append
        )
    assert got == []


def test_a_short_disk_is_told_before_anything_comes(
    shell: Shell, there: Path, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    monkeypatch.setattr("labctl.actions.arrivals.RESERVE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="no room here"):
        bring(shell, lab)
    assert list((lab / "runs" / "r1").rglob("*.bin")) == []


def test_nothing_is_written_through_a_link_here(shell: Shell, there: Path, lab: Path) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    outside = lab.parent / "outside"
    outside.mkdir()
    home = lab / "runs" / "r1"
    home.mkdir(parents=True)
    (home / "checkpoints").symlink_to(outside)
    with pytest.raises(PolicyError, match="is a link"):
        bring(shell, lab)
    (home / "checkpoints").unlink()
    (home / PARTIAL).mkdir()
    (home / PARTIAL / "checkpoints").symlink_to(outside)
    assert bring(shell, lab).complete
    assert list(outside.iterdir()) == []


class OnEvent(Silent):
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
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    spoiled: list[int] = []

    def once(event: Event) -> None:
        if arrived(event) and not spoiled:
            spoiled.append(1)
            spoil(lab, LARGE)

    brought = bring(shell, lab, OnEvent(once))
    assert spoiled
    assert (brought.files, brought.bytes, brought.complete) == (1, 2 * LARGE, True)
    assert tree(lab / "runs" / "r1") == tree(there)


def test_a_disk_that_spoils_it_each_time_is_told_and_nothing_gets_its_name(
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))

    def always(event: Event) -> None:
        if arrived(event):
            spoil(lab, LARGE)

    with pytest.raises(TransferError, match="arrived different"):
        bring(shell, lab, OnEvent(always))
    assert tree(lab / "runs" / "r1" / "checkpoints") == {}
    assert not (there / ".labctl" / "pulled.json").exists()


def test_a_file_that_was_changed_here_is_brought_again(
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    assert bring(shell, lab).complete
    here = lab / "runs" / "r1" / "checkpoints" / "a.bin"
    before = here.stat()
    spoil(lab, LARGE)
    os.utime(here, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [one.path for one in verify(Remote(shell), *LAB, [], lab)] == ["checkpoints/a.bin"]
    assert bring(shell, lab).bytes == LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_what_an_earlier_version_noted_of_the_stream_is_not_believed(
    shell: Shell, there: Path, lab: Path
) -> None:
    put(there, "checkpoints/a.bin", content := os.urandom(LARGE))
    put(lab / "runs" / "r1", "checkpoints/a.bin", os.urandom(LARGE))
    found = (lab / "runs" / "r1" / "checkpoints" / "a.bin").lstat()
    entry = [*identity(found), hashlib.sha256(content).hexdigest()]
    put(lab, ".labctl/index.json", json.dumps({"runs/r1": {"checkpoints/a.bin": entry}}).encode())
    assert [one.path for one in verify(Remote(shell), *LAB, [], lab)] == ["checkpoints/a.bin"]
    assert bring(shell, lab).bytes == LARGE
    assert tree(lab / "runs" / "r1") == tree(there)


def test_the_server_is_told_only_of_what_has_its_name_here(
    shell: Shell, there: Path, lab: Path
) -> None:
    """Its watchdog saves the rest: a checkpoint waits as long as one of its files does."""
    put(there, "logs/run.log", b"text")
    put(there, "checkpoints/s1/a.bin", b"small")
    put(there, "checkpoints/s1/b.bin", os.urandom(LARGE))
    put(there, "checkpoints/s1/manifest.json", b'{"files": {}}')

    def rewrite() -> None:
        (there / "checkpoints" / "s1" / "b.bin").write_bytes(os.urandom(LARGE))

    shell.between = rewrite
    with pytest.raises(TransferError, match="arrived different"):
        bring(shell, lab)
    named = {path.name for path in (lab / "runs" / "r1").iterdir()}
    assert named == {"logs", PARTIAL}
    assert json.loads((there / ".labctl" / "pulled.json").read_text()).keys() == {"logs/run.log"}


def test_two_threads_pull_one_after_the_other(shell: Shell, there: Path, lab: Path) -> None:
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    waits = threading.Event()
    notes: list[str] = []
    second: list[PulledRun] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
            waits.set()

    thread = threading.Thread(
        target=lambda: second.append(bring(Shell(shell.home), lab, OnEvent(hear)))
    )

    def meanwhile() -> None:
        thread.start()
        assert waits.wait(60)

    shell.between = meanwhile
    assert bring(shell, lab).files == 1
    thread.join()
    assert f"pid {os.getpid()}" in notes[0]
    assert "`pull`" in notes[0]
    assert (second[0].files, second[0].complete) == (0, True)


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_it_is_on_the_disk_before_it_is_called_pulled(
    shell: Shell, there: Path, lab: Path, monkeypatch: pytest.MonkeyPatch, has_syncfs: bool
) -> None:
    """The real calls, in their order: contents, names, and only then the server is told."""
    put(there, "checkpoints/a.bin", os.urandom(LARGE))
    put(there, "logs/run.log", b"text")
    done: list[str] = []
    home = lab / "runs" / "r1"
    real = durability._sync_filesystem, os.fsync, Remote.call

    def sync_filesystem(folder: Path) -> bool:
        if has_syncfs:
            done.append("syncfs")
            assert real[0](folder)
        return has_syncfs

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(os.path.relpath(name, home))
        real[1](descriptor)

    def call(self: Remote, verb: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        done.append(verb)
        return real[2](self, verb, request, **more)

    monkeypatch.setattr(durability, "_sync_filesystem", sync_filesystem)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Remote, "call", call)
    bring(shell, lab)
    contents = [f"{PARTIAL}/checkpoints/a.bin", f"{PARTIAL}/logs/run.log"]
    first = ["manifest", *(["syncfs"] if has_syncfs else contents)]
    assert done[: len(first)] == first
    assert set(done[len(first) : -1]) == {"../..", "..", ".", "checkpoints", "logs"}
    assert done[-1] == "pulled"


def test_who_does_not_want_to_wait_is_told_for_whom(shell: Shell, there: Path, lab: Path) -> None:
    with (
        hold_transfers(lab, "push", Silent()),
        pytest.raises(BusyError, match=rf"pid {os.getpid()}\) is busy with `push`"),
    ):
        pull(Remote(shell), *LAB, ["r1"], lab, reporter=Silent(), wait_s=0.0)
    assert not (lab / "runs").exists()
