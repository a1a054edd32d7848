"""The part of the command course grades that compares grades with Canvas's, and sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.course_options import find_acting_person, shorten_name
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.options import SCREEN
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.courses.canvas import CanvasGradebook, CanvasTransfer
from labctl.errors import UsageError
from labctl.text import count_text

if TYPE_CHECKING:
    from labctl.course import Course
    from labctl.courses.records.folder import CourseFolder


def check_options(assignment: str, to: str | None, is_export: bool) -> None:
    """Raise UsageError if --send lacks --to, or --to writes a file as well."""
    if to is None:
        raise UsageError(
            "--send needs --to", hint=f"labctl course grades {assignment} --to canvas --send"
        )
    if is_export:
        raise UsageError(
            "--to cannot be combined with --format or --out",
            why="one sends grades, the others write a file",
            hint=f"labctl course grades {assignment} --to {to}",
        )


def transfer_grades(
    ctx: click.Context, course: Course, name: str, *, penalty: bool, send: bool, json_: bool
) -> None:
    """Show the grades that differ from Canvas's; with `send`, send them.

    Exits with 1 if Canvas did not take all of them.
    """
    gradebook = CanvasGradebook(course.folder, course.paths, name)
    transfer = gradebook.plan(penalty=penalty)
    if not json_:
        _print_changes(transfer, course.folder)
    if send and transfer.changes:
        transfer = gradebook.send(transfer, find_acting_person(), ctx.meta[SCREEN])
        ctx.meta[SCREEN].stop_drawing()
    if json_:
        print_json({"canvas": transfer})
    elif send:
        _print_sent(transfer)
    elif transfer.changes:
        command = f"labctl course grades {name} --to canvas --send"
        print_message("Nothing was sent.")
        print_next(command)
    ctx.exit(1 if transfer.failed else 0)


def _print_changes(transfer: CanvasTransfer, folder: CourseFolder) -> None:
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    rows = [
        (
            change.student,
            shorten_name(names.get(change.student) or "-"),
            change.before or "-",
            change.after,
        )
        for change in transfer.changes
    ]
    if rows:
        print_table(rows, ("STUDENT", "NAME", "IN CANVAS", "NEW"))
    same = f"{count_text(transfer.same, 'grade')} already there"
    print_message(f"{clean(transfer.title)} in Canvas: {len(rows)} to send, {same}")
    for note in transfer.notes:
        print_message(clean(note))


def _print_sent(transfer: CanvasTransfer) -> None:
    print_message(f"sent {count_text(transfer.sent, 'grade')} to Canvas")
    if transfer.failed:
        students = ", ".join(transfer.failed)
        print_message(f"Canvas rejected the grades of: {clean(students)}")
        command = f"labctl course grades {transfer.assignment} --to canvas --send"
        print_next(f"{command}   # sends only these")
