"""The mirror: a pass sends what is new of a lab's runs to its store.

Only whole files count (see outputs.py), each verified by its hash, and what was sent is written
down beside the run every few seconds, so that a pass that was killed costs no more than that.
Two passes of one lab never overlap; one that is stuck makes way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files import outputs
from ..files.edits import edits
from ..host.engine import inspect
from ..host.paths import age_of, lab_dir, read_json, sha256_of, write_json
from ..reply import Failure, answer
from ..runs.run_state import existing, final, last_attempt, look
from ..watchdog.saved_results import note
from .store import ChangedError, Store, StoreError, able, config, elsewhere, open_store
from .store_index import Files, grouped, key

LOCK = "mirror.lock"
STUCK_S = 60.0
POLL_S = 0.05
SENT = "sent.json"
SMALL_BYTES = 1024 * 1024
# What a pass that is killed has sent for nothing.
INDEX_S = 2.0


def mirror_now(request: dict[str, Any]) -> dict[str, Any]:
    """One pass over "run" or all runs of the lab; "all" takes new files and edited code along.

    Replies how many files and "bytes" were "sent", "behind_bytes" that were to be and were not,
    "failed" [[name, why]...], "why" the store is of no use now ("" if it is), and "bytes_s".
    """
    root = lab_dir(request["lab"], request["lab_id"])
    if not able(config(root).get("url", "")):
        return elsewhere("mirror-now", request)
    with _alone(root / ".labctl" / LOCK) as progress:
        store = open_store(root, request["lab"], request["lab_id"], progress)
        try:
            return _Pass(root, request, store).all()
        finally:
            store.close()


def serve(request: dict[str, Any]) -> None:
    """A pass for each line of standard input, this request's first; an answer for each.

    Started once, Python and boto3 are loaded once: a pass of little then costs milliseconds.
    """
    gently()
    while True:
        try:
            answer(mirror_now(request))
        except Failure as failure:
            answer({"error": failure.body})
        except OSError as error:
            answer({"error": Failure("disk", "the mirror failed", str(error)).body})
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)


def gently() -> None:
    """Give way to whatever else wants the processor."""
    with suppress(OSError):
        os.nice(19)


@contextmanager
def _alone(path: Path) -> Iterator[Any]:
    """One pass at a time. Yields what a pass calls when it gets on; one that does not is killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _preempt(descriptor)
                time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        last = time.monotonic()

        def progress() -> None:
            nonlocal last
            if time.monotonic() - last > 1:
                last = time.monotonic()
                os.utime(descriptor)

        yield progress
    finally:
        os.close(descriptor)


def _preempt(descriptor: int) -> None:
    if age_of(os.fstat(descriptor).st_mtime) > STUCK_S:
        holder = int(os.pread(descriptor, 20, 0) or b"0")
        with suppress(OSError):
            if holder > 1:
                os.kill(holder, signal.SIGKILL)


