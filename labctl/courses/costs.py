"""The costs of a course, for people and for spreadsheets."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence

import msgspec

from labctl.courses.context import find_baked_image
from labctl.courses.metering import record_costs
from labctl.courses.records.cost_report import (
    CourseCosts,
    add_gpu_minutes,
    compute_course_costs,
)
from labctl.courses.records.gpu_minutes import read_gpu_minutes
from labctl.courses.records.spending import RunningServer
from labctl.courses.servers import CourseOperator
from labctl.courses.status import refresh_gpu_minutes

COLUMNS = (
    *("student", "team", "section", "active", "usd", "hours", "idle_hours"),
    *("seat_usd", "seat_budget_usd", "seat_left_usd"),
)


def compute_costs(
    staff: CourseOperator, *, refresh: bool = False, now: float | None = None
) -> CourseCosts:
    """Compute a course's costs from its ledger.

    With `refresh` the ledger is first updated from the provider. Without it, servers that are on
    record as up count as running until now.
    """
    folder = staff.folder
    living: list[RunningServer] | None = None
    if refresh:
        course = staff.course()
        servers = course.provider.servers()
        record_costs(folder, course, servers)
        refresh_gpu_minutes(course)
        living = folder.list_running(servers)
    costs = compute_course_costs(
        folder.config,
        folder.list_students(active_only=False),
        folder.ledger.list_entries(),
        time.time() if now is None else now,
        living,
    )
    if (image := find_baked_image(folder)) is not None:
        costs = msgspec.structs.replace(costs, image_usd_per_month=image.usd_per_month)
    names = [seat.seat for seat in costs.seats if seat.students]
    return add_gpu_minutes(costs, read_gpu_minutes(folder.config, folder.private, names))


def format_csv(found: CourseCosts) -> str:
    """Return the costs as CSV, one line for each student, without names.

    A team's dollars are split equally. In a course with Slurm, lines also have the seat's GPU
    minutes.
    """
    seats = {student: seat for seat in found.seats for student in seat.students}
    has_minutes = any(seat.gpu_minutes for seat in found.seats)
    rows: list[Sequence[object]] = [(*COLUMNS, *(("seat_gpu_minutes",) if has_minutes else ()))]
    for cost in found.students:
        seat = seats[cost.student]
        rows.append(
            (
                cost.student,
                cost.team,
                escape_formula(cost.section),
                "yes" if cost.active else "no",
                f"{cost.usd:.4f}",
                f"{cost.hours:.3f}",
                f"{cost.idle_hours:.3f}",
                f"{seat.usd:.4f}",
                "" if seat.budget_usd is None else f"{seat.budget_usd:.2f}",
                "" if seat.left_usd is None else f"{seat.left_usd:.4f}",
                *((seat.gpu_minutes.used if seat.gpu_minutes else "",) if has_minutes else ()),
            )
        )
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def escape_formula(text: str) -> str:
    """Return a cell's text, quoted if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
