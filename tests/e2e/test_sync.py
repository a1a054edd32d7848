"""Push, pull, edits and fetched data sets against a real sshd and python3."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from sshd_container import Sshd, docker, start, wait_for
from sync_lab import HOME, LAB, LAB_ID, Box, Recorder, build_image, local_hashes

from labctl.errors import DiskFullError, NotFoundError, PolicyError, TransferError, UsageError
from labctl.events import Event, Progress
from labctl.model import GIB, FileEntry, Run
from labctl.rehearsal.core.images import BOTO3
from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.sync.edits import pull_edits
from labctl.sync.fetch import fetch_data
from labctl.sync.pull import pull, verify
from labctl.sync.push import PushedTree, push_tree
from labctl.sync.scan import HashIndex, scan_code, scan_data
from labctl.transports.fabric import FabricTransport
from labctl.wire.files import EDITS, PLAN
from labctl.wire.verbs import LabRequest, Verb

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine
MIB = 1024**2
OURS = (".labctl", "runs", "server-edits")


@pytest.fixture(scope="module")
def machine(sshd_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    sshd = start(build_image(), tmp_path_factory.mktemp("keys") / "id_ed25519")
    yield sshd
    docker("rm", "-f", "-v", sshd.name)


@pytest.fixture
def box(machine: Sshd, connections: Connections) -> Iterator[Box]:
    machine.sh("rm -rf /home/student/labctl /home/noisy/labctl")
    found = Box(machine, connections)
    yield found
    found.transport.close()


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    root = tmp_path / "lab"
    (root / "src").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "src" / "model.py").write_text("layers = 3\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root


def push_code(box: Box, lab: Path, told: Recorder | None = None, **more: Any) -> PushedTree:
    told = told or Recorder()
    remote = more.pop("remote", box.remote)
    index = HashIndex(lab, "code")
    files = scan_code(lab, told, later=index)
    return push_tree(remote, LAB, LAB_ID, "code", lab, files, told, index=index, **more)


def test_a_push_brings_what_is_here_and_a_second_one_nothing(box: Box, lab: Path) -> None:
    assert push_code(box, lab) == PushedTree(target="code", sent=3, sent_bytes=36)
    assert box.hashes("code") == local_hashes(lab)
    assert box.sh(f"{HOME}/code/run.sh && echo ran") == "ran\n"
    calls = Counting(box.transport)
    assert push_code(box, lab, remote=calls) == PushedTree(target="code", unchanged=3)
    assert calls.verbs == ["plan"]


def test_what_little_was_edited_arrives_with_one_call(box: Box, lab: Path) -> None:
    calls = Counting(box.transport)
    assert push_code(box, lab, remote=calls).sent == 3
    (lab / "train.py").write_text("print('better')\n")
    (lab / "src" / "model.py").unlink()
    assert push_code(box, lab, remote=calls) == PushedTree(
        target="code", sent=1, sent_bytes=16, removed=1, unchanged=1
    )
    assert calls.verbs == ["plan", "plan"]
    assert box.hashes("code") == local_hashes(lab)
    (lab / "large.py").write_bytes(os.urandom(300 * 1024))
    assert push_code(box, lab, remote=calls).sent == 1
    assert calls.verbs[2:] == ["plan", "commit"]
    assert box.hashes("code") == local_hashes(lab)


class Counting(AgentClient):
    verbs: list[str]

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.verbs = []

    def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
        self.verbs.append(verb.name)
        return super().call(verb, request, **more)


def test_changes_and_removals_arrive(box: Box, lab: Path) -> None:
    push_code(box, lab)
    (lab / "train.py").write_text("print('better')\n")
    (lab / "src" / "model.py").unlink()
    (lab / "src").rmdir()
    (lab / "src").write_text("now a file\n")
    assert push_code(box, lab).removed == 1
    assert box.hashes("code") == local_hashes(lab)


@pytest.mark.parametrize(
    "way", ["ssh", pytest.param("noisy shell", marks=pytest.mark.long), "fabric"]
)
def test_much_arrives_whichever_way_it_goes(
    box: Box, lab: Path, connections: Connections, way: str
) -> None:
    for number in range(40):
        (lab / f"näme {number} 'quoted'.bin").write_bytes(os.urandom(MIB // 2))
    (lab / "large.bin").write_bytes(os.urandom(40 * MIB))
    (lab / "large.bin").chmod(0o400)
    told = Recorder()
    remote = box.remote
    if way == "noisy shell":
        box = Box(box.sshd, connections, "noisy")
        remote = box.remote
    if way == "fabric":
        remote = AgentClient(FabricTransport(box.transport.endpoint))
    result = push_code(box, lab, told, remote=remote)
    if way == "fabric":
        remote.transport.close()
    size = sum(p.stat().st_size for p in lab.rglob("*") if p.is_file() and ".labctl" not in p.parts)
    assert result == PushedTree(target="code", sent=44, sent_bytes=size)
    assert box.hashes("code") == local_hashes(lab)
    bars = told.progress("sending code")
    assert len(bars) > 2
    assert [b.done for b in bars] == sorted(b.done for b in bars)
    assert (bars[-1].done, bars[-1].total, bars[-1].unit) == (size, size, "bytes")


def test_what_packs_well_is_packed_on_both_ways(box: Box, lab: Path) -> None:
    rows = b"".join(b"%d,%d,0.125\n" % (n, n * n % 97) for n in range(200_000))
    (lab / "rows.csv").write_bytes(rows)
    before = travelled(box)
    push_code(box, lab)
    assert box.hashes("code") == local_hashes(lab)
    assert travelled(box)[0] - before[0] < len(rows) / 2
    box.make_run("packed")
    box.put("runs/packed/logs/rows.log", rows)
    before = travelled(box)
    pull(box.remote, LAB, LAB_ID, ["packed"], lab, reporter=Recorder())
    assert (lab / "runs" / "packed" / "logs" / "rows.log").read_bytes() == rows
    assert travelled(box)[1] - before[1] < len(rows) / 2


def travelled(box: Box) -> tuple[int, int]:
    """Bytes that the server's network has taken in and given out so far."""
    fields = docker("exec", box.sshd.name, "cat", "/proc/net/dev").split("eth0:")[1].split()
    return int(fields[0]), int(fields[8])


