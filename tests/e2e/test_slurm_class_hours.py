"""Class hours in Slurm between classes: a holiday takes some away, and the end of term all."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from course_bed import CourseBed
from slurm_class_bed import LIMITS, MARKS, bring_up, make_staff, run_class
from slurm_machine import slurm_machine
from sshd_container import Sshd

from labctl.courses.shared_seats import SharedSeats
from labctl.courses.teardown import end_of_term, end_seats

pytestmark = MARKS
DAYS = "[mon, tue, wed, thu, fri, sat, sun]"
HOURS = f"hours: [{{days: {DAYS}, from: '3:00', to: '4:00', zone: UTC}}]\n"


@pytest.fixture(scope="module")
def box(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with slurm_machine(server_image, tmp_path_factory.mktemp("slurm")) as box:
        yield box


@pytest.fixture(scope="module")
def bed(box: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    with run_class([box], folder, LIMITS.format(minutes=1200) + HOURS) as bed:
        yield bed


def list_reservations(box: Sshd) -> list[str]:
    """Each without what changes by itself."""
    lines = box.sh("SLURM_TIME_FORMAT=%s scontrol -o show reservation").splitlines()
    return [line.partition(" State=")[0] for line in lines if line.startswith("Reservation")]


def test_a_holiday_counts_while_no_account_is_there(bed: CourseBed, box: Sshd) -> None:
    bring_up(bed)
    endings = end_seats(make_staff(bed), bed.course.list_seats(active_only=False))
    assert all(ending.ended for ending in endings)
    count = len(list_reservations(box))
    assert count >= 8, "a keeper keeps them for the next class"
    day = datetime.now(UTC).date() + timedelta(days=3)
    file = bed.folder / "ml" / "course.yaml"
    file.write_text(file.read_text() + f"holidays: [{day}]\n")
    provider = make_staff(bed).course().provider
    assert isinstance(provider, SharedSeats)
    provider.upkeep.reserve_hours()
    left = list_reservations(box)
    assert len(left) == count - 1
    assert not any(f"{day:%Y%m%d}T" in line for line in left)


def test_the_end_of_term_ends_all_reservations(bed: CourseBed, box: Sshd) -> None:
    assert list_reservations(box)
    end_of_term(make_staff(bed), collect=lambda name: "", revoke=lambda: 0)
    assert list_reservations(box) == []
