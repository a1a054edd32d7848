"""A class on one machine that its course holds: the lease is the course's own and bars nobody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from course_bed import CourseBed, course_bed, keeping
from lab_servers import GPU_SETTINGS, LabServer, StartLabServer
from shared_bed import IMAGE, Agreeing
from sshd_container import Sshd
from submit_bed import SSHD

from labctl.config import find_paths
from labctl.courses.seat_operations import CachingCourseOperator, SeatOperations
from labctl.courses.servers import CourseOperator, SeatOutcome, bring_up_servers
from labctl.courses.teardown import end_seats
from labctl.errors import CapacityError
from labctl.model import Server
from labctl.providers.local import LocalSettings
from labctl.state import State

pytest_plugins = ["sshd_fixtures"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")),
        reason="there is no sshd on this machine",
    ),
]
CLASS = ("alice", "bob", "carol", "dora")
MORE = f"shared: {{accounts_per_server: 4, gpu_lease: 1h}}\nimage: {IMAGE}\n"


@pytest.fixture
def host(start_lab_server: StartLabServer, gpu_image: str, small_image: str) -> LabServer:
    host = start_lab_server("class", LocalSettings(image=gpu_image, **GPU_SETTINGS))
    # Device nodes as a driver makes them. There is no device behind them.
    host.sh("for n in 0 1; do mknod -m 666 /dev/nvidia$n c 195 $n; done")
    host.load(IMAGE)
    return host


def on_static(port: int, identity: object) -> str:
    """course.yaml's section for one existing machine."""
    machine = f"{{host: 127.0.0.1, port: {port}, user: student, identity: {identity}}}"
    return f"{{provider: static, static: {{hosts: [{machine}]}}}}"


@pytest.fixture
def bed(host: LabServer, tmp_path: Path) -> Iterator[CourseBed]:
    way = host.endpoint
    with course_bed(tmp_path, on_static(way.port, way.identity), MORE) as made:
        rows = "".join(f"{one},{one.title()},,,,yes\n" for one in (*CLASS, "eve"))
        (tmp_path / "ml" / "roster.csv").write_text("id,name,email,team,section,active\n" + rows)
        yield made


def staff(bed: CourseBed, by: str = "staff") -> CourseOperator:
    """As a process that has just begun has it: nothing is remembered."""
    home = bed.folder / "keeper-home"
    home.mkdir(exist_ok=True)
    places = find_paths({"HOME": str(home)})
    return CachingCourseOperator(bed.course, places, State(places.database), Agreeing(), by=by)


def made(bed: CourseBed, *names: str) -> list[SeatOutcome]:
    """`labctl course up --only ...`."""
    return bring_up_servers(staff(bed), bed.course.choose_seats(names))


def joined(bed: CourseBed, student: str) -> Path:
    said = bed.labctl(student, "join", str(bed.invited(student)), "--yes", "--json")[0]
    return Path(json.loads(said)["joined"]["directory"])


def whoami(bed: CourseBed, student: str, lab: Path) -> str:
    """The account in which a student's commands run, once `labctl up` is through."""
    said = bed.labctl(student, "up", "--yes", "--json", cwd=lab)[0]
    assert msgspec.convert(json.loads(said)["server"], Server).state == "running"
    return bed.labctl(student, "ssh", "--", "id", "-un", cwd=lab)[0].strip()


@pytest.mark.long
def test_a_class_of_four_with_one_who_joins_late(
    bed: CourseBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing that the provider said an hour ago is remembered.
    monkeypatch.setattr("labctl.courses.seat_operations.OFFERS_S", -1.0)
    assert [one.error for one in made(bed, "alice", "bob")] == ["", ""]
    (carol,) = made(bed, "carol")
    assert (carol.error, carol.why) == ("", "")
    with keeping(bed, SeatOperations(staff(bed, "keeper"))):
        for student in CLASS:
            assert whoami(bed, student, joined(bed, student)) == f"lab-{student}"
        eve = joined(bed, "eve")
        said = bed.labctl("eve", "up", "--yes", cwd=eve, code=1)[1]
        assert "all 4 places on the course's shared servers are taken" in said
        # A place that is given up is free for whoever was refused.
        bed.labctl("dora", "down", "--yes", cwd=bed.home("dora") / "ml-2026")
        assert whoami(bed, "eve", eve) == "lab-eve"
        # Staff ends the machine beneath the keeper, which has remembered it as ready.
        assert all(one.ended for one in end_seats(staff(bed), bed.course.list_seats()))
        assert staff(bed).course(plain=True).provider.servers() == []
        assert whoami(bed, "alice", bed.home("alice") / "ml-2026") == "lab-alice"
    seats = {one.lab_id: one.name for one in bed.course.list_seats()}
    living = staff(bed).course().provider.servers()
    assert [seats[one.lab_id] for one in living] == ["alice"]


def test_a_machine_of_ones_own_that_is_ready_is_offered_to_its_seat(
    start_sshd: Callable[..., Sshd], tmp_path: Path
) -> None:
    """The only machine is leased, by the course for alice: she gets it, and bob is told why not."""
    box = start_sshd()
    with course_bed(tmp_path, on_static(box.port, box.key)) as bed:
        alice, bob = bed.course.choose_seats(["alice", "bob"])
        (ready,) = bring_up_servers(staff(bed), [alice], login_only=True)
        assert ready.server is not None, (ready.error, ready.why)
        work = SeatOperations(staff(bed, "keeper"), login_only=True)
        work.check(alice)
        assert work.offers(alice) == [ready.server.offer]
        assert work.create_server(alice).id == ready.server.id
        with pytest.raises(CapacityError, match="is in use"):
            work.offers(bob)
