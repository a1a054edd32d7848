"""Class hours as reservations of Slurm: what scontrol prints, and which commands change it."""

from __future__ import annotations

from datetime import UTC, datetime

from labctl.commands.slurm_reservations import (
    ClassReservation,
    build_changes,
    build_wanted,
    parse_reservations,
)

ACCOUNT = "course-ml"
NOW = int(datetime(2026, 11, 2, 9, 0, tzinfo=UTC).timestamp())
HOUR_S = 3600
FIRST = ClassReservation("course-ml-20261102T1000Z", NOW + HOUR_S, NOW + 2 * HOUR_S)
REST = "Nodes=n[1-2] NodeCnt=2 Flags=FLEX,IGNORE_JOBS,SPEC_NODES,ALL_NODES,MAGNETIC TRES=cpu=8"


def line(name: str, begins: int, ends: int, account: str = ACCOUNT) -> str:
    """As Slurm 22.05 prints it."""
    return (
        f"ReservationName={name} StartTime={begins} EndTime={ends} Duration=01:00:00 {REST} "
        f"Users=(null) Groups=(null) Accounts={account} Licenses=(null) State=INACTIVE\n"
    )


def test_hours_that_overlap_are_one_reservation_and_past_ones_are_none() -> None:
    hours = [
        (NOW - 2 * HOUR_S, NOW - HOUR_S),
        (NOW + 1.5 * HOUR_S, NOW + 2 * HOUR_S),
        (NOW + HOUR_S, NOW + 1.75 * HOUR_S),
    ]
    assert build_wanted(ACCOUNT, hours, NOW) == [FIRST]
    # Two that meet stay two, so that days of 24 hours keep their names.
    touching = [*hours, (FIRST.ends, FIRST.ends + 60)]
    assert len(build_wanted(ACCOUNT, touching, NOW)) == 2


def test_reservations_of_others_are_left_alone() -> None:
    output = (
        line(FIRST.name, FIRST.begins, FIRST.ends)
        + line("course-ml-2-20261102T1000Z", 1, 2, "course-ml-2")
        + line("maintenance", 1, 2)
    )
    assert parse_reservations(output, ACCOUNT) == [FIRST]
    assert parse_reservations("No reservations in the system\n", ACCOUNT) == []


def test_only_what_differs_is_changed() -> None:
    (creation,) = build_changes(ACCOUNT, [FIRST], [], NOW)
    assert creation == (
        f"scontrol create reservation ReservationName={FIRST.name} StartTime=uts{FIRST.begins} "
        f"EndTime=uts{FIRST.ends} Nodes=ALL Accounts=course-ml Flags=MAGNETIC,FLEX,IGNORE_JOBS"
    )
    assert build_changes(ACCOUNT, [FIRST], [FIRST], NOW) == []
    (removal,) = build_changes(ACCOUNT, [], [FIRST], NOW)
    assert removal.startswith(f"{{ scontrol delete ReservationName={FIRST.name} 2>/dev/null || ")
    longer = ClassReservation(FIRST.name, FIRST.begins, FIRST.ends + 60)
    (update,) = build_changes(ACCOUNT, [longer], [FIRST], NOW)
    assert update == f"scontrol update ReservationName={FIRST.name} EndTime=uts{longer.ends}"


def test_a_class_that_has_begun_is_reserved_from_now_on() -> None:
    (creation,) = build_changes(ACCOUNT, [FIRST], [], FIRST.begins + 60)
    assert " StartTime=now " in creation
    begun = ClassReservation(FIRST.name, FIRST.begins + 61, FIRST.ends)
    assert build_changes(ACCOUNT, [FIRST], [begun], FIRST.begins + 120) == []
