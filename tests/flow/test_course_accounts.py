"""A course's servers are in one account; with the credentials of another nothing is concluded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from course_context import Class, a_class, roster
from course_keeper_context import Pretended

from labctl.config import Paths
from labctl.courses import servers
from labctl.courses.costs import compute_costs
from labctl.courses.forget import forget_lost
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.leftovers import list_leftovers
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger_servers import read_servers
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_operations import SeatOperations
from labctl.courses.servers import CourseOperator, bring_up_servers
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.shared_servers import SharedServers
from labctl.courses.status import read_status
from labctl.courses.tasks import CourseTasks
from labctl.courses.teardown import end_of_term, end_seats
from labctl.errors import PolicyError
from labctl.events import Reporter
from labctl.model import CreateServerRequest, Need, ProviderAccount
from labctl.state import State

SCHOOL, OTHER = ProviderAccount(id="111", profile="school"), ProviderAccount(id="222")
NAMES = ("alice", "bob")


@pytest.fixture
def ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    """A class that is up in one account, and whose staff has come with another one's profile."""
    made = a_class(tmp_path, monkeypatch, roster(NAMES))
    made.cloud.account, made.cloud.settle_s = SCHOOL, 0.0
    outcomes = bring_up_servers(made.staff(), made.folder.list_seats())
    assert not any(one.error for one in outcomes)
    made.cloud.account = OTHER
    return made


def unended(ml: Class) -> set[str]:
    found = read_servers(ml.staff().folder.ledger.list_entries())
    return {server_id for server_id, one in found.items() if not one.ended}


def take_keeper_snapshot(staff: CourseOperator) -> object:
    folder = staff.folder
    request_handler = RequestHandler(folder, Pretended(folder))
    keys = AuthorizedKeys(folder, folder.path / "authorized_keys")
    return CourseTasks(staff, request_handler, keys, lambda name, text: None).take_snapshot()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(lambda staff: bring_up_servers(staff, staff.folder.list_seats()), id="up"),
        pytest.param(lambda staff: end_seats(staff, staff.folder.list_seats()), id="down"),
        pytest.param(
            lambda staff: read_status(staff, staff.folder.list_seats(), refresh=True), id="status"
        ),
        pytest.param(lambda staff: compute_costs(staff, refresh=True), id="cost"),
        pytest.param(
            lambda staff: end_of_term(staff, collect=lambda name: "", revoke=lambda: 0),
            id="end-of-term",
        ),
        pytest.param(take_keeper_snapshot, id="keeper"),
    ],
)
def test_another_account_is_refused_and_no_line_is_written(
    ml: Class, command: Callable[[CourseOperator], object]
) -> None:
    before = ml.staff().folder.ledger.list_entries()
    with pytest.raises(PolicyError) as raised:
        command(ml.staff())
    assert "account 111 (profile school)" in raised.value.what
    assert "account 222" in raised.value.why
    assert raised.value.hint.startswith("LABCTL_SERVER_CLOUD_PROFILE=school labctl course ")
    assert ml.staff().folder.ledger.list_entries() == before
    assert {one.id for one in ml.state.list_servers()} == set(ml.cloud.machines) == unended(ml)


def test_the_course_is_refused_where_only_its_ledger_knows(ml: Class) -> None:
    """As on another machine than the one that made the servers."""
    for one in ml.state.list_servers():
        ml.state.drop_server(one.id)
    with pytest.raises(PolicyError) as raised:
        compute_costs(ml.staff(), refresh=True)
    assert "account 111" in raised.value.what
    assert len(unended(ml)) == 2


def test_a_proof_is_not_clean_while_another_account_has_servers(ml: Class) -> None:
    (left,) = list_leftovers(ml.staff())
    assert left.has_costs
    assert "account 111" in left.error


def test_the_keeper_lets_no_seat_go_in_another_account(ml: Class) -> None:
    work = SeatOperations(ml.staff(), login_only=True)
    server = ml.server("alice")
    assert work.check_server(ml.seat("alice"), server) == server
    with pytest.raises(PolicyError):
        work.save_and_remove_server(ml.seat("alice"), server)
    assert server.id in ml.cloud.machines
    ml.cloud.account = SCHOOL
    del ml.cloud.machines[server.id]
    assert work.check_server(ml.seat("alice"), server) is None


def test_a_course_goes_on_with_the_right_account(ml: Class) -> None:
    ml.cloud.account = SCHOOL
    assert not any(one.error for one in end_seats(ml.staff(), ml.folder.list_seats()))
    assert (unended(ml), ml.cloud.machines) == (set(), {})


def test_what_nobody_can_ask_about_is_forgotten_on_request(ml: Class) -> None:
    ml.reporter.answers = [False]
    with pytest.raises(PolicyError):
        forget_lost(ml.staff())
    assert len(unended(ml)) == 2
    assert set(forget_lost(ml.staff())) == set(ml.cloud.machines)
    assert (unended(ml), ml.state.list_servers()) == (set(), [])
    assert len(ml.cloud.machines) == 2  # nothing was ended
    before = time.time()
    assert not any(one.error for one in bring_up_servers(ml.staff(), ml.folder.list_seats()))
    assert all(one.created_at >= before for one in ml.state.list_servers())


def test_servers_of_an_earlier_labctl_get_their_account_once_they_are_shown(ml: Class) -> None:
    ledger = ml.folder.ledger.path
    text = ledger.read_text()
    assert '"account":"111"' in text
    ledger.write_text(text.replace(',"account":"111"', ""))
    for one in ml.state.list_servers():
        ml.state.save_server(msgspec.structs.replace(one, account=""))
    compute_costs(ml.staff(), refresh=True)  # in the other account, which shows nothing
    assert len(unended(ml)) == 2
    ml.cloud.account = SCHOOL
    compute_costs(ml.staff(), refresh=True)
    found = read_servers(ml.staff().folder.ledger.list_entries())
    assert {one.account for one in found.values()} == {"111"}


def test_a_shared_server_of_another_account_is_not_written_off_with_its_last_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "shared: {accounts_per_server: 4, gpus: 1, gpu_lease: 4h}\n"
    made = a_class(tmp_path, monkeypatch, roster(NAMES), shared)
    made.cloud.account, made.cloud.settle_s = SCHOOL, 0.0
    hosts = SharedServers(made.folder, servers.build_course_context(*_context_of(made), plain=True))
    request = CreateServerRequest(
        lab="ml-a",
        lab_id=made.seat("alice").lab_id,
        token="token1",
        public_key="ssh-ed25519 AAAA course",
        identity="/keys/id",
        need=Need(),
    )
    sitting = hosts.seating.reserve(request, "alice", 4)
    hosts.seating.set_state([sitting.token], "there")
    host = made.cloud.add("srv-host", "ml-shared-1", hosts.lab_id(sitting.host))
    made.state.save_server(host)
    made.cloud.account = OTHER
    with pytest.raises(PolicyError):
        SharedSeats(hosts).terminate(sitting.server_id)
    assert [one.state for one in hosts.seating.list_all()] == ["leaving"]
    assert "srv-host" in made.cloud.machines


def _context_of(made: Class) -> tuple[CourseFolder, Paths, State, Reporter]:
    return made.folder, made.places, made.state, made.reporter