class _Pass:
    def __init__(self, root: Path, request: dict[str, Any], store: Store) -> None:
        self.root = root
        self.store = store
        self.about = {name: request[name] for name in ("lab", "lab_id")}
        self.only = request.get("run") or ""
        self.everything = bool(request.get("all"))
        self.url = config(root)["url"]
        self.sent = self.bytes = self.behind = 0
        self.failed: list[list[str]] = []
        self.why = ""
        self.engine = True

    def all(self) -> dict[str, Any]:
        began = time.monotonic()
        runs = sorted((d for d in self.root.glob("runs/[a-z0-9]*") if d.is_dir()), key=_age)
        if self.only:
            runs = [existing({**self.about, "run": self.only})]
        seen = self._seen(runs)
        for directory in runs:
            self._try(directory.name, _Run(self, directory, seen).mirror)
        if self.everything and not self.only:
            self._try("the edited code", self._edits)
        took = max(time.monotonic() - began, 0.001)
        return {
            "sent": self.sent,
            "bytes": self.bytes,
            "behind_bytes": self.behind,
            "failed": self.failed[:50],
            "why": self.why,
            "bytes_s": self.bytes / took if self.bytes else 0.0,
        }

    def _try(self, name: str, deed: Any) -> None:
        try:
            deed()
        except StoreError as error:
            self.lost(name, error)
        except Failure as failure:
            self.failed.append([name, failure.body["what"]])
        except OSError as error:
            self.failed.append([name, str(error)])

    def lost(self, name: str, error: StoreError) -> None:
        self.failed.append([name, str(error)])
        if error.whole:
            self.why = str(error)

    def _seen(self, runs: list[Path]) -> dict[str, Any]:
        names = [last_attempt(d).get("container", "") for d in runs if not final(d)]
        try:
            return inspect([name for name in names if name])
        except Failure:
            self.engine = False  # results are worth sending all the same
            return {}

    def send(self, name: str, path: Path, size: int, sha256: str) -> bool:
        """Whether it is in the store now; nothing more is tried once the store is of no use."""
        if self.why:
            self.behind += size
            return False
        try:
            self.store.send(name, path, size, sha256)
        except FileNotFoundError:
            return False  # removed meanwhile: nothing is behind
        except ChangedError:
            self.behind += size
            return False
        except StoreError as error:
            self.lost(name, error)
            self.behind += size
            return False
        self.sent += 1
        self.bytes += size
        return True

    def _edits(self) -> None:
        kept = self.root / ".labctl" / "saved-edits.json"
        known = read_json(kept)
        for name, size, sha256, _ in edits(self.about)["files"]:
            if known.get(name) != sha256 and self.send(
                f"server-edits/{name}", self.root / "code" / name, size, sha256
            ):
                note(kept, {name: sha256})


