"""The gateway of a store on an SSH server: what it lets a key do, and all that it does not."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_bed import DirectStore, sha256
from store_sshd import StoreSshd, find_lacks, store_sshd

from labctl.agent.mirror import authorized_keys, ssh_gateway
from labctl.agent.mirror.ssh_store import PART_BYTES
from labctl.agent.mirror.store import ChangedError, StoreError

GATEWAY = Path(ssh_gateway.__file__)


class Session:
    """A session with the program, as a forced command would start it."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "error", str(GATEWAY), "serve", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(120) == 0

    def ask(self, do: Any, body: bytes = b"", **words: Any) -> dict[str, Any]:
        asked = {"do": do, "length": len(body), **words}
        return self.say(json.dumps(asked).encode() + b"\n" + body)

    def say(self, text: bytes) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(text)
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply

    def put(self, key: Any, content: bytes, **words: Any) -> dict[str, Any]:
        known = {"size": len(content), "sha256": sha256(content), "offset": 0, **words}
        return self.ask("put", content, key=key, **known)

    def get(self, key: str, offset: int = 0, length: int = 10**7) -> bytes:
        reply = self.ask("get", key=key, offset=offset, length=length)
        assert self.process.stdout
        assert "length" in reply, reply
        return self.process.stdout.read(reply["length"])


def list_files(directory: Path) -> list[str]:
    """The files of a store, without what belongs to the gateway."""
    paths = (p.relative_to(directory) for p in directory.rglob("*") if p.is_file())
    own = (".incoming", ".lock")
    return sorted(str(path) for path in paths if path.parts[0] not in own)


