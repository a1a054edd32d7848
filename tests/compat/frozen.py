"""Frozen files put back into a temporary place, their neutral paths made that place's.

What is frozen is told in tests/fixtures/README.md. `/home/student` there is `<root>/student` here.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
FIRST = TESTS / "fixtures" / "first"
for folder in ("flow", "unit"):
    sys.path.append(str(TESTS / folder))

from engine_socket import Answer, EngineSocket, engine_socket  # noqa: E402
from lab_world import DiskCloud, Machine, Recorded, Wires  # noqa: E402

from labctl.config import Paths, find_paths, load_lab  # noqa: E402
from labctl.model import ProviderAccount, Server  # noqa: E402
from labctl.servers.context import LabContext  # noqa: E402
from labctl.state import State  # noqa: E402

__all__ = ["EngineSocket", "engine_socket"]

NEUTRAL = b"/home/"
DIGITS, FACES, VOICES = "0f1e2d3c4b5a", "1a2b3c4d5e6f", "2b3c4d5e6f70"
ACCOUNT = ProviderAccount(id="123456789012", profile="class")


@dataclass
class Frozen:
    """One set of fixtures, and the directory that it is put back into."""

    root: Path
    source: Path = FIRST

    def rewrite_paths(self, content: bytes) -> bytes:
        return content if b"\0" in content else content.replace(NEUTRAL, f"{self.root}/".encode())

    def read(self, name: str) -> bytes:
        return self.rewrite_paths((self.source / name).read_bytes())

    def value(self, name: str) -> Any:
        return json.loads(self.read(name))

    def unpack(self, name: str) -> Path:
        """`<name>.tar.gz` as the directory `<root>/<name>`."""
        folder = self.root / name
        folder.mkdir(parents=True)
        with tarfile.open(self.source / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        for path in folder.rglob("*"):
            if path.is_file():
                self._rewrite(path)
        return folder

    def _rewrite(self, path: Path) -> None:
        found, content = path.stat(), path.read_bytes()
        if self.rewrite_paths(content) != content:
            path.write_bytes(self.rewrite_paths(content))
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    def restore_database(self, name: str, path: Path) -> Path:
        """The database at `path` that `<name>` holds as statements."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with sqlite3.connect(path) as db:
            db.executescript(self.read(name).decode())
        db.close()
        return path

    def unpack_agent(self) -> Path:
        """The program as it lies on a server."""
        name = (self.source / "agent.name").read_text().strip()
        folder = self.root / "agent" / name
        with zipfile.ZipFile(self.source / "agent.zip") as archive:
            archive.extractall(folder)
        return folder


class FrozenCloud(DiskCloud):
    """The account at AWS that the servers on record belong to."""

    name = "aws"

    def __init__(self) -> None:
        super().__init__("")
        self.account = ACCOUNT


class FrozenMachine(Machine):
    """The server, whose Docker Engine is at `docker_host`; no command arms a watchdog there."""

    def __init__(self, home: Path, docker_host: str) -> None:
        super().__init__(home)
        self.docker_host = docker_host

    def _answer(self, line: str, stdin: bytes) -> Any:
        assert line.split()[-1] not in ("guard", "extend"), "it would end this machine"
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = self.docker_host
        try:
            return self._run(line, stdin)
        finally:
            os.environ.pop("DOCKER_HOST")
            if before is not None:
                os.environ["DOCKER_HOST"] = before

    def _run(self, line: str, stdin: bytes) -> Any:
        from labctl.transports import Result

        environ = {**os.environ, "HOME": str(self.home)}
        done = subprocess.run(
            ["sh", "-c", line], input=stdin, capture_output=True, env=environ, check=False
        )
        out = done.stdout.decode(errors="surrogateescape")
        return Result(code=done.returncode, stdout=out, stderr=done.stderr.decode())


@dataclass
class Student:
    """The student's home and server, put back; `context` is as a new process would make it."""

    frozen: Frozen
    machine: FrozenMachine
    cloud: FrozenCloud

    @property
    def home(self) -> Path:
        return self.frozen.root / "student"

    @property
    def places(self) -> Paths:
        return find_paths({"HOME": str(self.home)})

    def server(self) -> Server:
        found = State(self.places.database).get_lab_server(DIGITS)
        assert found is not None
        return found

    def context(self, lab: str = "digits", lab_id: str = DIGITS) -> LabContext:
        config = load_lab(self.home / lab, environ={"HOME": str(self.home)})
        made = LabContext(config, lab_id, self.places, State(self.places.database), Recorded())
        made.__dict__["provider"] = self.cloud
        made.__dict__["connections"] = Wires(self.places, self.machine)
        return made


@dataclass
class Inspected:
    """An engine that knows the containers whose `docker inspect` was frozen."""

    containers: dict[str, Any]

    def __call__(self, method: str, path: str, body: Any) -> Answer | None:
        words = path.split("?")[0].split("/")[2:]
        if words == ["containers", "json"]:
            return 200, []
        known = self.containers.get(words[1]) if len(words) > 1 else None
        return (200, known) if known and method == "GET" else None
