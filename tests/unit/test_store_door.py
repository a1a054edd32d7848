"""The door of a store on an SSH server: what it lets a key do, and all that it does not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from store_bed import sha256

from labctl.remote import store_door, store_keys

DOOR = Path(store_door.__file__)


class Door:
    """A session with the program, as a forced command would start it."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "error", str(DOOR), "serve", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(120) == 0

    def ask(self, do: str, body: bytes = b"", **words: Any) -> dict[str, Any]:
        asked = {"do": do, "length": len(body), **words}
        return self.say(json.dumps(asked).encode() + b"\n" + body)

    def say(self, text: bytes) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(text)
        self.process.stdin.flush()
        return self.heard()

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply

    def put(self, key: str, content: bytes, **words: Any) -> dict[str, Any]:
        known = {"size": len(content), "sha256": sha256(content), "offset": 0, **words}
        return self.ask("put", content, key=key, **known)

    def get(self, key: str) -> bytes:
        reply = self.ask("get", key=key, offset=0, length=10**9)
        assert self.process.stdout
        assert "length" in reply, reply
        return self.process.stdout.read(reply["length"])


def test_what_was_put_is_there_whole(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    with Door(tmp_path / "lab") as door:
        assert door.put("runs/a/files/x", content) == {"done": True}
        assert door.get("runs/a/files/x") == content
        assert door.put("runs/a/files/x", b"") == {"done": True}
        assert door.put("runs/b", b"1") == {"done": True}
        found = door.ask("look", key="runs/a/files/x")
        assert (found["size"], found["sha256"]) == (0, sha256(b""))
        assert door.ask("look", key="none")["size"] == -1
        assert door.ask("list", prefix="runs/a")["names"] == ["runs/a/files/x"]
        assert door.ask("list", prefix="runs/")["names"] == ["runs/a/files/x", "runs/b"]
        assert door.ask("list")["names"] == ["runs/a/files/x", "runs/b"]
        assert door.ask("get", key="none", offset=0)["error"] == "missing"
    modes = [stat.S_IMODE(p.stat().st_mode) & 0o077 for p in (tmp_path / "lab").rglob("*")]
    assert set(modes) == {0}


def test_a_file_that_is_not_as_promised_changes_nothing(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        door.put("x", b"good")
        assert door.put("x", b"evil", sha256=sha256(b"else"))["error"] == "bad"
        assert door.put("x", b"longer", size=3)["error"] == "bad"
        assert door.get("x") == b"good"
    assert list((tmp_path / ".incoming").iterdir()) == []


def test_a_cut_upload_goes_on_where_it_was(tmp_path: Path) -> None:
    content = os.urandom(200_000)
    about = {"key": "x", "size": len(content), "sha256": sha256(content)}
    line = json.dumps({"do": "put", **about, "offset": 0, "length": len(content)})
    cut = Door(tmp_path)
    assert cut.process.stdin
    cut.process.stdin.write(line.encode() + b"\n" + content[:150_000])
    cut.__exit__()
    with Door(tmp_path) as door:
        staged = door.ask("look", **about)["staged"]
        assert staged == 150_000
        assert door.ask("get", key="x", offset=0)["error"] == "missing"
        rest = content[staged:]
        assert door.ask("put", rest, **about, offset=staged) == {"done": True}
        assert door.get("x") == content
        assert door.ask("put", b"", **{**about, "key": "y"}, offset=9)["error"] == "bad"


HOSTILE = [
    *("..", "../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.", "./a", "a/", ".incoming/x"),
    *(".lock", "\0", "a\nb", "a\x1b[2J", "x" * 300, "/".join("abcdefgh" * 5), "é" * 600, "\udcff"),
    *(7, None, ["a"]),
]


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_no_key_leaves_the_directory(tmp_path: Path, key: Any) -> None:
    lab = tmp_path / "labs" / "mine"
    with Door(lab) as door:
        assert door.put("before", b"1") == {"done": True}
        for reply in (
            door.ask("put", b"1", key=key, size=1, sha256=sha256(b"1"), offset=0),
            door.ask("get", key=key, offset=0),
            door.ask("look", key=key),
            door.ask("swap", b"1", key=key, expected=""),
        ):
            assert reply["error"] == "name"
        assert door.ask("list")["names"] == ["before"]
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
    with Door(lab) as door:
        for key in ("folder/secret", "file", "pipe"):
            assert door.ask("get", key=key, offset=0)["error"] in ("name", "io"), key
        assert door.put("folder/new", b"1")["error"] == "name"
        assert door.put("folder/deep/new", b"1")["error"] == "name"
        assert door.put("file", b"1") == {"done": True}, "the link itself is replaced"
        assert door.ask("list")["names"] == ["file", "pipe"]
    assert {p.name: p.read_bytes() for p in other.iterdir()} == {"secret": b"theirs"}
    assert not (lab / "file").is_symlink()


@pytest.mark.parametrize("name", [".incoming", ".lock"])
def test_not_even_its_own_files_may_be_links(tmp_path: Path, name: str) -> None:
    lab, other = tmp_path / "mine", tmp_path / "other"
    lab.mkdir()
    other.mkdir()
    (lab / name).symlink_to(other if name == ".incoming" else other / "x")
    with Door(lab) as door:
        assert "error" in door.ask("swap", b"1", key="k", expected="")
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("do", ["delete", "rename", "__init__", "put", "", None, "_clear", "top"])
def test_there_is_no_way_to_remove(tmp_path: Path, do: Any) -> None:
    with Door(tmp_path) as door:
        door.put("kept", b"1")
        assert "error" in door.ask(do, key="kept", length=0, to="other")
        assert door.get("kept") == b"1"


@pytest.mark.parametrize("line", [b"\n", b"no json\n", b"[]\n", b"{}\n", b"x" * 70_000, b"7\n"])
def test_what_is_no_request_ends_the_session(tmp_path: Path, line: bytes) -> None:
    door = Door(tmp_path)
    assert door.say(line)["error"] == "name"
    assert door.process.wait(120) == 0
    assert door.process.stdin
    assert door.process.stdout
    assert door.process.stdout.read() == b""
    door.process.stdout.close()
    with suppress(BrokenPipeError):
        door.process.stdin.close()


def test_of_many_that_swap_one_wins(tmp_path: Path) -> None:
    def attempt(body: bytes) -> bool:
        with Door(tmp_path) as door:
            barrier.wait()
            return bool(door.ask("swap", body, key="watch.json", expected=expected)["done"])

    expected = ""
    for turn in range(5):
        barrier = threading.Barrier(6)
        bodies = [b"%d of turn %d" % (number, turn) for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(attempt, bodies))
        assert sum(won) == 1
        assert (tmp_path / "watch.json").read_bytes() == bodies[won.index(True)]
        expected = sha256(bodies[won.index(True)])
    with Door(tmp_path) as door:
        assert door.ask("swap", b"x", key="watch.json", expected="") == {"done": False}
        assert door.ask("swap", b"x" * 2_000_000, key="k", expected="")["error"] == "name"
        assert door.put("after", b"1") == {"done": True}, "what was refused was read to its end"


def test_parts_that_nobody_finished_go_in_time(tmp_path: Path) -> None:
    folder = tmp_path / ".incoming"
    folder.mkdir()
    for name, age in (("old", store_door.STALE_S + 60), ("new", 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    with Door(tmp_path) as door:
        door.ask("list")
    assert [p.name for p in folder.iterdir()] == ["new"]


KEY = "ssh-ed25519 " + "A" * 68
LINE = 'restrict,command="/usr/bin/python3 -I -S /h/door.py serve /h/labs/x" ' + KEY


def test_a_lab_has_one_line_of_authorized_keys() -> None:
    other = f"{LINE} labctl-store:y-1\n"
    before = f"# mine\nssh-rsa AAAA me@home\n\n{other}"
    once = store_keys.changed(before, "x-1", f"{LINE} labctl-store:x-1")
    assert once == f"{before}{LINE} labctl-store:x-1\n"
    twice = store_keys.changed(once, "x-1", f"{LINE}B labctl-store:x-1")
    assert twice == f"{before}{LINE}B labctl-store:x-1\n"
    assert store_keys.changed(twice, "x-1", "") == before
    assert store_keys.changed("ssh-rsa AAAA me", "z", "") == "ssh-rsa AAAA me\n"


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
        store_keys.key_line("/h/door.py", place, "x", key)