def test_what_was_put_is_there_whole(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    with Session(tmp_path / "lab") as session:
        assert session.put("runs/a/files/x", content) == {"done": True}
        assert session.get("runs/a/files/x") == content
        assert session.get("runs/a/files/x", 2_999_990, 100) == content[-10:]
        assert session.put("runs/a/files/x", b"") == {"done": True}
        assert session.get("runs/a/files/x") == b""
        assert session.put("runs/b", b"1") == {"done": True}
        assert list_files(tmp_path / "lab") == ["runs/a/files/x", "runs/b"]
        assert session.ask("get", key="none", offset=0)["error"] == "missing"
    modes = [stat.S_IMODE(p.stat().st_mode) & 0o077 for p in (tmp_path / "lab").rglob("*")]
    assert set(modes) == {0}


def test_a_file_that_is_not_as_promised_changes_nothing(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.put("x", b"good")
        assert session.put("x", b"evil", sha256=sha256(b"else"))["error"] == "bad"
        assert session.put("x", b"longer", size=3)["error"] == "bad"
        assert session.get("x") == b"good"
    assert list((tmp_path / ".incoming").iterdir()) == []


def test_a_cut_request_changes_nothing(tmp_path: Path) -> None:
    about = {"do": "put", "key": "x", "size": 1000, "sha256": sha256(b"x" * 1000), "length": 1000}
    cut = Session(tmp_path)
    assert cut.process.stdin
    cut.process.stdin.write(json.dumps(about).encode() + b"\n" + b"x" * 700)
    cut.__exit__()
    assert [path.name for path in tmp_path.iterdir()] == [".incoming"]


HOSTILE = [
    *("..", "../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.", "./a", "a/", ".incoming/x"),
    *(".lock", "\0", "a\nb", "a\x1b[2J", "x" * 300, "/".join("abcdefgh" * 5), "é" * 600, "\udcff"),
    *(7, None, ["a"]),
]


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_no_key_leaves_the_directory(tmp_path: Path, key: Any) -> None:
    lab = tmp_path / "labs" / "mine"
    with Session(lab) as session:
        assert session.put("before", b"1") == {"done": True}
        for reply in (
            session.put(key, b"1"),
            session.ask("get", key=key, offset=0),
            session.put(key, b"1", expected=""),
            session.ask("put", key="x", size=1, sha256=f"../{key}"),
        ):
            assert reply.get("error", "") == "name" or reply == {"done": False}, reply
        assert list_files(lab) == ["before"]
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and lab not in p.parents]
    assert outside == []


def test_links_lead_nowhere(tmp_path: Path) -> None:
    other = tmp_path / "other-lab"
    other.mkdir()
    (other / "secret").write_bytes(b"theirs")
    lab = tmp_path / "mine"
    lab.mkdir()
    (lab / "folder").symlink_to(other)
    (lab / "file").symlink_to(other / "secret")
    os.mkfifo(lab / "pipe")
    with Session(lab) as session:
        for key in ("folder/secret", "file", "pipe"):
            assert session.ask("get", key=key, offset=0)["error"] == "name", key
            assert session.put(key, b"1")["error"] == "name", key
        assert session.put("folder/deep/new", b"1")["error"] == "name"
    assert {p.name: p.read_bytes() for p in other.iterdir()} == {"secret": b"theirs"}


@pytest.mark.parametrize(
    "do", ["delete", "rename", "__init__", "", None, "write", ["put"], "list", "swap"]
)
def test_there_is_no_way_to_remove(tmp_path: Path, do: Any) -> None:
    with Session(tmp_path) as session:
        session.put("kept", b"1")
        assert "error" in session.ask(do, key="kept", length=0, to="other")
        assert session.get("kept") == b"1"


@pytest.mark.parametrize("line", [b"\n", b"no json\n", b"[]\n", b"{}\n", b"7\n"])
def test_what_is_no_request_is_told(tmp_path: Path, line: bytes) -> None:
    with Session(tmp_path) as session:
        assert session.say(line)["error"] == "name"
        assert session.put("x", b"1") == {"done": True}


def test_a_read_is_bounded(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.put("x", b"12345")
        assert session.get("x", 1, 2) == b"23"
        assert session.get("x", 0, -1) == b""
        assert session.ask("get", key="x", offset=-1, length=5)["error"] == "io"
        assert session.get("x") == b"12345"


def test_of_many_that_swap_one_wins(tmp_path: Path) -> None:
    def attempt(body: bytes) -> bool:
        with Session(tmp_path) as session:
            barrier.wait()
            return bool(session.put("watch.json", body, expected=expected)["done"])

    expected = ""
    for turn in range(5):
        barrier = threading.Barrier(6)
        bodies = [b"%d of turn %d" % (number, turn) for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(attempt, bodies))
        assert sum(won) == 1
        assert (tmp_path / "watch.json").read_bytes() == bodies[won.index(True)]
        expected = sha256(bodies[won.index(True)])
    with Session(tmp_path) as session:
        assert session.put("watch.json", b"x", expected="") == {"done": False}
        assert session.put("after", b"1") == {"done": True}
    assert list((tmp_path / ".incoming").iterdir()) == []


@pytest.mark.parametrize("expected", [None, sha256(b"old")])
def test_a_put_waits_for_a_swap_that_has_compared(tmp_path: Path, expected: str | None) -> None:
    """This test holds the lock, as another session does between its comparison and its write."""
    words = {} if expected is None else {"expected": expected}
    with Session(tmp_path) as session, ThreadPoolExecutor(1) as threads:
        assert session.put("watch.json", b"old") == {"done": True}
        with (tmp_path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            reply = threads.submit(session.put, "watch.json", b"new", **words)
            while not is_waiting_for_lock(session.process.pid):
                assert not reply.done(), reply.result()
                time.sleep(0.01)
            assert (tmp_path / "watch.json").read_bytes() == b"old"
        assert reply.result(120) == {"done": True}
        assert session.get("watch.json") == b"new"


def is_waiting_for_lock(pid: int) -> bool:
    """A line of a process that waits is `1: -> FLOCK ADVISORY WRITE pid ...`."""
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1] == "->" and words[5] == str(pid) for words in waiting)


def test_a_draft_that_another_session_publishes_meanwhile_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, gone = tmp_path / "stale", tmp_path / "gone"
    stale.write_bytes(b"x")
    listed = SimpleNamespace(iterdir=lambda: iter([gone, stale]))
    monkeypatch.setattr(ssh_gateway, "INCOMING", listed)
    ssh_gateway.clear_drafts(0)
    assert not stale.exists()


@pytest.mark.parametrize(("body", "is_kept"), [(b"", True), (b"new", False)])
def test_a_full_disk_costs_drafts_only_if_a_file_needs_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, is_kept: bool
) -> None:
    """A draft that only lacks room to be published must not be sent again."""
    draft = tmp_path / ".incoming" / "draft"
    draft.parent.mkdir()
    draft.write_text("most of a large file")
    monkeypatch.chdir(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ssh_gateway, "put_file", fail)
    request = json.dumps({"do": "put", "key": "a", "length": len(body)}).encode() + b"\n" + body
    out = io.BytesIO()
    ssh_gateway.serve(io.BytesIO(request), out)
    assert json.loads(out.getvalue())["error"] == "full"
    assert draft.exists() == is_kept


