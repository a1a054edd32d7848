"""`labctl` commands as processes that need no start: forked from one that has imported everything.

Run as a program, it reads requests from standard input, a JSON object on each line, and answers in
the same way: the process it has begun, and how each one ended. It has no threads, so that a fork of
it is whole. `Warm` is how tests use it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

COMMAND_S = 300.0
MODULES = (
    *(
        f"labctl.cli.{name}"
        for name in ("exit_codes", "screen", "setup", "status", "billing", "runs", "settings")
    ),
    *(f"labctl.lifecycle.{name}" for name in ("down", "status", "up")),
    *(f"labctl.servers.{name}" for name in ("guard", "leftovers")),
    "labctl.lab",
    "labctl.providers.aws",
    "boto3",
    "botocore.httpsession",
    "filelock",
    "jinja2",
    "tenacity",
)
# By these audit events a file appears at its place.
EFFECTS = ("os.rename", "os.link")
RANDOM = re.compile(r"[0-9a-f]{8,}")


# In the program: no part of a test's own process.


def serve() -> None:
    for name in MODULES:
        importlib.import_module(name)
    _read_models_once()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not sys.stdin:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _answer({"pid": key.data, "code": os.waitstatus_to_exitcode(status)})
            elif line := sys.stdin.readline():
                pid = _begun(json.loads(line))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _answer({"begun": pid})
            else:
                return


def _answer(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


def _read_models_once() -> None:
    """AWS's library reads a megabyte about EC2 in every process: half of what a command takes."""
    import boto3
    from botocore.loaders import JSONFileLoader

    JSONFileLoader.load_file = functools.cache(JSONFileLoader.load_file)
    session = boto3.session.Session("none", "none", region_name="us-east-1")
    for service in ("ec2", "ssm", "pricing", "scheduler"):
        session.client(service).close()


def _begun(request: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    code = 70
    try:
        code = _labctl(request)
    finally:
        os._exit(code)


def _labctl(request: dict[str, Any]) -> int:
    from labctl.cli import main

    os.setsid()
    for number, place in enumerate((os.devnull, request["said"], request["said"])):
        os.dup2(os.open(place, os.O_RDWR | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    random.seed()
    for place, value in request["settings"].items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)
    if request["trace"]:
        _trace(Path(request["trace"]), request["last"])
    sys.argv = ["labctl", *request["words"]]
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _trace(file: Path, last: str) -> None:
    """Write down each effect on this machine; before the one called `last`, kill -9."""
    from labctl.state import State

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: Counter[str] = Counter()

    def effect(name: str) -> None:
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} ({seen[name]})"
        if numbered == last:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(descriptor, f"{numbered}\n".encode())

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in EFFECTS:
            effect(f"{event} {RANDOM.sub('*', Path(args[1]).name)}")

    written = State._write

    def write(self: State, line: str, values: tuple[Any, ...] = ()) -> None:
        what = " ".join(line.split()[:3])
        effect(f"{what} {values[1]}" if "events" in what else what)
        written(self, line, values)

    State._write = write
    sys.addaudithook(audit)


# For tests.


@dataclass
class Command:
    """A `labctl` that was begun. `said` is what it wrote on either output."""

    pid: int
    file: Path
    done: threading.Event = field(default_factory=threading.Event)
    code: int | None = None

    @property
    def said(self) -> str:
        return self.file.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9. A process that has ended is left alone: its number may be another's."""
        if not self.done.is_set():
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = COMMAND_S) -> int:
        """Its exit code; minus the signal that ended it."""
        if not self.done.wait(timeout_s):
            self.kill()
            raise AssertionError(f"still there after {timeout_s} s:\n{self.said}")
        assert self.code is not None
        return self.code


class Warm:
    """A context manager; `start` begins a command and returns at once."""

    def __enter__(self) -> Warm:
        self._directory = tempfile.TemporaryDirectory()
        self._commands: dict[int, Command] = {}
        self._begun: Queue[Command] = Queue()
        self._lock = threading.Lock()
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(COMMAND_S)
        self._reader.join(COMMAND_S)
        self._process.stdout.close()
        self._directory.cleanup()

    def end_all(self) -> None:
        """kill -9 of every command that still goes on."""
        for command in list(self._commands.values()):
            command.kill()
            command.wait()

    def start(
        self,
        *words: str,
        directory: Path,
        environ: dict[str, str],
        settings: dict[str, float] | None = None,
        trace: Path | None = None,
        last: str = "",
    ) -> Command:
        """`settings` are constants of labctl's by their dotted name. `trace` is a file to which
        effects on this machine are written, line by line; before the one called `last` the
        process is killed."""
        with self._lock:
            self._count += 1
            said = Path(self._directory.name) / f"{self._count}"
            said.touch()
            request = {
                "words": words,
                "directory": str(directory),
                "environ": environ,
                "said": str(said),
                "settings": settings or {},
                "trace": str(trace or ""),
                "last": last,
            }
            assert self._process.stdin is not None
            self._file = said
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._begun.get(timeout=COMMAND_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "begun" in told:
                command = self._commands[told["begun"]] = Command(told["begun"], self._file)
                self._begun.put(command)
            else:
                command = self._commands.pop(told["pid"])
                command.code = told["code"]
                command.done.set()


if __name__ == "__main__":
    serve()
