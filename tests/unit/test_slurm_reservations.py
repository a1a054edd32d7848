"""Class hours as reservations of Slurm: what scontrol prints, and which commands change it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

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


def line(
    name: str,
    begins: int,
    ends: int,
    account: str = ACCOUNT,
    users: str = "(null)",
    rest: str = REST,
) -> str:
    """As Slurm 22.05 prints it."""
    return (
        f"ReservationName={name} StartTime={begins} EndTime={ends} Duration=01:00:00 {rest} "
        f"Users={users} Groups=(null) Accounts={account} Licenses=(null) State=INACTIVE\n"
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


@pytest.mark.parametrize(
    "edited",
    [
        line(FIRST.name, FIRST.begins, FIRST.ends, "staff"),
        line(FIRST.name, FIRST.begins, FIRST.ends, "(null)", "root"),
        line(FIRST.name, FIRST.begins, FIRST.ends, users="root"),
        line(FIRST.name, FIRST.begins, FIRST.ends, rest=REST.replace("FLEX,", "")),
        line(FIRST.name, FIRST.begins + HOUR_S // 2, FIRST.ends),
        line(FIRST.name, FIRST.begins - HOUR_S // 2, FIRST.ends),
    ],
)
def test_a_reservation_that_staff_edited_is_made_anew(edited: str) -> None:
    present = parse_reservations(edited, ACCOUNT)
    assert [each.name for each in present] == [FIRST.name]
    (change,) = build_changes(ACCOUNT, [FIRST], present, NOW)
    assert change.startswith(f"if scontrol delete ReservationName={FIRST.name} 2>/dev/null; then ")
    assert f"StartTime=uts{FIRST.begins} EndTime=uts{FIRST.ends}" in change


def test_the_end_of_a_class_in_progress_is_no_edit_and_a_later_beginning_is() -> None:
    begun = ClassReservation(FIRST.name, FIRST.begins + 61, FIRST.ends)
    assert build_changes(ACCOUNT, [FIRST], [begun], FIRST.begins + 120) == []
    later = ClassReservation(FIRST.name, FIRST.begins + HOUR_S // 2, FIRST.ends)
    (change,) = build_changes(ACCOUNT, [FIRST], [later], FIRST.begins + 120)
    assert "StartTime=now " in change


def test_hours_of_a_machine_that_is_not_in_use_are_not_added() -> None:
    second = ClassReservation("course-ml-20261103T1000Z", FIRST.begins + 86400, FIRST.ends + 86400)
    assert build_changes(ACCOUNT, [FIRST, second], [FIRST], NOW, can_create=False) == []
    (removal,) = build_changes(ACCOUNT, [second], [FIRST], NOW, can_create=False)
    assert f"scontrol delete ReservationName={FIRST.name}" in removal


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
