"""What the benchmarks of the dashboard and of the page for students share.

The course is on disk as a term leaves it: a server, runs, submissions and a grade for nearly
everybody, and a ledger of 100 lines a seat. The pages are served by a process of its own. While
they are watched, another one writes what a keeper writes: every 15 s each server's watchdog and
run, and a line of the ledger each. Times are from the request to the last byte, on a connection of
its own each.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.marks import draft_mark_line

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from dashboard_bed import (  # noqa: E402  # after the path above
    Bed,
    Stream,
    Visitor,
    fill,
    make,
    stream_of,
)

__all__ = [
    "TARGET_PAGE_MS", "Bed", "Visitor", "build_course", "measure_watched", "read_rss_mb", "report",
    "run_benchmark", "serve", "time_first_page", "time_page",
]  # fmt: skip

LEDGER_LINES = 100
# of a rubric
ITEMS, ITEM_POINTS = 8, 5.0
SWEEP_S = 15.0
SETTLE_S = 8.0
REQUESTS = 40
TARGET_PAGE_MS = 100.0


def build_course(root: Path, students: int, assignments: int = 0) -> Bed:
    """Build a complete course as late in a term.

    It has `assignments` more of them, which everybody has submitted and for which everybody has a
    mark for each item of a rubric.
    """
    names = tuple(f"Student {number:04}" for number in range(students))
    bed = fill(make(root, names))
    lines = _add_assignments(bed, assignments)
    for server in bed.state.list_servers():
        seat = next(one for one in bed.folder.list_seats() if one.lab_id == server.lab_id)
        step_s = (bed.now - server.created_at) / LEDGER_LINES
        for number in range(LEDGER_LINES):
            begin = server.created_at + number * step_s
            detail = {
                "server_id": server.id, "from": begin, "until": begin + step_s, "idle_s": 0.0,
                "usd": step_s / 3600 * server.offer.price_usd_per_hour,
            }  # fmt: skip
            lines.append(
                CourseLedgerDraft(kind="cost", seat=seat.name, at=begin + step_s, detail=detail)
            )
        for number in range(8):
            bed.run(server, f"1119-{number:06}-cccc", "exited")
    bed.folder.ledger.append_all(lines)
    return bed


def _add_assignments(bed: Bed, count: int) -> list[CourseLedgerDraft]:
    """Add assignments with submissions and grades; return the ledger's lines of their marks."""
    names = [f"lab{number}" for number in range(count)]
    rubric = ", ".join(f"item{number}: {ITEM_POINTS}" for number in range(ITEMS))
    due = "2099-01-01 00:00 UTC"
    rules = f'{{due: "{due}", points: 100, grade: {{points: 60}}, rubric: {{{rubric}}}}}'
    with bed.folder.config.path.open("a") as file:
        file.writelines(f"  {name}: {rules}\n" for name in names)
    bed.folder.refresh()
    lines = []
    for name in names:
        for student in bed.folder.list_students():
            bed.hand_in(student.id, name)
            bed.grade(student.id, name, 50)
            lines += [
                draft_mark_line(name, student.seat, student.id, f"item{item}", ITEM_POINTS)
                for item in range(ITEMS)
            ]
    return lines


def write_as_keeper(bed: Bed, stop: Any) -> None:
    """Write what the keeper writes during the measurement."""
    step = 421.0
    while not stop.is_set():
        begun = time.monotonic()
        step += 1
        for server in bed.state.list_servers():
            bed.watch(server, busy=(f"GPU 0 is at {int(step) % 100}%",))
            run = next(
                (one for one in bed.state.list_runs(server.lab_id) if not one.has_ended), None
            )
            if run is not None:
                progress = {"step": step, "total_steps": 1000.0}
                bed.state.save_run(msgspec.structs.replace(run, progress=progress))
        bed.folder.ledger.append("cost", seat=bed.seat(0).name, server_id="x")
        stop.wait(max(0.0, SWEEP_S - (time.monotonic() - begun)))


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds (user and system) of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def time_first_page(visitor: Visitor) -> float:
    """Return the milliseconds of the first page that a new process sends."""
    begun = time.perf_counter()
    status, _, _ = visitor.ask("/")
    assert status == 200, status
    return round((time.perf_counter() - begun) * 1000, 1)


def time_page(visitor: Visitor, path: str) -> dict[str, float]:
    """Return a page's milliseconds (median, 95th percentile, maximum) and its size."""
    took = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        status, _, body = visitor.ask(path)
        took.append((time.perf_counter() - begun) * 1000)
        assert status == 200, (path, status)
        time.sleep(0.1)
    took.sort()
    return {
        "median_ms": round(statistics.median(took), 1),
        "p95_ms": round(took[int(len(took) * 0.95) - 1], 1),
        "worst_ms": round(took[-1], 1),
        "kib": round(len(body.encode()) / 1024),
    }


class Watcher(threading.Thread):
    """A browser with the dashboard open, which counts the bytes it receives."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(daemon=True)
        self.stream = Stream(visitor, stream_of(visitor.ask("/")[2]))
        self.events = 0
        self.parts = 0

    def run(self) -> None:
        try:
            while parts := self.stream.update():
                self.events += 1
                self.parts += len(parts)
        except (OSError, AttributeError, http.client.HTTPException):
            return  # the dashboard has ended


@contextmanager
def serve(program: str, root: Path) -> Iterator[tuple[int, str]]:
    """Run a program that serves the course below `root`; yield its pid and the URL it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def measure_watched(
    bed: Bed, pid: int, visitors: Sequence[Visitor], seconds: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Let each of these watch the first page while a keeper writes.

    Returns the times of that page meanwhile, and what the watching cost the process `pid`.
    """
    stop = multiprocessing.Event()
    keeper = multiprocessing.Process(target=write_as_keeper, args=(bed, stop), daemon=True)
    keeper.start()
    watchers = [Watcher(visitor) for visitor in visitors]
    for watcher in watchers:
        watcher.start()
    time.sleep(SETTLE_S)
    cpu_s, begun = read_cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    percent = 100 * (read_cpu_s(pid) - cpu_s) / (time.monotonic() - begun)
    page = time_page(visitors[0], "/")
    stop.set()
    keeper.join(30)
    return page, {
        "cpu_percent_of_a_core": round(percent, 2),
        "events_each": statistics.mean(watcher.events for watcher in watchers),
        "parts_each": statistics.mean(watcher.parts for watcher in watchers),
        "rss_watched_mb": round(read_rss_mb(pid), 1),
    }


def run_benchmark(
    parser: argparse.ArgumentParser,
    name: str,
    measure: Callable[[Path, argparse.Namespace], dict[str, Any]],
    check: Callable[[dict[str, Any]], Mapping[str, bool]],
) -> int:
    """Measure a class of --students for --seconds, and report it."""
    parser.add_argument("--students", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"labctl-{name}-") as folder:
        figures = measure(Path(folder), given)
    # Without updates the pages cost nothing, and the figures say nothing.
    is_updated = figures["events_each"] >= 1
    return report(name, figures, {"each page was updated": is_updated, **check(figures)})


def report(name: str, figures: dict[str, Any], targets: Mapping[str, bool]) -> int:
    """Print the figures and store them under `name`; return 1 if a target was missed."""
    figures["at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    figures["cores"] = os.cpu_count()
    print(json.dumps(figures, indent=1))
    for target, is_met in targets.items():
        print(f"{'met   ' if is_met else 'MISSED'} {target}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(targets.values()) else 1
