"""receive: the instructor's side of `submit`: assignments, students' keys, what was handed in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from labctl.cli.options import json_option

if TYPE_CHECKING:
    from labctl.submissions.receiver import Receiver

DIRECTORY = click.argument(
    "directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path)
)
NAME = click.argument("name", metavar="ASSIGNMENT")
IDLE_S = 600


@click.group("receive")
def receive_command() -> None:
    """Take in what students hand in: DIR holds assignments, bundles and signed receipts.

    \b
    labctl receive init ~/drop
    labctl receive assignment ~/drop hw3 --due "2026-11-28 23:59 Europe/Berlin" \\
        --at ssh://drop@course.example > hw3.yaml
    labctl receive admit ~/drop alice alice.pub
    labctl receive list ~/drop hw3
    """


def _receiver(directory: Path) -> Receiver:
    from labctl.submissions.receiver import Receiver

    return Receiver(directory.expanduser().absolute())


@receive_command.command("init")
@DIRECTORY
@json_option
def _init(directory: Path, json_: bool) -> None:
    """Make DIR and its signing key. Repeated, nothing changes.

    \b
    labctl receive init ~/drop
    """
    from labctl.cli.screen import as_json
    from labctl.submissions.confinement import UNCONFINED, has_filter

    public = _receiver(directory).init()
    if not has_filter():
        click.echo(f"warning: {UNCONFINED}", err=True)
    if json_:
        as_json({"receiver": public})
        return
    click.echo(f"{directory} takes in submissions; it signs receipts as")
    click.echo(f"  {public}")
    click.echo(f"keep {directory / 'signing-key'} to yourself, and a copy of it elsewhere")
    click.echo(f"  next: labctl receive assignment {directory} hw1 --due ... --at ssh://...")


@receive_command.command("assignment", short_help="Make or change an assignment; prints its file.")
@DIRECTORY
@NAME
@click.option("--due", default="", help='With zone: "2026-11-28 23:59 Europe/Berlin".')
@click.option("--late", default="never", help="never, any, or how long after: 48h.")
@click.option("--penalty", default="0", metavar="PERCENT", help="For each day begun; told only.")
@click.option("--max-size", default="500MB", help="Of the whole bundle.")
@click.option("--require", multiple=True, help="model, logs, report, evaluation, code.")
@click.option("--at", "place", required=True, help="ssh://user@host[:port] or s3://bucket/folder.")
@click.option("--host-key", default="", help="Of that SSH server; default: asked from here.")
@click.option("--course", default="", help="The course's name.")
def _assignment(directory: Path, name: str, place: str, **given: object) -> None:
    """Make (or change) an assignment; its file, for the students, goes to standard output.

    \b
    labctl receive assignment ~/drop hw3 --due "2026-11-28 23:59 Europe/Berlin" \\
        --late 48h --penalty 10 --max-size 200MB \\
        --at ssh://drop@course.example > hw3.yaml
    """
    from labctl.submissions.receive import write_assignment

    click.echo(write_assignment(_receiver(directory), name, place, given), nl=False)


@receive_command.command("admit", short_help="Let a student's key hand in.")
@DIRECTORY
@click.argument("student")
@click.argument("key", type=click.File("r"))
@click.option(
    "--authorized-keys",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("~/.ssh/authorized_keys"),
    show_default=True,
    help="Of the account that takes bundles in.",
)
def _admit(directory: Path, student: str, key: TextIO, file: Path) -> None:
    """Let STUDENT hand in with the public KEY (a file, or - for standard input).

    The key can do nothing else: one line of authorized_keys, with a forced command. Another key of
    the same student replaces it.

    \b
    labctl receive admit ~/drop alice alice.pub
    """
    from labctl.submissions.receive import admit

    line = admit(_receiver(directory), student, key.read(), file.expanduser())
    click.echo(line)
    click.echo(f"written to {file}; {student} can hand in", err=True)


@receive_command.command("expel")
@click.argument("student")
@click.option(
    "--authorized-keys",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("~/.ssh/authorized_keys"),
    show_default=True,
    help="Of the account that takes bundles in.",
)
def _expel(student: str, file: Path) -> None:
    """Let STUDENT's key in no longer. What was handed in stays.

    \b
    labctl receive expel alice
    """
    from labctl.submissions.receive import expel

    was = expel(student, file.expanduser())
    click.echo(f"{student} {'can hand in no longer' if was else 'had no key there'}")


@receive_command.command("extend", short_help="Move the due time for one student.")
@DIRECTORY
@NAME
@click.argument("student")
@click.argument("time", metavar="TIME")
def _extend(directory: Path, name: str, student: str, time: str) -> None:
    """Move the due time of ASSIGNMENT for STUDENT by TIME (3d, 12h; 0 takes it back).

    \b
    labctl receive extend ~/drop hw3 alice 3d
    """
    from labctl.cli.submit_output import moment
    from labctl.submissions.receive import extend

    standing, due = extend(_receiver(directory), name, student, time)
    if standing.due_at is None:
        click.echo(f"{name} has no due time")
        return
    click.echo(f"{name} is due for {student} on {moment(standing.due_at, due)}")


@receive_command.command("list")
@DIRECTORY
@NAME
@json_option
def _list(directory: Path, name: str, json_: bool) -> None:
    """Who has handed in, when, how late.

    \b
    labctl receive list ~/drop hw3
    """
    from labctl.cli.screen import as_json, size, table
    from labctl.cli.submit_output import length

    receiver = _receiver(directory)
    receiver.rules(name)
    found = [
        signed.receipt
        for student in receiver.students(name)
        for signed in receiver.receipts(name, student)
    ]
    if json_:
        as_json({"submissions": found})
        return
    if not found:
        click.echo(f"nobody has handed in {name} yet")
        return
    rows = [
        (
            one.student,
            str(one.number),
            one.received,
            f"{length(one.late_s)} late" if one.late_s else "on time",
            f"{one.penalty}%" if one.penalty else "",
            size(one.bundle_bytes),
            one.bundle_sha256[:16],
        )
        for one in found
    ]
    table(rows, ("STUDENT", "NO", "RECEIVED", "STATE", "OFF", "SIZE", "SHA256"))


@receive_command.command("check", short_help="Compare bundles with their receipts.")
@DIRECTORY
@NAME
@json_option
@click.pass_context
def _check(ctx: click.Context, directory: Path, name: str, json_: bool) -> None:
    """Compare every bundle with its receipt, and every receipt with the signing key.

    \b
    labctl receive check ~/drop hw3
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.submissions.receipt import Receipt

    receiver = _receiver(directory)
    receiver.rules(name)
    rows = [
        (f"{one.student} {one.number}" if isinstance(one, Receipt) else one, wrong)
        for one, wrong in receiver.check(name)
    ]
    if json_:
        as_json({"checked": [{"submission": place, "wrong": wrong} for place, wrong in rows]})
    else:
        for place, wrong in rows:
            if wrong:
                click.echo(click.style(clean(f"{place}: {wrong}"), fg="red"))
        bad = sum(bool(wrong) for _, wrong in rows)
        click.echo(f"submissions: {len(rows)}; not as they were signed for: {bad}")
    ctx.exit(1 if any(wrong for _, wrong in rows) else 0)


