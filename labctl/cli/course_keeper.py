"""course serve, invite and door: the keeper, and how students reach it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from labctl.courses.records.folder import CourseFolder

AUTHORIZED_KEYS = click.option(
    "--authorized-keys",
    "keys_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("~/.ssh/authorized_keys"),
    show_default=True,
    help="Of the account that students log in to.",
)
IDLE_S = 600
# Of a student's process here: looking into a bundle keeps nobody else waiting.
NICE = 10


@click.command("invite", short_help="A join file for each student.")
@click.argument("names", nargs=-1, metavar="[STUDENT]...")
@click.option("--all", "everybody", is_flag=True, help="Everybody who has not joined yet.")
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path("join"),
    show_default=True, help="The directory that gets the files.",
)  # fmt: skip
@click.option("--valid", default="14d", show_default=True, help="How long a file can be used.")
@click.option("--host-key", default="", help="The keeper's; default: asked from here, once.")
@AUTHORIZED_KEYS
@json_option
@click.pass_context
def invite_command(
    ctx: click.Context,
    names: tuple[str, ...],
    everybody: bool,
    into: Path,
    valid: str,
    host_key: str,
    keys_file: Path,
    json_: bool,
) -> None:
    """Write a join file for each STUDENT, on the keeper's machine. A new one replaces an old one.

    Each works once and until it expires. It holds no key: send it to that student alone, by mail
    or from an https:// address.

    \b
    labctl course invite alice
    labctl course invite --all --into ./join
    """
    from msgspec import to_builtins

    from labctl.cli.screen import as_json, table
    from labctl.config import parse_duration
    from labctl.errors import UsageError

    course = open_course(ctx, quiet=json_)
    try:
        valid_s = parse_duration(valid)
    except ValueError as error:
        raise UsageError(str(error), hint="--valid 14d") from None
    chosen = _chosen(course.folder, names, everybody, keys_file)
    found = course.invite(
        chosen, into, host_key=host_key, valid_s=valid_s, authorized_keys=keys_file
    )
    if json_:
        as_json({"invited": [{**to_builtins(one, enc_hook=str)} for one in found]})
        return
    if not found:
        click.echo("everybody has joined already; for a new laptop: labctl course invite NAME")
        return
    table([(one.student, str(one.path)) for one in found], ("STUDENT", "FILE"))
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found[0].expires))
    click.echo("each for that student alone, and once; there: labctl join FILE", err=True)
    click.echo(f"they can be used until {until}", err=True)


def _chosen(
    folder: CourseFolder, names: tuple[str, ...], everybody: bool, keys_file: Path
) -> list[str]:
    from labctl.courses.keys import Keys
    from labctl.errors import UsageError

    if bool(names) == everybody:
        raise UsageError(
            "whom to invite?",
            why="name students, or say --all, and not both",
            hint="labctl course invite --all",
        )
    if not everybody:
        return list(names)
    joined = set(Keys(folder, keys_file).students())
    return [one.id for one in folder.students() if one.id not in joined]


@click.command("door", hidden=True)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("student")
@click.option("--joining", type=click.Path(dir_okay=False, path_type=Path))
def door_command(directory: Path, student: str, joining: Path | None) -> None:
    """Answer one student: the forced command of their key, and of an invitation's."""
    import os
    import signal

    from labctl.config import environment
    from labctl.courses.loading import open_course as opened
    from labctl.submissions.confinement import limit_memory
    from labctl.submissions.connection_limits import MAX_MEMORY_BYTES, hold_connection

    os.umask(0o077)
    os.nice(NICE)
    limit_memory(MAX_MEMORY_BYTES)
    asked = environment().get("SSH_ORIGINAL_COMMAND", "")

    def alive() -> None:
        """A connection on which nothing comes any more ends, and this process with it."""
        signal.alarm(IDLE_S)

    alive()
    folder = opened(directory)
    from labctl.courses.keys import CHECKER, keeper_dir
    from labctl.courses.rpc import say
    from labctl.errors import BusyError

    # A check is nobody's: its places are apart from those of a student who is called so.
    kind, name = ("checks", "check") if student == CHECKER else ("doors", student)
    try:
        with hold_connection(keeper_dir(folder) / kind, name):
            if joining is not None:
                _enrol(folder, student, asked, joining)
            else:
                _answer(folder, student, asked, alive)
    except BusyError as error:
        say(sys.stdout.buffer, error)


def _answer(folder: CourseFolder, student: str, asked: str, alive: Callable[[], None]) -> None:
    from labctl.errors import PolicyError
    from labctl.providers.course import REQUEST as DOOR_REQUEST
    from labctl.submissions import REQUEST as SUBMIT_REQUEST

    source, sink = sys.stdin.buffer, sys.stdout.buffer
    if asked == DOOR_REQUEST:
        from labctl.courses.rpc import relay

        relay(folder.id, student, source, sink, alive)
    elif asked in ("", SUBMIT_REQUEST):
        from labctl.submissions.receiver import Receiver, checked
        from labctl.submissions.service import serve

        serve(Receiver(folder.drop), checked(student), source, sink, alive)
    else:
        raise PolicyError(
            f"{asked[:80]!a} cannot be run here",
            why="this key asks for servers and hands in submissions, and nothing else",
            hint="labctl up, labctl submit",
        )


