"""A course on a keeper's machine: a folder, a real sshd that forces `labctl course door`, and the
keeper's process here, in this one."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sshd_container import wait_for
from submit_bed import COMMAND_S, Machine, receiving_machine

from labctl.config import find_paths
from labctl.courses.invitation import invite
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import publish_assignments
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.requests import RequestHandler
from labctl.courses.rpc import RpcServer
from labctl.courses.seat_operations import CachingCourseOperator, SeatOperations
from labctl.courses.servers import CourseOperator
from labctl.events import SilentReporter
from labctl.state import State

BEGUN = "the keeper of "
STUDENTS = ("alice", "bob", "carol")


@dataclass
class CourseBed:
    """The keeper's machine with one course on it; students' homes are below `folder`."""

    machine: Machine
    folder: Path

    @property
    def course(self) -> CourseFolder:
        return CourseFolder(self.folder / "ml")

    @property
    def keys(self) -> AuthorizedKeys:
        return AuthorizedKeys(self.course, self.machine.keys)

    def invited(self, student: str, valid_s: int = 3600) -> Path:
        """A student's join file."""
        publish_assignments(self.course, self.machine.host_key)
        into = self.folder / "join"
        return invite(self.course, student, into, self.keys, self.machine.host_key, valid_s).path

    def staff(self) -> CourseOperator:
        """The keeper, with a home of its own."""
        home = self.folder / "keeper-home"
        home.mkdir(exist_ok=True)
        places = find_paths({"HOME": str(home)})
        return CachingCourseOperator(
            self.course, places, State(places.database), SilentReporter(), by="keeper"
        )

    def command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """argv and environment of `labctl -C ml course ...` on the keeper's machine."""
        home = self.folder / "keeper-home"
        home.mkdir(exist_ok=True)
        environ = {**os.environ, "HOME": str(home), "LANG": "C.UTF-8"}
        argv = [sys.executable, "-m", "labctl", "-C", str(self.folder / "ml"), "course", *words]
        return argv, environ

    def serve(self, log: IO[str], program: str = "") -> subprocess.Popen[bytes]:
        """`labctl course serve` in a process of its own, once its door is open.

        `program` is Python source to run instead of `python -m labctl`.
        """
        argv, environ = self.command("serve", "--authorized-keys", str(self.machine.keys))
        if program:
            argv[1:3] = ["-c", program]
        begun = Path(log.name).read_text().count(BEGUN)
        process = subprocess.Popen(argv, env=environ, stderr=log)

        def is_open() -> bool:
            over = process.poll() is not None
            return over or Path(log.name).read_text().count(BEGUN) > begun

        wait_for(is_open, COMMAND_S)
        return process

    def home(self, student: str) -> Path:
        home = self.folder / f"{student}-home"
        home.mkdir(exist_ok=True)
        return home

    def labctl(
        self, student: str, *words: str, code: int = 0, cwd: Path | None = None
    ) -> tuple[str, str]:
        """(standard output, standard error) of a student's labctl."""
        home = self.home(student)
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [sys.executable, "-m", "labctl", *words],
            cwd=cwd or home,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr


@contextmanager
def course_bed(folder: Path, server: str, more: str = "") -> Iterator[CourseBed]:
    """`server` is course.yaml's section, in one line of YAML; `more` are further lines."""
    with receiving_machine(folder / "machine") as machine:
        made = folder / "ml"
        made.mkdir()
        (made / "course.yaml").write_text(
            f"course: ml-2026\nserver: {server}\n"
            f"keeper: {{host: 127.0.0.1, user: {getpass.getuser()}, port: {machine.wire.port}}}\n"
            "assignments: {hw3: {due: 2099-01-01 12:00 UTC, late: 48h}}\n" + more
        )
        rows = "".join(f"{one},{one.title()},{one}@example.edu,,,yes\n" for one in STUDENTS)
        roster = made / "roster.csv"
        roster.write_text("id,name,email,team,section,active\n" + rows)
        roster.chmod(0o600)
        make_private(made)
        yield CourseBed(machine, folder)


@contextmanager
def keeping(bed: CourseBed, work: Any = None) -> Iterator[RequestHandler]:
    """The keeper's process: its door is open."""
    request_handler = RequestHandler(bed.course, work or SeatOperations(bed.staff()))
    with RpcServer(request_handler):
        yield request_handler
        assert request_handler.wait(60.0)


__all__ = ["STUDENTS", "CourseBed", "course_bed", "keeping"]
