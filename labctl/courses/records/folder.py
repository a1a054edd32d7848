"""A course's folder on this machine: its configuration, students, seats and ledger.

    course.yaml, roster.csv, imported/, assignments/     for people
    .course/                                             0700, labctl's own, never in git

Everything is read when it is first needed, and at most once.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config import CourseConfig, expand_user, load_course
from labctl.config.document import escape, make_read_error
from labctl.config.identity import write_private
from labctl.config.reader import find_nearest
from labctl.courses.records.ledger import Ledger
from labctl.courses.records.roster import ROSTER_FILE, read_roster
from labctl.courses.records.spending import RunningServer
from labctl.courses.records.student import Student
from labctl.decoding import decode_json
from labctl.errors import ConfigError, LabError, NotFoundError
from labctl.model import NAME_PATTERN, Server, Value
from labctl.servers.provider_traits import read_provider_traits

PRIVATE = ".course"
MOST_NAME = 39
# Prefix of a seat that has no students any more. Without it a student's name means their present
# seat, which may be their team's.
FORMER = "former:"


class Seat(Value, frozen=True):
    """The place of one student or team: it has a server, or an account on a shared one.

    `name` is the team's or the student's id. `lab`, `lab_id` and `pseudonym` do not reveal it: only
    they are sent to providers.
    """

    name: str
    lab: str
    lab_id: str
    students: tuple[str, ...]
    pseudonym: str = ""


class _Identity(Value, frozen=True):
    version: int
    id: str
    secret: str


class CourseFolder:
    """The folder of one course."""

    def __init__(self, path: Path, *, notify: Callable[[str], None] = lambda text: None) -> None:
        self.path = expand_user(path).absolute()
        self.notify = notify

    @functools.cached_property
    def config(self) -> CourseConfig:
        """course.yaml; ConfigError lists everything wrong in it, also for its providers."""
        return load_course(self.path, find_provider=read_provider_traits)

    @property
    def id(self) -> str:
        """16 hex digits that mark everything of the course at a provider."""
        return self._identity.id

    @property
    def private(self) -> Path:
        return self.path / PRIVATE

    @property
    def drop(self) -> Path:
        """The directory of the course's `Receiver`."""
        return self.private / "drop"

    @property
    def grades(self) -> Path:
        return self.private / "grades"

    @property
    def imported(self) -> Path:
        return self.path / "imported"

    @property
    def roster_file(self) -> Path:
        return self.path / ROSTER_FILE

    @functools.cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.private / "ledger.jsonl", notify=self.notify)

    @functools.cached_property
    def _roster(self) -> tuple[Student, ...]:
        return tuple(read_roster(self.roster_file))

    def list_students(self, *, active_only: bool = True) -> tuple[Student, ...]:
        """Return the students in the roster's order; ConfigError lists every bad line."""
        return tuple(student for student in self._roster if student.active or not active_only)

    def find_student(self, student_id: str) -> Student:
        """Return a student of the roster, active or not; NotFoundError suggests the nearest id."""
        for student in self._roster:
            if student.id == student_id:
                return student
        ids = [student.id for student in self._roster]
        raise _make_unknown_error("student", student_id, ids, self.path)

    def list_seats(self, *, active_only: bool = True, former: bool = False) -> tuple[Seat, ...]:
        """Return the seats in the roster's order; with `active_only`, those with active students.

        With `former`, also seats that have a server but are no longer in the roster, for example
        because their student joined a team: they have no students, and may still cost money.
        """
        members: dict[str, list[str]] = {}
        for student in self.list_students(active_only=active_only):
            members.setdefault(student.seat, []).append(student.id)
        seats = list(self.build_seats(members))
        if former:
            in_roster = {student.seat for student in self._roster}
            names = [name for name in self._list_open_seats() if name not in in_roster]
            seats += [self._build_seat(name, []) for name in names]
        return tuple(seats)

    def build_seats(self, members: Mapping[str, Sequence[str]]) -> tuple[Seat, ...]:
        """Build seats with these members, by name, whatever the roster says now."""
        return tuple(self._build_seat(name, list(students)) for name, students in members.items())

    def list_unneeded_seats(self) -> tuple[Seat, ...]:
        """Return seats with a server that nobody needs: students left or changed their team."""
        unneeded = {*self._list_open_seats()} - {seat.name for seat in self.list_seats()}
        every = self.list_seats(active_only=False, former=True)
        return tuple(seat for seat in every if seat.name in unneeded)

    def list_past_seats(self) -> tuple[Seat, ...]:
        """Return every seat that ever had a server. Its disk may outlive its server."""
        entries = self.ledger.list_entries()
        names = {entry.seat for entry in entries if entry.kind == "up" and _is_students(entry.seat)}
        return self.build_seats(dict.fromkeys(sorted(names), ()))

    def _list_open_seats(self) -> list[str]:
        """List the seats with a server that has no end in the ledger."""
        open_servers: dict[str, set[str]] = {}
        for entry in self.ledger.list_entries():
            server_id = str(entry.detail.get("server_id", ""))
            if entry.kind == "up" and _is_students(entry.seat):
                open_servers.setdefault(entry.seat, set()).add(server_id)
            elif entry.kind == "down":
                open_servers.get(entry.seat, set()).discard(server_id)
        return [name for name, servers in open_servers.items() if servers]

    def find_seat_of(self, student: str | Student) -> Seat:
        """Return the seat that a student has or had."""
        return self.find_seat(
            self.find_student(student if isinstance(student, str) else student.id).seat
        )

    def find_seat(self, name: str) -> Seat:
        """Return the seat of a team or a student; NotFoundError suggests the nearest name."""
        return self.choose_seats([name])[0]

    def choose_seats(
        self, names: Iterable[str], among: Sequence[Seat] | None = None
    ) -> tuple[Seat, ...]:
        """Return the seats of these students and teams, each once; without names, all active ones.

        `among` are the seats to choose from, for example those of an assignment; by default those
        of the roster. `former:NAME` is a past seat, for example of a student who joined a team.
        NotFoundError, with the nearest name, for an unknown one.
        """
        names = list(names)
        if not names:
            return self.list_seats() if among is None else tuple(among)
        every = self.list_seats(active_only=False) if among is None else among
        seats = {seat.name: seat for seat in every}
        by_student = {student: seat for seat in seats.values() for student in seat.students}
        chosen: dict[str, Seat] = {}
        for name in names:
            seat = seats.get(name) or by_student.get(name) or self._find_former(name)
            if seat is None:
                candidates = [*seats, *by_student]
                raise _make_unknown_error("student or team", name, candidates, self.path)
            chosen[seat.name] = seat
        return tuple(chosen.values())

    def _find_former(self, name: str) -> Seat | None:
        if not name.startswith(FORMER):
            return None
        every = self.list_seats(active_only=False, former=True)
        former = {f"{FORMER}{seat.name}": seat for seat in every if not seat.students}
        return former.get(name)

    def pseudonym(self, name: str) -> str:
        """Return 8 hex digits for a name, which only this folder's secret can produce."""
        return self._digest("pseudonym", name)[:8]

    def list_running(self, servers: Iterable[Server]) -> list[RunningServer]:
        """Return the provider's servers that belong to seats of this course, to compute costs."""
        seats = {seat.lab_id: seat.name for seat in self.list_seats(active_only=False, former=True)}
        return [
            RunningServer(
                server_id=server.id,
                seat=seats[server.lab_id],
                created_at=server.created_at,
                usd_per_hour=server.offer.price_usd_per_hour,
                stopped=server.state == "stopped",
            )
            for server in servers
            if server.lab_id in seats and server.state != "terminated"
        ]

    def refresh(self) -> None:
        """Have course.yaml and the roster read again when they are next needed."""
        for name in ("config", "_roster"):
            self.__dict__.pop(name, None)

    def _build_seat(self, name: str, students: list[str]) -> Seat:
        pseudonym = self.pseudonym(name)
        room = MOST_NAME - len(pseudonym) - 1
        return Seat(
            name=name,
            lab=f"{self.config.name[:room].rstrip('-')}-{pseudonym}",
            lab_id=self._digest("lab", name)[:12],
            students=tuple(students),
            pseudonym=pseudonym,
        )

    def _digest(self, label: str, name: str) -> str:
        digest = self._digests.get((label, name))
        if digest is None:
            secret = bytes.fromhex(self._identity.secret)
            digest = hmac.digest(secret, f"{label}:{name}".encode(), "sha256").hex()
            self._digests[label, name] = digest
        return digest

    @functools.cached_property
    def _digests(self) -> dict[tuple[str, str], str]:
        return {}

    @functools.cached_property
    def _identity(self) -> _Identity:
        file = self.private / "course.json"
        try:
            identity = decode_json(file.read_bytes(), _Identity)
        except FileNotFoundError:
            raise ConfigError(
                f"{escape(str(self.path))} is not a course folder",
                why="it has no .course/course.json, which identifies its servers",
                hint="labctl course init NAME --roster FILE   # or restore the file",
            ) from None
        except msgspec.MsgspecError:
            identity = _Identity(version=1, id="", secret="")
        except OSError as error:
            raise make_read_error(file, error) from error
        is_valid = re.fullmatch("[0-9a-f]{16}", identity.id) and re.fullmatch(
            "[0-9a-f]{32}", identity.secret
        )
        if identity.version != 1 or not is_valid:
            raise ConfigError(
                f"{escape(str(file))} is damaged, or from a newer labctl",
                why="it holds the secret that identifies this course's servers",
                hint="restore it from a backup; until then:\nlabctl orphans",
            )
        return identity


def _is_students(name: str) -> bool:
    """Tell whether a seat in the ledger is a student's: the course's own begin with a dot."""
    return NAME_PATTERN.fullmatch(name) is not None


def make_private(path: Path) -> bool:
    """Create a course's `.course` with its id and secret; return False if they exist already."""
    private = path / PRIVATE
    if private.is_symlink():
        raise LabError(
            f"{escape(str(private))} is a link, which is not allowed", hint=f"rm {private}"
        )
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)
    for name in ("drop", "grades", "keeper"):
        (private / name).mkdir(mode=0o700, exist_ok=True)
    (private / ".gitignore").write_text("*\n")
    file = private / "course.json"
    if file.exists():
        return False
    identity = _Identity(version=1, id=os.urandom(8).hex(), secret=os.urandom(16).hex())
    write_private(file, msgspec.json.encode(identity) + b"\n")
    return True


def _make_unknown_error(kind: str, name: str, candidates: list[str], folder: Path) -> NotFoundError:
    near = find_nearest(name, candidates)
    return NotFoundError(
        f"there is no {kind} {escape(name)!r} in this course",
        why=f"did you mean {near}?" if near else "",
        hint=f"labctl -C {escape(str(folder))} course roster   # lists them",
    )
