"""The dashboard at 300 students: the time of a page, and the cost of ten watching browsers.

python -m benchmarks.dashboard [--students N] [--watchers N] [--seconds S] [--assignments N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.course_pages import (
    TARGET_PAGE_MS,
    Visitor,
    build_course,
    measure_watched,
    read_rss_mb,
    run_benchmark,
    serve,
    time_first_page,
    time_page,
)

TARGET_CPU_PERCENT, TARGET_RSS_MB = 5.0, 150.0
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


def measure(root: Path, given: argparse.Namespace) -> dict[str, Any]:
    bed = build_course(root, given.students, given.assignments)
    with serve(SERVE, root) as (pid, url), bed.state:
        visitor = Visitor(url)
        visitor.enter()
        first_ms = time_first_page(visitor)
        key = bed.seat(0).pseudonym
        pages = {"board": "/", "seat": f"/seats/{key}", "assignment": "/assignments/hw3",
                 "costs": "/costs"}  # fmt: skip
        times = {name: time_page(visitor, path) for name, path in pages.items()}
        alone_mb = read_rss_mb(pid)
        watched, cost = measure_watched(bed, pid, [visitor] * given.watchers, given.seconds)
    return {
        "students": given.students,
        "watchers": given.watchers,
        "assignments": given.assignments,
        "first_page_ms": first_ms,
        "pages": times,
        "board_while_watched": watched,
        "rss_mb": round(alone_mb, 1),
        **cost,
    }


def check_targets(figures: dict[str, Any]) -> dict[str, bool]:
    slowest = max(times["p95_ms"] for times in figures["pages"].values())
    return {
        f"the first page under {TARGET_PAGE_MS:g} ms": figures["first_page_ms"] < TARGET_PAGE_MS,
        f"pages under {TARGET_PAGE_MS:g} ms (95th of 100)": slowest < TARGET_PAGE_MS,
        f"watchers under {TARGET_CPU_PERCENT:g}% of a core": figures["cpu_percent_of_a_core"]
        < TARGET_CPU_PERCENT,
        f"memory under {TARGET_RSS_MB:g} MB": figures["rss_watched_mb"] < TARGET_RSS_MB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--watchers", type=int, default=10)
    parser.add_argument("--assignments", type=int, default=0, help="more, with marked rubrics")
    return run_benchmark(parser, "dashboard", measure, check_targets)


if __name__ == "__main__":
    sys.exit(main())
