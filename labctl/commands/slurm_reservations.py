"""Class hours as reservations of Slurm: which there should be, which there are, and the difference.

A reservation holds all machines for a course's account. Slurm places the account's jobs in it
without an option (MAGNETIC), also those that begin before it or end after it (FLEX). Jobs of others
that would reach into it do not begin. Pure functions; nothing runs here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from labctl.model import Value

# IGNORE_JOBS: jobs of others that run when the reservation is made do not prevent it.
FLAGS = "MAGNETIC,FLEX,IGNORE_JOBS"
# Seconds that the beginning of a reservation may differ from what it should be.
BEGIN_TOLERANCE_S = 180
# Seconds within which a reservation that should not be there may end by itself.
ENDING_S = 90
# Hours that end sooner are not reserved.
LEAST_S = 300


class ClassReservation(Value, frozen=True):
    """A stretch of class hours, in Unix seconds.

    `is_edited`: somebody has changed whom it is for, or how jobs use it.
    """

    name: str
    begins: int
    ends: int
    is_edited: bool = False


def build_wanted(
    account: str, hours: Iterable[tuple[float, float]], now: float
) -> list[ClassReservation]:
    """Return the reservations for these class hours, in order, without those that are over.

    Hours that overlap become one: two reservations cannot have the same machines.
    """
    stretches: list[tuple[int, int]] = []
    for begins, ends in sorted((round(begins), round(ends)) for begins, ends in hours):
        if stretches and begins < stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(ends, stretches[-1][1]))
        else:
            stretches.append((begins, ends))
    return [
        ClassReservation(f"{account}-{_format_utc(begins)}", begins, ends)
        for begins, ends in stretches
        if ends > now + LEAST_S
    ]


def _format_utc(at: int) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%MZ}"


def build_query() -> str:
    """Return the script that prints all reservations, with times in Unix seconds."""
    return "SLURM_TIME_FORMAT=%s scontrol --oneliner show reservation"


def parse_reservations(output: str, account: str) -> list[ClassReservation]:
    """Parse what `build_query` prints into the reservations that labctl made for the account.

    Their names say whose they are: staff may have changed everything else.
    """
    reservations = []
    for line in output.splitlines():
        fields = dict(re.findall(r"(\S+?)=(\S*)", line))
        name = fields.get("ReservationName", "")
        if re.fullmatch(rf"{re.escape(account)}-\d{{8}}T\d{{4}}Z", name):
            is_same = (
                fields.get("Accounts") == account
                and fields.get("Users", "(null)") == "(null)"
                and set(FLAGS.split(",")) <= set(fields.get("Flags", "").split(","))
            )
            begins, ends = int(fields["StartTime"]), int(fields["EndTime"])
            reservations.append(ClassReservation(name, begins, ends, not is_same))
    return reservations


def build_changes(
    account: str,
    wanted: Sequence[ClassReservation],
    present: Sequence[ClassReservation],
    now: float,
    *,
    can_create: bool = True,
) -> list[str]:
    """Return the commands that make the reservations what they should be; none if they are that.

    A reservation that has begun keeps its beginning, and ends at once if it should not be there:
    Slurm does not delete one in which jobs run. Without `can_create`, none is added.
    """
    present_by_name = {reservation.name: reservation for reservation in present}
    names = {reservation.name for reservation in wanted}
    commands = []
    # First those that are not wanted: new ones may overlap them.
    for reservation in present:
        if reservation.name not in names and reservation.ends > now + ENDING_S:
            commands.append(build_removal(reservation))
    for reservation in wanted:
        old = present_by_name.get(reservation.name)
        if old is None:
            commands += [_build_creation(account, reservation, now)] if can_create else []
        elif old.is_edited or not _is_beginning_right(old, reservation, now):
            commands.append(_build_replacement(account, reservation, now))
        elif old.ends != reservation.ends:
            end = f"EndTime=uts{reservation.ends}"
            commands.append(_scontrol("update", f"ReservationName={reservation.name}", end))
    return commands


def _is_beginning_right(old: ClassReservation, wanted: ClassReservation, now: float) -> bool:
    """Whether it begins with the class; of a class that has begun, whether it has begun too."""
    if wanted.begins <= now:
        return old.begins <= now + BEGIN_TOLERANCE_S
    return abs(old.begins - wanted.begins) <= BEGIN_TOLERANCE_S


def _build_replacement(account: str, reservation: ClassReservation, now: float) -> str:
    """Return the command that makes a reservation anew; one in which jobs run is only changed."""
    name = f"ReservationName={reservation.name}"
    again = _build_creation(account, reservation, now)
    update = _scontrol(
        "update",
        name,
        f"Accounts={account}",
        "Users=",
        f"EndTime=uts{reservation.ends}",
        f"Flags+={FLAGS}",
    )
    return f"if {_scontrol('delete', name)} 2>/dev/null; then {again}; else {update}; fi"


def build_removal(reservation: ClassReservation) -> str:
    """Return the command that deletes a reservation, or ends it in a minute if jobs run in it.

    The jobs go on. One that has not begun must begin first to end so soon.
    """
    name = f"ReservationName={reservation.name}"
    end = ("update", name, "EndTime=now+1minutes")
    ways = [_scontrol("delete", name), _scontrol(*end), _scontrol(*end, "StartTime=now")]
    return f"{{ {' 2>/dev/null || '.join(ways)}; }}"


def _build_creation(account: str, reservation: ClassReservation, now: float) -> str:
    def create(begins: str) -> str:
        return _scontrol(
            "create",
            "reservation",
            f"ReservationName={reservation.name}",
            f"StartTime={begins}",
            f"EndTime=uts{reservation.ends}",
            "Nodes=ALL",
            f"Accounts={account}",
            f"Flags={FLAGS}",
        )

    if reservation.begins > now + ENDING_S:
        return create(f"uts{reservation.begins}")
    # Slurm refuses a beginning in the past, or before the end of what `build_removal` has left.
    return f"{{ {create('now')} 2>/dev/null || {create('now+2minutes')}; }}"


def _scontrol(*words: str) -> str:
    return " ".join(shlex.quote(word) for word in ("scontrol", *words))
