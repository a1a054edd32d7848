"""A lab with its own server, used through the real `labctl` command in a home of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_servers import inside, wait_for

COMMAND_S = 400.0
# A secret's value with what is hard to hand on: a new line and both quotes.
TOKEN = "to\nken-'3f9b\"e1"
LAB_YAML = """\
lab: {name}
server:
  provider: local
  gpu: auto
{local}image: {{build: .}}
run: sh train.sh
env: {{SEED: "7"}}
secrets: [E2E_TOKEN]
outputs: [checkpoints, logs]
limits: {{memory: 96MB, cpus: 1.5, shm: 32MB}}
"""
DOCKERFILE = """\
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN echo made > /made-by-dockerfile
ENTRYPOINT ["env", "FROM_ENTRYPOINT=yes"]
"""
# Shell: wait until the test lets the run go on (`lab.let_go`).
UNTIL_GO = "until [ -e /lab/run/go ]; do sleep 0.02; done"
# Shell: numbered lines until `lab.let_go`.
COUNTING = """\
i=0; until [ -e /lab/run/go ]; do echo "line $i"; i=$((i+1)); sleep 0.03; done; echo last"""


@dataclass
class Process:
    """A `labctl` that runs, with what it has said so far."""

    popen: subprocess.Popen[bytes]
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    readers: list[threading.Thread] = field(default_factory=list)

    def read(self) -> Process:
        for pipe, kept in ((self.popen.stdout, self.out), (self.popen.stderr, self.err)):
            assert pipe is not None
            reader = threading.Thread(target=_drain, args=(pipe.fileno(), kept), daemon=True)
            reader.start()
            self.readers.append(reader)
        return self

    def said(self, text: str, times: int = 1, deadline_s: float = COMMAND_S) -> None:
        """Wait until standard output or error holds `text` so many times."""
        wanted = text.encode()

        def there() -> bool:
            if max(self.out.count(wanted), self.err.count(wanted)) >= times:
                return True
            assert self.popen.poll() is None or any(r.is_alive() for r in self.readers), (
                f"ended without {text!r}: {self.out[-2000:]!r} {self.err.decode()}"
            )
            return False

        wait_for(there, deadline_s)

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)

    def end(self, code: int | None = 0, deadline_s: float = COMMAND_S) -> Process:
        """Wait for its end, which must be `code` (None: any)."""
        try:
            self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            # faulthandler then says on standard error where it hangs.
            self.popen.send_signal(signal.SIGABRT)
            self.popen.wait()
            self.readers[1].join(5)
            raise AssertionError(f"still there: {self.out[-500:]!r} {self.err.decode()}") from None
        finally:
            if self.popen.poll() is None:
                self.popen.kill()
                self.popen.wait()
        for reader in self.readers:
            reader.join()
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()
        told = f"exit {self.code}: {self.out[-2000:].decode(errors='replace')}{self.err.decode()}"
        assert code is None or self.code == code, told
        return self

    @property
    def code(self) -> int:
        return int(self.popen.returncode)

    @property
    def stdout(self) -> str:
        return self.out.decode()

    @property
    def stderr(self) -> str:
        return self.err.decode()


def _drain(pipe: int, kept: bytearray) -> None:
    # EIO is how a terminal says that nobody is at its other end any more.
    with suppress(OSError):
        while block := os.read(pipe, 65536):
            kept.extend(block)


@dataclass
class Terminal:
    """A `labctl` in a terminal of its own: what it shows, and a keyboard."""

    popen: subprocess.Popen[bytes]
    keyboard: int
    shown: bytearray

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def said(self, text: str, deadline_s: float = COMMAND_S) -> None:
        try:
            wait_for(lambda: text.encode() in self.shown, deadline_s)
        except AssertionError as late:
            raise AssertionError(f"{late}: {text!r} in {self.shown.decode()!r}") from None


@dataclass
class LabDirectory:
    """A lab on this machine, and the server that its `labctl up` made."""

    root: Path
    name: str
    environ: dict[str, str]
    server_id: str = ""

    def start(self, *words: str) -> Process:
        popen = subprocess.Popen(
            [sys.executable, "-m", "labctl", *words],
            cwd=self.root,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return Process(popen).read()

    @contextmanager
    def in_terminal(self, *words: str) -> Iterator[Terminal]:
        outside, inside = pty.openpty()
        popen = subprocess.Popen(
            [sys.executable, "-m", "labctl", *words],
            cwd=self.root,
            env={**self.environ, "TERM": "xterm"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        terminal = Terminal(popen, outside, bytearray())
        reader = threading.Thread(target=_drain, args=(outside, terminal.shown), daemon=True)
        reader.start()
        try:
            yield terminal
        finally:
            popen.kill()
            popen.wait()
            reader.join(5)
            os.close(outside)

    def labctl(self, *words: str, code: int | None = 0) -> Process:
        """`labctl` with these words, to its end."""
        return self.start(*words).end(code)

    def run(self, shell: str, *options: str, code: int | None = 0) -> Process:
        """`labctl run` of a shell line, followed to its end."""
        return self.labctl("run", *options, "--", "sh", "-c", shell, code=code)

    def follow(self, run: str, shell: str) -> Process:
        """`labctl run` of a shell line that is followed while the test goes on."""
        return self.start("run", "--id", run, "--", "sh", "-c", shell)

    def json(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.labctl(*words, "--json", code=code).stdout)
        return found

    def seen(self, run: str) -> dict[str, Any]:
        """A run as `labctl status --refresh` tells it."""
        runs = self.json("status", "--refresh")["runs"]
        one: dict[str, Any] = next(found for found in runs if found["id"] == run)
        return one

    def sh(self, line: str, *, check: bool = True, user: str = "root") -> str:
        """A shell line on the server, through the engine: no ssh."""
        code, text = inside(self.server_id, line, user=user, workdir="/home/student")
        assert not check or code == 0, f"{line}: {text}"
        return text

    def student(self, line: str, *, check: bool = True) -> str:
        return self.sh(f"export HOME=/home/student; {line}", check=check, user="student")

    def place(self, run: str) -> str:
        """The run's directory on the server."""
        return f"/home/student/labctl/{self.name}/runs/{run}"

    def let_go(self, run: str) -> None:
        self.student(f"touch {self.place(run)}/go")

    def log(self, run: str) -> str:
        """The run's log as it lies on the server."""
        return self.student(f"cat {self.place(run)}/logs/run.log")

    def containers(self, run: str) -> list[str]:
        words = f"docker ps -a --filter label=labctl.run={run} --format '{{{{.Names}}}}'"
        return self.student(words).split()

    def inspected(self, run: str) -> dict[str, Any]:
        (name,) = self.containers(run)
        found: list[dict[str, Any]] = json.loads(self.student(f"docker inspect {name}"))
        return found[0]

    @contextmanager
    def holding(self, name: str, content: str) -> Iterator[None]:
        """A file of the lab has other content for a while."""
        file = self.root / name
        before = file.read_text() if file.exists() else None
        file.write_text(content)
        try:
            yield
        finally:
            if before is None:
                file.unlink()
            else:
                file.write_text(before)

    @contextmanager
    def gpu(self, need: str) -> Iterator[None]:
        text = (self.root / "lab.yaml").read_text().replace("gpu: auto", f'gpu: "{need}"')
        with self.holding("lab.yaml", text):
            self.labctl("trust", "--yes")
            yield


