"""The commands below receive: assignments, students' keys and submissions, for the instructor."""

from __future__ import annotations

import os
import platform
import pwd
import shlex
import signal
import sys
from pathlib import Path
from typing import TextIO

import click

from labctl.cli.exit_codes import clean, read_typed_command
from labctl.cli.number_range import NumberRange
from labctl.cli.options import AUTHORIZED_KEYS, PROFILE, json_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config import copy_environment, expand_user
from labctl.errors import BusyError, ConnectError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.submissions.confinement import UNCONFINED, has_filter, limit_memory
from labctl.submissions.connection_limits import MAX_MEMORY_BYTES, hold_connection
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver
from labctl.text import bytes_text, duration_text

with lazy_imports(__name__):
    from labctl.cli import submit_output
    from labctl.submissions import bundle, receive, service

DIRECTORY = click.argument(
    "directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path)
)
NAME = click.argument("name", metavar="ASSIGNMENT")
HOST_KEY_FILE = "/etc/ssh/ssh_host_ed25519_key.pub"
# seconds without data after which a student's connection is closed
IDLE_S = 600


@click.group("receive")
def receive_command() -> None:
    """Accept submissions: DIR holds assignments, bundles and signed receipts.

    \b
    labctl receive init ~/drop
    labctl receive assignment ~/drop hw3 --due "2026-11-28 23:59 Europe/Berlin" \\
        --at ssh://drop@course.example --out hw3.yaml
    labctl receive admit ~/drop alice alice.pub
    labctl receive list ~/drop hw3
    """


def _open_receiver(directory: Path) -> Receiver:
    return Receiver(expand_user(directory).absolute())


def _open_assignment(directory: Path, name: str) -> Receiver:
    """Open the receiver; NotFoundError with the instructor's next command if it lacks NAME."""
    receiver = _open_receiver(directory)
    file = receiver.assignment_file(name)
    if not file.is_file():
        names = sorted(path.stem for path in file.parent.glob("*.yaml"))
        drop = shlex.quote(str(directory))
        example = f"labctl receive assignment {drop} {name} --at ssh://drop@course.example"
        raise NotFoundError(
            f"there is no assignment {name} in {directory}",
            why=f"this receiver has {', '.join(names) or 'no assignments yet'}",
            hint=f"labctl receive list {drop} {names[0]}" if names else example,
        )
    return receiver


@receive_command.command("init")
@DIRECTORY
@json_option
def _init(directory: Path, json_: bool) -> None:
    """Create DIR and its signing key. An existing key is kept.

    \b
    labctl receive init ~/drop
    """
    public = _open_receiver(directory).init()
    if not has_filter():
        print_message(f"warning: {UNCONFINED}")
    if json_:
        print_json({"receiver": public})
        return
    print_message(
        f"{directory} is ready for submissions. It signs receipts with the key", err=False
    )
    click.echo(f"  {public}")
    print_message(
        f"Keep {directory / 'signing-key'} secret, and store a backup of it elsewhere.", err=False
    )
    place = f"ssh://{pwd.getpwuid(os.getuid()).pw_name}@{platform.node()}"
    words = ["receive", "assignment", str(directory), "hw1", "--at", place, "--out", "hw1.yaml"]
    click.echo(f"  next: {shlex.join(['labctl', *words])}")


