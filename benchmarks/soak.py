"""Memory of commands that run for hours: `forward`, `logs -f` and `pull --follow`.

A run on a real lab server prints and writes all the time; requests go through the forward. What is
compared is the resident memory of each process after a warm-up and at the end.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from benchmarks.lab_server import ReadyLab, start_lab
from benchmarks.measure import Comparison, NotDoneError, Row, environment
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL
from labctl.services.port_forward import find_free_port

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
def _labctl(lab: ReadyLab, out: IO[bytes], *words: str) -> Iterator[subprocess.Popen[bytes]]:
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


def compare(settings: Settings) -> Generator[Comparison]:
    """Measure how much each command's memory grows between its warm-up and the end."""
    with start_lab(settings.home / "soak", settings.image) as lab:
        soak = _Soak(lab, settings.sizes.soak_s)
        rows = [
            Row(f"labctl {name}", work, limit=GROWTH_MB, against=f"labctl {name}", unit="MB")
            for name, work in soak.list_work()
        ]
        yield Comparison(f"growth in {soak.lasting_s:.0f} s", rows, rounds=0)


class _Soak:
    """All commands at the same time, once; each row takes the figure of its command."""

    def __init__(self, lab: ReadyLab, lasting_s: float) -> None:
        self.lab = lab
        self.lasting_s = lasting_s
        self.port = find_free_port(0)
        self.commands = {
            "forward": ("forward", SSH_PORT, "--port", str(self.port)),
            "logs -f": ("logs", "-f", RUN),
            "pull --follow": ("pull", "--follow", RUN),
        }

    def list_work(self) -> list[tuple[str, Callable[[int], float]]]:
        def make_work(name: str) -> Callable[[int], float]:
            return lambda number: self._read_growth_mb(name)

        return [(name, make_work(name)) for name in self.commands]

    def _read_growth_mb(self, name: str) -> float:
        growth = self._growth_mb[name]
        if isinstance(growth, NotDoneError):
            raise growth
        return growth

    @functools.cached_property
    def _growth_mb(self) -> dict[str, float | NotDoneError]:
        """Return the growth of each command, or why there is none: one does not cost the others."""
        self.lab.labctl("run", "--detach", "--id", RUN, "--", "sh", "-c", COMMAND)
        log = self.lab.home / "logs.out"
        with ExitStack() as stack:
            processes = {}
            for name, words in self.commands.items():
                path = log if words[0] == "logs" else self.lab.home / f"{words[0]}.out"
                out = stack.enter_context(path.open("wb"))
                processes[name] = stack.enter_context(_labctl(self.lab, out, *words))
            connections = _connect_repeatedly(self.port, self.lasting_s * WARM_UP_SHARE)
            early = {name: _read_rss_mb(process) for name, process in processes.items()}
            connections += _connect_repeatedly(self.port, self.lasting_s * (1 - WARM_UP_SHARE))
            late = {name: _read_rss_mb(process) for name, process in processes.items()}
        self.lab.labctl("cancel", RUN, "--grace", "1")
        done = {
            "forward": connections,
            "logs -f": log.stat().st_size,
            "pull --follow": len([*(self.lab.root / "runs" / RUN).rglob("part-*")]),
        }
        return {name: _compare(name, early[name], late[name], done[name]) for name in processes}


def _compare(
    name: str, early_mb: float | None, late_mb: float | None, done: int
) -> float | NotDoneError:
    if early_mb is None or late_mb is None:
        return NotDoneError(f"labctl {name} ended too early")
    if not done:
        return NotDoneError(f"labctl {name} carried nothing")
    return late_mb - early_mb


def _connect_repeatedly(port: int, lasting_s: float) -> int:
    """Open connections through the forward; return how many were answered."""
    greeted = 0
    end = time.monotonic() + lasting_s
    while time.monotonic() < end:
        greeted += _greets(port)
        time.sleep(EVERY_S)
    return greeted


def _greets(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as wire:
            return wire.recv(4) == b"SSH-"
    except OSError:
        return False


def _read_rss_mb(process: subprocess.Popen[bytes]) -> float | None:
    """Return the resident memory of the process without its ssh; None if it has ended."""
    if process.poll() is not None:
        return None
    statm = Path(f"/proc/{process.pid}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    words = ("ps", "-o", "rss=", "-p", str(process.pid))
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1000