def make_lab(folder: Path, name: str, base_image: str, local: str = "") -> LabDirectory:
    home, root = folder / "home", folder / name
    for directory in (home, root):
        directory.mkdir()
    (root / "lab.yaml").write_text(LAB_YAML.format(name=name, local=local))
    (root / "Dockerfile").write_text(DOCKERFILE)
    (root / "train.sh").write_text("echo trained\n")
    kept = ("PATH", "PYTHONPATH", "LANG", "DOCKER_HOST", "TMPDIR", "VIRTUAL_ENV")
    environ = {key: os.environ[key] for key in kept if key in os.environ}
    environ |= {"HOME": str(home), "LABCTL_BASE_IMAGE": base_image, "E2E_TOKEN": TOKEN}
    # Whose cached image layers are used: those of the other test servers.
    environ["LOGNAME"] = environ["LABCTL_CACHE_POOL"] = "tests"
    environ["PYTHONFAULTHANDLER"] = "1"
    return LabDirectory(root, name, environ)


@contextmanager
def with_server(lab: LabDirectory) -> Iterator[LabDirectory]:
    """`up`, the image built by a first run, and in the end `down`."""
    try:
        lab.server_id = lab.json("up", "--yes")["server"]["id"]
        lab.labctl("run", "--yes", "--id", "first")
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard")