class _Run:
    """One run's part of a pass. `sent` is what the store has: see SENT."""

    def __init__(self, whole: _Pass, directory: Path, seen: dict[str, Any]) -> None:
        self.whole = whole
        self.directory = directory
        self.name = directory.name
        self.own = directory / ".labctl"
        self.seen = seen
        self.spec = read_json(self.own / "spec.json")
        self.sent: dict[str, Any] = read_json(self.own / SENT)
        if self.sent.get("url") != whole.url:
            self.sent = {"url": whole.url}
        self.files: Files = self.sent.setdefault("files", {})
        self.index: Files = self.sent.setdefault("index", {})
        self.next = dict(self.index)
        self.indexed_s = time.monotonic()

    def mirror(self) -> None:
        if not self.spec or not (self.directory / "code").is_dir():
            return  # claimed a moment ago
        ended = final(self.directory)
        if ended and self.sent.get("final") == ended and not self.whole.everything:
            return
        record = self._record()
        told = self._code() and self._about(record)
        complete = self._outputs(self._manifest()) and told
        if complete and final(self.directory) and not self.whole.why:
            self.sent["final"] = final(self.directory)  # a run that is resumed ends once more
            self._keep()

    def _record(self) -> dict[str, Any]:
        known = final(self.directory)
        if not known and self.whole.engine:
            with suppress(Failure):
                return look(self.directory, self.seen)
        return known or {"id": self.name, "state": "unknown"}

    def _manifest(self) -> list[list[Any]]:
        wish = {**self.whole.about, "runs": [self.name], "all": self.whole.everything}
        found: list[list[Any]] = outputs.manifest(wish)["runs"][self.name]["files"]
        return found

    def _code(self) -> bool:
        """The run's own code, sent once."""
        if self.sent.get("code"):
            return True
        packed = self.own / "code.tar"
        try:
            pack(self.directory, packed)
            size, sha256 = packed.stat().st_size, sha256_of(packed)
            if not self.whole.send(key(self.name, "code.tar"), packed, size, sha256):
                return False
        finally:
            if packed.exists():
                packed.unlink()
        self.sent["code"] = {"size": size, "sha256": sha256}
        self._keep()
        return True

    def _about(self, record: dict[str, Any]) -> bool:
        """run.json, where it would say something new."""
        attempts = sorted(self.own.glob("attempt-*"), key=lambda path: int(path.name[8:]))
        body = {
            "spec": self.spec,
            "code": self.sent["code"],
            "record": record,
            "attempts": [read_json(path) for path in attempts],
        }
        if self.sent.get("about") == body:
            return True
        if not self._put("run.json", {**body, "at": time.time()}):
            return False
        self.sent["about"] = body
        self._keep()
        return True

    def _outputs(self, found: list[list[Any]]) -> bool:
        """Send what is new, newest checkpoints first, and index it; whether all of it arrived."""
        there = {name: [size, sha256] for name, size, sha256, _ in found}
        growing = {name for name, _, _, grows in found if grows}
        self._forget_gone(there)
        groups = grouped(there)
        complete = True
        for top in sorted(groups, key=self._rank):
            due = [name for name in groups[top] if self.files.get(name) != there[name]]
            if due and not self._announce(due, there, growing):
                return False
            good = [name for name in due if self._send(name, there, name in growing)]
            self.files.update({name: there[name] for name in good})
            lost = {*due} - {*good}
            complete = complete and not lost
            whole = [] if top and lost else [name for name in groups[top] if name not in lost]
            for name in groups[top]:
                self.next.pop(name, None)
            self.next.update({name: there[name] for name in whole})
            if time.monotonic() - self.indexed_s > INDEX_S:
                self._put_index({})
        return self._put_index({}) and complete

    def _rank(self, top: str) -> float:
        """What is no checkpoint is small and comes first, then the newest checkpoint."""
        if not top:
            return float("-inf")
        with suppress(OSError):
            return -(self.directory / top / "manifest.json").stat().st_mtime
        return 0.0

    def _forget_gone(self, there: Files) -> None:
        """Out of the index goes what is gone here; what is merely changing just now stays in it."""
        for name in [*self.next]:
            if name not in there and not (self.directory / name).exists():
                del self.next[name]

    def _announce(self, due: list[str], there: Files, growing: set[str]) -> bool:
        """Before anything is replaced: see "pending" in store_index.py."""
        pending = {n: there[n] for n in due if n in self.files and n not in growing}
        return not pending or self._put_index(pending)

    def _send(self, name: str, there: Files, growing: bool) -> bool:
        path = self.directory / name
        if growing and there[name][0] < SMALL_BYTES:
            # As it is now: such a file may have been replaced since it was looked at.
            with suppress(OSError):
                content = path.read_bytes()
                there[name] = [len(content), hashlib.sha256(content).hexdigest()]
        return self.whole.send(key(self.name, f"files/{name}"), path, *there[name])

    def _put_index(self, pending: Files) -> bool:
        """Write what is in the store now, unless the index there says it already."""
        if self.next == self.index and not pending:
            return True
        if not self._put("index.json", {"files": self.next, "pending": pending, "at": time.time()}):
            return False
        news = {name: known for name, known in self.next.items() if self.index.get(name) != known}
        self.index, self.indexed_s = dict(self.next), time.monotonic()
        note(self.own / "mirrored.json", news)
        self._keep()
        return True

    def _put(self, name: str, body: dict[str, Any]) -> bool:
        if self.whole.why:
            return False
        try:
            self.whole.store.put(key(self.name, name), json.dumps(body).encode())
        except StoreError as error:
            self.whole.lost(key(self.name, name), error)
            return False
        return True

    def _keep(self) -> None:
        self.sent.update(files=self.files, index=self.index)
        write_json(self.own / SENT, self.sent)


def pack(directory: Path, target: Path) -> None:
    """A tar of the code as the run got it: the files that were there when it began."""
    import tarfile

    names = json.loads((directory / ".labctl" / "code.json").read_text())
    with target.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name in sorted(names):
            path = directory / "code" / name
            if path.is_file() and not path.is_symlink():
                info = archive.gettarinfo(str(path), name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                with path.open("rb") as content:
                    archive.addfile(info, content)


def _age(directory: Path) -> float:
    """The newest run first: it is the one that lives."""
    with suppress(OSError):
        return -(directory / ".labctl" / "claim.json").stat().st_mtime
    return 0.0


def words() -> list[str]:
    """What a pass beside a run is started with, where there is such a program."""
    return ["ionice", "-c", "3"] if shutil.which("ionice") else []
