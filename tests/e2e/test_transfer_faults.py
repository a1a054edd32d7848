"""Transfers that go wrong: cut links, killed programs, full disks, half-written files, bad servers.

The numbers are those of the table of faults in the documentation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from calibration import dead_link_limit_s
from sshd_container import Sshd, docker, start, wait_for
from sync_lab import HOME, LAB, LAB_ID, Box, Recorder, build_image, local_hashes

from labctl.errors import DiskFullError, LinkLostError, PolicyError, TransferError
from labctl.events import Event, Progress
from labctl.servers.agent import AgentClient, program_name
from labctl.servers.connections import Connections
from labctl.sync.edits import pull_edits
from labctl.sync.pull import pull, verify
from labctl.sync.push import PushedTree, push_tree
from labctl.sync.scan import HashIndex, scan_code
from labctl.wire.files import MANIFEST, CompleteFile, ManifestReply, RunManifest
from labctl.wire.verbs import LabRequest, Verb

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine
MIB = 1024**2
BIG_BYTES = 128 * MIB
DISK = "/home/student/labctl"


@pytest.fixture(scope="module")
def machine(sshd_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server whose labs lie on a disk of 1200 MiB of their own."""
    disk = f"{DISK}:size=1200m,uid=1000,mode=755"
    sshd = start(build_image(), tmp_path_factory.mktemp("keys") / "id", "--tmpfs", disk)
    yield sshd
    docker("rm", "-f", "-v", sshd.name)


@pytest.fixture
def box(machine: Sshd, connections: Connections) -> Iterator[Box]:
    machine.sh(f"find {DISK} -mindepth 1 -delete; rm -rf /home/student/.cache")
    found = Box(machine, connections)
    yield found
    machine.mend()
    found.transport.close()


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    root = tmp_path / "lab"
    root.mkdir()
    (root / "model.bin").write_bytes(b"the good one")
    return root


class AtProgress(Recorder):
    """Does `action` once, when a step of this name is half done and not over."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        super().__init__()
        self.name = name
        self.action: Callable[[], None] | None = action
        self.at = 0.0

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Progress) and event.name == self.name and self.action:
            assert event.done < event.total, "it was over before the deed"
            if event.done >= event.total // 2:
                action, self.action = self.action, None
                action()
                self.at = time.monotonic()


def write_big(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(BIG_BYTES // MIB):
            file.write(os.urandom(MIB))


def push_code(box: Box, lab: Path, told: Recorder) -> PushedTree:
    index = HashIndex(lab, "code")
    files = scan_code(lab, told, later=index)
    return push_tree(box.remote, LAB, LAB_ID, "code", lab, files, told, index=index)


def local(program: str) -> list[int]:
    """The processes of that name that this one has started."""
    said = subprocess.run(
        ["ps", "-o", "pid=,ppid=,comm=", "-A"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in said.splitlines()]
    ours = {os.getpid()}
    for _ in rows:
        ours |= {int(pid) for pid, parent, _ in rows if int(parent) in ours}
    return [int(pid) for pid, _, name in rows if int(pid) in ours and name.strip() == program]


def while_stopped(program: str, action: Callable[[], None]) -> None:
    """Do `action` while the processes of that name stand still, however slow this machine is."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in local(program):
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            action()


def assert_resumed(box: Box, lab: Path) -> None:
    """The good file is still there, and the next push sends only the rest."""
    assert box.sh(f"cat {HOME}/code/model.bin") == "the good one"
    result = push_code(box, lab, Recorder())
    assert 0 < result.sent_bytes < BIG_BYTES - MIB
    assert box.hashes("code") == local_hashes(lab)


def killed_programs(side: str, number: int) -> pytest.MarkDecorator:
    """Kill rsync on this side with this signal; the other pairs only with --long."""
    return pytest.mark.parametrize(
        ("side", "number"),
        [
            pytest.param(
                each_side,
                each,
                id=f"{each_side}-{each}",
                marks=[] if (each_side, each) == (side, number) else pytest.mark.long,
            )
            for each_side in ("here", "there")
            for each in (int(signal.SIGKILL), int(signal.SIGTERM))
        ],
    )