def test_edits_on_the_server_stop_a_push(box: Box, lab: Path) -> None:
    push_code(box, lab)
    box.put("code/train.py", b"edited there\n")
    (lab / "train.py").write_text("edited here\n")
    with pytest.raises(PolicyError) as caught:
        push_code(box, lab)
    assert "train.py" in caught.value.why
    assert "labctl pull --code" in caught.value.hint
    assert "labctl push --force" in caught.value.hint
    assert box.sh(f"cat {HOME}/code/train.py") == "edited there\n"
    push_code(box, lab, force=True)
    assert box.sh(f"cat {HOME}/code/train.py") == "edited here\n"


def test_edits_are_saved_or_brought_back_and_no_local_change_is_lost(box: Box, lab: Path) -> None:
    push_code(box, lab)
    box.put("code/train.py", b"edited there\n")
    box.put("code/src/model.py", b"edited there too\n")
    box.put("code/notebook.ipynb", b"{}\n")
    saved = pull_edits(box.remote, LabRequest(LAB, LAB_ID), lab, reporter=Recorder())
    assert set(saved.saved) == {"train.py", "src/model.py", "notebook.ipynb"}
    assert (Path(saved.directory) / "src" / "model.py").read_text() == "edited there too\n"
    assert (lab / "train.py").read_text() == "print('train')\n"

    (lab / "train.py").write_text("changed here as well\n")
    told = Recorder()
    brought = pull_edits(box.remote, LabRequest(LAB, LAB_ID), lab, reporter=told, merge=True)
    assert set(brought.brought) == {"src/model.py", "notebook.ipynb"}
    assert brought.saved == ("train.py",)
    assert (lab / "train.py").read_text() == "changed here as well\n"
    assert (Path(brought.directory) / "train.py").read_text() == "edited there\n"
    assert (lab / "src" / "model.py").read_text() == "edited there too\n"
    assert "train.py" in told.notes[-1]
    push_code(box, lab, force=True)
    assert box.hashes("code") == local_hashes(lab, without=OURS)
    assert pull_edits(box.remote, LabRequest(LAB, LAB_ID), lab, reporter=told).saved == ()


class Meddling(AgentClient):
    """Calls `meddle` once the server has its plan: it is not what was scanned then."""

    def __init__(self, transport: Any, meddle: Callable[[], None]) -> None:
        super().__init__(transport)
        self.meddle = meddle

    def call(self, verb: Verb[Any, Any], request: Any, **more: Any) -> Any:
        reply = super().call(verb, request, **more)
        if verb is PLAN:
            self.meddle()
        return reply


