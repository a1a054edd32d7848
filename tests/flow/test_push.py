"""Pushes with a real rsync, a real tar, and the real program on the server."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from directory_server import KILLED_PROGRAMS, DirectoryServer, rsyncs, slow_down, wait_until
from lab_world import Recorded

from labctl.commands import rsync
from labctl.errors import (
    BusyError,
    DiskFullError,
    LabError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.events import Event, Progress
from labctl.model import FileEntry
from labctl.parallel import run_parts
from labctl.servers.agent import AgentClient
from labctl.sync.push import INLINE_BYTES, PushedTree, push_tree
from labctl.sync.scan import LARGE_BYTES, HashIndex, scan_code
from labctl.sync.transfer_lock import hold_transfers
from labctl.transports.rsync import find_program

LAB = ("digits", "0f1e2d3c4b5a")
MIB = 1024**2
OLD_S = time.time() - 3600


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    root = tmp_path / "my lab"
    (root / "src").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "src" / "model.py").write_text("layers = 3\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root


@pytest.fixture(params=["rsync", "tar", "noisy shell"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> DirectoryServer:
    home = tmp_path / "the server's"
    prelude = "echo Welcome, the cake is in the kitchen" if request.param == "noisy shell" else ""
    return DirectoryServer(home, has_rsync=request.param != "tar", prelude=prelude)


@pytest.fixture
def with_rsync(tmp_path: Path) -> DirectoryServer:
    return DirectoryServer(tmp_path / "the server's")


def push_code(
    server: DirectoryServer, lab: Path, reporter: Recorded | None = None, *, force: bool = False
) -> PushedTree:
    reporter = reporter or Recorded()
    index = HashIndex(lab, "code")
    files = scan_code(lab, reporter, later=index)
    remote = AgentClient(server)
    return push_tree(remote, *LAB, "code", lab, files, reporter, index=index, force=force)


def code(server: DirectoryServer) -> Path:
    return server.home / "labctl" / LAB[0] / "code"


def tree(root: Path) -> dict[str, tuple[str, int]]:
    """Hash and mode of each file."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            0o755 if path.stat().st_mode & 0o100 else 0o644,
        )
        for path in root.rglob("*")
        if path.is_file() and ".labctl" not in path.parts
    }