TRANSFERRING = "pgrep -f 'rsync --serve[r]' || true"


@pytest.mark.long
@pytest.mark.timed
def test_18_a_link_cut_during_a_push_is_noticed_and_the_transfer_goes_on(
    box: Box, lab: Path, slow: None
) -> None:
    push_code(box, lab, Recorder())
    write_big(lab / "model.bin")
    limit_s = dead_link_limit_s()
    told = AtProgress("sending code", box.sshd.black_hole)
    with pytest.raises(LinkLostError) as caught:
        push_code(box, lab, told)
    assert time.monotonic() - told.at < limit_s
    assert "labctl push" in caught.value.hint
    box.sshd.mend()
    box.transport.close()
    wait_for(lambda: not box.sh(TRANSFERRING))
    assert_resumed(box, lab)


@pytest.mark.long
@killed_programs("here", signal.SIGKILL)
def test_19_20_a_push_whose_program_is_killed_loses_nothing(
    box: Box, lab: Path, slow: None, side: str, number: signal.Signals
) -> None:
    push_code(box, lab, Recorder())
    write_big(lab / "model.bin")

    def kill() -> None:
        if side == "here":
            for pid in local("ssh"):
                os.kill(pid, number)
        else:
            box.sh(f"pkill -{int(number)} -f 'rsync --serve[r]'")

    with pytest.raises((TransferError, LinkLostError)) as caught:
        push_code(box, lab, AtProgress("sending code", kill))
    assert "labctl push" in caught.value.hint
    wait_for(lambda: not box.sh(TRANSFERRING))
    assert_resumed(box, lab)


def pull_model(box: Box, lab: Path) -> Path:
    """A good checkpoint is here, and a larger one has taken its place there."""
    box.make_run("r1")
    box.put("runs/r1/checkpoints/model.bin", b"the good one")
    pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    box.sh(f"head -c {BIG_BYTES} /dev/urandom > {HOME}/runs/r1/checkpoints/model.bin")
    return lab / "runs" / "r1" / "checkpoints" / "model.bin"


def assert_pull_resumed(box: Box, lab: Path, model: Path) -> None:
    """The good file is still there, and the next pull brings only the rest."""
    assert model.read_bytes() == b"the good one"
    result = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder()).runs[0]
    assert 0 < result.bytes < BIG_BYTES - MIB
    assert result.complete
    assert hashlib.sha256(model.read_bytes()).hexdigest() in box.hashes("runs/r1").values()


@pytest.mark.long
@pytest.mark.timed
def test_18_a_link_cut_during_a_pull_is_noticed_and_the_transfer_goes_on(
    box: Box, lab: Path, slow: None
) -> None:
    model = pull_model(box, lab)
    limit_s = dead_link_limit_s()
    told = AtProgress("pull r1", box.sshd.black_hole)
    with pytest.raises(LinkLostError) as caught:
        pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=told)
    assert time.monotonic() - told.at < limit_s
    assert "labctl pull" in caught.value.hint
    box.sshd.mend()
    box.transport.close()
    wait_for(lambda: not box.sh(TRANSFERRING))
    assert_pull_resumed(box, lab, model)


@pytest.mark.long
@killed_programs("there", signal.SIGTERM)
def test_19_20_a_pull_whose_program_is_killed_loses_nothing(
    box: Box, lab: Path, slow: None, side: str, number: signal.Signals
) -> None:
    model = pull_model(box, lab)

    def kill() -> None:
        if side == "here":
            for pid in local("ssh"):
                os.kill(pid, number)
        else:
            box.sh(f"pkill -{int(number)} -f 'rsync --serve[r]'")

    with pytest.raises((TransferError, LinkLostError)) as caught:
        pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=AtProgress("pull r1", kill))
    assert "labctl pull" in caught.value.hint
    wait_for(lambda: not box.sh(TRANSFERRING))
    assert_pull_resumed(box, lab, model)


