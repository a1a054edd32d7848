"""What a server sends to its store and makes a run from again: moto's S3, and the door."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_socket import Answer, engine_socket
from shell_store import shell_store
from store_bed import ABOUT, LAB_ID, PREFIX, DirectStore, Lab, metadata_service, sha256, tree

from labctl.agent.mirror import boto3_python, image_download, restore, run_pass, store
from labctl.agent.mirror import mirror as store_mirror
from labctl.agent.reply import Failure
from labctl.agent.watchdog import mirroring
from labctl.agent.watchdog.activity import LabAccount
from labctl.errors import DeniedError, NotFoundError, TransferError
from labctl.model import Endpoint
from labctl.servers.agent import list_program_files
from labctl.stores import LabStore, StoreContext, open_store, ssh
from labctl.wire import s3 as s3_client
from labctl.wire.images import LoadStoredImageRequest
from labctl.wire.mirrors import (
    MirrorPassReply,
    MirrorPassRequest,
    RestoreRunReply,
    RestoreRunRequest,
)
from labctl.wire.verbs import Empty, LabRequest
from labctl.wire.watchdog import MirrorStateRecord

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from labctl.rehearsal.aws import Rehearsal, Scenario  # noqa: E402 (what it needs may be missing)

URL = "s3://results/labs"
KEY = f"labs/{PREFIX}/runs/first/"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Rehearsal]:
    with Rehearsal(Scenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture(scope="module")
def imds() -> Iterator[str]:
    with metadata_service() as address:
        yield address


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """What runs on its server runs in the container c-1."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Lab(tmp_path)

    def answers(method: str, path: str, body: Any) -> Answer | None:
        there = path.endswith("/containers/c-1/json") and not made.moved
        return (200, {"Name": "/c-1", "State": {"Running": True}}) if there else None

    with engine_socket() as engine:
        engine.answers = answers
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        yield made