def write_old(path: Path, content: bytes) -> None:
    """A file that was not written just now, so that its hash may be kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (OLD_S, OLD_S))


def progress(reporter: Recorded) -> list[Progress]:
    events = [one for one in reporter.events if isinstance(one, Progress)]
    return [one for one in events if one.name == "sending code"]


def test_much_arrives_whichever_way_it_goes(server: DirectoryServer, lab: Path) -> None:
    for number in range(40):
        write_old(lab / f"d {number % 3}" / f"näme {number} 'quoted'.bin", os.urandom(MIB // 4))
    write_old(lab / "#comment", os.urandom(3))
    write_old(lab / "-rf", b"x" * INLINE_BYTES)
    write_old(lab / "large.bin", os.urandom(LARGE_BYTES + 17))
    (lab / "large.bin").chmod(0o400)
    reporter = Recorded()
    result = push_code(server, lab, reporter)
    size = sum(
        path.stat().st_size
        for path in lab.rglob("*")
        if path.is_file() and ".labctl" not in path.parts
    )
    assert result == PushedTree(target="code", sent=46, sent_bytes=size)
    assert tree(code(server)) == tree(lab)
    done = [one.done for one in progress(reporter)]
    assert done == sorted(done)
    assert (done[-1], progress(reporter)[-1].total) == (size, size)
    assert not (code(server).parent / ".labctl" / ".staging-code").exists()
    assert code(server).stat().st_mode & 0o777 == 0o755
    server.lines.clear()
    assert push_code(server, lab) == PushedTree(target="code", unchanged=46)
    assert server.verbs == ["plan"]


def test_a_large_file_is_hashed_once(with_rsync: DirectoryServer, lab: Path) -> None:
    write_old(lab / "large.bin", os.urandom(LARGE_BYTES + 1))
    assert push_code(with_rsync, lab).sent == 4
    assert with_rsync.verbs[-2:] == ["plan", "commit"]
    (entry,) = [f for f in scan_code(lab, Recorded(), later=HashIndex(lab, "code")) if f.size > MIB]
    assert entry.sha256 == tree(lab)["large.bin"][0]


def test_what_little_was_edited_takes_one_call(with_rsync: DirectoryServer, lab: Path) -> None:
    push_code(with_rsync, lab)
    (lab / "train.py").write_text("print('better')\n")
    (lab / "src" / "model.py").unlink()
    with_rsync.lines.clear()
    found = push_code(with_rsync, lab)
    assert found == PushedTree(target="code", sent=1, sent_bytes=16, removed=1, unchanged=1)
    assert (with_rsync.verbs, with_rsync.shells) == (["plan"], 0)
    assert tree(code(with_rsync)) == tree(lab)


def test_only_what_changed_in_a_file_travels(with_rsync: DirectoryServer, lab: Path) -> None:
    content = bytearray(os.urandom(8 * MIB))
    write_old(lab / "weights.bin", bytes(content))
    push_code(with_rsync, lab)
    content[4 * MIB : 4 * MIB + 3] = b"new"
    (lab / "weights.bin").write_bytes(content)
    assert 0 < push_code(with_rsync, lab).sent_bytes < MIB
    assert tree(code(with_rsync)) == tree(lab)


def test_the_scan_begins_once_the_agent_was_started(with_rsync: DirectoryServer, lab: Path) -> None:
    started: list[list[str]] = []

    def scan() -> tuple[FileEntry, ...]:
        started.append(with_rsync.verbs)
        return scan_code(lab, Recorded())

    push_tree(AgentClient(with_rsync), *LAB, "code", lab, scan, Recorded())
    assert [verbs[-1] for verbs in started] == ["plan"]
    assert tree(code(with_rsync)) == tree(lab)


def test_an_error_of_the_scan_pushes_nothing(with_rsync: DirectoryServer, lab: Path) -> None:
    (lab / "bad\nname").touch()
    index = HashIndex(lab, "code")
    scan = functools.partial(scan_code, lab, Recorded(), later=index)
    with pytest.raises(UsageError, match="control character"):
        push_tree(AgentClient(with_rsync), *LAB, "code", lab, scan, Recorded(), index=index)
    assert not code(with_rsync).exists()


class AtProgress(Recorded):
    """Does something once, when half of it has gone."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action = action
        self.is_done = False

    def emit(self, event: Event) -> None:
        super().emit(event)
        if not isinstance(event, Progress) or event.name != "sending code" or self.is_done:
            return
        if event.total // 3 <= event.done < event.total:
            self.is_done = True
            self.action()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)