@pytest.mark.parametrize("size", [300 * 1024, 33 * MIB])
def test_a_file_that_changes_once_while_it_is_sent_arrives(box: Box, lab: Path, size: int) -> None:
    (lab / "moving.bin").write_bytes(b"a" * size)
    contents = [b"b" * (size + 1)]

    def once() -> None:
        if contents:
            (lab / "moving.bin").write_bytes(contents.pop())

    push_code(box, lab, remote=Meddling(box.transport, once))
    assert box.hashes("code") == local_hashes(lab)


def test_a_large_file_is_read_once_and_known_from_then_on(box: Box, lab: Path) -> None:
    settled_s = time.time() - 60
    large = lab / "large.bin"
    large.write_bytes(os.urandom(33 * MIB))
    os.utime(large, (settled_s, settled_s))
    told = Recorder()
    calls = Counting(box.transport)
    assert push_code(box, lab, told, remote=calls).sent == 4
    assert calls.verbs == ["plan", "commit"]
    assert all(p.total < MIB for p in told.progress("hash")), "it was read before it was sent"
    assert box.hashes("code") == local_hashes(lab)
    (entry,) = [f for f in scan_code(lab, told, later=HashIndex(lab, "code")) if f.size > MIB]
    assert entry.sha256 == local_hashes(lab)["large.bin"]

    os.utime(large, (settled_s + 1, settled_s + 1))
    calls.verbs.clear()
    assert push_code(box, lab, remote=calls) == PushedTree(target="code", unchanged=4)
    assert calls.verbs == ["plan", "plan"]


