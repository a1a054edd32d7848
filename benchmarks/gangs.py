"""From nothing to the first step on four servers at once, compared with one server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from benchmarks.fleet import rehearsal
from benchmarks.measure import Comparison, NotDoneError, Row, environment
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL
from benchmarks.timed_lab import OWNER, TimedLab

SERVERS, TARGET = 4, 1.3
# About as long as an instance of EC2 takes until sshd answers; a container here takes a second.
BOOT = "30s"
# Each process reports its rank, so the output shows that all servers took part.
FIRST_STEP = ("sh", "-c", "echo first step of rank ${RANK:-0}")


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare `up` and `run` on several servers with the same on one."""
    home, rounds = settings.home / "gangs", settings.sizes.few
    # No target: four servers boot on the processors of this machine.
    local = _list_rows(home / "local", "local", None)
    yield Comparison("first step on servers of this machine", local, rounds)
    if settings.sizes.has_training:  # --quick has no time for servers of a cloud
        with rehearsal(home / "cloud", "cloud-init", f"delays.boot={BOOT}") as env:
            cloud = _list_rows(home / "cloud", "aws", TARGET, **env)
            yield Comparison(f"first step on a cloud (rehearsed, boot {BOOT})", cloud, rounds)


def _list_rows(home: Path, provider: str, target: float | None, **env: str) -> list[Row]:
    rows = []
    for name, count in (("one", 1), ("several", SERVERS)):
        start = _Start(_make_lab(home, name, provider, count, env), count)
        limit = target if count > 1 else None
        row = Row(f"{count} servers" if count > 1 else "one server", start, limit, ours=True)
        row.after = start.end
        rows.append(row)
    return rows


def _make_lab(home: Path, name: str, provider: str, count: int, env: dict[str, str]) -> TimedLab:
    root = home / name
    root.mkdir(parents=True)
    server = f"{{provider: {provider}, count: {count}, executor: process}}"
    (root / "lab.yaml").write_text(f"lab: {name}\nserver: {server}\nrun: echo begun\n")
    return TimedLab(home, root, FIRST_STEP, env)


class _Start:
    """`labctl up` and a run whose only work is to print a line on each server."""

    def __init__(self, lab: TimedLab, count: int) -> None:
        self._lab = lab
        self._count = count

    def __call__(self, number: int) -> float:
        begun = time.monotonic()
        self._lab.labctl("up", "--yes")
        run = f"first-{number}"
        first_s = self._await_first_line(run) - begun
        printed = self._lab.labctl("logs", run, *(("--rank", "all") if self._count > 1 else ()))
        for rank in range(self._count):
            if f"first step of rank {rank}" not in printed:
                raise NotDoneError(f"rank {rank} printed nothing: {printed}")
        return first_s

    def _await_first_line(self, run: str) -> float:
        """Run the command to its end; return when its first line was shown."""
        lab = self._lab
        env = {
            **environment(lab.home),
            "LOGNAME": OWNER,
            "LABCTL_CACHE_POOL": OWNER,
            **lab.settings,
        }
        words = [LABCTL, "run", "--id", run, "--", *lab.command]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(words, cwd=lab.root, env=env, text=True, **options) as process:
            shown = [(time.monotonic(), line) for line in process.stdout or ()]
        printed = "".join(line for _, line in shown)
        if process.returncode != 0:
            raise NotDoneError(f"labctl run exited with {process.returncode}: {printed[-600:]}")
        return next(at for at, line in shown if line.startswith("first step"))

    def end(self, number: int) -> None:
        self._lab.end_server()
