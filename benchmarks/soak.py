"""Memory of commands that run for hours: `forward`, `logs -f` and `pull --follow`.

A run on a real lab server prints and writes all the time; requests go through the forward. What is
compared is the resident memory of each process after a warm-up and at the end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.containers import Ready
from benchmarks.measure import NotDoneError, environment
from benchmarks.startup import LABCTL

RUN = "soak"
# on the server's loopback, where its own sshd answers
SSH_PORT = "22"
WARM_UP_SHARE = 0.25
EVERY_S = 0.5
# growth in MB from warm-up to end that counts as growing
GROWTH_MB = 8.0
COMMAND = (
    "i=0; while :; do i=$((i+1)); seq 2000; "
    "head -c 100000 /dev/urandom > $LABCTL_CHECKPOINT_DIR/part-$((i % 20)); sleep 0.2; done"
)


@contextmanager
def _labctl(lab: Ready, out: IO[bytes], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [LABCTL, *words],
        cwd=lab.root,
        env=environment(lab.home),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def run(lab: Ready, lasting_s: float) -> dict[str, Any]:
    """Return by command: MB after the warm-up and at the end, and the work done by then."""
    lab.labctl("run", "--detach", "--id", RUN, "--", "sh", "-c", COMMAND)
    port = _free_port()
    logs = {name: lab.home / f"{name}.out" for name in ("forward", "logs", "pull")}
    words = {
        "forward": ("forward", SSH_PORT, "--port", str(port)),
        "logs": ("logs", "-f", RUN),
        "pull": ("pull", "--follow", RUN),
    }
    with ExitStack() as stack:
        begun = {
            name: stack.enter_context(
                _labctl(lab, stack.enter_context(path.open("wb")), *words[name])
            )
            for name, path in logs.items()
        }
        greeted = _watched(begun, port, lasting_s * WARM_UP_SHARE)
        early = {name: _rss_mb(process) for name, process in begun.items()}
        greeted += _watched(begun, port, lasting_s * (1 - WARM_UP_SHARE))
        late = {name: _rss_mb(process) for name, process in begun.items()}
    done = {
        "forward": f"{greeted} connections",
        "logs": f"{logs['logs'].stat().st_size / 1e6:.1f} MB of log",
        "pull": f"{len(_pulled(lab))} files here",
    }
    lab.labctl("cancel", RUN, "--grace", "1")
    if not greeted or not logs["logs"].stat().st_size or not _pulled(lab):
        raise NotDoneError(f"a command did nothing: {done}")
    return {
        name: {
            "lasting_s": lasting_s,
            "early_mb": round(early[name], 1),
            "late_mb": round(late[name], 1),
            "did": done[name],
            "flat": late[name] - early[name] <= GROWTH_MB,
        }
        for name in begun
    }


def _watched(begun: dict[str, subprocess.Popen[bytes]], port: int, lasting_s: float) -> int:
    """Open connections through the forward; return how many were answered."""
    greeted = 0
    end = time.monotonic() + lasting_s
    while time.monotonic() < end:
        for name, process in begun.items():
            if process.poll() is not None:
                raise NotDoneError(f"labctl {name} exited with {process.returncode}")
        greeted += _greets(port)
        time.sleep(EVERY_S)
    return greeted


def _greets(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as wire:
            return wire.recv(4) == b"SSH-"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pulled(lab: Ready) -> list[Path]:
    return [*(lab.root / "runs" / RUN).rglob("part-*")]


def _rss_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of the process without its ssh."""
    statm = Path(f"/proc/{process.pid}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    words = ("ps", "-o", "rss=", "-p", str(process.pid))
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1000


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["\nmemory, MB: after the warm-up, at the end"]
    for name, one in found.items():
        flat = "flat" if one["flat"] else "GROWS"
        figures = f"{one['early_mb']:>7.1f} {one['late_mb']:>7.1f}"
        lines.append(f"{name:<10}{figures}  {flat}  ({one['lasting_s']:.0f} s, {one['did']})")
    return "\n".join(lines)
