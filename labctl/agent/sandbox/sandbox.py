"""A container for a stranger's program: no network, no rights, bounds on all that it can use.

It writes to memory alone (a bounded tmpfs), and its output is never logged: what it prints and the
one file that it leaves go through pipes into this process, which stops reading at a bound. So
nothing that it does can fill the server's disk.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from typing import Any, NamedTuple
from urllib.parse import quote

from ..host import engine
from ..reply import Failure

# The account inside, "nobody": owner of nothing on the server.
OWNER = 65534
OUT, SCRATCH = "/lab/out", "/lab/tmp"
# What the program prints goes to standard error; standard output is its one file, and only that. A
# program that writes there itself forges nothing but its own answer.
WRAPPER = (
    'out=$1; shift; "$@" </dev/null >&2; code=$?; '
    '[ "$code" -eq 0 ] && [ -f "$out" ] && cat -- "$out"; exit "$code"'
)
# Of what it prints, its beginning and its end are kept.
HEAD_BYTES, TAIL_BYTES = 4 * 1024, 28 * 1024
MOST_FILES = 65536
KILLED = 137
END_S = 20.0


class Ended(NamedTuple):
    """How it ended. `outcome`: ok, exit, time, memory, large (its file), none (no file)."""

    outcome: str
    code: int
    said: str
    seconds: float
    output: bytes

    def told(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "code": self.code,
            "said": self.said,
            "seconds": round(self.seconds, 3),
        }


def body(
    image: dict[str, Any],
    command: list[str],
    output: str,
    mounts: list[dict[str, Any]],
    env: dict[str, str],
    labels: dict[str, str],
    limits: dict[str, Any],
) -> dict[str, Any]:
    """The container, as the engine's `create` takes it. `output` names its one file below OUT.

    `limits`: memory_bytes, cpus, pids, disk_bytes, shm_bytes, devices. The image's entrypoint is
    left out: it may print where the answer is read.
    """
    scratch = f"rw,nosuid,nodev,size={limits['disk_bytes']},nr_inodes={MOST_FILES},mode=1777"
    # An image's own /tmp may be closed to all but root, and keeps its mode.
    place = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "USER": "nobody", "PYTHONUNBUFFERED": "1"}
    variables = {**place, **env}
    taken = {"/tmp", SCRATCH, OUT, *(one["Target"] for one in mounts)}
    return {
        "Image": image["Id"],
        "Hostname": "sealed",
        "User": f"{OWNER}:{OWNER}",
        "WorkingDir": "/lab/code",
        "Env": [f"{key}={value}" for key, value in sorted(variables.items())],
        "Labels": labels,
        "Entrypoint": ["/bin/sh", "-c", WRAPPER, "sealed", f"{OUT}/{output}"],
        "Cmd": command,
        "AttachStdout": True,
        "AttachStderr": True,
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "Mounts": [*mounts, *engine.covers(image, taken, limits["disk_bytes"])],
            "NetworkMode": "none",
            "IpcMode": "private",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": limits["memory_bytes"],
            "MemorySwap": limits["memory_bytes"],
            "NanoCpus": round(limits["cpus"] * 1e9),
            "PidsLimit": limits["pids"],
            "ShmSize": limits["shm_bytes"],  # counts as memory, as all of these do
            "Tmpfs": {"/tmp": scratch, SCRATCH: scratch, OUT: scratch},
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "nofile", "Soft": 4096, "Hard": 4096},
            ],
            "OomScoreAdj": 500,
            "LogConfig": {"Type": "none", "Config": {}},
            "DeviceRequests": limits.get("devices") or [],
        },
    }


def run(name: str, made: dict[str, Any], deadline_s: float, most_bytes: int) -> Ended:
    """Run a container to its end, which comes after `deadline_s` at the latest, and remove it.

    A Failure where it could not even begin: that is nothing its program did.
    """
    engine.remove(name)  # what a call that was killed left behind
    engine.create(name, made)
    begun = time.monotonic()
    try:
        read = _Reading(name, begun + deadline_s, most_bytes)
        outcome = read.all()
        seconds = time.monotonic() - begun
        state = (engine.inspect([name]).get(name) or {}).get("State") or {}
    finally:
        engine.remove(name)
    never = str(state.get("StartedAt", "")).startswith("0001")
    if state.get("Error") or never or (not state and not outcome):
        raise Failure("docker", "a sealed container did not start", _why(state, read.text()))
    if state.get("Running"):
        raise Failure("engine", "the engine on the grading server let go of a container that ran")
    code = int(state.get("ExitCode", KILLED))
    if not outcome:
        outcome = _outcome(state, code, bytes(read.output))
    output = bytes(read.output) if outcome == "ok" else b""
    return Ended(outcome, code, read.text(), seconds, output)


def left(label: str) -> list[str]:
    """Ids of the containers that bear a label."""
    filters = quote(json.dumps({"label": [label]}))
    found = json.loads(engine.ask("GET", f"/containers/json?all=1&filters={filters}"))
    return [one["Id"] for one in found]


def _why(state: dict[str, Any], said: str) -> str:
    return str(state.get("Error") or said).strip()[-2000:]


def _outcome(state: dict[str, Any], code: int, output: bytes) -> str:
    # The engine may hear of the kernel's kill after the end. Nobody else kills in here.
    if state.get("OOMKilled") or code == KILLED:
        return "memory"
    if code:
        return "exit"
    return "ok" if output else "none"


class _Reading:
    """Both pipes of a container that starts, up to its end, the deadline or the bound."""

    def __init__(self, name: str, deadline: float, most_bytes: int) -> None:
        self.name = name
        self.deadline = deadline
        self.most_bytes = most_bytes
        self.output = bytearray()
        self.head = bytearray()
        self.tail = bytearray()
        self.left_out = 0

    def all(self) -> str:
        """ "" where it ended by itself, else "time" or "large": then it was ended."""
        # A session of its own: what ends this program's terminal must not end the reading.
        with subprocess.Popen(
            ["docker", "start", "--attach", self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            outcome = self._read(process)
            if outcome:
                # In this order: the engine waits for whoever does not read on.
                process.kill()
                engine.remove(self.name)
            else:
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        return outcome

    def _read(self, process: Any) -> str:
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ, self._take_output)
            ready.register(process.stderr, selectors.EVENT_READ, self._take_said)
            while ready.get_map():
                left_s = self.deadline - time.monotonic()
                if left_s <= 0:
                    return "time"
                for key, _ in ready.select(left_s):
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

    def _take_said(self, block: bytes) -> None:
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += block[:room]
            block = block[room:]
        self.tail += block
        more = len(self.tail) - TAIL_BYTES
        if more > 0:
            del self.tail[:more]
            self.left_out += more

    def text(self) -> str:
        """What was printed; where it was much, its beginning and its end."""
        gap = f"\n[... {self.left_out} bytes ...]\n".encode() if self.left_out else b""
        return bytes(self.head + gap + self.tail).decode("utf-8", "replace")
