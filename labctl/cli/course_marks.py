"""The commands course mark and course excuse: points by hand, and excused students."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import WHY, find_acting_person, names_by_seat
from labctl.cli.exit_codes import INTERRUPTED, clean, print_next
from labctl.cli.options import json_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.unreleased import print_unseen_change
from labctl.cli.wrapping import print_message
from labctl.courses import marking, marking_tasks
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.records.gradebook import points_text
from labctl.courses.records.marks import list_notes
from labctl.courses.submission_files import find_submission
from labctl.decoding import convert_value
from labctl.errors import LabError, LockHeldError, UsageError
from labctl.model import Value
from labctl.text import count_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from labctl.courses.marking import GivenMark
    from labctl.courses.marking_tasks import MarkingTask
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.records.marks import ItemMark, MarkedSubmission, RubricItem

# what `mark --next` accepts
ENTER = "Enter points such as 7 or 7.5, s to skip an item, or q to stop"
# earlier notes that `mark --next` offers
MOST_NOTES = 5


@click.command("mark", short_help="Give points for the items of a rubric.")
@click.argument("assignment")
@click.argument("name", metavar="[STUDENT]", default="")
@click.argument("item", metavar="[ITEM]", default="")
@click.argument("points", metavar="[POINTS]", default="")
@click.option("--note", default="", help="A note that the student reads with the grade.")
@click.option("--alone", is_flag=True, help="Mark only this student, not the whole team.")
@click.option("--replace", is_flag=True, help="Replace a mark that another grader has given.")
@click.option("--undo", is_flag=True, help="Take the mark back.")
@click.option("--next", "next_", is_flag=True, help="Go through what is to be marked, and ask.")
@click.option("--list", "list_", is_flag=True, help="List what is to be marked.")
@json_option
@click.pass_context
def mark_command(ctx: click.Context, /, **options: Any) -> None:
    """Give STUDENT (and their team) POINTS for ITEM of the rubric of ASSIGNMENT.

    Several graders can mark at the same time. A mark of another grader is replaced only with
    --replace; the ledger keeps every mark with who gave it (labctl course --as NAME).

    \b
    labctl course mark hw3 --list
    labctl course mark hw3 alice presentation 17 --note "clear slides"
    labctl course mark hw3 --next
    """
    assignment, json_ = options["assignment"], options["json_"]
    folder = open_course(ctx, quiet=json_).folder
    if not options["list_"] and not options["next_"]:
        given = _record_mark(folder, convert_value(options, MarkOptions))
        if json_:
            print_json({"mark": given})
        else:
            print_mark(given)
            _print_missing(given)
            print_unseen_change(folder, assignment, given.students)
        return
    if options["name"] or (options["next_"] and (options["list_"] or json_)):
        raise UsageError(
            "--list and --next take only an assignment",
            hint=f"labctl course mark {assignment} --list",
        )
    if options["list_"]:
        _print_tasks(folder, assignment, json_)
    else:
        _walk(folder, assignment)


class MarkOptions(Value, frozen=True):
    """The words and options of a command that gives one mark, or takes it back."""

    assignment: str
    name: str
    item: str
    points: str
    note: str
    alone: bool
    replace: bool
    undo: bool


def _record_mark(folder: CourseFolder, options: MarkOptions) -> GivenMark:
    """Give the mark that the command's words name, or take it back."""
    assignment = options.assignment
    if not options.item or bool(options.points) == options.undo:
        raise UsageError(
            "a mark needs a student, an item and points",
            hint=f"labctl course mark {assignment} alice presentation 17\n"
            f"labctl course mark {assignment} alice presentation --undo",
        )
    who = (folder, assignment, options.name, options.item)
    by = find_acting_person()
    if options.undo:
        return marking.take_back_mark(*who, by=by, alone=options.alone)
    return marking.give_mark(
        *who,
        read_points(options.points),
        note=options.note,
        by=by,
        alone=options.alone,
        replace=options.replace,
    )


def read_points(text: str) -> str:
    """Return points with a decimal point: many people type a comma."""
    return text.strip().replace(",", ".")


def print_mark(given: GivenMark) -> None:
    students, most = ", ".join(given.students), points_text(given.most)
    before = given.before
    was = f" (was {_describe_before(before)})" if before else ""
    if given.points is None:
        click.echo(f"{students}: {given.item} is unmarked again{clean(was)}")
        return
    click.echo(f"{students}: {given.item} {points_text(given.points)} of {most}{clean(was)}")


