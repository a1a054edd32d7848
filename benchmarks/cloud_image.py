"""A new cloud server loads an image that this machine keeps: what the early start of it is worth.

The cloud is labctl's rehearsal, whose instances boot in containers on this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fleet import rehearsal
from benchmarks.measure import Comparison, NotDoneError, Row
from benchmarks.timed_lab import TimedLab, make_small_lab

# seconds for a background process to keep the image that the first lab's server has built
KEPT_S = 900.0
IMAGE_MIB = 512


def compare(home: Path, rounds: int) -> Generator[Comparison]:
    """Compare `up` and `run` on a new server with the same where the load begins with `run`.

    A server of the provider `local` builds the image, since this machine keeps no other.
    """
    late = "up, run; the load begins with `run`"
    with rehearsal(home, "cloud-init") as env:
        builder = make_small_lab(home, "builder", IMAGE_MIB)
        measured = _Measured(builder, make_small_lab(home, "cloud", IMAGE_MIB, "aws", **env))
        rows = [
            Row(late, measured.load_late, before=measured.prepare, after=measured.end_server),
            # No target: here boot, load and push share two cores and wait for no network.
            Row("labctl up, labctl run", measured.load_early, after=measured.end_server),
        ]
        yield Comparison("a new cloud server (rehearsed) with a kept image", rows, rounds)


class _Measured:
    def __init__(self, builder: TimedLab, lab: TimedLab) -> None:
        self._builder, self._lab = builder, lab
        self._archives = lab.home / ".cache" / "labctl" / "images"

    def prepare(self, number: int) -> None:
        """Have the image built on this machine and kept, once."""
        if self._has_archive():
            return
        self._builder.run_on_new_server(f"kept-{number}")
        deadline = time.monotonic() + KEPT_S
        while not self._has_archive():
            if time.monotonic() > deadline:
                raise NotDoneError("the image was not kept")
            time.sleep(1)
        self._builder.end_server()

    def load_late(self, number: int) -> float:
        with _hide(self._archives):
            up = self._lab.read_timings("up", "--yes")
        return self._run(up["total_s"], f"late-{number}")

    def load_early(self, number: int) -> float:
        return self._run(self._lab.read_timings("up", "--yes")["total_s"], f"early-{number}")

    def end_server(self, number: int) -> None:
        self._lab.end_server()

    def _run(self, up_s: float, run_id: str) -> float:
        run = self._lab.run(run_id)
        if self._lab.labctl(
            "ssh", "--", f"ls labctl/{self._lab.root.name}/builds 2>/dev/null; true"
        ):
            raise NotDoneError("the server built the image")
        total_s: float = up_s + run["total_s"]
        return total_s

    def _has_archive(self) -> bool:
        return bool(json.loads(self._lab.labctl("images", "--json"))["images"])


@contextmanager
def _hide(folder: Path) -> Iterator[None]:
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    try:
        yield
    finally:
        if folder.exists():
            raise NotDoneError("labctl has made another directory of archives")
        hidden.rename(folder)
