"""The commands course serve, invite and door: the keeper, and how students reach it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from labctl.cli import student_page
from labctl.cli.course import open_course
from labctl.cli.keeper_process import install_unit, log_lines
from labctl.cli.number_range import NumberRange
from labctl.cli.options import AUTHORIZED_KEYS, INSTALL, json_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.commands.systemd import course_unit
from labctl.config import copy_environment, expand_user, parse_duration
from labctl.config.times import local_time_text
from labctl.courses.records.timetable import find_zone
from labctl.errors import BusyError, PolicyError, UsageError
from labctl.lazy import lazy_imports
from labctl.submissions import REQUEST as SUBMIT_REQUEST
from labctl.submissions.confinement import UNCONFINED, has_filter, limit_memory
from labctl.text import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import tzinfo

    from labctl.courses.invitation import Invitation
    from labctl.courses.records.folder import CourseFolder

with lazy_imports(__name__):
    from labctl.courses import (
        join_codes,
        keys,
        publish,
        regrades,
        requests,
        rpc,
        seat_operations,
    )
    from labctl.courses import scheduler as course_scheduler
    from labctl.courses.records import folder as course_folder
    from labctl.providers import course
    from labctl.submissions import connection_limits, receiver, service
    from labctl.web import http_server

# seconds without data after which a student's connection is closed
IDLE_S = 600
# niceness of a student's process: examining a bundle must not delay other requests
NICE = 10
INTO, VALID = Path("join"), "14d"


@click.command("invite", short_help="Write a join file for each student.")
@click.argument("names", nargs=-1, metavar="[STUDENT]...")
@click.option("--all", "everybody", is_flag=True, help="Invite all who have not joined yet.")
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=INTO,
    show_default=True, help="Write the files to this directory.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="Revoke the keys of the students' other devices now.")
@click.option("--valid", default=VALID, show_default=True, help="How long a file can be used.")
@click.option(
    "--host-key", default="", help="Host key of the keeper (default: read it from the keeper)."
)
@AUTHORIZED_KEYS
@json_option
@click.pass_context
def invite_command(
    ctx: click.Context,
    names: tuple[str, ...],
    everybody: bool,
    into: Path,
    replace: bool,
    valid: str,
    host_key: str,
    keys_file: Path,
    json_: bool,
) -> None:
    """Write a join file for each STUDENT. Run this command on the keeper's machine.

    A new file makes the student's earlier file invalid. Each file works once, and expires after
    --valid. It does not contain the student's private key. Send it only to that student, by mail or
    through an https:// address. To send them all with a mail merge, use invitations.csv beside the
    files. A student can join from several devices; --replace ends the access of the earlier ones.

    This also publishes the files of assignments that were never published. labctl course push
    publishes changes.

    \b
    labctl course invite alice
    labctl course invite --all --into ./join
    """
    course = open_course(ctx, quiet=json_)
    try:
        valid_s = parse_duration(valid)
    except ValueError as error:
        # The user's own command: another one could invalidate files that students have by now.
        words = [*names, *(["--all"] if everybody else [])] or ["STUDENT"]
        words += ["--into", str(into)] if into != INTO else []
        words += ["--replace"] if replace else []
        words += ["--host-key", host_key] if host_key else []
        hint = shlex.join(["labctl", "course", "invite", *words, "--valid", VALID])
        raise UsageError(str(error), hint=hint) from None
    if replace and everybody:
        raise UsageError(
            "--replace cannot be combined with --all",
            why="--all invites students who have no key yet",
            hint="labctl course invite alice --replace",
        )
    students = _select_students(course.folder, names, everybody, keys_file)
    invitations = course.invite(
        students,
        into,
        host_key=host_key,
        valid_s=valid_s,
        replace=replace,
        authorized_keys=keys_file,
    )
    if json_:
        print_json({"invited": [{**to_builtins(one, enc_hook=str)} for one in invitations]})
    else:
        _print_invitations(invitations, into, find_zone(course.folder.config))


def _print_invitations(invitations: Sequence[Invitation], into: Path, zone: tzinfo) -> None:
    if not invitations:
        click.echo("All students have joined. For another device: labctl course invite NAME")
        return
    rows = [(one.student, str(one.path)) for one in invitations]
    print_table(rows, ("STUDENT", "FILE"), cut=False)
    print_message("Send each file only to its student. It works once: labctl join FILE")
    print_message(f"The files expire on {local_time_text(invitations[0].expires, zone)}.")
    print_message(f"For a mail merge: {into / publish.MAIL_MERGE}")


def _select_students(
    folder: CourseFolder, names: tuple[str, ...], everybody: bool, keys_file: Path
) -> list[str]:
    if bool(names) == everybody:
        raise UsageError(
            "no students were named" if not names else "names cannot be combined with --all",
            why="name students, or use --all for all who have not joined",
            hint=f"labctl course invite {' '.join(names) or 'STUDENT'}\n"
            "labctl course invite --all   # replaces the earlier files of all who have not joined",
        )
    if not everybody:
        return list(names)
    joined = {
        *keys.AuthorizedKeys(folder, keys_file).list_students(),
        *join_codes.list_page_users(folder),
    }
    return [student.id for student in folder.list_students() if student.id not in joined]


@click.command("door", hidden=True)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("student")
@click.option("--joining", type=click.Path(dir_okay=False, path_type=Path))
def door_command(directory: Path, student: str, joining: Path | None) -> None:
    """Serve one student's connection; sshd runs this for the student's key or join file."""
    os.umask(0o077)
    os.nice(NICE)
    limit_memory(connection_limits.MAX_MEMORY_BYTES)
    command = copy_environment().get("SSH_ORIGINAL_COMMAND", "")

    def restart_idle_timer() -> None:
        """Kill this process IDLE_S seconds after the last data arrived."""
        signal.alarm(IDLE_S)

    restart_idle_timer()
    folder = course_folder.CourseFolder(directory)
    # A check belongs to no student; its slots are apart from those of a student with its name.
    kind, name = ("checks", "check") if student == keys.CHECKER else ("doors", student)
    try:
        with connection_limits.hold_connection(keys.keeper_dir(folder) / kind, name):
            if joining is not None:
                _enroll(folder, student, command, joining)
            else:
                _dispatch_command(folder, student, command, restart_idle_timer)
    except BusyError as error:
        rpc.send_error(sys.stdout.buffer, error)


def _dispatch_command(
    folder: CourseFolder, student: str, command: str, restart_idle_timer: Callable[[], None]
) -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    if command == course.REQUEST:
        rpc.relay(folder.id, student, source, sink, restart_idle_timer)
    elif command in ("", SUBMIT_REQUEST):
        service.serve(
            receiver.Receiver(folder.drop),
            receiver.check_name(student),
            source,
            sink,
            restart_idle_timer,
            lambda: regrades.RegradeDesk(folder),
        )
    else:
        raise PolicyError(
            f"{command[:80]!a} cannot be run here",
            why="this key can only request servers and submit work",
            hint="labctl up\nlabctl submit",
        )


def _enroll(folder: CourseFolder, student: str, command: str, keys_file: Path) -> None:
    if command != keys.JOIN_REQUEST:
        raise PolicyError(
            f"{command[:80]!a} cannot be run here",
            why="this join file can only register one key",
            hint="labctl join FILE",
        )
    line = sys.stdin.buffer.readline(32 * 1024)
    reply = rpc.answer_enrollment(
        folder, student, line, keys.AuthorizedKeys(folder, keys_file), time.time()
    )
    click.echo(reply)


@click.command("serve", short_help="Run the course's keeper, which is always on.")
@INSTALL
@click.option("--dashboard", is_flag=True, help="Also serve the dashboard, on 127.0.0.1.")
@click.option(
    "--port",
    type=NumberRange(8600, 0, 65535),
    default=8600,
    show_default=True,
    help="Port of the dashboard; 0 chooses a free one.",
)
@student_page.add_options
@AUTHORIZED_KEYS
@click.pass_context
def serve_command(
    ctx: click.Context,
    /,
    install: bool,
    dashboard: bool,
    port: int,
    keys_file: Path,
    **page_options: Any,
) -> None:
    """Run the course's keeper. It answers students' requests and enforces class hours and budgets.

    It also copies the ledger to the store. It runs in the foreground until Ctrl-C. Servers, runs
    and watchdogs continue without it, and the next keeper resumes its work.

    \b
    labctl -C ml-2026 course serve
    labctl -C ml-2026 course serve --dashboard --install
    labctl -C ml-2026 course serve --students --students-url https://HOST
    """
    page = student_page.read_settings(**page_options)
    if dashboard or page is not None:
        http_server.require_extra()
    if install:
        _install_unit(ctx, dashboard, port, page, keys_file)
    else:
        _run_keeper(ctx, dashboard, port, page, keys_file)


def _run_keeper(
    ctx: click.Context,
    dashboard: bool,
    port: int,
    page: http_server.StudentSettings | None,
    keys_file: Path,
) -> None:
    course = open_course(ctx)
    folder = course.folder
    staff = seat_operations.CachingCourseOperator(
        folder,
        course.paths,
        course.state,
        course_scheduler.make_course_log_reporter(log_lines),
        by="keeper",
    )
    with rpc.hold_keeper_lock(folder, course.paths):
        request_handler = requests.RequestHandler(
            folder, seat_operations.SeatOperations(staff), notify=log_lines
        )
        scheduler = course_scheduler.CourseScheduler(
            staff, request_handler, keys.AuthorizedKeys(folder, keys_file), notify=log_lines
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: scheduler.stop.set())
        scheduler.restore()
        with rpc.RpcServer(request_handler):
            seats = count_text(len(folder.list_seats()), "seat")
            log_lines("", f"the keeper of {folder.config.name} started with {seats}")
            if not has_filter():
                log_lines("", f"warning: {UNCONFINED}")
            if dashboard:
                url = http_server.serve_dashboard(
                    folder, course.paths, course.state, port=port, stop=scheduler.stop
                )
                log_lines("", f"dashboard: {url}")
            if page is not None:
                url = http_server.serve_student_page(
                    folder,
                    course.paths,
                    course.state,
                    page,
                    request_handler=request_handler,
                    stop=scheduler.stop,
                    notify=lambda text: log_lines("page for students", text),
                )
                log_lines("", f"page for students: {url}")
            scheduler.run()
        log_lines("", "the keeper stopped; the next one resumes its work")


def _install_unit(
    ctx: click.Context,
    dashboard: bool,
    port: int,
    page: http_server.StudentSettings | None,
    keys_file: Path,
) -> None:
    course = open_course(ctx)
    name = f"labctl-course-{course.config.name}"
    words = [sys.executable, "-m", "labctl", "-C", str(course.folder.path), "course", "serve"]
    words += ["--authorized-keys", str(expand_user(keys_file))]
    words += ["--dashboard", "--port", str(port)] if dashboard else []
    words += student_page.list_options(page) if page is not None else []
    install_unit(
        course.paths,
        name,
        ("ssh", "rsync", "python3"),
        lambda path: course_unit(words, course.config.name, path=path),
    )