@pytest.fixture
def s3(cloud: Rehearsal, imds: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The person's own client; what the server uses is its role's."""
    metadata = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds, "AWS_EC2_METADATA_DISABLED": "false"}
    for name, value in {**cloud.environment, **metadata}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="results")
    lab.config(URL)
    s3_client.connect_as_role.cache_clear()
    yield client
    s3_client.connect_as_role.cache_clear()
    cloud.change(denied=[], lost=[], dropped=[])
    bucket = boto3.resource("s3").Bucket("results")
    bucket.objects.all().delete()
    bucket.delete()


@pytest.fixture
def direct_store(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a store that is reached without an ssh."""
    directory = tmp_path / "store" / PREFIX

    def opened(*_: Any) -> DirectStore:
        return DirectStore(directory)

    for module in (store, store_mirror, restore):
        monkeypatch.setattr(module, "open_store", opened)
    lab.config("ssh://student@store/labs")
    return directory


def mirrored(**words: bool) -> MirrorPassReply:
    return store_mirror.mirror_now(MirrorPassRequest(**ABOUT, **words))


def restored(run: str = "first") -> RestoreRunReply:
    return restore.restore(RestoreRunRequest(**ABOUT, run=run))


def held(s3: Any) -> dict[str, bytes]:
    found = s3.list_objects_v2(Bucket="results").get("Contents", [])
    return {
        one["Key"]: s3.get_object(Bucket="results", Key=one["Key"])["Body"].read() for one in found
    }


def around(**words: Any) -> StoreContext:
    def none(*_: Any) -> Endpoint:
        raise AssertionError("S3 needs no connection")

    return StoreContext(none, none, none, b"", b"", **words)


def test_a_run_comes_back_byte_for_byte_from_the_bucket_alone(s3: Any, lab: Lab) -> None:
    run = lab.run("first")
    top = run.checkpoint(10)
    run.checkpoint(20, size=3_000_000)  # several parts of one upload
    done = mirrored()
    assert (done.failed, done.why, done.behind_bytes, done.sent) == ((), "", 0, 6)
    before = run.tree()
    objects = held(s3)
    assert {name for name in objects if "checkpoint" not in name} == {
        KEY + name for name in ("run.json", "code.tar", "index.json", "files/logs/run.log")
    }
    index = json.loads(objects[KEY + "index.json"])["files"]
    for name, (size, digest) in index.items():
        content = objects[f"{KEY}files/{name}"]
        assert (len(content), sha256(content)) == (size, digest)
    head = s3.head_object(Bucket="results", Key=f"{KEY}files/{top}/model", ChecksumMode="ENABLED")
    assert head["Metadata"]["sha256"] == index[f"{top}/model"][1]
    assert head["ChecksumSHA256"]
    lab.again()
    reply = restored()
    assert (reply.left_out, reply.files) == ((), 6)
    assert run.tree() == before
    assert os.access(run.directory / "code/sub/go.sh", os.X_OK)
    assert not os.access(run.directory / "code/train.py", os.X_OK)
    assert reply.run.state == "exited"
    assert restored().files == 0, "what is here stays"
    assert mirrored().sent == 0, "what came from the store is known to be there"


def test_what_ran_when_its_server_went_comes_back_as_lost(s3: Any, lab: Lab) -> None:
    lab.run("first", "running").checkpoint(1)
    mirrored()
    lab.again()
    run = restored().run
    assert (run.state, run.created_at) == ("lost", pytest.approx(time.time(), abs=60))
    own = lab.root / "runs/first/.labctl"
    assert json.loads((own / "attempt-1").read_text())["container"] == "c-1"


def test_only_what_is_new_is_sent(s3: Any, lab: Lab) -> None:
    run = lab.run("first", "running")
    run.checkpoint(1)
    assert mirrored().sent == 4
    assert mirrored().sent == 0
    run.write("logs/run.log", b"begun\nmore\n")
    done = mirrored()
    assert (done.sent, done.bytes) == (1, 11)
    (run.directory / ".labctl/sent.json").unlink()
    assert mirrored().failed == ()
    run.write(".labctl/record.json", json.dumps({"id": "first", "state": "exited"}).encode())
    mirrored()
    assert json.loads(held(s3)[KEY + "run.json"])["record"]["state"] == "exited"
    run.write("code/model.pth", b"outside the outputs")
    assert mirrored().sent == 0
    (lab.root / "code").mkdir()
    (lab.root / "code/notebook.ipynb").write_text("edited here")
    assert mirrored(all=True).sent == 2
    objects = held(s3)
    assert objects[KEY + "files/code/model.pth"] == b"outside the outputs"
    assert objects[f"labs/{PREFIX}/server-edits/notebook.ipynb"] == b"edited here"
    assert mirrored(all=True).sent == 0


def test_a_run_that_was_resumed_is_mirrored_again(s3: Any, lab: Lab) -> None:
    run = lab.run("first", "lost")
    mirrored()
    record = run.directory / ".labctl/record.json"
    record.rename(run.directory / ".labctl/ended-1-record.json")
    run.write("logs/run.log", b"begun\nresumed\n")
    assert mirrored().sent == 1
    record.write_text(json.dumps({"id": "first", "state": "exited", "exit_code": 0}))
    run.checkpoint(2)
    assert mirrored().sent == 2
    assert mirrored().sent == 0


def test_only_whole_checkpoints_are_sent(s3: Any, lab: Lab) -> None:
    run = lab.run("first")
    run.checkpoint(1)
    half = run.checkpoint(2)
    (run.directory / half / "model").write_bytes(b"half")
    run.write("checkpoints/step-00000003/model", b"its manifest is not there yet")
    mirrored()
    index = json.loads(held(s3)[KEY + "index.json"])["files"]
    assert half not in str(index)
    assert not any(half in name for name in held(s3))
    run.checkpoint(2)
    (run.directory / ".labctl/record.json").rename(run.directory / ".labctl/was.json")
    (run.directory / ".labctl/sent.json").unlink()
    mirrored()
    assert f"{half}/model" in json.loads(held(s3)[KEY + "index.json"])["files"]


def test_what_is_removed_here_leaves_the_index(s3: Any, lab: Lab) -> None:
    run = lab.run("first", "running")
    first = run.checkpoint(1)
    mirrored()
    shutil.rmtree(run.directory / first)
    run.checkpoint(2)
    mirrored()
    index = json.loads(held(s3)[KEY + "index.json"])["files"]
    assert not any(name.startswith(first) for name in index)
    assert f"{KEY}files/{first}/model" in held(s3), "a server removes nothing"


def test_a_run_that_deletes_checkpoints_before_they_are_sent_keeps_one_in_the_store(
    s3: Any, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.run("first", state="running")
    first = run.checkpoint(10)
    mirrored()
    shutil.rmtree(run.directory / first)
    second = run.checkpoint(20)
    list_outputs = run_pass.RunPass._list_outputs

    def list_and_delete(run_pass: Any) -> Any:
        files = list_outputs(run_pass)
        shutil.rmtree(run.directory / second)
        return files

    with monkeypatch.context() as patch:
        patch.setattr(run_pass.RunPass, "_list_outputs", list_and_delete)
        mirrored()
    indexed = json.loads(held(s3)[f"{KEY}index.json"])["files"]
    assert {f"{first}/model", f"{first}/manifest.json"} <= set(indexed)
    third = run.checkpoint(30)
    mirrored()
    indexed = json.loads(held(s3)[f"{KEY}index.json"])["files"]
    assert [name for name in indexed if name.endswith("/model")] == [f"{third}/model"]


def test_a_checkpoint_that_loses_a_file_on_purpose_stays_in_the_index(s3: Any, lab: Lab) -> None:
    run = lab.run("first", state="running")
    first, second = run.checkpoint(10), run.checkpoint(20)
    optimizer = run.write(f"{second}/optimizer", b"large")
    mirrored()
    optimizer.unlink()
    mirrored()
    indexed = json.loads(held(s3)[f"{KEY}index.json"])["files"]
    assert {f"{first}/manifest.json", f"{second}/manifest.json"} <= set(indexed)
    assert f"{second}/optimizer" not in indexed


def test_a_corrupt_checkpoint_makes_way_for_the_one_before(s3: Any, lab: Lab) -> None:
    run = lab.run("first")
    tops = [run.checkpoint(step) for step in (1, 2, 3, 4)]
    mirrored()
    before = run.tree()
    where = {"Bucket": "results", "Key": f"{KEY}files/{tops[3]}/model"}
    s3.put_object(**where, Body=before[f"{tops[3]}/model"][:-1] + b"!")
    s3.delete_object(Bucket="results", Key=f"{KEY}files/{tops[2]}/manifest.json")
    lab.again()
    reply = restored()
    assert {name for name, _ in reply.left_out} >= {f"{tops[3]}/", f"{tops[2]}/"}
    whole = {n: c for n, c in before.items() if not n.startswith((tops[2], tops[3]))}
    assert run.tree() == whole


def test_a_log_that_grew_after_its_index_comes_back_as_indexed(s3: Any, lab: Lab) -> None:
    run = lab.run("first", "running")
    mirrored()
    s3.put_object(Bucket="results", Key=f"{KEY}files/logs/run.log", Body=b"begun\nand more")
    lab.again()
    assert restored().left_out == ()
    assert run.tree()["logs/run.log"] == b"begun\n"


class DiedError(Exception):
    pass


def test_a_file_that_was_being_replaced_is_either_of_the_two(s3: Any, lab: Lab) -> None:
    """The pass dies between the file and the index that names it."""
    run = lab.run("first")
    path = run.write("checkpoints/model.pt", b"one")
    mirrored()
    path.write_bytes(b"another")
    sent = json.loads((run.directory / ".labctl/sent.json").read_text())
    (run.directory / ".labctl/sent.json").write_text(json.dumps({**sent, "final": {}}))

    def die(*_: Any) -> None:
        raise DiedError

    with pytest.MonkeyPatch.context() as patch:
        real = run_pass.RunPass._put_index
        patch.setattr(
            run_pass.RunPass,
            "_put_index",
            lambda run, pending: real(run, pending) if pending else die(),
        )
        with pytest.raises(DiedError):
            mirrored()
    lab.again()
    assert restored().left_out == ()
    assert run.tree()["checkpoints/model.pt"] == b"another"


@pytest.mark.parametrize("names", [["../../../evil", "a/../../x", "/etc/x"], [".labctl/entry.sh"]])
def test_a_hostile_store_writes_nowhere_else(s3: Any, lab: Lab, names: list[str]) -> None:
    lab.run("first")
    mirrored()
    index = json.loads(held(s3)[KEY + "index.json"])
    for name in names:
        index["files"][name] = [4, sha256(b"evil")]
        s3.put_object(Bucket="results", Key=f"{KEY}files/{name}", Body=b"evil")
    s3.put_object(Bucket="results", Key=KEY + "index.json", Body=json.dumps(index).encode())
    lab.again()
    outside = tree(lab.root.parents[1])
    if names[0].startswith(".labctl"):
        restored()
        assert not (lab.root / "runs/first/.labctl/entry.sh").exists()
    else:
        with pytest.raises(Failure, match="leaves its directory"):
            restored()
        assert not (lab.root / "runs/first").exists()
    after = tree(lab.root.parents[1])
    new = {name for name in {*after} - {*outside} if not name.startswith("labctl/digits/runs/")}
    assert new == {"labctl/digits/.labctl/restore.lock"}


def test_another_labs_run_is_not_taken_for_this_one(s3: Any, lab: Lab) -> None:
    lab.run("first")
    mirrored()
    body = json.loads(held(s3)[KEY + "run.json"])
    body["spec"]["lab_id"] = "ffffffffffff"
    s3.put_object(Bucket="results", Key=KEY + "run.json", Body=json.dumps(body).encode())
    lab.again()
    with pytest.raises(Failure, match="another run"):
        restored()
    with pytest.raises(Failure, match="has no files of run second"):
        restored("second")
    with pytest.raises(Failure, match="this server's store is"):
        restore.restore(RestoreRunRequest(**ABOUT, run="first", store="s3://elsewhere"))


def test_a_store_that_refuses_is_said_and_tried_again(s3: Any, lab: Lab, cloud: Rehearsal) -> None:
    run = lab.run("first")
    run.checkpoint(1)
    cloud.change(denied=["PutObject"])
    done = mirrored()
    assert done.sent == 0
    assert done.behind_bytes > 6000
    assert done.why
    with pytest.raises(Failure, match="cannot use the store"):
        store.probe(LabRequest(**ABOUT))
    cloud.change(denied=[])
    assert store.probe(LabRequest(**ABOUT)) == Empty()
    assert mirrored().why == ""
    before = run.tree()
    lab.again()
    restored()
    assert run.tree() == before


def test_a_store_that_refuses_is_said_before_the_first_run(
    s3: Any, lab: Lab, cloud: Rehearsal
) -> None:
    assert mirrored().why == ""
    cloud.change(denied=["PutObject"])
    assert mirrored().why
    cloud.change(denied=[])
    assert mirrored().why == ""


def test_a_persons_own_keys_are_not_used(
    s3: Any, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run("first")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    s3_client.connect_as_role.cache_clear()
    assert boto3.Session().get_credentials() is not None
    assert "no instance profile" in mirrored().why
    assert held(s3) == {}


def test_without_boto3_it_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.config(URL)
    monkeypatch.setattr(store_mirror, "can_use_store", lambda url: False)
    monkeypatch.setattr(boto3_python, "PYTHONS", ("no-such-python",))
    with pytest.raises(Failure, match="results cannot be sent to S3"):
        mirrored()
    (lab.root / ".labctl" / store.CONFIG).unlink()
    with pytest.raises(Failure, match="has no store"):
        store.open_store(lab.root, "digits", LAB_ID)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in list_program_files():
        path = tmp_path / "program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "program"


def test_a_pass_that_is_killed_anywhere_leaves_the_store_usable(
    s3: Any, lab: Lab, program: Path
) -> None:
    """What is indexed at a kill is whole, and the next pass goes on."""
    run = lab.run("first")
    for step in range(1, 5):
        run.checkpoint(step, size=200_000)
    whole, killed = run.tree(), 0
    for number in range(40):
        words = [sys.executable, str(program), "mirror-now"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin
        process.stdin.write(json.dumps(ABOUT).encode() + b"\n")
        process.stdin.close()
        sent = run.directory / ".labctl/sent.json"
        wanted = len(held(s3)) + 1
        deadline = time.monotonic() + 120
        while process.poll() is None and len(held_names(s3)) < wanted + number % 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert process.stdout
        process.stdout.close()
        objects = held(s3)
        index = json.loads(objects.get(KEY + "index.json", b'{"files": {}}'))["files"]
        for name, (_, digest) in index.items():
            assert sha256(objects[f"{KEY}files/{name}"]) == digest
        if sent.exists() and json.loads(sent.read_text()).get("final"):
            break
    assert killed >= 3
    assert mirrored().why == ""
    lab.again()
    assert restored().left_out == ()
    assert run.tree() == whole


def held_names(s3: Any) -> list[str]:
    return [one["Key"] for one in s3.list_objects_v2(Bucket="results").get("Contents", [])]


def test_passes_do_not_overlap_and_a_stuck_one_makes_way(
    s3: Any, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run("first")
    lock = lab.root / ".labctl" / store_mirror.LOCK
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    monkeypatch.setattr(store_mirror, "STUCK_S", 1.0)
    began = time.monotonic()
    assert mirrored().why == ""
    assert time.monotonic() - began > 0.5, "it waited first"
    assert holder.wait(120) == -signal.SIGKILL
    holder.stdout.close()
    assert holder.stdin
    holder.stdin.close()


HOLD = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid())); file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_door_keeps_the_same(direct_store: Path, lab: Lab) -> None:
    run = lab.run("first")
    run.checkpoint(1)
    run.checkpoint(2, size=4_000_000)
    assert mirrored().failed == ()
    before = run.tree()
    (run.directory / ".labctl/sent.json").unlink()
    assert mirrored().failed == ()
    assert store.probe(LabRequest(**ABOUT)) == Empty()
    model = direct_store / "runs/first/files/checkpoints/step-00000002/model"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    lab.again()
    assert [name for name, _ in restored().left_out][-1] == "checkpoints/step-00000002/"
    step = "checkpoints/step-00000002/"
    assert run.tree() == {n: c for n, c in before.items() if not n.startswith(step)}


@pytest.mark.long
def test_the_mirror_beside_the_runs_says_what_it_cannot_do(
    s3: Any, lab: Lab, cloud: Rehearsal, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "PROGRAM", program)
    run = lab.run("first", "running")
    said: list[str] = []
    mirror = mirroring.Mirror(lambda what, why: said.append(what))
    account = LabAccount(os.geteuid(), os.getegid())
    told = mirroring.MirrorRequest(account, LAB_ID, False, 0.05, frozenset({"run first"}))

    def until(condition: Callable[[MirrorStateRecord], bool]) -> MirrorStateRecord:
        deadline = time.monotonic() + 120
        while not (mirror.shown and condition(mirror.shown)):
            assert time.monotonic() < deadline, (mirror.shown, said)
            time.sleep(0.01)
        return mirror.shown

    try:
        mirror.update(told)
        first = until(lambda shown: shown.at > 0)
        assert (first.failed, first.behind_bytes) == ("", 0)
        cloud.change(denied=["PutObject"])
        run.write("logs/run.log", b"begun\nmore\n")
        behind = until(lambda shown: bool(shown.failed) and shown.behind_bytes == 11)
        assert behind.at >= first.at
        cloud.change(denied=[])
        until(lambda shown: not shown.failed and shown.behind_bytes == 0)
        assert said[:3] == ["mirrored", "not mirrored", "mirrored again"]
        child = mirror._child
        assert child
        child.kill()
        run.write("logs/run.log", b"begun\nmore\nstill\n")
        until(lambda shown: held(s3)[f"{KEY}files/logs/run.log"].endswith(b"still\n"))
        assert mirror._child is not child
    finally:
        mirror.update(told._replace(interval_s=1e6))
        mirror._stop()


@pytest.fixture(params=["s3", "ssh"])
def from_here(request: pytest.FixtureRequest, tmp_path: Path) -> LabStore:
    """A store as a person reaches it; the ssh one through a shell of this machine."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_store(URL, PREFIX, around())
    return shell_store(tmp_path, PREFIX)


def test_a_person_reads_and_writes_the_same(from_here: LabStore, tmp_path: Path) -> None:
    content = os.urandom(9_000_000)
    assert from_here.read("watch.json") is None
    from_here.write("runs/a/x", content)
    from_here.write("runs/a/y", b"")
    assert from_here.read("runs/a/x") == content
    assert from_here.read("runs/a/y") == b""
    target = tmp_path / "here" / "x"
    from_here.fetch("runs/a/x", target, len(content), sha256(content))
    assert target.read_bytes() == content
    from_here.fetch("runs/a/x", target, 5, sha256(content[:5]))
    from_here.fetch("runs/a/y", tmp_path / "y", 0, sha256(b""))
    with pytest.raises(TransferError):
        from_here.fetch("runs/a/x", target, 5, sha256(b"other"))
    with pytest.raises(NotFoundError):
        from_here.fetch("none", target, 5, sha256(b"other"))
    assert [p.name for p in target.parent.iterdir()] == ["x"]
    assert target.read_bytes() == content[:5]


def test_a_file_that_is_too_large_is_not_read(
    from_here: LabStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the lab can write to its store, and must not fill this machine's memory."""
    for module in (s3_client, ssh):
        monkeypatch.setattr(module, "MOST_READ_BYTES", 2**20)
    from_here.write("runs/a/run.json", bytes(2**20))
    assert from_here.read("runs/a/run.json") == bytes(2**20)
    from_here.write("runs/a/run.json", bytes(2**20 + 1))
    with pytest.raises(TransferError, match="too large to read") as caught:
        from_here.read("runs/a/run.json")
    assert caught.value.why == "runs/a/run.json has more than 1 MiB"


def test_a_server_reads_no_file_of_the_bucket_that_is_too_large(
    s3: Any, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_id = "0" * 64
    s3.put_object(Bucket="results", Key=f"labs/{PREFIX}/images/{image_id}.json", Body=bytes(2001))
    monkeypatch.setattr(s3_client, "MOST_READ_BYTES", 2000)
    request = LoadStoredImageRequest(
        **ABOUT, image_id=f"sha256:{image_id}", reference="labctl/built:1"
    )
    assert image_download.load(request).why == f"images/{image_id}.json has more than 0 MiB"


def test_a_lease_is_taken_by_one(from_here: LabStore) -> None:
    assert from_here.swap("watch.json", b"mine", None)
    assert not from_here.swap("watch.json", b"theirs", None)
    assert not from_here.swap("watch.json", b"theirs", b"nobody's")
    assert from_here.swap("watch.json", b"theirs", b"mine")
    assert from_here.read("watch.json") == b"theirs"
    assert from_here.swap("watch.json", b"", b"theirs")
    assert not from_here.swap("watch.json", b"mine", None), "an empty file is not an absent one"
    assert from_here.swap("watch.json", b"mine", b"")


SWAP = """
import sys
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
from shell_store import shell_store
from labctl.stores import StoreContext, open_store
url, prefix, folder, expected, body = sys.argv[2:]
if url:
    store = open_store(url, prefix, StoreContext(None, None, None, b"", b""))
    store.read("watch.json")
else:
    store = shell_store(Path(folder), prefix)
print("ready", flush=True)
sys.stdin.readline()
print(store.swap("watch.json", body.encode(), expected.encode() or None), flush=True)
"""


@pytest.mark.parametrize("url", [URL, ""], ids=["s3", "ssh"])
def test_of_processes_that_take_a_lease_at_once_one_gets_it(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if url:
        request.getfixturevalue("s3")
    expected = ""
    for turn in range(2):
        bodies = [f"process {number} of turn {turn}" for number in range(3)]
        about = [str(Path(__file__).parent), url, PREFIX, str(tmp_path)]
        words = [sys.executable, "-c", SWAP, *about]
        processes = [
            subprocess.Popen(
                [*words, expected, body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for body in bodies
        ]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=240)[0].strip() for process in processes]
        assert sorted(said) == ["False", "False", "True"]
        expected = bodies[said.index("True")]


def test_what_s3_refuses_is_told(s3: Any, cloud: Rehearsal) -> None:
    mine = open_store(URL, PREFIX, around())
    cloud.change(denied=["s3:*"])
    with pytest.raises(DeniedError, match="was denied"):
        mine.write("x", b"1")
    cloud.change(denied=[])
    with pytest.raises(TransferError, match="bucket nowhere does not exist"):
        open_store("s3://nowhere", PREFIX, around()).write("x", b"1")