@receive_command.command("assignment", short_help="Create or change an assignment; print its file.")
@DIRECTORY
@NAME
@click.option("--due", default="", help='Due time with zone: "2026-11-28 23:59 Europe/Berlin".')
@click.option(
    "--late", default="never", help="Accept late work: never, any, or for a time such as 48h."
)
@click.option(
    "--penalty",
    default="0",
    metavar="PERCENT",
    help="Percent off for each day or part of a day late; only stated, not applied.",
)
@click.option("--max-size", default="500MB", help="Largest bundle to accept.")
@click.option(
    "--require", multiple=True, help="Required part: model, logs, report, evaluation or code."
)
@click.option(
    "--at",
    "place",
    required=True,
    help="Where students submit: ssh://user@host[:port] or s3://bucket/folder.",
)
@click.option(
    "--host-key", default="", help="Key of that SSH server (default: read over the network)."
)
@click.option("--course", default="", help="Name of the course.")
@click.option(
    "-o",
    "--out",
    type=click.File("w", encoding="utf-8", lazy=True),
    default="-",
    help="Write the students' file there (default: standard output).",
)
def _write_assignment(
    directory: Path, name: str, place: str, out: TextIO, **options: object
) -> None:
    """Create (or change) an assignment, and write its file for the students.

    \b
    labctl receive assignment ~/drop hw3 --due "2026-11-28 23:59 Europe/Berlin" \\
        --late 48h --penalty 10 --max-size 200MB \\
        --at ssh://drop@course.example --out hw3.yaml
    """
    try:
        text = receive.write_assignment(_open_receiver(directory), name, place, options)
    except ConnectError as error:
        error.hint = (
            f'{read_typed_command()} --host-key "$(cat {HOST_KEY_FILE})"   '
            "# on that SSH server; elsewhere, copy the content of this file"
        )
        raise
    click.echo(text, file=out, nl=False)
    drop = shlex.quote(str(directory))
    if place.startswith("s3://"):
        print_message("Through a bucket, each student needs a file of their own:")
        click.echo(f"  labctl receive ticket {drop} {name} STUDENT --into ./tickets", err=True)
    elif out.name not in ("-", "<stdout>"):
        print_message(f"{out.name} is the file for your students. To let one submit:")
        click.echo(f"  labctl receive admit {drop} STUDENT KEYFILE", err=True)


@receive_command.command("admit", short_help="Allow a student's key to submit.")
@DIRECTORY
@click.argument("student")
@click.argument("key", type=click.File("r"))
@AUTHORIZED_KEYS
def _admit(directory: Path, student: str, key: TextIO, keys_file: Path) -> None:
    """Allow STUDENT to submit with the public KEY (a file, or - for standard input).

    The key is one line of authorized_keys with a forced command, so it can do nothing else. A new
    key of the same student replaces the old one.

    \b
    labctl receive admit ~/drop alice alice.pub
    """
    line = receive.admit(_open_receiver(directory), student, key.read(), expand_user(keys_file))
    click.echo(line)
    print_message(f"written to {keys_file}; {student} can submit")


@receive_command.command("expel")
@click.argument("student")
@AUTHORIZED_KEYS
def _expel(student: str, keys_file: Path) -> None:
    """Remove STUDENT's key. Existing submissions are kept.

    \b
    labctl receive expel alice
    """
    had_key = receive.expel(student, expand_user(keys_file))
    click.echo(f"{student} {'can no longer submit' if had_key else f'had no key in {keys_file}'}")


@receive_command.command("extend", short_help="Move the due time for one student.")
@DIRECTORY
@NAME
@click.argument("student")
@click.argument("time", metavar="TIME")
def _extend(directory: Path, name: str, student: str, time: str) -> None:
    """Move the due time of ASSIGNMENT for STUDENT by TIME (3d, 12h; 0 removes the extension).

    \b
    labctl receive extend ~/drop hw3 alice 3d
    """
    receiver = _open_assignment(directory, name)
    standing = receive.extend(receiver, name, student, time)
    if standing.due_at is None:
        click.echo(f"{name} has no due time")
        return
    due = receiver.load_rules(name).format_time(standing.due_at)
    click.echo(f"{name} is due for {student} on {due}")