def _print_missing(given: GivenMark) -> None:
    """Say that a first mark is for somebody who has submitted nothing: maybe the wrong name."""
    is_first = given.points is not None and given.before is None
    if is_first and given.submission is not None and not given.submission.number:
        have = "has" if len(given.students) == 1 else "have"
        who = clean(", ".join(given.students))
        text = f"{who} {have} not submitted {given.assignment}; the points count all the same"
        print_message(f"! {text}", fg="yellow")


def _describe_before(before: ItemMark) -> str:
    """Describe a mark that was replaced, as in "8, by ann, for submission 1"."""
    number = before.submission.number if before.submission else 0
    submission = f", for submission {number}" if number else ""
    return f"{points_text(before.points)}, by {before.by or 'unknown'}{submission}"


def _print_tasks(folder: CourseFolder, assignment: str, json_: bool) -> None:
    tasks = marking.list_marking_tasks(folder, assignment)
    if json_:
        print_json({"assignment": assignment, "unmarked": tasks})
        return
    if not tasks:
        click.echo(_describe_no_tasks(folder, assignment))
        return
    names = names_by_seat(folder)
    rows = [
        (seat, names.get(seat, "-"), number, items, why)
        for seat, number, items, why in marking_tasks.describe_tasks(tasks)
    ]
    print_table(rows, ("SEAT", "NAME", "SUBMISSION", "TO MARK (POINTS)", ""), cut=False)
    print_message(f"next: labctl course mark {assignment} --next")


def _describe_no_tasks(folder: CourseFolder, assignment: str) -> str:
    if marking.list_seat_grades(folder, assignment):
        return f"Every submission for {assignment} is marked."
    return f"There is nothing to mark: nobody has submitted {assignment}."


def _walk(folder: CourseFolder, assignment: str) -> None:
    """Ask for a mark for each item that needs one, seat by seat."""
    if not sys.stdin.isatty():
        raise UsageError(
            "--next asks for each mark, and this is not a terminal",
            hint=f"labctl course mark {assignment} --list\n"
            f"labctl course mark {assignment} STUDENT ITEM POINTS",
        )
    tasks = marking.list_marking_tasks(folder, assignment)
    if not tasks:
        print_message(_describe_no_tasks(folder, assignment))
        return
    print_message(f"{ENTER}. A note is optional.")
    given: list[GivenMark] = []
    is_interrupted = False
    try:
        given.extend(_ask_tasks(folder, assignment, tasks))
    except click.Abort:  # Ctrl-C, or Ctrl-D
        is_interrupted = True
    left = sum(len(task.items) for task in marking.list_marking_tasks(folder, assignment))
    rest = f"{count_text(left, 'item')} left" if left else "nothing is left"
    print_message(f"\n{count_text(len(given), 'mark')} given; {rest}")
    print_unseen_change(folder, assignment, {one for mark in given for one in mark.students})
    if not left:
        print_next(f"labctl course grades {assignment} --release")
    if is_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


def _ask_tasks(
    folder: CourseFolder, assignment: str, tasks: Sequence[MarkingTask]
) -> Iterator[GivenMark]:
    """Ask for the marks of each task until the person stops; yield each mark that was given.

    Leaves out what another grader has open, or has marked since the list was made.
    """
    by = find_acting_person()
    for position, listed in enumerate(tasks, 1):
        try:
            with marking.reserve_seat(folder, assignment, listed.seat):
                task = marking.find_marking_task(folder, assignment, listed.seat)
                if task is None:
                    continue
                submission = _print_task(folder, assignment, task, f"{position} of {len(tasks)}")
                for item in task.items:
                    answer = _ask_points(folder, assignment, task, submission, item, by)
                    if answer is None:
                        return
                    yield from answer
                _print_arrival(folder, assignment, task, submission)
        except LockHeldError:
            print_message(f"\n{listed.seat}: skipped, since another grader is marking it")


def _print_task(
    folder: CourseFolder, assignment: str, task: MarkingTask, position: str
) -> MarkedSubmission:
    """Print a seat and the paths of its files; return the submission that the person marks."""
    names = names_by_seat(folder).get(task.seat, "")
    (seat,) = folder.choose_seats([task.seat], list_assignment_seats(folder, assignment))
    # Before the files: if another submission arrives meanwhile, the marks are not for that one.
    submission = find_submission(folder, assignment, seat)
    number = f", submission {submission.number}" if submission.number else ", no submission"
    heading = f"{task.seat} ({clean(names)}){number}, {position}"
    click.echo(f"\n{click.style(heading, bold=True)}")
    if task.outdated_text:
        click.echo(f"  {task.outdated_text}")
    try:
        paths = marking.write_readable_files(folder, assignment, seat)
    except LabError as error:  # a damaged bundle can still be marked
        print_message(f"  {clean(error.what)}")
        return submission
    for part, path in paths.items():
        click.echo(f"  {part:<11} {clean(str(path))}")
    return submission