@receive_command.command("open", short_help="Unpack a submission to look at it.")
@DIRECTORY
@NAME
@click.argument("student")
@click.option("--number", type=click.IntRange(min=1), default=None, help="Default: the last one.")
@click.option(
    "--into",
    required=True,
    type=click.Path(exists=False, path_type=Path),
    help="A directory that is not there yet.",
)
def _open(directory: Path, name: str, student: str, number: int | None, into: Path) -> None:
    """Unpack a submission to look at it. Nothing in it is run, and no file is executable.

    \b
    labctl receive open ~/drop hw3 alice --into ./alice-hw3
    """
    from labctl.submissions.bundle import unpack

    with _receiver(directory).bundle_of(name, student, number or 0).open("rb") as file:
        found = unpack(file, into)
    click.echo(f"{into}: {len(found.files)} files of run {found.run}")


@receive_command.command("ticket", short_help="A bucket: leave to post, a file for each student.")
@DIRECTORY
@NAME
@click.argument("students", nargs=-1, required=True)
@click.option("--valid", default="7d", help="How long; 7d at most.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The directory for the files; default: this one.",
)
@click.option("--profile", default="", help="Of ~/.aws/config.")
def _ticket(
    directory: Path, name: str, students: tuple[str, ...], valid: str, into: Path, profile: str
) -> None:
    """For an assignment in a bucket: a file for each student, with leave to post there.

    \b
    labctl receive ticket ~/drop hw3 alice bob --into ./tickets
    """
    from labctl.submissions.receive import write_tickets

    for path in write_tickets(_receiver(directory), name, students, valid, into, profile):
        click.echo(f"{path}   # for this student alone, as assignment.yaml")


@receive_command.command("collect", short_help="A bucket: take in what was posted.")
@DIRECTORY
@NAME
@click.option("--profile", default="", help="Of ~/.aws/config.")
@json_option
def _collect(directory: Path, name: str, profile: str, json_: bool) -> None:
    """For an assignment in a bucket: take in what was posted, and sign for it.

    \b
    labctl receive collect ~/drop hw3
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.submissions.receive import collect_posts

    found = collect_posts(_receiver(directory), name, profile)
    if json_:
        as_json({"collected": found})
        return
    for one in found:
        if one.signed is None:
            click.echo(click.style(clean(f"{one.student}: refused: {one.why}"), fg="red"))
        else:
            click.echo(f"{one.student}: number {one.signed.receipt.number} taken in")
    click.echo(f"new posts: {len(found)}")


@receive_command.command("serve", hidden=True)
@DIRECTORY
@click.argument("student")
def _serve(directory: Path, student: str) -> None:
    """Answer one student: the forced command that `admit` writes."""
    import os
    import signal

    from labctl.config import environment
    from labctl.errors import BusyError
    from labctl.submissions.confinement import limit_memory
    from labctl.submissions.connection_limits import MAX_MEMORY_BYTES, hold_connection
    from labctl.submissions.service import check_request, refuse, serve

    os.umask(0o077)
    limit_memory(MAX_MEMORY_BYTES)
    check_request(environment().get("SSH_ORIGINAL_COMMAND", ""))

    def alive() -> None:
        """A connection on which nothing comes any more ends, and this process with it."""
        signal.alarm(IDLE_S)

    alive()
    receiver = _receiver(directory)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        with hold_connection(receiver.directory / "connections", student):
            serve(receiver, student, source, sink, alive)
    except BusyError as error:
        refuse(sink, error)