WRITER = """
import os, sys
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
with open(sys.argv[1], "wb") as file:
    file.write(b"x" * 6000000)
    file.flush()
    os.utime(sys.argv[1], (1, 1))
    print("half", flush=True)
    sys.stdin.readline()
    file.write(b"y" * 12000000)
os.utime(sys.argv[1], (1, 1))
"""


def test_21_a_file_that_is_being_written_is_never_taken_for_whole(box: Box, lab: Path) -> None:
    """6 of 18 MB are there, and its time stands still as long as anybody cares to look."""
    box.make_run("r1", ended=False)
    path = f"{HOME}/runs/r1/checkpoints/model.pt"
    argv = ["docker", "exec", "-i", "-u", "student", box.sshd.name, "python3", "-c", WRITER, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        run = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder()).runs[0]
        assert [(m.path, m.reason) for m in run.skipped] == [
            ("checkpoints/model.pt", "still open for writing")
        ]
        assert not (lab / "runs" / "r1" / "checkpoints").exists()
        writer.communicate(b"go on\n")
    pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    assert (lab / "runs" / "r1" / "checkpoints" / "model.pt").stat().st_size == 18_000_000


class Meddling(AgentClient):
    """Calls `meddle` after the server has said what there is, before any of it is read."""

    def __init__(self, transport: Any, meddle: Callable[[], None]) -> None:
        super().__init__(transport)
        self.meddle = meddle

    def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
        reply = super().call(verb, request, **more)
        if verb is MANIFEST:
            self.meddle()
        return reply


def put_checkpoint(box: Box, content: bytes) -> None:
    listed = {"files": {"m.bin": {"sha256": hashlib.sha256(content).hexdigest()}}}
    box.put("runs/r1/checkpoints/s1/m.bin", content)
    box.put("runs/r1/checkpoints/s1/manifest.json", json.dumps(listed).encode())


def test_21_a_checkpoint_replaced_while_it_is_pulled_arrives_as_one_of_the_two(
    box: Box, lab: Path
) -> None:
    box.make_run("r1")
    put_checkpoint(box, b"first")
    later = [b"second, and longer"]
    seen: list[bool] = []

    def replace() -> None:
        seen.append((lab / "runs" / "r1" / "checkpoints" / "s1").exists())
        if later:
            put_checkpoint(box, later.pop())

    remote = Meddling(box.transport, replace)
    assert pull(remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder()).complete
    assert seen == [False, False]  # never half of it, between the two tries either
    here = lab / "runs" / "r1" / "checkpoints" / "s1"
    assert (here / "m.bin").read_bytes() == b"second, and longer"
    listed = json.loads((here / "manifest.json").read_text())["files"]["m.bin"]["sha256"]
    assert listed == hashlib.sha256(b"second, and longer").hexdigest()


def test_21_a_checkpoint_with_half_a_file_is_left_out(box: Box, lab: Path) -> None:
    box.make_run("r1")
    put_checkpoint(box, b"whole")
    box.put("runs/r1/checkpoints/s1/m.bin", b"who")
    run = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder()).runs[0]
    assert not run.complete
    assert "manifest does not match" in run.skipped[0].reason
    assert not (lab / "runs" / "r1" / "checkpoints").exists()


def fill(box: Box, keep_bytes: int) -> None:
    """Leave `keep_bytes` of the server's disk for the labs."""
    free = int(box.sh(f"df -B1 --output=avail {DISK} | tail -1"))
    box.sh(f"head -c {free - keep_bytes} /dev/zero > {DISK}/ballast || true")


def test_22_a_full_disk_there_is_told_before_anything_is_sent(box: Box, lab: Path) -> None:
    push_code(box, lab, Recorder())
    fill(box, 80 * MIB)
    (lab / "model.bin").write_bytes(os.urandom(20 * MIB))
    told = Recorder()
    with pytest.raises(DiskFullError, match="not enough disk space") as caught:
        push_code(box, lab, told)
    assert re.search(r"[34]\.\d MiB more is needed, (80\.0|79\.\d) MiB is free", caught.value.why)
    assert told.progress("sending code") == []
    assert box.sh(f"cat {HOME}/code/model.bin") == "the good one"


