"""What labctl prints about the starters of assignments: for staff, and for a student."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.wrapping import print_message
from labctl.config.reader import LAB_FILE
from labctl.runs.public_tests import has_public_tests
from labctl.shell import command
from labctl.text import count_text, names_text, next_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from labctl.courses.broadcast import PushOutcome
    from labctl.courses.join import JoinResult
    from labctl.courses.starter_delivery import DeliveredStarter
    from labctl.sync.starter_update import FileChange

MAX_NAMES = 12
VERBS = {
    "updated": "updated",
    "merged": "merged with your changes",
    "removed": "removed, as in the course",
    "kept": "left as you changed it",
}
WRITTEN = ("added", "updated", "removed")
LEFT_DELETED = "changed in the course; not written, as you deleted it"


def count_files(count: int, which: str = "") -> str:
    """Return the number of files in words, such as "1 new file"."""
    return f"{count} {which}{'file' if count == 1 else 'files'}"


def has_failed(joined: JoinResult) -> bool:
    """Whether a starter is not in place as the course has it now."""
    return any(
        starter.state == "failed"
        or any(change.action in ("conflict", "blocked") for change in starter.changes)
        for starter in joined.starters
    )


def print_image_change(joined: JoinResult) -> None:
    """Print that the course has another image than the student's lab.yaml named, if it has."""
    image = clean(joined.image)
    if joined.image_change == "updated":
        click.echo(f"lab.yaml: the course's image is now {image or 'none'}")
    elif joined.image_change == "differs":
        file = clean(_relative(joined.directory / LAB_FILE))
        text = f"{file} does not use the course's image; your file is unchanged"
        print_message(f"! {text}", err=False, fg="yellow")
        click.echo(f"  next: to use it, write there: image: {image}")


def print_starters(joined: JoinResult) -> None:
    """Print what happened to each assignment's files, and what is left for the student to do."""
    for starter in joined.starters:
        name = clean(starter.assignment)
        if starter.state == "failed":
            print_message(f"- {name}: {clean(starter.problem)}", err=False, fg="red")
            click.echo("\n".join(next_lines(clean(starter.next or "labctl join"))))
            continue
        text = _describe_news(starter)
        click.echo(f"{name}: {text} in {clean(_relative(starter.directory))}")
        if starter.state == "new" and has_public_tests(starter.directory):
            click.echo("  labctl check runs its tests on this machine, and so does labctl submit")
        for action, words in VERBS.items():
            _print_paths(starter, action, words)
        for change in starter.changes:
            _print_problem(starter.directory, change)


def _describe_news(starter: DeliveredStarter) -> str:
    """Describe what came; the lab.yaml that join generates is not a file of the course."""
    added = [change.path for change in starter.changes if change.action == "added"]
    if starter.has_generated_lab_file and LAB_FILE in added and len(added) > 1:
        return f"{count_files(len(added) - 1, 'new ')} and {LAB_FILE}"
    if added:
        return count_files(len(added), "new ")
    return "no newer files" if starter.state == "current" else "newer files"


def _print_paths(starter: DeliveredStarter, action: str, words: str) -> None:
    paths = [change.path for change in starter.changes if change.action == action]
    for path in paths[:MAX_NAMES]:
        is_deleted = action == "kept" and not (starter.directory / path).exists()
        click.echo(f"  {clean(path)}: {LEFT_DELETED if is_deleted else words}")
    if len(paths) > MAX_NAMES:
        click.echo(f"  and {len(paths) - MAX_NAMES} more {words}; --json lists them all")


def _print_problem(directory: Path, change: FileChange) -> None:
    if change.action == "conflict":
        text = "you and the course changed the same lines; your file is unchanged"
        print_message(f"! {clean(change.path)}: {text}", err=False, fg="yellow")
        old, new = _relative(directory / change.beside), _relative(directory / change.path)
        edit = command("mv", old, new).render()
        click.echo(f"  next: edit {clean(old)}, then:\n        {clean(edit)}")
    elif change.action == "blocked":
        text = f"not written: {change.why}"
        print_message(f"! {clean(change.path)}: {clean(text)}", err=False, fg="yellow")
        path = clean(_relative(directory / change.blocked_by))
        click.echo(f"  next: move {path} away, then:\n        labctl join")


def print_delivered(outcomes: Sequence[PushOutcome]) -> None:
    """Print what a push wrote into the labs on seats' servers, and which seats' files stay."""
    written: Counter[str] = Counter()
    stays: dict[str, list[str]] = {}
    for outcome in outcomes:
        for starter in outcome.starters:
            for change in starter.changes:
                written[change.action] += 1
                if text := _describe_stay(starter.assignment, change):
                    stays.setdefault(text, []).append(outcome.seat)
    done = [f"{written[action]} {action}" for action in WRITTEN if written[action]]
    if done:
        servers = count_text(sum(map(_has_written, outcomes)), "server")
        click.echo(f"assignments' files in /lab/code: {', '.join(done)}, on {servers}")
    for text, seats in stays.items():
        print_message(f"! {names_text(seats, MAX_NAMES)}: {text}", err=False, fg="yellow")


def _has_written(outcome: PushOutcome) -> bool:
    changes = (change for starter in outcome.starters for change in starter.changes)
    return any(change.action in WRITTEN for change in changes)


def _describe_stay(assignment: str, change: FileChange) -> str:
    """Return why a file of an assignment is not on a server as published; "" if it is."""
    path = f"{clean(change.path)} of {clean(assignment)}"
    if change.action == "conflict":
        return f"{path} was changed there; the course's version is in {clean(change.beside)}"
    if change.action == "blocked" or change.why:
        return f"{path} was not written; {clean(change.why)}"
    return f"{path} was deleted or changed there, and stays so" if change.action == "kept" else ""


def _relative(path: Path) -> str:
    return os.path.relpath(path)