def test_drafts_that_nobody_finished_go_in_time(tmp_path: Path) -> None:
    folder = tmp_path / ".incoming"
    folder.mkdir()
    for name, age in (("old", ssh_gateway.STALE_S + 60), ("new", 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    with Session(tmp_path) as session:
        session.put("x", b"1")
    assert [p.name for p in folder.iterdir()] == ["new"]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[StoreSshd]:
    if lacks := find_lacks():
        pytest.skip(f"there is no {lacks} here")
    with store_sshd(tmp_path) as found:
        yield found


@pytest.fixture
def rrsync() -> None:
    if not shutil.which("rrsync"):
        pytest.skip("there is no rrsync here")


def test_a_large_file_goes_by_rsync_and_is_put_whole(
    sshd: StoreSshd, tmp_path: Path, rrsync: None
) -> None:
    content = os.urandom(PART_BYTES + 1000)
    big = tmp_path / "big"
    big.write_bytes(content)
    store = sshd.open_store()
    store.send("runs/a/big", big, len(content), sha256(content))
    placed = sshd.directory / "runs/a/big"
    assert placed.read_bytes() == content
    assert stat.S_IMODE(placed.stat().st_mode) == 0o600
    store.send("runs/b/grown", big, PART_BYTES + 10, sha256(content[: PART_BYTES + 10]))
    assert (sshd.directory / "runs/b/grown").read_bytes() == content[: PART_BYTES + 10]
    with pytest.raises(ChangedError):
        store.send("runs/a/big", big, len(content), sha256(b"another"))
    assert placed.read_bytes() == content
    store.fetch("runs/a/big", tmp_path / "back", len(content))
    assert (tmp_path / "back").read_bytes() == content
    assert list((sshd.directory / ".incoming").iterdir()) == []
    before = placed.stat().st_ino
    store.send("runs/a/big", big, len(content), sha256(content))
    assert placed.stat().st_ino == before, "what is there is not sent again"
    store.close()


@pytest.mark.parametrize("length", [11, -1])
def test_a_store_that_sends_more_than_was_requested_is_cut_off(tmp_path: Path, length: int) -> None:
    """Otherwise it could fill the memory and the disk of the lab's server."""
    store = DirectStore(tmp_path / "lab")
    script = tmp_path / "hostile"
    script.write_text(f"#!/bin/sh\nread line\necho '{{\"length\": {length}}}'\necho 123456789012\n")
    script.chmod(0o755)
    store.words = [str(script)]
    target = tmp_path / "fetched"
    with pytest.raises(StoreError, match="more than was requested"):
        store.fetch("runs/a/x", target, 10)
    assert target.read_bytes() == b""


@pytest.mark.parametrize("kind", ["begun", "begun wrong", "whole but wrong"])
def test_a_draft_of_an_upload_that_was_cut_is_gone_on_with(
    sshd: StoreSshd, tmp_path: Path, rrsync: None, kind: str
) -> None:
    content = os.urandom(PART_BYTES + 1000)
    big = tmp_path / "big"
    big.write_bytes(content)
    draft = sshd.directory / ".incoming" / f"{sha256(content)}.{len(content)}"
    draft.parent.mkdir(parents=True)
    drafts = {
        "begun": content[:PART_BYTES],
        "begun wrong": b"?" + content[1:PART_BYTES],
        "whole but wrong": b"?" + content[1:],
    }
    draft.write_bytes(drafts[kind])
    store = sshd.open_store()
    store.send("x", big, len(content), sha256(content))
    assert (sshd.directory / "x").read_bytes() == content
    store.close()


def test_the_key_opens_nothing_but_the_gateway(
    sshd: StoreSshd, tmp_path: Path, rrsync: None
) -> None:
    store = sshd.open_store()
    store.write("kept", b"1")
    store.close()
    (tmp_path / "secret").write_bytes(b"theirs")
    for words in (["id"], ["cat", "/etc/passwd"], ["scp", "-t", "/tmp"]):
        done = sshd.call(*words, stdin=b"id\n")
        assert b"invalid request" in done.stdout, words
    assert sshd.call("rsync", "--server", "--daemon", ".").returncode != 0
    local = tmp_path / "local"
    local.mkdir()
    (local / "kept").write_bytes(b"2")
    (local / "link").symlink_to(tmp_path / "secret")
    assert sshd.rsync("labctl-store:kept", str(tmp_path / "read")).returncode != 0
    assert not (tmp_path / "read").exists()
    for target in ("../kept", str(sshd.directory / "kept"), "../../other"):
        sshd.rsync(str(local / "kept"), f"labctl-store:{target}")
    sshd.rsync("-r", "--delete", f"{local}/", "labctl-store:..")
    sshd.rsync("-l", str(local / "link"), "labctl-store:" + "0" * 64 + ".6")
    with pytest.raises(StoreError):
        store.send("stolen", local / "kept", 6, "0" * 64)
    assert store._send_request(
        {"do": "put", "key": "stolen", "size": 6, "sha256": "0" * 64, "length": 0}
    )
    store.close()
    assert (sshd.directory / "kept").read_bytes() == b"1"
    assert not (sshd.directory / "stolen").exists()
    assert {path.name for path in sshd.directory.iterdir()} == {"kept", ".incoming", ".lock"}
    assert {path.name for path in sshd.directory.parent.iterdir()} == {"digits-1"}


def test_without_rrsync_small_files_go_and_large_ones_are_told(
    sshd: StoreSshd, tmp_path: Path
) -> None:
    """sshd gives its own PATH to what it starts: the gateway names a program that is not there."""
    copy = tmp_path / "gateway.py"
    copy.write_text(GATEWAY.read_text().replace('RRSYNC = ("rrsync"', 'RRSYNC = ("no-rrsync"'))
    keys = tmp_path / "authorized_keys"
    keys.write_text(keys.read_text().replace(str(GATEWAY), str(copy)))
    big = tmp_path / "big"
    big.write_bytes(bytes(PART_BYTES + 1))
    store = sshd.open_store()
    store.write("small", b"1")
    with pytest.raises(StoreError, match="without rrsync on the store's machine") as raised:
        store.send("big", big, PART_BYTES + 1, sha256(bytes(PART_BYTES + 1)))
    assert not raised.value.whole
    assert store.read("small") == b"1"
    store.close()


def test_a_line_of_an_earlier_version_goes_on_working(sshd: StoreSshd, tmp_path: Path) -> None:
    """Its program knew nothing of rsync, and took a file of any size in one request."""
    earlier, changed = re.subn(r', "rsync": .*}', "}", GATEWAY.read_text())
    assert changed == 2
    copy = tmp_path / "store-door.py"
    copy.write_text(earlier)
    keys = tmp_path / "authorized_keys"
    keys.write_text(keys.read_text().replace(str(GATEWAY), str(copy)))
    content = os.urandom(PART_BYTES + 5)
    (tmp_path / "big").write_bytes(content + b"more")
    store = sshd.open_store()
    store.send("big", tmp_path / "big", len(content), sha256(content))
    assert (sshd.directory / "big").read_bytes() == content
    with pytest.raises(ChangedError):
        store.send("other", tmp_path / "big", len(content) + 9, sha256(content))
    store.write("small", b"1")
    assert store.read("small") == b"1"
    store.close()


KEY = "ssh-ed25519 " + "A" * 68
LINE = 'restrict,command="/usr/bin/python3 -I -S /h/gateway.py serve /h/labs/x" ' + KEY


def test_a_lab_has_one_line_of_authorized_keys() -> None:
    other = f"{LINE} labctl-store:y-1\n"
    before = f"# mine\nssh-rsa AAAA me@home\n\n{other}"
    once = authorized_keys.replace_line(before, "x-1", f"{LINE} labctl-store:x-1")
    assert once == f"{before}{LINE} labctl-store:x-1\n"
    twice = authorized_keys.replace_line(once, "x-1", f"{LINE}B labctl-store:x-1")
    assert twice == f"{before}{LINE}B labctl-store:x-1\n"
    assert authorized_keys.replace_line(twice, "x-1", "") == before
    assert authorized_keys.replace_line("ssh-rsa AAAA me", "z", "") == "ssh-rsa AAAA me\n"


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ('/h/a"b', KEY),
        ("/h/a b", KEY),
        ("/h/a;id", KEY),
        ("/h/$(id)", KEY),
        ("/h/x\ny", KEY),
        ("/h/x", KEY + "\nssh-ed25519 AAAA"),
        ("/h/x", "ssh-rsa AAAA"),
        ("/h/x", 'command="id" ' + KEY),
    ],
)
def test_nothing_odd_gets_into_authorized_keys(place: str, key: str) -> None:
    with pytest.raises(ValueError):
        authorized_keys.build_key_line("/h/gateway.py", place, "x", key)