@pytest.mark.long
def test_22_a_disk_there_that_fills_up_meanwhile_is_told(box: Box, lab: Path, slow: None) -> None:
    push_code(box, lab, Recorder())
    write_big(lab / "model.bin")
    told = AtProgress("sending code", lambda: while_stopped("rsync", lambda: fill(box, 0)))
    with pytest.raises(DiskFullError, match="full"):
        push_code(box, lab, told)
    box.sh(f"rm {DISK}/ballast")
    assert_resumed(box, lab)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk here of 160 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    line = ["mount", "-t", "tmpfs", "-o", f"size=160m,mode=700,uid={os.geteuid()}"]
    subprocess.run([*sudo, *line, "labctl-test", str(place)], check=True)
    yield place
    subprocess.run([*sudo, "umount", str(place)], check=True)


def test_23_a_full_disk_here_is_told_before_anything_is_brought(box: Box, small_disk: Path) -> None:
    box.make_run("r1")
    box.sh(f"head -c {100 * MIB} /dev/urandom > {HOME}/runs/r1/logs/big.bin")
    told = Recorder()
    with pytest.raises(DiskFullError, match="not enough disk space on this machine") as caught:
        pull(box.remote, LAB, LAB_ID, ["r1"], small_disk, reporter=told)
    assert "needs 100 MiB" in caught.value.why
    assert told.progress("pull r1") == []


def test_23_a_disk_here_that_fills_up_meanwhile_is_told(
    box: Box, small_disk: Path, slow: None
) -> None:
    box.make_run("r1")
    box.sh(f"head -c {90 * MIB} /dev/urandom > {HOME}/runs/r1/logs/big.bin")
    ballast = small_disk / "ballast"

    def fill_here() -> None:
        found = os.statvfs(small_disk)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)

    told = AtProgress("pull r1", fill_here)
    with pytest.raises(DiskFullError, match="disk of this machine is full"):
        pull(box.remote, LAB, LAB_ID, ["r1"], small_disk, reporter=told)
    ballast.unlink()
    kept = (small_disk / "runs" / "r1" / ".labctl-partial" / "logs" / "big.bin").stat().st_size
    run = pull(box.remote, LAB, LAB_ID, ["r1"], small_disk, reporter=Recorder()).runs[0]
    assert run.complete
    assert kept > 0
    assert run.bytes <= 90 * MIB - kept + MIB // 8  # whole blocks travel
    assert local_hashes(small_disk / "runs" / "r1" / "logs") == box.hashes("runs/r1/logs")


PULLING = """
import sys
from pathlib import Path
import msgspec
from labctl.commands import rsync
from labctl.events import Note, Progress
from labctl.servers.agent import AgentClient
from labctl.sync.pull import pull
from labctl.model import Endpoint
from labctl.transports.openssh import OpenSshTransport

build = rsync.transfer_argv
rsync.transfer_argv = lambda *about: [*build(*about)[:1], "--bwlimit=6144", *build(*about)[1:]]

class Told:
    half = "half" not in sys.argv
    def emit(self, event):
        if isinstance(event, Note):
            print(event.text, flush=True)
        if isinstance(event, Progress) and event.done >= event.total // 2 and not self.half:
            Told.half = True
            print("half", flush=True)
            sys.stdin.readline()

config, server_id, endpoint, lab, lab_id, root = sys.argv[1:7]
transport = OpenSshTransport(
    Path(config), server_id, msgspec.json.decode(endpoint.encode(), type=Endpoint)
)
(run,) = pull(AgentClient(transport), lab, lab_id, ["r1"], Path(root), reporter=Told()).runs
print(msgspec.json.encode(run).decode(), flush=True)
"""


