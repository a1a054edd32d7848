"""The page for students: the time of a page, and the cost of a whole class that has it open.

    python -m benchmarks.student_page [--students N] [--seconds S]

The course is that of `benchmarks.dashboard`, late in a term. Every student is signed in and has the
page open. The page runs in a process of its own; meanwhile, another one writes what a keeper
writes. Requests for servers are not part of it: they take what `labctl up` takes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.dashboard import (
    RESULTS,
    ROOT,
    SETTLE_S,
    Watcher,
    course,
    cpu_s,
    keep,
    rss_mb,
    timed,
)
from labctl.courses import join_codes

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from dashboard_bed import Bed, Visitor  # after the path above

CODE = "abcdefgh" * 4
TARGET_PAGE_MS, TARGET_CPU_PERCENT = 100.0, 10.0
SERVE = """
import sys, threading
from pathlib import Path
from labctl.config import find_paths
from labctl.courses.records.folder import CourseFolder
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_operations import SeatOperations
from labctl.courses.servers import CourseOperator
from labctl.events import SilentReporter
from labctl.state import State
from labctl.web import http_server
root = Path(sys.argv[1])
places = find_paths({"HOME": str(root / "home")})
state, folder = State(places.database, network=False), CourseFolder(root / "ml-2026")
staff = CourseOperator(folder, places, state, SilentReporter())
settings = http_server.StudentSettings(port=0, services_port=0)
print(http_server.serve_student_page(folder, places, state, settings, stop=threading.Event(),
      request_handler=RequestHandler(folder, SeatOperations(staff))), flush=True)
sys.stdin.read()
"""


def sign_in(bed: Bed, url: str, student: str) -> Visitor:
    public = join_codes.derive_key_pair(bed.folder.id, student, CODE)[1]
    join_codes.store_page_code(bed.folder, student, public, int(time.time()) + 3600)
    visitor = Visitor(f"{url}/")
    status, _, _ = visitor.form("/sign-in", csrf="", student=student, code=CODE)
    assert status == 303, status
    return visitor


def measure(root: Path, students: int, seconds: float) -> dict[str, Any]:
    bed = course(root, students)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        visitors = [sign_in(bed, url, one.id) for one in bed.folder.list_students()]
        page = timed(visitors[0], "/")
        stop = multiprocessing.Event()
        keeper = multiprocessing.Process(target=keep, args=(bed, stop), daemon=True)
        keeper.start()
        crowd = [Watcher(visitor) for visitor in visitors]
        for one in crowd:
            one.start()
        time.sleep(SETTLE_S)
        before, begun = cpu_s(process.pid), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (cpu_s(process.pid) - before) / (time.monotonic() - begun)
        loaded = timed(visitors[0], "/")
        stop.set()
        keeper.join(30)
        return {
            "students": students,
            "page": page,
            "page_while_all_watch": loaded,
            "cpu_percent_of_a_core": round(percent, 2),
            "events_each": statistics.mean(one.events for one in crowd),
            "parts_each": statistics.mean(one.parts for one in crowd),
            "rss_mb": round(rss_mb(process.pid), 1),
        }
    finally:
        process.kill()
        process.wait()
        bed.state.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--students", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labctl-students-") as folder:
        found = measure(Path(folder), given.students, given.seconds)
    found["at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found["cores"] = os.cpu_count()
    print(json.dumps(found, indent=1))
    met = {
        f"a page under {TARGET_PAGE_MS:g} ms (95th of 100)": found["page_while_all_watch"]["p95_ms"]
        < TARGET_PAGE_MS,
        f"all pages under {TARGET_CPU_PERCENT:g}% of a core": found["cpu_percent_of_a_core"]
        < TARGET_CPU_PERCENT,
    }
    for name, holds in met.items():
        print(f"{'met   ' if holds else 'MISSED'} {name}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "student_page.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
