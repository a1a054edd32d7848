"""The command join: a student enters a course."""

from __future__ import annotations

import math
import time
from pathlib import Path

import click

from labctl.cli.completion_values import complete_files
from labctl.cli.exit_codes import clean
from labctl.cli.options import SCREEN, json_option, open_lab, yes_option
from labctl.cli.screen import Screen
from labctl.cli.starter_output import has_failed, print_image_change, print_starters
from labctl.cli.tables import print_json
from labctl.config import LAB_FILE, find_lab, find_paths, load_lab
from labctl.courses.course_update import update_course_lab
from labctl.courses.join import (
    JoinResult,
    fetch_join_file,
    join_course,
    result_as_json,
)
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.runs.public_tests import has_public_tests
from labctl.servers.provider_traits import read_provider_traits
from labctl.submissions.assignment import judge, load_assignment
from labctl.sync.starter_update import restore_file


@click.command("join")
@click.argument("place", metavar="[FILE-OR-URL]", default="", shell_complete=complete_files)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Create the lab in this directory (default: the course's name).",
)
@click.option(
    "--key", default="", metavar="ed25519:...", help="Check that the course has this key."
)
@click.option(
    "--restore",
    multiple=True,
    metavar="PATH",
    help="Write a file of the assignment again that you have deleted.",
)
@yes_option
@json_option
@click.pass_context
def join_command(
    ctx: click.Context,
    place: str,
    into: Path | None,
    key: str,
    restore: tuple[str, ...],
    yes: bool,
    json_: bool,
) -> None:
    """Join a course with the file or the https:// address from your instructor.

    Each file works once. labctl creates your private key on this machine, where it stays, and sends
    the public key to the keeper. After that, labctl up, run, submit and the other commands work
    within the course's budget.

    An assignment that hands out files gets a directory of its own. Without FILE-OR-URL, labctl
    fetches new assignments and newer files into the course that you have joined. It keeps your
    changes.

    \b
    labctl join ml-2026-alice.join
    cd ml-2026 && labctl up
    labctl join
    labctl join --restore tests/test_model.py
    """
    if restore:
        _restore_files(ctx, restore, is_alone=not (place or into or key), json_=json_)
        return
    if not place:
        _update_course(ctx, into, key, yes, json_)
        return
    screen = Screen(yes=yes, quiet=json_)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.stop_drawing)
    data = fetch_join_file(place)
    base = Path(ctx.find_root().obj or ".")
    target = base / into if into is not None else None
    joined = join_course(data, target, find_paths(), screen, key=key, base=base)
    if json_:
        print_json({"joined": result_as_json(joined)})
    else:
        _print_joined(joined)
    ctx.exit(1 if has_failed(joined) else 0)


def _restore_files(
    ctx: click.Context, paths: tuple[str, ...], *, is_alone: bool, json_: bool
) -> None:
    """Restore files of the assignment in -C's directory."""
    if not is_alone:
        raise UsageError(
            "--restore is an option on its own",
            why="it writes files that this assignment's lab has already received",
            hint="labctl join --restore PATH",
        )
    why = "--restore writes a file into the directory of an assignment"
    root = _find_course_lab(ctx, why, "labctl -C COURSE/ASSIGNMENT join --restore PATH")
    for path in paths:
        restore_file(root, path)
    if json_:
        print_json({"restored": paths})
        return
    for path in paths:
        click.echo(f"restored {clean(path)}")


def _print_joined(joined: JoinResult) -> None:
    event = "You had already joined" if joined.again else "You have joined"
    click.echo(f"{event} {joined.course} as {joined.student}.")
    if joined.section:
        file = joined.directory / "lab.yaml"
        click.echo(f"{file} was not changed. To get servers, add these lines to it:\n")
        click.echo(clean(joined.section))
    for name in joined.assignments:
        click.echo(f"  assignments/{name}.yaml")
    print_image_change(joined)
    print_starters(joined)
    _print_next_commands(joined)


def _update_course(ctx: click.Context, into: Path | None, key: str, yes: bool, json_: bool) -> None:
    """Update the joined course of -C's directory."""
    if into is not None or key:
        raise UsageError(
            "--into and --key need a join file",
            why="without one, labctl join updates the course of this directory",
            hint="labctl join FILE --into DIR",
        )
    why = "without a join file, labctl join updates the course of this directory"
    _find_course_lab(ctx, why, "labctl -C COURSE join")
    lab = open_lab(ctx, yes=yes, quiet=json_)
    joined = update_course_lab(lab.context)
    if json_:
        print_json({"joined": result_as_json(joined)})
    else:
        count = len(joined.assignments)
        click.echo(f"{joined.course}: {count} {'assignment' if count == 1 else 'assignments'}")
        print_image_change(joined)
        print_starters(joined)
    ctx.exit(1 if has_failed(joined) else 0)


def _find_course_lab(ctx: click.Context, why: str, again: str) -> Path:
    """Return the lab of -C's directory. NotFoundError, which says how to join, without one."""
    root = find_lab(Path(ctx.find_root().obj or "."))
    file = root / LAB_FILE if root.is_dir() else root
    if not file.exists():
        raise NotFoundError(
            f"no course was joined in {clean(str(root.absolute()))}",
            why=why,
            hint="labctl join FILE   # with the join file from your instructor\n"
            f"{again}   # in a course that you have joined",
        )
    return root


def _has_program(directory: Path) -> bool:
    """Whether lab.yaml says what `labctl run` starts."""
    try:
        return bool(load_lab(directory, find_provider=read_provider_traits).run)
    except LabError:
        return False


def _print_next_commands(joined: JoinResult) -> None:
    ready = [starter for starter in joined.starters if starter.state != "failed"]
    directory = clean(str(ready[0].directory if ready else joined.directory))
    click.echo(f"\n  cd {directory}")
    if ready and has_public_tests(ready[0].directory):
        click.echo("  labctl check      run the course's tests on this machine")
    run = "labctl run" if _has_program(Path(directory)) else "labctl run -- COMMAND"
    click.echo(f"  labctl up         start your server\n  {run}")
    if ready:
        click.echo("  labctl submit")
    elif joined.assignments:
        name = _find_next_due(joined)
        click.echo(f"  labctl submit --assignment assignments/{name}.yaml")


def _find_next_due(joined: JoinResult) -> str:
    """Return the open assignment that is due next; the first one if none is open."""
    dues = dict[str, float]()
    for name in joined.assignments:
        try:
            rules = load_assignment(joined.directory / "assignments" / f"{name}.yaml")
        except LabError:
            continue
        if judge(rules, time.time()).accepted:
            dues[name] = rules.due.at if rules.due is not None else math.inf
    return min(dues, key=dues.__getitem__, default=joined.assignments[0])