@contextmanager
def pulling(box: Box, lab: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that pulls; with "half" it stops there until a line is written to it."""
    way = box.transport
    endpoint = msgspec.json.encode(way.endpoint).decode()
    about = [str(way.config_path), f"{box.user}-1", endpoint, LAB, LAB_ID, str(lab), *more]
    with subprocess.Popen(
        [sys.executable, "-c", PULLING, *about],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.long
@pytest.mark.parametrize("end", ["is killed", "goes on"])
def test_41_of_two_pulls_at_once_one_waits_and_the_result_is_whole(
    box: Box, lab: Path, end: str
) -> None:
    model = pull_model(box, lab)
    with pulling(box, lab, "half") as first:
        assert line_of(first) == "half"
        with pulling(box, lab) as second:
            waits = line_of(second)
            assert f"pid {first.pid}" in waits
            assert "`pull`" in waits
            assert model.read_bytes() == b"the good one"
            if end == "is killed":
                first.kill()
            else:
                first.communicate("go on\n")
            run = json.loads(line_of(second))
    assert run["complete"]
    if end == "is killed":
        assert 0 < run["bytes"] < BIG_BYTES - MIB  # what the first one left is used
    else:
        assert (run["files"], run["bytes"]) == (0, 0)
    assert hashlib.sha256(model.read_bytes()).hexdigest() in box.hashes("runs/r1").values()


def test_41_a_file_that_the_disk_spoils_before_it_has_its_name_comes_again(
    box: Box, lab: Path
) -> None:
    box.make_run("r1")
    box.sh(f"head -c {4 * MIB + 1} /dev/urandom > {HOME}/runs/r1/logs/big.bin")
    spoiled: list[Path] = []

    class Spoiling(Recorder):
        def emit(self, event: Event) -> None:
            super().emit(event)
            if isinstance(event, Progress) and event.done == event.total and not spoiled:
                for path in lab.rglob("*"):
                    if path.is_file() and path.stat().st_size == 4 * MIB + 1:
                        spoiled.append(path)
                        with path.open("r+b") as file:
                            file.write(b"spoiled")

    assert pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Spoiling()).complete
    assert spoiled
    assert local_hashes(lab / "runs" / "r1" / "logs") == box.hashes("runs/r1/logs")


def test_what_this_user_may_not_read_there_counts_as_missing(box: Box, lab: Path) -> None:
    """Whatever it is: in a directory that cannot be listed nobody knows."""
    box.make_run("r1")
    home = f"{HOME}/runs/r1"
    box.sh(f"cd {home} && mkdir closed blind && echo 1 > closed/in && echo 2 > blind/in")
    box.sh(f"cd {home} && echo 3 > secret && chmod 000 closed secret && chmod 644 blind")
    box.sh(f"mkdir -p {HOME}/code/closed && chmod 000 {HOME}/code/closed")
    pull(box.remote, LAB, LAB_ID, [], lab, reporter=Recorder(), everything=True)
    missing = verify(box.remote, LAB, LAB_ID, [], lab, everything=True)
    edits = pull_edits(box.remote, LabRequest(LAB, LAB_ID), lab, reporter=Recorder())
    box.sh(f"chmod -R u+rwX {home} {HOME}/code")
    assert {(one.path, one.reason) for one in missing} == {
        (name, "this user may not read it") for name in ("blind/in", "closed", "secret")
    }
    assert edits.skipped == ("closed: this user may not read it",)


EVIL = """
import hashlib, json, sys
name, content = {name!r}, {content!r}
sys.stdin.buffer.readline()
def say(body, to):
    to.buffer.write(b"\\x1elabctl " + json.dumps(body).encode() + b"\\n")
    to.flush()
if sys.argv[1] == "manifest":
    entry = [name, len(content), hashlib.sha256(content.encode()).hexdigest(), False]
    run = {{"files": [entry], "skipped": [], "directory": {directory!r}, "ended": True}}
    say({{"runs": {{{run!r}: run}}}}, sys.stdout)
else:
    say({{}}, sys.stdout)
    sys.stdout.buffer.write(content.encode())
    sys.stdout.flush()
    say({{}}, sys.stderr)
"""


def turn_evil(box: Box, name: str, *, run: str = "r1", content: str = "evil") -> None:
    """Replace the program on the server by one that answers as it likes."""
    box.transport.run("true")
    directory = f"{HOME}/runs/r1"
    text = EVIL.format(name=name, content=content, directory=directory, run=run)
    folder = f".cache/labctl/{program_name()}"
    line = f"mkdir -p ~/{folder} && cat > ~/{folder}/__main__.py"
    docker("exec", "-i", "-u", "student", box.sshd.name, "sh", "-c", line, stdin=text)


@pytest.mark.parametrize("name", ["../../x", "/etc/abs", "logs/../../../x", "a//b", "logs/.", "\0"])
def test_34_35_names_that_lead_elsewhere_are_refused(box: Box, lab: Path, name: str) -> None:
    turn_evil(box, name)
    with pytest.raises(PolicyError, match="leaves its directory"):
        pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    assert local_hashes(lab) == {"model.bin": hashlib.sha256(b"the good one").hexdigest()}
    assert not (lab.parent / "x").exists()


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "x\ny"])
def test_34_35_control_characters_in_a_name_are_escaped(box: Box, lab: Path, name: str) -> None:
    turn_evil(box, name)
    box.sh(f"mkdir -p {HOME}/runs/r1 && printf evil >{HOME}/runs/r1/{shlex.quote(name)}")
    pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    (file,) = (path for path in (lab / "runs" / "r1").iterdir() if path.is_file())
    assert file.name.isprintable()
    assert file.read_text() == "evil"


@pytest.mark.parametrize("name", ["run.json", ".labctl-partial/x"])
def test_34_35_names_of_labctls_own_files_are_left_out(box: Box, lab: Path, name: str) -> None:
    turn_evil(box, name)
    run = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder()).runs[0]
    assert not run.complete
    assert run.skipped[0].path.isprintable()
    assert list((lab / "runs" / "r1").iterdir()) == []


def test_34_35_a_run_that_was_not_asked_for_is_refused(box: Box, lab: Path) -> None:
    turn_evil(box, "logs/x", run="../../elsewhere")
    with pytest.raises(PolicyError, match="did not request"):
        pull(box.remote, LAB, LAB_ID, [], lab, reporter=Recorder())


def test_34_35_nothing_is_written_through_a_link_here(box: Box, lab: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    box.make_run("r1")
    (lab / "runs" / "r1").mkdir(parents=True)
    (lab / "runs" / "r1" / "logs").symlink_to(outside)
    with pytest.raises(PolicyError, match="is a symbolic link"):
        pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    assert list(outside.iterdir()) == []


def test_34_35_links_do_not_travel(box: Box, lab: Path) -> None:
    """The server promises a file of 40 MiB and, when it is asked, has a link to another."""
    box.make_run("r1")
    secret = "s" * (40 * MIB)
    box.sh(f"head -c {40 * MIB} /dev/zero | tr '\\0' s > {DISK}/elsewhere")
    box.sh(f"ln -s {DISK}/elsewhere {HOME}/runs/r1/logs/link")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    promised = RunManifest(
        files=(CompleteFile("logs/link", 40 * MIB, digest, growing=False),),
        skipped=(),
        directory=f"{HOME}/runs/r1",
        rsync="rsync  version 3",
        ended=True,
    )

    class Lying(AgentClient):
        def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
            if verb is MANIFEST:
                return ManifestReply({"r1": promised})
            return super().call(verb, request, **more)

    with pytest.raises(TransferError, match="arrived corrupted"):
        pull(Lying(box.transport), LAB, LAB_ID, ["r1"], lab, reporter=Recorder())
    assert not any(p.is_symlink() for p in (lab / "runs").rglob("*"))
    assert not (lab / "runs" / "r1" / "logs").exists()