@KILLED_PROGRAMS
def test_what_was_cut_goes_on_and_the_good_file_stays(
    with_rsync: DirectoryServer,
    lab: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: None,
    side: str,
    number: signal.Signals,
) -> None:
    write_old(lab / "model.bin", b"the good one")
    push_code(with_rsync, lab)
    write_old(lab / "model.bin", os.urandom(64 * MIB))

    def kill() -> None:
        for pid in rsyncs(is_server=side == "there"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    with pytest.raises(TransferError, match="cut short") as caught:
        push_code(with_rsync, lab, AtProgress(kill))
    assert "labctl push" in caught.value.hint
    assert (code(with_rsync) / "model.bin").read_bytes() == b"the good one"
    wait_until(lambda: not rsyncs())
    monkeypatch.undo()
    assert 0 < push_code(with_rsync, lab).sent_bytes < 60 * MIB
    assert tree(code(with_rsync)) == tree(lab)


def test_an_interrupted_push_leaves_no_rsync_behind(
    with_rsync: DirectoryServer, lab: Path, slow: None
) -> None:
    write_old(lab / "model.bin", os.urandom(64 * MIB))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push_code(with_rsync, lab, AtProgress(interrupt))
    wait_until(lambda: not rsyncs())
    assert not code(with_rsync).exists()


def test_a_push_ends_with_the_part_that_it_runs_in(
    with_rsync: DirectoryServer, lab: Path, tmp_path: Path
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "rsync").write_text(
        f'#!/bin/sh\n[ "$1" = --server ] || exec /usr/bin/rsync "$@"\n'
        f"touch {tmp_path}/begun; exec sleep 60\n"
    )
    (bin_ / "rsync").chmod(0o755)
    with_rsync.prelude = f"PATH={bin_}:$PATH"
    write_old(lab / "model.bin", os.urandom(INLINE_BYTES + 1))

    def fail() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        raise LabError("stop")

    started = time.monotonic()
    with pytest.raises(LabError, match="stop"):
        run_parts({"push": lambda: push_code(with_rsync, lab), "fail": fail})
    assert time.monotonic() - started < 30
    assert not code(with_rsync).exists()
    with_rsync.prelude = ""
    assert push_code(with_rsync, lab).sent > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from directory_server import DirectoryServer
from labctl.commands import rsync
from labctl.transports.rsync import copy, find_program

many = [os.open("/", os.O_RDONLY) for _ in range(20)]
server = DirectoryServer(Path(sys.argv[1]))
shell = server.remote_shell()
transfer = rsync.Transfer(
    shell_words=shell.words, source=f"{sys.argv[2]}/", target=f"here:{server.home}/"
)
argv = rsync.transfer_argv(find_program(), transfer)
names = rsync.name_list(["model.bin"])
argv.insert(1, "--bwlimit=1024")

def die(done):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)

