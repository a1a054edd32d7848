"""A run made from the lab's store alone: its code, its outputs, its spec, as a run that was lost.

Everything lands in a staging directory, is checked by its hash and renamed; a restore that was cut
goes on. What does not arrive whole is left out and said, a checkpoint as a whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from ..files.files import RESERVE_BYTES
from ..files.unpack import unpack
from ..host.paths import (
    drop_tree,
    free_bytes,
    inside,
    lab_dir,
    read_json,
    run_dir,
    sha256_of,
    write_json,
    write_text,
)
from ..reply import Failure
from ..runs.run_state import look
from ..watchdog.saved_results import note
from .mirror import SENT
from .store import Store, StoreError, able, config, elsewhere, open_store
from .store_index import MANIFEST, Files, broken, grouped, key

STAGING = ".from-store-"
CONTAINER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,200}")


def restore(request: dict[str, Any]) -> dict[str, Any]:
    """Make run "run" here, of what the store has of it; one that is here already stays.

    Replies the "run" as `status` shows it, how many "files" and "bytes" came, and "left_out"
    [[name, why]...]: what is missing in the store or not as its index promises.
    """
    root = lab_dir(request["lab"], request["lab_id"])
    directory = run_dir(root, request["run"])
    url = config(root).get("url", "")
    if request.get("store") not in (None, "", url):
        said = f"this server's store is {url or 'none'}, not {request['store']}"
        raise Failure("policy", said, "", "labctl up")
    if not able(url):
        return elsewhere("restore-run", request)
    with (root / ".labctl" / "restore.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return {"run": look(directory, {}), "files": 0, "bytes": 0, "left_out": []}
        store = open_store(root, request["lab"], request["lab_id"])
        try:
            done = _Restore(root, request, store, url).all()
        except StoreError as error:
            raise Failure("store", f"{url} cannot be used", str(error), "labctl up") from None
        finally:
            store.close()
        return {"run": look(directory, {}), **done}


class _Restore:
    def __init__(self, root: Path, request: dict[str, Any], store: Store, url: str) -> None:
        self.run = request["run"]
        self.lab_id = request["lab_id"]
        self.url = url
        self.store = store
        self.directory = run_dir(root, self.run)
        self.staging = self.directory.with_name(STAGING + self.run)
        self.left_out: list[list[str]] = []
        self.arrived: Files = {}

    def all(self) -> dict[str, Any]:
        about, index = self._object("run.json"), self._object("index.json", needed=False)
        spec = about.get("spec")
        if not isinstance(spec, dict) or (spec.get("id"), spec.get("lab_id")) != (
            self.run,
            self.lab_id,
        ):
            raise Failure("policy", f"what the store calls run {self.run} is another run")
        wanted, pending = _listed(index.get("files")), _listed(index.get("pending"))
        code = [int(about["code"]["size"]), str(about["code"]["sha256"])]
        self._room([*wanted.values(), code, code])
        (self.staging / ".labctl").mkdir(parents=True, exist_ok=True)
        self._code(code)
        for name in sorted({*wanted, *pending}):
            either = [known[name] for known in (wanted, pending) if name in known]
            self._bring(key(self.run, f"files/{name}"), name, either)
        self._checkpoints(sorted({*wanted, *pending}))
        self._own(spec, about, code)
        self.staging.rename(self.directory)
        size = sum(known[0] for known in self.arrived.values()) + code[0]
        return {"files": len(self.arrived) + 1, "bytes": size, "left_out": self.left_out}

    def _object(self, name: str, needed: bool = True) -> dict[str, Any]:
        content = self.store.read(key(self.run, name))
        if content is None and not needed:
            return {}
        if content is None:
            said = f"there is nothing of run {self.run} in {self.url}"
            raise Failure("missing", said, "", "labctl status --refresh")
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise Failure("store", f"{name} of run {self.run} in {self.url} is damaged")
        return body

    def _room(self, files: list[list[Any]]) -> None:
        size, free = sum(known[0] for known in files), free_bytes(self.staging)
        if size + RESERVE_BYTES > free:
            why = f"run {self.run} takes {size} bytes, {free} are free"
            raise Failure("disk", "the server's disk has no room", why, "labctl ssh -- df -h")

    def _bring(self, where: str, name: str, either: list[list[Any]]) -> bool:
        """One file to the staging directory, as one of `either` ([size, sha256]) promises."""
        place = inside(self.staging, name)
        known = _fits(place, either)
        try:
            if known is None:
                place.parent.mkdir(parents=True, exist_ok=True)
                self.store.fetch(where, place, max(size for size, _ in either))
                known = _fits(place, either)
        except StoreError as error:
            if error.whole:
                raise
            self.left_out.append([name, str(error)])
        else:
            if known is None:
                self.left_out.append([name, "it is not as the store's index promises"])
        if known is None:
            if place.exists():
                place.unlink()
            return False
        self.arrived[name] = known
        return True

    def _code(self, known: list[Any]) -> None:
        packed = self.staging / ".labctl" / "code.tar"
        if not self._bring(key(self.run, "code.tar"), ".labctl/code.tar", [known]):
            said = f"the code of run {self.run} is not whole in {self.url}"
            raise Failure("store", said, self.left_out[-1][1])
        del self.arrived[".labctl/code.tar"]
        code = self.staging / "code"
        drop_tree(code)
        code.mkdir()
        unpack(packed, "code.tar", code)
        names = _made_executable(packed, code)
        write_json(self.staging / ".labctl" / "code.json", names)
        packed.unlink()

    def _checkpoints(self, names: list[str]) -> None:
        """A checkpoint of which anything is missing goes altogether."""
        for top, members in grouped(names).items():
            if not top:
                continue
            why = broken(top, read_json(self.staging / top / MANIFEST), self.arrived)
            lost = [name for name in members if name not in self.arrived]
            if lost or why:
                self.left_out.append([top, why or f"{lost[0][len(top) :]} is missing"])
                drop_tree(inside(self.staging, top.rstrip("/")))
                for name in members:
                    self.arrived.pop(name, None)

    def _own(self, spec: dict[str, Any], about: dict[str, Any], code: list[Any]) -> None:
        """What a run directory says of itself: one whose machine has gone."""
        own = self.staging / ".labctl"
        text = json.dumps(spec, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        record = about.get("record") or {}
        created = float(record.get("created_at") or time.time())
        write_text(own / "spec.json", text)
        write_json(own / "claim.json", {"hash": digest, "created_at": created})
        for number, attempt in enumerate(about.get("attempts") or [{}], 1):
            name = str(attempt.get("container", ""))
            known: dict[str, Any] = {"container": name if CONTAINER.fullmatch(name) else ""}
            known["started_at"] = float(attempt.get("started_at") or 0.0)
            # Of another machine: by its boot the attempt is seen to be lost.
            write_json(own / f"attempt-{number}", {**known, "boot": "elsewhere"})
        if record.get("state") in ("exited", "cancelled"):
            write_json(own / "record.json", record)
        sent = {"url": self.url, "files": self.arrived, "index": self.arrived}
        write_json(own / SENT, {**sent, "code": {"size": code[0], "sha256": code[1]}})
        note(own / "mirrored.json", self.arrived)


def _listed(found: Any) -> Files:
    """Files of an index; one whose name is the run's own business is none."""
    listed: Files = {}
    for name, known in found.items() if isinstance(found, dict) else ():
        if name.split("/")[0] != ".labctl":
            listed[name] = [max(0, int(known[0])), str(known[1])]
    return listed


def _fits(place: Path, either: list[list[Any]]) -> list[Any] | None:
    """Which of `either` the file's first bytes are; it is cut to them. A log may have grown since
    it was indexed."""
    if not place.is_file() or place.is_symlink():
        return None
    for size, sha256 in either:
        if place.stat().st_size >= size and sha256_of(place, size) == sha256:
            with place.open("r+b") as file:
                file.truncate(size)
            return [size, sha256]
    return None


def _made_executable(packed: Path, code: Path) -> list[str]:
    """The names in the archive; programs among them become programs."""
    import tarfile

    names = []
    with tarfile.open(str(packed)) as archive:
        for member in archive:
            if member.isreg():
                names.append(member.name)
                if member.mode & 0o100:
                    inside(code, member.name).chmod(0o755)
    return names