class Changing(Recorder):
    """Writes to the beginning of a file, once, when it has been read and more is on its way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.before = path.stat().st_mtime_ns

    def emit(self, event: Event) -> None:
        super().emit(event)
        under_way = isinstance(event, Progress) and 4 * MIB < event.done < event.total
        if under_way and self.path.stat().st_mtime_ns == self.before:
            with self.path.open("r+b") as file:
                file.write(b"new")


def test_a_large_file_that_changes_behind_what_was_read_arrives(
    box: Box, lab: Path, slow: None
) -> None:
    large = lab / "large.bin"
    large.write_bytes(os.urandom(64 * MIB))
    push_code(box, lab, Changing(large))
    assert large.read_bytes()[:3] == b"new"
    assert box.hashes("code") == local_hashes(lab)


def test_a_file_that_never_stands_still_is_told(box: Box, lab: Path) -> None:
    def always() -> None:
        (lab / "moving.log").write_bytes(os.urandom(300 * 1024))

    always()
    with pytest.raises(TransferError, match=r"moving\.log"):
        push_code(box, lab, remote=Meddling(box.transport, always))


def test_more_than_a_gib_asks_first(box: Box, lab: Path) -> None:
    told = Recorder(answer=False)
    huge = [FileEntry(path="huge.bin", size=GIB + 1, sha256="0" * 64)]
    with pytest.raises(PolicyError, match="nothing was pushed"):
        push_tree(box.remote, LAB, LAB_ID, "data/big", lab, huge, told)
    assert "1.0 GiB" in told.asked[0].question


def test_data_is_pushed_by_its_name(box: Box, lab: Path, tmp_path: Path) -> None:
    data = tmp_path / "elsewhere"
    (data / "train").mkdir(parents=True)
    (data / "train" / "1.png").write_bytes(b"\x89PNG")
    told = Recorder()
    files = scan_data(lab, "digits", data, told)
    push_tree(box.remote, LAB, LAB_ID, "data/digits", data, files, told)
    assert box.hashes("data/digits") == local_hashes(data)


def test_a_pull_brings_outputs_once(box: Box, lab: Path) -> None:
    box.make_run("r1")
    box.put("runs/r1/checkpoints/model.bin", os.urandom(5000))
    box.put("runs/r1/checkpoints/empty", b"")
    box.put("runs/r1/code/model.pth", b"not an output")
    record = Run(id="r1", lab_id=LAB_ID, server_id="s", state="exited", exit_code=0)
    told = Recorder()
    assert {m.path for m in verify(box.remote, LAB, LAB_ID, [], lab)} == {
        "checkpoints/model.bin",
        "checkpoints/empty",
        "logs/run.log",
    }
    result = pull(box.remote, LAB, LAB_ID, [], lab, reporter=told, records=[record]).runs[0]
    assert (result.files, result.bytes, result.complete) == (3, 5008, True)
    here = local_hashes(lab / "runs" / "r1", without=("run.json",))
    there = box.hashes("runs/r1")
    assert here == {n: h for n, h in there.items() if n.startswith(("checkpoints/", "logs/"))}
    assert '"exit_code": 0' in (lab / "runs" / "r1" / "run.json").read_text()
    again = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=told).runs[0]
    assert (again.files, again.bytes, again.complete) == (0, 0, True)
    assert verify(box.remote, LAB, LAB_ID, [], lab) == ()
    everything = pull(box.remote, LAB, LAB_ID, [], lab, reporter=told, everything=True).runs[0]
    assert everything.files == 1
    assert (lab / "runs" / "r1" / "code" / "model.pth").read_bytes() == b"not an output"
    assert not (lab / "runs" / "r1" / ".labctl-partial").exists()


@pytest.mark.parametrize("way", ["ssh", pytest.param("fabric", marks=pytest.mark.long)])
def test_much_is_pulled_whichever_way_it_goes(box: Box, lab: Path, way: str) -> None:
    box.make_run("r1")
    box.sh(f"head -c {40 * MIB} /dev/urandom > {HOME}/runs/r1/logs/big.bin")
    box.put("runs/r1/logs/sub dir/ü.bin", b"x")
    told = Recorder()
    remote = box.remote
    if way == "fabric":
        remote = AgentClient(FabricTransport(box.transport.endpoint))
    result = pull(remote, LAB, LAB_ID, ["r1"], lab, reporter=told).runs[0]
    if way == "fabric":
        remote.transport.close()
    assert result.complete
    assert local_hashes(lab / "runs" / "r1" / "logs") == box.hashes("runs/r1/logs")
    assert told.progress("pull r1")[-1].done == 40 * MIB + 9


def test_a_growing_log_is_pulled_as_far_as_it_was_and_goes_on(box: Box, lab: Path) -> None:
    box.make_run("r1", ended=False)
    told = Recorder()
    first = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=told).runs[0]
    assert (first.files, first.complete) == (1, False)
    box.sh(f"echo 'epoch 2' >> {HOME}/runs/r1/logs/run.log")
    second = pull(box.remote, LAB, LAB_ID, ["r1"], lab, reporter=told).runs[0]
    assert 8 <= second.bytes <= 16
    assert (lab / "runs" / "r1" / "logs" / "run.log").read_text() == "epoch 1\nepoch 2\n"


def test_a_run_that_is_not_there_is_told(box: Box, lab: Path) -> None:
    with pytest.raises(NotFoundError, match="nosuch"):
        pull(box.remote, LAB, LAB_ID, ["nosuch"], lab, reporter=Recorder())


PORT = 8123
SITE = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def site(box: Box) -> Iterator[Callable[[], list[str]]]:
    """The data server inside the machine; gives the requests it has had."""
    code = (Path(__file__).parent / "data_server.py").read_text()
    name = box.sshd.name
    box.sh("rm -rf ~/site; mkdir ~/site")
    docker("exec", "-i", "-u", "student", name, "sh", "-c", "cat > ~/site/serve.py", stdin=code)
    line = f"cd ~/site && echo $$ > pid && exec python3 serve.py {PORT}"
    docker("exec", "-d", "-u", "student", name, "sh", "-c", line)
    probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"
    wait_for(lambda: "up" in box.sh(f'python3 -c "{probe}" 2>/dev/null && echo up || true'))
    yield lambda: box.sh("cat ~/site/requests.log").splitlines()
    box.sh("kill $(cat ~/site/pid)")
    wait_for(lambda: "up" not in box.sh(f'python3 -c "{probe}" 2>/dev/null && echo up || true'))


def fetch(box: Box, address: str, **more: str) -> Any:
    return fetch_data(box.remote, LAB, LAB_ID, {"set": address}, Recorder(), **more)["set"]


def test_a_broken_download_goes_on_and_a_second_one_is_skipped(
    box: Box, site: Callable[[], list[str]]
) -> None:
    told = Recorder()
    got = fetch_data(box.remote, LAB, LAB_ID, {"set": f"{SITE}/flaky.bin"}, told)["set"]
    assert (got.files, got.bytes, got.unchanged) == (1, 2 * MIB, False)
    assert site() == ["/flaky.bin - 200", f"/flaky.bin bytes={MIB}- 206"]
    assert told.progress("fetch set")[-1].done == 2 * MIB
    assert box.sh(f"stat -c %s {HOME}/data/set/flaky.bin") == f"{2 * MIB}\n"
    assert fetch(box, f"{SITE}/flaky.bin").unchanged
    assert site()[2:] == ["/flaky.bin - 304"]


def test_an_archive_is_unpacked_and_replaces_what_was_there(
    box: Box, site: Callable[[], list[str]]
) -> None:
    fetch(box, f"{SITE}/same.bin")
    assert fetch(box, f"{SITE}/set.tar.gz").files == 2
    assert set(box.hashes("data/set")) == {"train/1.png", "val/2.png"}


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/forbidden", PolicyError, "403"),
        ("/nosuch", NotFoundError, "404"),
        ("/huge.bin", DiskFullError, "no room"),
        ("/elsewhere", UsageError, "192.0.2.1"),
        ("/evil.tar.gz", PolicyError, "leaves its directory"),
    ],
)
def test_what_cannot_be_fetched_is_told_and_leaves_the_old_data(
    box: Box, site: Callable[[], list[str]], path: str, error: type[Exception], words: str
) -> None:
    fetch(box, f"{SITE}/set.tar.gz")
    before = box.hashes("data")
    with pytest.raises(error, match=words):
        fetch(box, SITE + path)
    assert box.hashes("data") == before


def test_a_name_that_does_not_resolve_is_told(box: Box) -> None:
    with pytest.raises(TransferError, match=r"cannot resolve the name nosuch\.invalid"):
        fetch(box, "https://nosuch.invalid/x")


@pytest.fixture
def boto3_there(box: Box, tmp_path: Path) -> None:
    """The packages that the playbook would install."""
    packed = tmp_path / "boto3.tar"
    with tarfile.open(packed, "w") as tar:
        for package in BOTO3:
            for file in metadata.files(package) or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    tar.add(str(file.locate()), arcname=file.as_posix())
    docker("cp", str(packed), f"{box.sshd.name}:/tmp/boto3.tar")
    box.sshd.sh("tar -xf /tmp/boto3.tar -C /usr/lib/python3/dist-packages; rm /tmp/boto3.tar")


@pytest.mark.long
def test_a_public_bucket_is_fetched_page_by_page_and_only_once(
    box: Box, site: Callable[[], list[str]], boto3_there: None
) -> None:
    got = fetch(box, "s3://bucket/sets/digits", s3_endpoint=SITE)
    assert (got.files, got.unchanged) == (3, False)
    assert set(box.hashes("data/set")) == {"a.png", "b.png", "c/d.png"}
    count = len(site())
    assert fetch(box, "s3://bucket/sets/digits", s3_endpoint=SITE).unchanged
    assert all("list-type" in line for line in site()[count:])
    assert fetch(box, "s3://bucket/single.bin", s3_endpoint=SITE).files == 1
    assert set(box.hashes("data/set")) == {"single.bin"}
    with pytest.raises(NotFoundError):
        fetch(box, "s3://bucket/nosuch", s3_endpoint=SITE)


def test_pushed_data_takes_the_place_of_fetched_data(
    box: Box, lab: Path, tmp_path: Path, site: Callable[[], list[str]]
) -> None:
    fetch(box, f"{SITE}/set.tar.gz")
    data = tmp_path / "mine"
    data.mkdir()
    (data / "x").write_bytes(b"x")
    told = Recorder()
    files = scan_data(lab, "set", data, told)
    push_tree(box.remote, LAB, LAB_ID, "data/set", data, files, told)
    assert set(box.hashes("data/set")) == {"x"}
    assert fetch(box, f"{SITE}/set.tar.gz").files == 2
    assert box.remote.call(EDITS, LabRequest(LAB, LAB_ID)).files == ()


@pytest.mark.long
def test_thousands_of_small_files(box: Box, lab: Path) -> None:
    """Prints the times that the documentation quotes; what is asserted is only that it works."""
    for number in range(2000):
        path = lab / f"d{number % 20}" / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(4096))
    began = time.monotonic()
    assert push_code(box, lab).sent == 2003
    first_s = time.monotonic() - began
    for number in range(10):
        (lab / f"d{number}" / f"{number}.bin").write_bytes(os.urandom(4096))
    began = time.monotonic()
    assert push_code(box, lab).sent == 10
    print(f"first push {first_s:.2f} s, ten changed {time.monotonic() - began:.2f} s")
    assert box.hashes("code") == local_hashes(lab)