copy(server.endpoint, shell, argv, names, die)
"""


def test_an_rsync_ends_with_a_labctl_that_is_killed(tmp_path: Path, lab: Path) -> None:
    write_old(lab / "model.bin", os.urandom(256 * MIB))
    home = tmp_path / "the server's"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(home), str(lab)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    listing = ["pgrep", "-f", f"rsync .*{tmp_path.name}"]
    wait_until(lambda: not subprocess.run(listing, capture_output=True).stdout)


def test_a_file_that_changes_while_it_travels_is_sent_anew(
    with_rsync: DirectoryServer, lab: Path, slow: None
) -> None:
    write_old(lab / "model.bin", os.urandom(40 * MIB))
    seen: list[bool] = []

    def change() -> None:
        seen.append(code(with_rsync).exists())
        (lab / "model.bin").write_bytes(b"new" + bytes(40 * MIB - 3))

    push_code(with_rsync, lab, AtProgress(change))
    assert seen == [False]
    assert tree(code(with_rsync)) == tree(lab)


def test_a_file_that_never_stands_still_is_named_and_nothing_is_changed(
    with_rsync: DirectoryServer, lab: Path
) -> None:
    push_code(with_rsync, lab)
    before = tree(code(with_rsync))
    moving = lab / "moving.log"
    moving.write_bytes(os.urandom(INLINE_BYTES + 1))

    def change(line: str) -> None:
        if line.endswith(" plan"):
            moving.write_bytes(os.urandom(INLINE_BYTES + 1))

    with_rsync.on_line = change
    with pytest.raises(TransferError, match=r"moving\.log"):
        push_code(with_rsync, lab)
    assert tree(code(with_rsync)) == before


def test_a_small_file_that_changes_after_the_scan_arrives_as_it_is_now(
    with_rsync: DirectoryServer, lab: Path
) -> None:
    index = HashIndex(lab, "code")
    files = scan_code(lab, Recorded(), later=index)
    (lab / "train.py").write_text("print('later')\n")
    push_tree(AgentClient(with_rsync), *LAB, "code", lab, files, Recorded(), index=index)
    assert tree(code(with_rsync)) == tree(lab)


def test_a_file_that_vanishes_meanwhile_is_left_out(with_rsync: DirectoryServer, lab: Path) -> None:
    write_old(lab / "gone.bin", os.urandom(INLINE_BYTES + 1))

    def remove(line: str) -> None:
        (lab / "gone.bin").unlink(missing_ok=True)

    with_rsync.on_line = remove
    push_code(with_rsync, lab)
    assert tree(code(with_rsync)) == tree(lab)


def test_an_edit_made_while_it_travels_stays(
    with_rsync: DirectoryServer, lab: Path, slow: None
) -> None:
    write_old(lab / "model.bin", b"first")
    push_code(with_rsync, lab)
    write_old(lab / "model.bin", os.urandom(40 * MIB))
    edited = code(with_rsync) / "model.bin"

    def edit() -> None:
        edited.write_bytes(b"edited there")

    with pytest.raises(PolicyError, match="changed on the server"):
        push_code(with_rsync, lab, AtProgress(edit))
    assert edited.read_bytes() == b"edited there"


def test_what_lies_in_the_way_in_staging_goes(with_rsync: DirectoryServer, lab: Path) -> None:
    write_old(lab / "big" / "file.bin", os.urandom(INLINE_BYTES + 1))
    staging = code(with_rsync).parent / ".labctl" / ".staging-code"
    (staging / "run.sh").mkdir(parents=True)
    (staging / "run.sh" / "inner").write_text("x")
    (staging / "train.py").symlink_to("/etc/passwd")
    (staging / "leftover").write_text("x")
    (staging.parent / "id").write_text(LAB[1])
    push_code(with_rsync, lab)
    assert tree(code(with_rsync)) == tree(lab)


def test_two_pushes_of_many_files_compress_what_shrinks(
    with_rsync: DirectoryServer, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    argv = rsync.transfer_argv

    def recorded(program: rsync.RsyncProgram, transfer: rsync.Transfer) -> list[str]:
        used.append(transfer.compression)
        return argv(program, transfer)

    monkeypatch.setattr(rsync, "transfer_argv", recorded)
    rows = b"".join(b"%d,%d,0.125\n" % (n, n * n % 97) for n in range(60_000))
    write_old(lab / "rows.csv", rows)
    push_code(with_rsync, lab)
    write_old(lab / "noise.bin", os.urandom(2 * MIB))
    push_code(with_rsync, lab)
    best = "zstd" if "zstd" in find_program().compressions else ""
    assert used == [best, ""]
    assert tree(code(with_rsync)) == tree(lab)


def test_a_disk_that_is_full_there_is_told_and_what_arrived_is_kept(
    with_rsync: DirectoryServer, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk is full here: an rsync on the server that ends as one does that could not write."""
    bin_ = with_rsync.home.parent / "bin"
    bin_.mkdir()
    (bin_ / "rsync").write_text(
        '#!/bin/sh\n[ "$1" = --server ] && exit 11\nexec /usr/bin/rsync "$@"\n'
    )
    (bin_ / "rsync").chmod(0o755)
    with_rsync.prelude = f"PATH={bin_}:$PATH"
    write_old(lab / "model.bin", os.urandom(INLINE_BYTES + 1))
    with pytest.raises(TransferError) as caught:
        push_code(with_rsync, lab)
    assert not code(with_rsync).exists()
    assert "labctl push" in caught.value.hint


KILLED = """
import os, subprocess, sys
from pathlib import Path
from labctl.events import SilentReporter
from labctl.sync.transfer_lock import hold_transfers
with hold_transfers(Path(sys.argv[1]), "push", SilentReporter()):
    left = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    print(left.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_another_process_waits_until_the_rsync_of_a_killed_one_has_ended(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(BusyError), hold_transfers(tmp_path, "push", Recorded(), wait_s=0.2):
        pass
    os.kill(int(done.stdout), signal.SIGKILL)
    with hold_transfers(tmp_path, "push", Recorded(), wait_s=30):
        pass


def test_no_room_is_told_before_anything_is_sent(with_rsync: DirectoryServer, lab: Path) -> None:
    index = HashIndex(lab, "code")
    huge = lab / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(2**43)
    files = [f for f in scan_code(lab, Recorded(), later=index) if f.path == "huge.bin"]
    with pytest.raises(DiskFullError, match="not enough disk space"):
        push_tree(AgentClient(with_rsync), *LAB, "code", lab, files, Recorded(), index=index)
    assert with_rsync.shells == 0
