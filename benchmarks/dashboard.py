"""The dashboard at 300 students: the time of a page, and the cost of ten watching browsers.

    python -m benchmarks.dashboard [--students N] [--watchers N] [--seconds S]

The course is on disk as a term leaves it: a server, runs, hand-ins and a grade for nearly
everybody, and a ledger of 100 lines a seat. The dashboard runs in a process of its own. While it is
watched, another one writes what a keeper writes: every 15 s each server's watchdog and run, and a
line of the ledger each. Times are from asking to the last byte, on a connection of its own each.
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
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from dashboard_bed import Bed, Stream, Visitor, fill, make, stream_of  # noqa: E402  # after the path above

LEDGER_LINES = 100
SWEEP_S = 15.0
SETTLE_S = 8.0
ASKED = 40
TARGET_PAGE_MS, TARGET_CPU_PERCENT, TARGET_RSS_MB = 100.0, 5.0, 150.0
SERVE = """
import sys, threading
from pathlib import Path
from labctl.courses.records.folder import CourseFolder
from labctl.config import find_paths
from labctl.web import http_server as serve
from labctl.state import State
root = Path(sys.argv[1])
places = find_paths({"HOME": str(root / "home")})
state = State(places.database, network=False)
print(serve.serve_dashboard(CourseFolder(root / "ml-2026"), places, state,
                            port=0, stop=threading.Event()), flush=True)
sys.stdin.read()
"""


def course(root: Path, students: int) -> Bed:
    """Build a complete course as late in a term."""
    names = tuple(f"Student {number:04}" for number in range(students))
    bed = fill(make(root, names))
    from labctl.courses.records.ledger_entries import CourseLedgerDraft

    lines = []
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


def keep(bed: Bed, stop: Any) -> None:
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


def cpu_s(pid: int) -> float:
    """Return the CPU seconds (user and system) of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def timed(visitor: Visitor, path: str) -> dict[str, float]:
    """Return a page's milliseconds (median, 95th percentile, maximum) and its size."""
    took = []
    for _ in range(ASKED):
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


def measured(root: Path, students: int, watchers: int, seconds: float) -> dict[str, Any]:
    bed = course(root, students)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        visitor = Visitor(process.stdout.readline().strip())
        visitor.enter()
        begun = time.perf_counter()
        visitor.ask("/")
        first_ms = (time.perf_counter() - begun) * 1000
        key = bed.seat(0).pseudonym
        pages = {"board": "/", "seat": f"/seats/{key}", "assignment": "/assignments/hw3",
                 "costs": "/costs"}  # fmt: skip
        times = {name: timed(visitor, path) for name, path in pages.items()}
        alone = rss_mb(process.pid)
        stop = multiprocessing.Event()
        keeper = multiprocessing.Process(target=keep, args=(bed, stop), daemon=True)
        keeper.start()
        crowd = [Watcher(visitor) for _ in range(watchers)]
        for one in crowd:
            one.start()
        time.sleep(SETTLE_S)
        before, begun = cpu_s(process.pid), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (cpu_s(process.pid) - before) / (time.monotonic() - begun)
        loaded = timed(visitor, "/")
        stop.set()
        keeper.join(30)
        return {
            "students": students,
            "watchers": watchers,
            "first_page_ms": round(first_ms, 1),
            "pages": times,
            "board_while_watched": loaded,
            "cpu_percent_of_a_core": round(percent, 2),
            "events_each": statistics.mean(one.events for one in crowd),
            "rows_each": statistics.mean(one.parts for one in crowd),
            "rss_mb": round(alone, 1),
            "rss_watched_mb": round(rss_mb(process.pid), 1),
        }
    finally:
        process.kill()
        process.wait()
        bed.state.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--students", type=int, default=300)
    parser.add_argument("--watchers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labctl-dashboard-") as folder:
        found = measured(Path(folder), given.students, given.watchers, given.seconds)
    found["at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found["cores"] = os.cpu_count()
    print(json.dumps(found, indent=1))
    slowest = max(one["p95_ms"] for one in found["pages"].values())
    met = {
        f"pages under {TARGET_PAGE_MS:g} ms (95th of 100)": slowest < TARGET_PAGE_MS,
        f"watchers under {TARGET_CPU_PERCENT:g}% of a core": found["cpu_percent_of_a_core"]
        < TARGET_CPU_PERCENT,
        f"memory under {TARGET_RSS_MB:g} MB": found["rss_watched_mb"] < TARGET_RSS_MB,
    }
    for name, holds in met.items():
        print(f"{'met   ' if holds else 'MISSED'} {name}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "dashboard.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
