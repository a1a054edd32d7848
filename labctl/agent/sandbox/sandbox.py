"""A sandbox for an untrusted program: a container without network or privileges, with limits.

The program writes only to memory (a tmpfs of limited size), and its output is never logged: what it
prints, and its one result file, go through pipes to this process, which stops reading at a limit.
So the program cannot fill the server's disk.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from typing import Any, NamedTuple

from ...wire.sandbox import ProgramResult, SandboxLimits
from ..host import engine
from ..host.engine_objects import (
    ContainerHealthcheck,
    ContainerLog,
    ContainerState,
    Image,
    Mount,
    NewContainer,
    NewHostConfig,
    Ulimit,
)
from ..reply import Failure
from ..runs.containers import ResourceLimits, build_device_requests, limit, restrict

# The account inside, "nobody", which owns nothing on the server.
OWNER = 65534
OUT, SCRATCH = "/lab/out", "/lab/tmp"
# The program's output goes to standard error; standard output carries only its result file. A
# program that writes to it directly forges only its own result.
WRAPPER = (
    'out=$1; shift; "$@" </dev/null >&2; code=$?; '
    '[ "$code" -eq 0 ] && [ -f "$out" ] && cat -- "$out"; exit "$code"'
)
# bytes kept of the beginning and the end of its output
HEAD_BYTES, TAIL_BYTES = 4 * 1024, 28 * 1024
MOST_FILES = 65536
KILLED = 137
END_S = 20.0


class SandboxResult(NamedTuple):
    """How a program ended, and its result file; b"" unless the outcome is "ok"."""

    program: ProgramResult
    output: bytes


def build_sandbox_container(
    image: Image,
    command: tuple[str, ...],
    output: str,
    mounts: list[Mount],
    env: dict[str, str],
    labels: dict[str, str],
    limits: SandboxLimits,
) -> NewContainer:
    """Return a container without network. `output` is its file below OUT.

    The image's entrypoint is not used, since it may print to the pipe of the result.
    """
    scratch = f"rw,nosuid,nodev,size={limits.disk_bytes},nr_inodes={MOST_FILES},mode=1777"
    # An image's own /tmp may be writable for root only, and would keep its mode.
    defaults = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "USER": "nobody", "PYTHONUNBUFFERED": "1"}
    variables = {**defaults, **env}
    used_targets = {"/tmp", SCRATCH, OUT, *(mount.Target for mount in mounts)}
    config = NewHostConfig(
        Mounts=(*mounts, *engine.build_volume_mounts(image, used_targets, limits.disk_bytes)),
        IpcMode="private",
        Ulimits=(Ulimit("core", 0, 0), Ulimit("nofile", 4096, 4096)),
        OomScoreAdj=500,
        LogConfig=ContainerLog("none", {}),
        DeviceRequests=build_device_requests(limits.gpus),
    )
    # /dev/shm and every tmpfs count as memory too.
    return NewContainer(
        Image=image.Id,
        Hostname="sealed",
        User=f"{OWNER}:{OWNER}",
        WorkingDir="/lab/code",
        Env=tuple(f"{key}={value}" for key, value in sorted(variables.items())),
        Labels=labels,
        Entrypoint=("/bin/sh", "-c", WRAPPER, "sealed", f"{OUT}/{output}"),
        Cmd=command,
        AttachStdout=True,
        AttachStderr=True,
        Healthcheck=ContainerHealthcheck(("NONE",)),
        HostConfig=restrict(
            limit(config, ResourceLimits(limits.memory_bytes, limits.cpus, limits.shm_bytes)),
            {"/tmp": scratch, SCRATCH: scratch, OUT: scratch},
            pids=limits.pids,
        ),
    )


def run_sandboxed(
    name: str, container: NewContainer, deadline_s: float, most_bytes: int
) -> SandboxResult:
    """Run a container for at most `deadline_s` seconds, and remove it.

    Failure if it could not start, which is not its program's fault.
    """
    engine.remove_container(name)  # left behind by a killed call
    engine.create_container(name, container)
    started_s = time.monotonic()
    try:
        reader = _OutputReader(name, started_s + deadline_s, most_bytes)
        outcome = reader.start_and_read()
        seconds = time.monotonic() - started_s
        container_after = engine.inspect_container(name)
    finally:
        engine.remove_container(name)
    state = container_after.State if container_after else ContainerState(ExitCode=KILLED)
    never_started = state.StartedAt.startswith("0001")
    if state.Error or never_started or (container_after is None and not outcome):
        raise Failure(
            "docker", "a sandbox container did not start", _error_text(state, reader.output_text())
        )
    if state.Running:
        what = "the Docker Engine on the grading server lost a running container"
        raise Failure("engine", what)
    code = state.ExitCode
    if not outcome:
        outcome = _determine_outcome(state, code, bytes(reader.output))
    output = bytes(reader.output) if outcome == "ok" else b""
    program = ProgramResult(outcome, code, reader.output_text(), round(seconds, 3))
    return SandboxResult(program, output)


def list_labeled_containers(label: str) -> list[str]:
    """Return the ids of the containers with this label."""
    return [container.Id for container in engine.list_containers(label, all_states=True)]


def _error_text(state: ContainerState, printed: str) -> str:
    return (state.Error or printed).strip()[-2000:]


def _determine_outcome(state: ContainerState, code: int, output: bytes) -> str:
    # The engine may learn of the kernel's OOM kill after the end. Nothing else kills here.
    if state.OOMKilled or code == KILLED:
        return "memory"
    if code:
        return "exit"
    return "ok" if output else "none"


class _OutputReader:
    """Reads both pipes of a container until its end, the deadline or the size limit."""

    def __init__(self, name: str, deadline: float, most_bytes: int) -> None:
        self.name = name
        self.deadline = deadline
        self.most_bytes = most_bytes
        self.output = bytearray()
        self.head = bytearray()
        self.tail = bytearray()
        self.left_out = 0

    def start_and_read(self) -> str:
        """Start the container and read; return "time" or "large" if it was stopped, else ""."""
        # A session of its own, so that closing this program's terminal does not stop it.
        with subprocess.Popen(
            ["docker", "start", "--attach", self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            outcome = self._read(process)
            if outcome:
                # In this order: the engine waits for a client that has stopped reading.
                process.kill()
                engine.remove_container(self.name)
            else:
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        return outcome

    def _read(self, process: Any) -> str:
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ, self._take_output)
            ready.register(process.stderr, selectors.EVENT_READ, self._take_printed)
            while ready.get_map():
                remaining_s = self.deadline - time.monotonic()
                if remaining_s <= 0:
                    return "time"
                for key, _ in ready.select(remaining_s):
                    block = os.read(key.fd, 64 * 1024)
                    if block:
                        key.data(block)
                    else:
                        ready.unregister(key.fileobj)
                if len(self.output) > self.most_bytes:
                    return "large"
        return ""

    def _take_output(self, block: bytes) -> None:
        self.output += block

    def _take_printed(self, block: bytes) -> None:
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += block[:room]
            block = block[room:]
        self.tail += block
        more = len(self.tail) - TAIL_BYTES
        if more > 0:
            del self.tail[:more]
            self.left_out += more

    def output_text(self) -> str:
        """The output; of a long output, its beginning and its end."""
        gap = f"\n[... {self.left_out} bytes ...]\n".encode() if self.left_out else b""
        return bytes(self.head + gap + self.tail).decode("utf-8", "replace")