def _enrol(folder: CourseFolder, student: str, asked: str, keys_file: Path) -> None:
    import json

    import msgspec

    from labctl.courses.keys import JOIN_REQUEST, Keys
    from labctl.courses.rpc import enrolment
    from labctl.errors import PolicyError

    if asked != JOIN_REQUEST:
        raise PolicyError(
            f"{asked[:80]!a} cannot be run here",
            why="this code enrols one key, and opens nothing else",
            hint="labctl join FILE",
        )
    line = sys.stdin.buffer.readline(32 * 1024)
    said = enrolment(folder, student, line, Keys(folder, keys_file), time.time())
    click.echo(json.dumps(msgspec.to_builtins(said)))


@click.command("serve", short_help="The always-on keeper, with the dashboard.")
@click.option("--install", is_flag=True, help="Write a systemd user unit that runs it.")
@click.option("--dashboard", is_flag=True, help="Serve the dashboard on this machine's loopback.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="Of the dashboard, on 127.0.0.1; 0: any free one.",
)
@AUTHORIZED_KEYS
@click.pass_context
def serve_command(
    ctx: click.Context, install: bool, dashboard: bool, port: int, keys_file: Path
) -> None:
    """Keep the course: answer students, class hours, budgets, the ledger's copy in the store.

    Runs in the foreground until Ctrl-C. Servers, runs and watchdogs go on without it, and the next
    one goes on where it was.

    \b
    labctl -C ml-2026 course serve
    labctl -C ml-2026 course serve --dashboard --install
    """
    if install:
        _install(ctx, dashboard, port, keys_file)
    else:
        _serve(ctx, dashboard, port, keys_file)


def _serve(ctx: click.Context, dashboard: bool, port: int, keys_file: Path) -> None:
    import signal

    from labctl.courses.keys import Keys
    from labctl.courses.requests import Desk
    from labctl.courses.rpc import Door, only_keeper
    from labctl.courses.scheduler import Vigil, Yes
    from labctl.courses.seat_operations import KeeperStaff, SeatWork
    from labctl.submissions.confinement import UNCONFINED, has_filter

    course = open_course(ctx)
    folder = course.folder
    staff = KeeperStaff(folder, course.paths, course.state, Yes(_tell), by="keeper")
    with only_keeper(folder, course.paths):
        desk = Desk(folder, SeatWork(staff), tell=_tell)
        vigil = Vigil(staff, desk, Keys(folder, keys_file), tell=_tell)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: vigil.stop.set())
        vigil.begin()
        with Door(desk):
            _tell("", f"the keeper of {folder.config.name} begins, {len(folder.seats())} seats")
            if not has_filter():
                _tell("", f"warning: {UNCONFINED}")
            if dashboard:
                from labctl.web.http_server import run

                url = run(folder, course.paths, course.state, port=port, stop=vigil.stop)
                _tell("", f"dashboard: {url}")
            vigil.run()
        _tell("", "the keeper ends; what it was at goes on with the next one")


def _tell(name: str, text: str) -> None:
    """One line of the log."""
    from labctl.cli.exit_codes import clean

    about = f"{name}: " if name else ""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for line in clean(text).splitlines():
        click.echo(f"{stamp} {about}{line}", err=True)


def _install(ctx: click.Context, dashboard: bool, port: int, keys_file: Path) -> None:
    import os
    import shutil

    from labctl.commands.systemd import course_unit
    from labctl.errors import LabError

    course = open_course(ctx)
    name = f"labctl-course-{course.config.name}"
    found = [shutil.which(program) for program in ("ssh", "rsync", "python3")]
    known = [str(Path(place).parent) for place in found if place]
    path = os.pathsep.join(dict.fromkeys([*known, "/usr/local/bin", "/usr/bin", "/bin"]))
    words = [sys.executable, "-m", "labctl", "-C", str(course.folder.path), "course", "serve"]
    words += ["--authorized-keys", str(keys_file.expanduser())]
    words += ["--dashboard", "--port", str(port)] if dashboard else []
    target = course.paths.config_dir.parent / "systemd" / "user" / f"{name}.service"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(course_unit(words, course.config.name, path=path))
    except OSError as error:
        raise LabError(
            f"cannot write {target}", why=error.strerror or "", hint=f"ls -ld {target.parent}"
        ) from error
    click.echo(f"{target} is written; next:")
    click.echo(f"  systemctl --user daemon-reload && systemctl --user enable --now {name}")
    click.echo("  loginctl enable-linger     # so that it goes on when you log out")
    click.echo(f"  journalctl --user -u {name} -f")
