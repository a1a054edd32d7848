"""How the jobs of a course whose engine is Slurm ended, a line for each seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.tables import print_table
from labctl.errors import UsageError
from labctl.text import duration_text, optional_text

if TYPE_CHECKING:
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.status import CourseStatus

# The fields of ClassJobs that count ends, with their headings
ENDS = {
    "completed": "DONE",
    "failed": "FAILED",
    "timed_out": "TIME LIMIT",
    "out_of_memory": "MEMORY",
    "preempted": "PREEMPTED",
    "canceled": "CANCELED",
    "other": "OTHER",
}


def require_queue(folder: CourseFolder) -> None:
    """Raise UsageError for a course without Slurm."""
    shared = folder.config.shared
    if shared is None or not shared.has_queue:
        raise UsageError(
            "this course has no jobs",
            why="only runs of a course with `shared: {engine: slurm}` are jobs",
            hint="labctl course status",
        )


def print_jobs(course: CourseStatus) -> None:
    """Print a table of the jobs of all seats, with the ends that occurred."""
    jobs_by_seat = {seat.seat: seat.gpu_minutes.jobs for seat in course.seats if seat.gpu_minutes}
    ends = [name for name in ENDS if any(getattr(jobs, name) for jobs in jobs_by_seat.values())]
    rows = [
        (
            seat,
            f"{jobs.gpu_hours:.1f}",
            *(str(getattr(jobs, name) or "-") for name in ends),
            optional_text(jobs.median_wait_s, duration_text),
            "-"
            if jobs.last_end_at is None
            else f"{duration_text(max(0.0, course.now - jobs.last_end_at))} ago",
        )
        for seat, jobs in jobs_by_seat.items()
    ]
    click.echo()
    headings = ("SEAT", "GPU HOURS", *(ENDS[name] for name in ends), "WAIT", "LAST END")
    print_table(rows, headings)