@receive_command.command("list")
@DIRECTORY
@NAME
@json_option
def _list(directory: Path, name: str, json_: bool) -> None:
    """List submissions with their time and lateness.

    \b
    labctl receive list ~/drop hw3
    """
    receiver = _open_assignment(directory, name)
    receipts = [
        signed.receipt
        for student in receiver.students(name)
        for signed in receiver.receipts(name, student)
    ]
    if json_:
        print_json({"submissions": receipts})
        return
    if not receipts:
        click.echo(f"nobody has submitted {name} yet")
        return
    zone = receiver.load_rules(name).time_zone
    rows = [
        (
            receipt.student,
            str(receipt.number),
            submit_output.table_time_text(receipt.received_at, zone),
            f"{duration_text(receipt.late_s)} late" if receipt.late_s else "on time",
            f"{receipt.penalty}%" if receipt.penalty else "",
            bytes_text(receipt.bundle_bytes),
            receipt.bundle_sha256[:16],
        )
        for receipt in receipts
    ]
    print_table(rows, ("STUDENT", "NO", "RECEIVED", "STATE", "OFF", "SIZE", "SHA256"))
    click.echo(f"Times are in {zone}.")


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
    receiver = _open_assignment(directory, name)
    rows = [
        (f"{checked.student} {checked.number}" if isinstance(checked, Receipt) else checked, error)
        for checked, error in receiver.check(name)
    ]
    mismatches = sum(bool(error) for _, error in rows)
    if json_:
        print_json({"checked": [{"submission": label, "wrong": error} for label, error in rows]})
    else:
        for label, error in rows:
            if error:
                click.echo(click.style(clean(f"{label}: {error}"), fg="red"))
        click.echo(f"submissions: {len(rows)}; mismatches: {mismatches}")
    ctx.exit(1 if mismatches else 0)


@receive_command.command("open", short_help="Unpack a submission to read it.")
@DIRECTORY
@NAME
@click.argument("student")
@click.option(
    "--number",
    type=NumberRange(100, min=1),
    default=None,
    help="Number of the submission (default: the last one).",
)
@click.option(
    "--into",
    required=True,
    type=click.Path(exists=False, path_type=Path),
    help="A directory that does not exist yet.",
)
def _open(directory: Path, name: str, student: str, number: int | None, into: Path) -> None:
    """Unpack a submission to read it. Nothing in it is run, and no file is executable.

    \b
    labctl receive open ~/drop hw3 alice --into ./alice-hw3
    """
    with (
        _open_assignment(directory, name).find_bundle(name, student, number or 0).open("rb") as file
    ):
        manifest = bundle.unpack(file, into)
    click.echo(f"{into}: {len(manifest.files)} files of run {manifest.run}")


@receive_command.command("ticket", short_help="For a bucket: write an upload ticket per student.")
@DIRECTORY
@NAME
@click.argument("students", nargs=-1, required=True)
@click.option("--valid", default="7d", help="How long the tickets are valid; at most 7d.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Write the files to this directory (default: the current one).",
)
@PROFILE
def _ticket(
    directory: Path, name: str, students: tuple[str, ...], valid: str, into: Path, profile: str
) -> None:
    """For an assignment in a bucket: write a file per student that permits uploads to it.

    \b
    labctl receive ticket ~/drop hw3 alice bob --into ./tickets
    """
    for path in receive.write_tickets(
        _open_assignment(directory, name), name, students, valid, into, profile
    ):
        click.echo(f"{path}   # send only to this student, as assignment.yaml")


@receive_command.command("collect", short_help="For a bucket: accept the uploaded submissions.")
@DIRECTORY
@NAME
@PROFILE
@json_option
def _collect(directory: Path, name: str, profile: str, json_: bool) -> None:
    """For an assignment in a bucket: accept the uploaded submissions and sign receipts.

    \b
    labctl receive collect ~/drop hw3
    """
    posts = receive.collect_posts(_open_assignment(directory, name), name, profile)
    if json_:
        print_json({"collected": posts})
        return
    for post in posts:
        if post.signed is None:
            click.echo(click.style(clean(f"{post.student}: refused: {post.why}"), fg="red"))
        else:
            click.echo(f"{post.student}: number {post.signed.receipt.number} accepted")
    click.echo(f"new uploads: {len(posts)}")


@receive_command.command("serve", hidden=True)
@DIRECTORY
@click.argument("student")
def _serve(directory: Path, student: str) -> None:
    """Serve one student's connection; `admit` writes this as the forced command."""
    os.umask(0o077)
    limit_memory(MAX_MEMORY_BYTES)
    service.check_request(copy_environment().get("SSH_ORIGINAL_COMMAND", ""))

    def restart_idle_timer() -> None:
        """Kill this process IDLE_S seconds after the last data arrived."""
        signal.alarm(IDLE_S)

    restart_idle_timer()
    receiver = _open_receiver(directory)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        with hold_connection(receiver.directory / "connections", student):
            service.serve(receiver, student, source, sink, restart_idle_timer)
    except BusyError as error:
        service.refuse(sink, error)