def _print_arrival(
    folder: CourseFolder, assignment: str, task: MarkingTask, marked: MarkedSubmission
) -> None:
    """Say that another submission than the marked one counts by now."""
    (seat,) = folder.choose_seats([task.seat], list_assignment_seats(folder, assignment))
    now = find_submission(folder, assignment, seat)
    if marked.is_older_than(now):
        was = f"submission {marked.number}" if marked.number else "no submission"
        print_message(
            f"{task.seat}: submission {now.number} has arrived; these marks are for {was}"
        )


def _ask_points(
    folder: CourseFolder,
    assignment: str,
    task: MarkingTask,
    submission: MarkedSubmission,
    item: RubricItem,
    by: str,
) -> list[GivenMark] | None:
    """Ask for an item until it has a mark; [] if the person skips it, None if they stop."""
    kept = task.find_mark_to_keep(item)
    while True:
        points = read_points(
            click.prompt(_ask_text(task, item, kept), default="s", show_default=False)
        )
        if points.lower() in ("s", "q"):
            return None if points.lower() == "q" else []
        try:
            if kept is not None and points.lower() == "k":
                points, note = points_text(kept.points), kept.note
            else:
                marking.parse_points(points, assignment, task.seat, item.name, item.points)
                note = _ask_note(folder, assignment, item.name)
            given = marking.give_mark(
                folder,
                assignment,
                task.seat,
                item.name,
                points,
                note=note,
                by=by,
                only=task.unmarked[item.name],
                seen=task.outdated.get(item.name, ()),
                submission=submission,
            )
        except LabError as error:
            print_message(clean(f"{error.what}: {error.why}" if error.why else error.what))
            if isinstance(error, UsageError):
                print_message(f"{ENTER}.")
                continue
            return []  # another grader was faster
        print_mark(given)
        return [given]


def _ask_text(task: MarkingTask, item: RubricItem, kept: ItemMark | None) -> str:
    """Return the question for an item's points, with the mark that `k` keeps."""
    keep = ""
    if kept is not None:
        by = f" of {clean(kept.by)}" if kept.by else ""
        keep = f", or k to keep the {points_text(kept.points)}{by}"
    return f"{task.describe_item(item)} (0-{points_text(item.points)}{keep})"


def _ask_note(folder: CourseFolder, assignment: str, item: str) -> str:
    """Ask for a note; a number chooses one that was given for this item before."""
    notes = list_notes(folder.ledger.list_entries(kind="mark"), assignment, item, MOST_NOTES)
    for number, note in enumerate(notes, 1):
        print_message(f"  {number}  {clean(textwrap.shorten(note, 70))}")
    answer: str = click.prompt("  note", default="", show_default=False).strip()
    if answer.isdecimal() and 1 <= int(answer) <= len(notes):
        return notes[int(answer) - 1]
    return answer


@click.command("excuse", short_help="Excuse a student from an assignment.")
@click.argument("assignment", default="")
@click.argument("name", metavar="[STUDENT]", default="")
@click.option("--undo", is_flag=True, help="Take the excuse back.")
@WHY
@json_option
@click.pass_context
def excuse_command(
    ctx: click.Context, assignment: str, name: str, undo: bool, why: str, json_: bool
) -> None:
    """Excuse STUDENT from ASSIGNMENT: it has no grade, and costs no points or free days.

    The name of a team excuses all of its students. Without STUDENT, the command lists the excuses
    in force.

    \b
    labctl course excuse hw3 alice --why "ill, with a note"
    labctl course excuse hw3 alice --undo
    labctl course excuse
    """
    folder = open_course(ctx, quiet=json_).folder
    if not name:
        _print_excuses(folder, assignment, json_)
        return
    changed = marking.set_excuse(
        folder, assignment, name, excused=not undo, by=find_acting_person(), why=why
    )
    if json_:
        print_json({"assignment": assignment, "excused": not undo, "changed": changed})
        return
    state = "is not excused any more" if undo else "is excused"
    for student in changed:
        click.echo(f"{student} {state}: {assignment}")
    if not changed:
        click.echo(f"{name} {'was not' if undo else 'was already'} excused: {assignment}")


def _print_excuses(folder: CourseFolder, assignment: str, json_: bool) -> None:
    excuses = marking.list_excuses(folder, assignment)
    if json_:
        print_json({"excuses": excuses})
        return
    rows = [(one.assignment, one.student, clean(one.by), clean(one.why)) for one in excuses]
    if rows:
        print_table(rows, ("ASSIGNMENT", "STUDENT", "BY", "WHY"), cut=False)
    else:
        click.echo("No student is excused.")
