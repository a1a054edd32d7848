"""The page for students: the time of a page, and the cost of a whole class that has it open.

    python -m benchmarks.student_page [--students N] [--seconds S]

Every student is signed in and has the page open. Requests for servers are not part of it: they take
what `labctl up` takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.course_pages import (
    TARGET_PAGE_MS,
    Bed,
    Visitor,
    build_course,
    measure_watched,
    run_benchmark,
    serve,
    time_first_page,
    time_page,
)
from labctl.courses import join_codes

CODE = "abcdefgh" * 4
TARGET_CPU_PERCENT = 10.0
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


def measure(root: Path, given: argparse.Namespace) -> dict[str, Any]:
    bed = build_course(root, given.students)
    with serve(SERVE, root) as (pid, url), bed.state:
        first, *others = [student.id for student in bed.folder.list_students()]
        visitors = [sign_in(bed, url, first)]
        first_ms = time_first_page(visitors[0])
        visitors += [sign_in(bed, url, student) for student in others]
        page = time_page(visitors[0], "/")
        watched, cost = measure_watched(bed, pid, visitors, given.seconds)
    return {
        "students": given.students,
        "first_page_ms": first_ms,
        "page": page,
        "page_while_all_watch": watched,
        **cost,
    }


def check_targets(figures: dict[str, Any]) -> dict[str, bool]:
    slow_ms = figures["page_while_all_watch"]["p95_ms"]
    return {
        f"a page under {TARGET_PAGE_MS:g} ms (95th of 100)": slow_ms < TARGET_PAGE_MS,
        f"all pages under {TARGET_CPU_PERCENT:g}% of a core": figures["cpu_percent_of_a_core"]
        < TARGET_CPU_PERCENT,
        f"the first page under {TARGET_PAGE_MS:g} ms": figures["first_page_ms"] < TARGET_PAGE_MS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    return run_benchmark(parser, "student_page", measure, check_targets)


if __name__ == "__main__":
    sys.exit(main())
