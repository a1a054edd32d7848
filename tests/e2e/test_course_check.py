"""The class-day check against a real keeper behind a real sshd, and a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from course_bed import CourseBed, course_bed, keeping
from lab_servers import small_image as build_small
from submit_bed import COMMAND_S, SSHD

from labctl.config import find_paths
from labctl.courses.image_check import check_image
from labctl.courses.keeper_check import check_keeper
from labctl.courses.keys import CHECKER, AuthorizedKeys
from labctl.courses.publish import store_host_key
from labctl.courses.records.folder import Seat
from labctl.courses.seat_operations import SeatOperations
from labctl.courses.servers import CourseOperator, bring_up_servers
from labctl.courses.status import build_seat_context
from labctl.errors import PolicyError, ProviderError
from labctl.events import SilentReporter
from labctl.model import Check, Offer
from labctl.providers.course import CourseProvider
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State

pytestmark = pytest.mark.skipif(
    not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd on this machine"
)
IMAGE = "labctl-test-small:1"
NOWHERE = "registry.invalid/labctl/none:1"


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[CourseBed]:
    with course_bed(tmp_path, "{provider: local}", f"image: {IMAGE}\n") as made:
        made.invited("alice")
        store_host_key(made.course, made.machine.host_key)
        yield made


def asked(
    bed: CourseBed, staff: CourseOperator | None = None, keys: AuthorizedKeys | None = None
) -> list[Check]:
    return check_keeper(staff or bed.staff(), keys or bed.keys)


def test_a_keeper_that_is_dead_is_not_well(bed: CourseBed) -> None:
    """One that was killed leaves its socket behind."""
    (before,) = asked(bed)
    assert (before.ok, before.skipped) == (False, False)
    assert before.detail == "the course's keeper is not running", "the rest is for students"
    assert "course serve" in before.next
    with (bed.folder / "serve.log").open("w+") as log:
        keeper = bed.serve(log)
        assert [one.ok for one in asked(bed)] == [True, True]
        keeper.kill()
        keeper.wait(COMMAND_S)
    (after,) = asked(bed)
    assert not after.ok
    bed.machine.wire.close()
    (unreachable,) = asked(bed)
    assert (unreachable.ok, unreachable.skipped) == (False, False)


def test_the_throw_away_key_asks_and_does_nothing_else(bed: CourseBed, tmp_path: Path) -> None:
    before = bed.machine.keys.read_text()
    with keeping(bed) as request_handler:
        assert [(one.name, one.ok) for one in asked(bed)] == [
            ("keeper", True),
            ("keeper's offers", True),
        ]
        assert bed.machine.keys.read_text() == before, "the key goes when the check is over"
        identity = tmp_path / "key"
        with bed.keys.admit_check(ensure_key_pair(identity)):
            assert CHECKER in bed.machine.keys.read_text()
            provider = student_of(bed, str(identity))
            for do in (provider.servers, lambda: provider.terminate("course-00000000-abcdef")):
                with pytest.raises(PolicyError, match="must not send"):
                    do()
            provider.close()
        assert request_handler.list_seat_servers() == []
    # A check that was killed leaves a line, which the end of the course takes away.
    leaving = bed.keys.admit_check(ensure_key_pair(tmp_path / "other"))
    leaving.__enter__()
    bed.keys.expel()
    assert CHECKER not in bed.machine.keys.read_text()


def student_of(bed: CourseBed, identity: str) -> CourseProvider:
    from labctl.courses.keeper_check import _build_provider

    return _build_provider(bed.staff(), bed.machine.host_key, identity)


def test_what_the_keeper_can_offer_nobody_is_named(bed: CourseBed) -> None:
    class Without(SeatOperations):
        def offers(self, seat: Seat) -> list[Offer]:
            raise ProviderError("the keeper's account has no credentials", why="it expired")

    with keeping(bed, Without(bed.staff())):
        well, bad = asked(bed)
    assert (well.ok, bad.ok) == (True, False)
    assert "no credentials: it expired" in bad.detail
    assert bed.course.ledger.list_entries(kind="refused") == []


def test_on_another_machine_ones_own_key_asks_or_nothing_is_said(
    bed: CourseBed, tmp_path: Path
) -> None:
    elsewhere = AuthorizedKeys(bed.course, tmp_path / "elsewhere" / "authorized_keys")
    with keeping(bed):
        (without,) = asked(bed, keys=elsewhere)
        assert (without.ok, without.skipped) == (True, True)
        assert without.detail.startswith("not checked")
        bed.labctl("alice", "join", str(bed.invited("alice")), "--yes")
        places = find_paths({"HOME": str(bed.home("alice"))})
        joined = CourseOperator(
            bed.course, places, State(places.database), SilentReporter(), by="staff"
        )
        assert [one.ok for one in asked(bed, joined, elsewhere)] == [True, True]
        bed.keys.expel(["alice"])
        (refused,) = asked(bed, joined, elsewhere)
        assert refused.skipped
    bed.machine.wire.close()
    (lost,) = asked(bed, joined, elsewhere)
    assert (lost.ok, lost.skipped) == (False, False)


@pytest.mark.long
@pytest.mark.engine
def test_the_image_is_tried_on_a_server_and_never_by_its_name(
    bed: CourseBed, server_image: str
) -> None:
    build_small()
    staff = bed.staff()
    argv, environ = bed.command("check", "--json", "--authorized-keys", str(bed.machine.keys))
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=COMMAND_S)
    told = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert told["keeper"]["ok"] is False
    assert told["image"]["skipped"] is True
    assert "not checked" in told["image"]["detail"]
    alice = bed.course.find_seat("alice")
    (made,) = bring_up_servers(staff, [alice])
    try:
        assert made.server is not None, (made.error, made.why)
        of = build_seat_context(staff, alice)
        assert "already" in image(staff, alice).detail
        shell(of, f"docker rmi {IMAGE}")
        came = image(staff, alice)
        assert (came.ok, came.skipped) == (True, False)
        assert IMAGE in shell(of, "docker images --format '{{.Repository}}:{{.Tag}}'")
        file = bed.folder / "ml" / "course.yaml"
        file.write_text(file.read_text().replace(IMAGE, NOWHERE))
        lost = image(bed.staff(), alice)
        assert (lost.ok, lost.skipped) == (False, False)
        assert NOWHERE in lost.detail
        assert lost.next
    finally:
        argv, environ = bed.command("down", "--yes", "--discard")
        subprocess.run(argv, env=environ, capture_output=True, timeout=COMMAND_S, check=True)


def image(staff: CourseOperator, seat: Seat) -> Check:
    (server,) = [one for one in staff.state.list_servers() if one.lab_id == seat.lab_id]
    return check_image(staff, [(seat, server)])


def shell(context: LabContext, line: str) -> str:
    return context.connections.open(context.get_server()).run(line, timeout_s=120.0).stdout
