"""A course's folder on this machine: its configuration, people, seats, ledger.

    course.yaml, roster.csv, imported/, assignments/     for people
    .course/                                             0700, labctl's own, never in git

Nothing is read before it is asked for, and everything at most once.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config import CourseConfig, load_course
from labctl.config.document import plain
from labctl.config.identity import write_private
from labctl.config.lab import SettingsType
from labctl.config.reader import nearest
from labctl.courses.records.ledger import Ledger
from labctl.courses.records.roster import ROSTER_FILE, read_roster
from labctl.courses.records.spending import Living
from labctl.courses.records.student import Student
from labctl.errors import ConfigError, LabError, NotFoundError
from labctl.model import NAME_PATTERN, Server, Value

PRIVATE = ".course"
MOST_NAME = 39
# Before the name of a seat that nobody stands in any more. Without it a student's name means the
# seat that they have now, which may be their team's.
FORMER = "former:"


class Seat(Value, frozen=True):
    """What one student, or one team, has: a server, or an account on a shared one.

    `name` is the team's or the student's id. `lab`, `lab_id` and `pseudonym` say nothing of who
    that is, and are what a provider may be told.
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
    """One course. `settings_type` gives providers' settings types, as for `load_lab`."""

    def __init__(
        self,
        path: Path,
        *,
        settings_type: SettingsType | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = path.expanduser().absolute()
        self.settings_type = settings_type
        self.tell = tell

    @functools.cached_property
    def config(self) -> CourseConfig:
        """ConfigError lists everything wrong in course.yaml."""
        return load_course(self.path, settings_type=self.settings_type)

    @property
    def id(self) -> str:
        """16 hex digits, by which everything of the course is found at a provider."""
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
        return Ledger(self.private / "ledger.jsonl", tell=self.tell)

    @functools.cached_property
    def _roster(self) -> tuple[Student, ...]:
        return tuple(read_roster(self.roster_file))

    def students(self, *, active_only: bool = True) -> tuple[Student, ...]:
        """The roster, in its order; ConfigError with every bad line of it."""
        return tuple(one for one in self._roster if one.active or not active_only)

    def student(self, student_id: str) -> Student:
        """One of the roster, who has left too; NotFoundError names the nearest id."""
        for one in self._roster:
            if one.id == student_id:
                return one
        raise _unknown("student", student_id, [one.id for one in self._roster], self.path)

    def seats(self, *, active_only: bool = True, former: bool = False) -> tuple[Seat, ...]:
        """Every seat in the roster's order: with `active_only` those that somebody still has.

        With `former` also those that a server was made for and the roster no longer knows, since
        their student went into a team, say: nobody stands in them, and they may still cost.
        """
        members: dict[str, list[str]] = {}
        for one in self.students(active_only=active_only):
            members.setdefault(one.seat, []).append(one.id)
        found = list(self.build_seats(members))
        if former:
            every = {one.seat for one in self._roster}
            gone = [name for name in self._going() if name not in every]
            found += [self._seat(name, []) for name in gone]
        return tuple(found)

    def build_seats(self, members: Mapping[str, Sequence[str]]) -> tuple[Seat, ...]:
        """Return seats with these members, by name, whatever the roster says now."""
        return tuple(self._seat(name, list(students)) for name, students in members.items())

    def unneeded_seats(self) -> tuple[Seat, ...]:
        """Seats with a server that nobody needs: their students left or went into another team."""
        unneeded = {*self._going()} - {one.name for one in self.seats()}
        every = self.seats(active_only=False, former=True)
        return tuple(one for one in every if one.name in unneeded)

    def past_seats(self) -> tuple[Seat, ...]:
        """Every seat that a server was ever made for. Their disks may outlive their servers."""
        entries = self.ledger.entries()
        names = {one.seat for one in entries if one.kind == "up" and _is_students(one.seat)}
        return self.build_seats(dict.fromkeys(sorted(names), ()))

    def _going(self) -> list[str]:
        """Seats of which the ledger knows no end of some server."""
        going: dict[str, set[str]] = {}
        for one in self.ledger.entries():
            server_id = str(one.detail.get("server_id", ""))
            if one.kind == "up" and _is_students(one.seat):
                going.setdefault(one.seat, set()).add(server_id)
            elif one.kind == "down":
                going.get(one.seat, set()).discard(server_id)
        return [name for name, servers in going.items() if servers]

    def seat_of(self, student: str | Student) -> Seat:
        """The seat that a student has or had."""
        return self.seat(self.student(student if isinstance(student, str) else student.id).seat)

    def seat(self, name: str) -> Seat:
        """A seat by the name of its team or of a student; NotFoundError names the nearest."""
        return self.chosen([name])[0]

    def chosen(self, names: Iterable[str], among: Sequence[Seat] | None = None) -> tuple[Seat, ...]:
        """The seats of these students and teams, each once; of everybody active for no names.

        `among` are the seats of an assignment, where those of the roster are not meant.

        `former:NAME` is a seat of before, that of a student who went into a team, say.
        NotFoundError, with the nearest name, for what is none of these.
        """
        names = list(names)
        if not names:
            return self.seats() if among is None else tuple(among)
        every = self.seats(active_only=False) if among is None else among
        seats = {one.name: one for one in every}
        by_student = {student: one for one in seats.values() for student in one.students}
        found: dict[str, Seat] = {}
        for name in names:
            seat = seats.get(name) or by_student.get(name) or self._former(name)
            if seat is None:
                known = [*seats, *by_student]
                raise _unknown("student or team", name, known, self.path)
            found[seat.name] = seat
        return tuple(found.values())

    def _former(self, name: str) -> Seat | None:
        if not name.startswith(FORMER):
            return None
        every = self.seats(active_only=False, former=True)
        gone = {f"{FORMER}{one.name}": one for one in every if not one.students}
        return gone.get(name)

    def pseudonym(self, name: str) -> str:
        """8 hex digits that only this folder can tell back."""
        return self._digest("pseudonym", name)[:8]

    def living(self, servers: Iterable[Server]) -> list[Living]:
        """Those of a provider's servers that are seats of this course, as the sums need them."""
        seats = {one.lab_id: one.name for one in self.seats(active_only=False, former=True)}
        return [
            Living(
                server_id=one.id,
                seat=seats[one.lab_id],
                created_at=one.created_at,
                usd_per_hour=one.offer.price_usd_per_hour,
                stopped=one.state == "stopped",
            )
            for one in servers
            if one.lab_id in seats and one.state != "terminated"
        ]

    def refresh(self) -> None:
        """Read course.yaml and the roster again at the next question."""
        for name in ("config", "_roster"):
            self.__dict__.pop(name, None)

    def _seat(self, name: str, students: list[str]) -> Seat:
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
        known = self._digests.get((label, name))
        if known is None:
            secret = bytes.fromhex(self._identity.secret)
            known = hmac.digest(secret, f"{label}:{name}".encode(), "sha256").hex()
            self._digests[label, name] = known
        return known

    @functools.cached_property
    def _digests(self) -> dict[tuple[str, str], str]:
        return {}

    @functools.cached_property
    def _identity(self) -> _Identity:
        file = self.private / "course.json"
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Identity)
        except FileNotFoundError:
            raise ConfigError(
                f"{plain(str(self.path))} is no course's folder",
                why="it has no .course/course.json, by which its servers are found",
                hint="labctl course init NAME --roster FILE   # or put the file back",
            ) from None
        except msgspec.MsgspecError:
            found = _Identity(version=1, id="", secret="")
        except OSError as error:
            raise LabError(
                f"cannot read {plain(str(file))}",
                why=error.strerror or "",
                hint=f"ls -l {plain(str(file))}",
            ) from error
        good = re.fullmatch("[0-9a-f]{16}", found.id) and re.fullmatch("[0-9a-f]{32}", found.secret)
        if found.version != 1 or not good:
            raise ConfigError(
                f"{plain(str(file))} is damaged or of a newer labctl",
                why="it holds the secret by which this course's servers are found",
                hint="put it back from a backup; until then: labctl orphans",
            )
        return found


def _is_students(name: str) -> bool:
    """Whether a seat in the ledger is of students: a dot begins the course's own."""
    return NAME_PATTERN.fullmatch(name) is not None


def make_private(path: Path) -> bool:
    """Make a course's `.course` with its id and secret; False where they are there already."""
    private = path / PRIVATE
    if private.is_symlink():
        raise LabError(
            f"{plain(str(private))} leads elsewhere through a link", hint=f"rm {private}"
        )
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)
    for name in ("drop", "grades", "keeper"):
        (private / name).mkdir(mode=0o700, exist_ok=True)
    (private / ".gitignore").write_text("*\n")
    file = private / "course.json"
    if file.exists():
        return False
    made = _Identity(version=1, id=os.urandom(8).hex(), secret=os.urandom(16).hex())
    write_private(file, msgspec.json.encode(made) + b"\n")
    return True


def _unknown(what: str, name: str, known: list[str], folder: Path) -> NotFoundError:
    near = nearest(name, known)
    return NotFoundError(
        f"there is no {what} {plain(name)!r} in this course",
        why=f"did you mean {near}?" if near else "",
        hint=f"labctl -C {plain(str(folder))} course roster   # who there is",
    )
