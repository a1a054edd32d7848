"""up: one server, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lab_world import LAB_ID, Cloud, DiskCloud, Machine, Recorded, World, unreachable, world

from labctl.errors import (
    AuthenticationError,
    BuildError,
    BusyError,
    CapacityError,
    ConnectError,
    HostKeyError,
    InterruptError,
    LabError,
    NoOfferError,
    PolicyError,
    ProviderError,
    QuotaError,
    ThrottledError,
)
from labctl.events import Step
from labctl.lifecycle import doctor
from labctl.lifecycle import up as provision
from labctl.model import (
    CreateServerRequest,
    DockerFault,
    GpuNeed,
    Need,
    Offer,
    Server,
    ServerFacts,
)
from labctl.servers import attempts, reachability
from labctl.servers.chosen_need import choose_need, restore_need
from labctl.servers.host_keys import ensure_key_pair
from labctl.transports import Result

NEED = Need()


def up(lab: World, need: Need = NEED, reporter: Recorded | None = None) -> Server:
    return provision.up(lab.context(reporter, need))


def test_the_first_makes_a_server_and_the_second_finds_it(lab: World) -> None:
    first, second = up(lab), up(lab)
    assert first.id == second.id
    assert (first.alias, first.state) == ("digits", "running")
    assert lab.cloud.calls == ["create"]
    context = lab.context()
    assert context.get_server().id == first.id
    assert context.load_facts(first).docker == "27.3.1"
    assert context.state.list_open_attempts() == []
    kinds = [line.kind for line in context.state.list_events(lab_id=LAB_ID)]
    assert kinds == ["attempt", "created", "ready", "gpu note", "ready"], "one note, not two"


def test_a_recovery_does_not_need_a_gpu_that_the_user_went_on_without(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider offers a T4, and the server that it creates has no GPU."""
    offer = Offer(provider="cloud", type="small", gpu_name="T4", gpu_count=1)
    monkeypatch.setattr(lab.cloud, "offers", lambda need: [offer])
    context = lab.context()
    wanted = choose_need(context.config, Need(gpu=GpuNeed(kind="T4"), spot="prefer"))
    with pytest.raises(LabError, match="GPU"):
        provision.up(context.make_sibling(wanted, LAB_ID, reporter=Recorded()))
    server = context.get_server()
    assert restore_need(context, server.id).server.need.gpu.kind == "T4"
    up(lab)
    need = restore_need(context, server.id).server.need
    assert (need.gpu.is_required, need.spot) == (False, "prefer")


def test_the_intent_is_on_disk_before_the_provider_is_asked(lab: World) -> None:
    seen: list[str] = []

    def check_attempt(request: CreateServerRequest) -> None:
        (attempt,) = lab.context().state.list_open_attempts(LAB_ID)
        assert attempt.token == request.token
        assert attempt.request == request
        seen.append(request.token)

    lab.cloud.at_create = check_attempt
    up(lab)
    assert len(seen) == 1


def test_the_request_carries_our_tag_and_a_key_that_is_ours(lab: World) -> None:
    requests: list[CreateServerRequest] = []
    lab.cloud.at_create = requests.append
    up(lab)
    (request,) = requests
    assert request.tags == {"labctl.lab-id": LAB_ID}
    assert request.public_key == ensure_key_pair(Path(request.identity))


def test_a_provider_that_says_no_leaves_nothing_behind(lab: World) -> None:
    lab.cloud.create_error = QuotaError("quota exceeded")
    with pytest.raises(QuotaError, match="quota"):
        up(lab)
    context = lab.context()
    assert context.state.list_open_attempts() == []
    assert context.state.list_servers() == []
    lab.cloud.create_error = None
    up(lab)
    assert lab.cloud.calls == ["create"]


def test_a_slip_in_the_name_of_a_gpu_is_named_before_a_server_is_sought(lab: World) -> None:
    reporter = Recorded()
    with pytest.raises(LabError):
        up(lab, Need(gpu=GpuNeed(kind="T44", count=1)), reporter)
    assert reporter.said.startswith("labctl knows no GPU named T44; did you mean T4?")


def test_a_new_server_that_never_answers_is_removed_with_its_console_shown(lab: World) -> None:
    lab.machine.error = unreachable()
    reporter = Recorded()
    with pytest.raises(ConnectError, match="could not log in") as caught:
        up(lab, reporter=reporter)
    assert "removed again" in caught.value.why
    assert caught.value.hint == "labctl up   # creates another one"
    assert "no sshd today" in reporter.said
    assert lab.cloud.machines == {}
    assert lab.context().state.list_servers() == []


def test_a_server_that_a_keeper_has_removed_already_is_said_to_be_removed_once(
    lab: World,
) -> None:
    why = "the registry is not there\nthe server was removed again"
    lab.machine.error = ProviderError("the server cannot pull python:3.12-slim", why=why)
    with pytest.raises(ProviderError, match="cannot pull") as caught:
        up(lab)
    assert caught.value.why == why


@pytest.mark.parametrize("kind", [AuthenticationError, HostKeyError])
def test_a_new_server_that_refuses_the_login_does_not_go_on_billing(
    lab: World, kind: type[LabError]
) -> None:
    lab.machine.error = kind("the login failed", hint="check the key")
    with pytest.raises(kind, match="the login failed") as caught:
        up(lab)
    assert "removed again" in caught.value.why
    assert caught.value.next_step == "check the key"
    assert lab.cloud.machines == {}
    assert lab.context().state.list_servers() == []


def test_a_server_that_was_ready_once_is_kept_when_it_does_not_answer(lab: World) -> None:
    server = up(lab)
    lab.machine.error = unreachable()
    with pytest.raises(ConnectError):
        up(lab)
    assert server.id in lab.cloud.machines


class EndedMachine(Machine):
    """Its server ends as labctl logs in to it: the staff's command came first."""

    def __init__(self, home: Path, cloud: Cloud, state: str) -> None:
        super().__init__(home)
        self.cloud = cloud
        self.state = state

    def _answer(self, line: str, stdin: bytes) -> Result:
        for server_id in self.cloud.machines:
            self.cloud.change(server_id, state=self.state)
        raise unreachable()


class ExplainingCloud(DiskCloud):
    def explain_end(self, server_id: str) -> str:
        return "the staff ended it"


@pytest.mark.parametrize(
    ("state", "what"),
    [("terminated", "has ended while labctl was logging in"), ("stopped", "was stopped while")],
)
@pytest.mark.usefixtures("eager_checks")
def test_a_server_that_ends_meanwhile_is_not_waited_for(
    tmp_path: Path, state: str, what: str
) -> None:
    lab = world(tmp_path, ExplainingCloud)
    up(lab)
    ended = replace(lab, machine=EndedMachine(lab.machine.home, lab.cloud, state))
    with pytest.raises(ProviderError, match=what) as caught:
        up(ended)
    assert caught.value.why == "the staff ended it"
    assert caught.value.hint == "labctl up   # starts it again, or gets another one"


@pytest.mark.usefixtures("eager_checks")
def test_a_provider_that_does_not_answer_meanwhile_changes_nothing(lab: World) -> None:
    up(lab)
    machine = EndedMachine(lab.machine.home, lab.cloud, "running")
    lab.cloud.find = _raise_busy_after(lab.cloud.find, calls=2)  # type: ignore[method-assign]
    with pytest.raises(ConnectError, match="could not log in") as caught:
        up(replace(lab, machine=machine))
    assert caught.value.hint == "ssh -v digits   # shows where the connection ends"


def _raise_busy_after(
    find: Callable[[str], Server | None], calls: int
) -> Callable[[str], Server | None]:
    remaining = [None] * calls

    def find_or_raise(server_id: str) -> Server | None:
        if not remaining:
            raise BusyError("the provider does not answer")
        remaining.pop()
        return find(server_id)

    return find_or_raise


@pytest.fixture
def eager_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider is asked after every failed login."""
    monkeypatch.setattr(reachability, "END_CHECK_S", 0.0)


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_may_hold_results_is_never_removed_as_if_it_were_new(
    lab: World, forgotten: bool
) -> None:
    """A stopped server kept its disk on purpose; one adopted without a record may hold anything."""
    server = up(lab)
    if forgotten:
        lab.places.database.unlink()
    else:
        lab.cloud.change(server.id, state="stopped")
    lab.machine.error = unreachable()
    with pytest.raises(ConnectError):
        up(lab)
    assert server.id in lab.cloud.machines
    assert "terminate" not in lab.cloud.calls


def test_ctrl_c_while_it_is_made_says_what_to_do_and_up_goes_on(lab: World) -> None:
    lab.cloud.interrupt_after_create = True
    with pytest.raises(InterruptError) as caught:
        up(lab)
    assert caught.value.exit_code == 130
    assert "labctl up" in caught.value.hint
    assert "labctl down" in caught.value.hint
    assert len(lab.context().state.list_open_attempts()) == 1
    lab.cloud.interrupt_after_create = False
    server = up(lab)
    assert [*lab.cloud.machines] == [server.id]
    assert lab.cloud.calls == ["create"]
    assert lab.context().state.list_open_attempts() == []


def test_a_server_not_shown_yet_is_not_gone(lab: World) -> None:
    server = up(lab)
    lab.cloud.invisible_finds = 2
    assert up(lab).id == server.id
    assert lab.cloud.calls == ["create"]


def test_a_server_that_is_really_gone_is_made_again(lab: World) -> None:
    server = up(lab)
    lab.cloud.change(server.id, state="terminated")
    again = up(lab)
    assert again.id != server.id
    assert [one.id for one in lab.context().state.list_servers()] == [again.id]


def test_without_its_state_the_lab_is_found_by_its_id_and_never_by_its_name(lab: World) -> None:
    lab.cloud.add("stranger", "digits", "ffffffffffff")
    server = up(lab)
    lab.places.database.unlink()
    assert up(lab).id == server.id != "stranger"
    assert lab.cloud.calls == ["create"]


def test_two_at_once_make_one_server(lab: World) -> None:
    gate = threading.Barrier(4)
    found: list[str] = []

    def one() -> None:
        context = lab.context()
        gate.wait(120)
        found.append(provision.up(context).id)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert len({*found}) == 1
    assert lab.cloud.calls == ["create"]


def test_an_alias_of_the_users_is_left_to_them(lab: World) -> None:
    lab.places.user_ssh_config.parent.mkdir()
    lab.places.user_ssh_config.write_text("Host digits\n  HostName 192.0.2.1\n")
    reporter = Recorded()
    server = up(lab, reporter=reporter)
    assert server.alias == f"digits-{LAB_ID[:4]}"
    assert server.alias in reporter.said
    again = Recorded()
    assert up(lab, reporter=again).alias == server.alias
    assert server.alias not in again.said, "said once"


def test_a_price_above_the_ceiling(lab: World) -> None:
    lab.cloud.price = 0.75
    with pytest.raises(ProviderError) as caught:
        up(lab, Need(max_price_usd_per_hour=0.5))
    assert "$0.75/h, above max_price" in caught.value.why
    assert lab.cloud.calls == []
    up(lab, Need(max_price_usd_per_hour=0.75))


def test_money_is_agreed_to_before_it_is_spent(lab: World) -> None:
    lab.cloud.price = 0.75
    reporter = Recorded(answers=[False])
    with pytest.raises(PolicyError, match="nothing was started"):
        up(lab, reporter=reporter)
    assert "$0.75" in reporter.asked[0].question
    assert lab.cloud.calls == []
    assert lab.context().state.list_events(kind="attempt") == []


def test_a_gpu_where_there_is_none(lab: World) -> None:
    with pytest.raises(NoOfferError, match="cloud has no server") as caught:
        up(lab, Need(gpu=GpuNeed(kind="T4", count=1)))
    assert "`gpu: T4`" in caught.value.why


def test_another_host_key_at_the_provider(lab: World, tmp_path: Path) -> None:
    server = up(lab)
    other = ensure_key_pair(tmp_path / "other").rpartition(" ")[0]
    foreign = server.endpoint.__class__(host="127.0.0.1", port=2222, host_key=other)
    lab.cloud.change(server.id, endpoint=foreign)
    with pytest.raises(HostKeyError, match="is not the one that was pinned"):
        up(lab)
    assert lab.context().get_server().endpoint.host_key == lab.cloud.key
    assert server.id in lab.cloud.machines


def test_a_server_that_stops_while_it_starts_is_removed(tmp_path: Path) -> None:
    lab = world(tmp_path, Cloud)
    lab.cloud.dies_at_once = True
    with pytest.raises(ProviderError, match="stopped while it was starting"):
        up(lab)
    assert lab.cloud.machines == {}


def test_while_one_works_another_is_told_who(lab: World) -> None:
    context = lab.context()
    with (
        context.state.lock(LAB_ID, "down"),
        pytest.raises(BusyError, match="down"),
        lab.context().state.lock(LAB_ID, "up", wait_s=0.1),
    ):
        raise AssertionError("two hold the lab")


def test_without_capacity_the_next_offer_is_asked_with_a_token_of_its_own(lab: World) -> None:
    lab.cloud.kinds = ["full", "small", "spare"]
    lab.cloud.create_errors = [CapacityError("no machine left")]
    reporter = Recorded()
    assert up(lab, reporter=reporter).offer.type == "small"
    kinds, tokens = zip(*lab.cloud.tried, strict=True)
    assert kinds == ("full", "small")
    assert len(set(tokens)) == 2
    assert "no machine left" in reporter.said
    assert lab.context().state.list_open_attempts() == []


def test_no_capacity_anywhere_names_what_was_tried(lab: World) -> None:
    lab.cloud.kinds = ["full", "small"]
    lab.cloud.create_error = CapacityError("no machine left")
    with pytest.raises(CapacityError, match="no machine left for digits") as caught:
        up(lab)
    assert caught.value.why.splitlines() == ["no full", "no small"]
    assert caught.value.exit_code == 75
    assert lab.context().state.list_open_attempts() == []


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)


@pytest.mark.usefixtures("no_pause")
def test_throttling_and_a_lost_reply_repeat_the_same_request(lab: World) -> None:
    lab.cloud.create_errors = [ThrottledError("too fast"), unreachable()]
    lab.cloud.loses_reply = True
    up(lab)
    assert len(lab.cloud.tried) == 4
    assert len(set(lab.cloud.tried)) == 1
    assert lab.cloud.calls == ["create"]


def test_an_answer_that_was_never_heard_is_asked_for_by_the_next_up(lab: World) -> None:
    lab.cloud.create_errors = [ProviderError("500: internal error")]
    with pytest.raises(ProviderError, match="internal"):
        up(lab)
    (attempt,) = lab.context().state.list_open_attempts()
    reporter = Recorded()
    up(lab, reporter=reporter)
    assert {token for _, token in lab.cloud.tried} == {attempt.token}
    assert "repeating the request" in reporter.said
    assert lab.context().state.list_open_attempts() == []


def test_an_image_that_did_not_build_leaves_no_attempt_behind(lab: World) -> None:
    lab.cloud.create_errors = [BuildError("the base image is not available")]
    with pytest.raises(BuildError):
        up(lab)
    assert lab.context().state.list_open_attempts() == []
    reporter = Recorded()
    up(lab, reporter=reporter)
    assert "interrupted" not in reporter.said


def test_an_old_attempt_is_not_repeated(lab: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.create_errors = [ProviderError("500: internal error")]
    with pytest.raises(ProviderError):
        up(lab)
    monkeypatch.setattr(attempts, "REPLAY_S", 0.0)
    up(lab)
    assert len({token for _, token in lab.cloud.tried}) == 2
    assert lab.context().state.list_open_attempts() == []


def test_a_dearer_offer_is_asked_about_again(lab: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {"full": 0.40, "near": 0.45, "dear": 2.0}
    monkeypatch.setattr(
        lab.cloud,
        "offers",
        lambda need: [
            Offer(provider="cloud", type=kind, price_usd_per_hour=price)
            for kind, price in prices.items()
        ],
    )
    lab.cloud.create_errors = [CapacityError("none"), CapacityError("none")]
    reporter = Recorded(answers=[True, False])
    with pytest.raises(PolicyError, match="nothing was started"):
        up(lab, reporter=reporter)
    assert [decision.question for decision in reporter.asked] == [
        "start full on demand for $0.40/h?",
        "start dear on demand for $2.00/h?",
    ]
    assert [kind for kind, _ in lab.cloud.tried] == ["full", "near"]


def test_the_plan_says_what_it_costs_at_most_and_what_ends_it(lab: World) -> None:
    lab.cloud.price = 0.5
    reporter = Recorded()
    up(lab, Need(budget_usd=3.0, ttl_s=4 * 3600, idle_s=1800), reporter)
    plan = reporter.asked[0].detail
    assert "after 4 h" in plan
    assert "when $3.00 is spent" in plan
    assert "after 30 min without work" in plan
    assert "at most $2.00" in plan


def test_a_budget_smaller_than_one_hour_starts_nothing(lab: World) -> None:
    lab.cloud.price = 0.5
    with pytest.raises(PolicyError, match="one hour costs") as caught:
        up(lab, Need(budget_usd=0.4))
    assert "has $0.40 left" in caught.value.what
    assert lab.cloud.tried == []


def test_the_budget_is_the_labs_and_not_each_servers(
    lab: World, guarded: list[float | None]
) -> None:
    lab.cloud.price = 0.5
    need = Need(budget_usd=1.0)
    server = up(lab, need)
    assert guarded == [1.0]
    lab.context().state.record(
        "terminated", lab_id=LAB_ID, server_id=server.id, detail={"at": server.created_at + 5400}
    )
    lab.context().state.drop_server(server.id)
    lab.cloud.machines.clear()
    with pytest.raises(PolicyError, match="one hour costs") as caught:
        up(lab, need)
    assert "has $0.25 left" in caught.value.what


@pytest.mark.parametrize(("fault", "words"), [("missing", "missing"), ("silent", "not usable")])
def test_doctor_calls_only_a_missing_docker_missing(
    lab: World, monkeypatch: pytest.MonkeyPatch, fault: DockerFault, words: str
) -> None:
    up(lab)
    facts = ServerFacts(os="Debian", docker_fault=fault, docker_error="out of order")
    monkeypatch.setattr(doctor, "probe", lambda transport: facts)
    checks = doctor.list_lab_checks(lab.context())
    assert any(f"Docker {words}, " in check.detail for check in checks)


class LeasingCloud(Cloud):
    """Servers exist already, and are leased."""

    def extend(self, server_id: str, span_s: int) -> Server | None:
        return self.find(server_id)


def test_a_machine_that_exists_already_is_leased_and_not_created(tmp_path: Path) -> None:
    lab = world(tmp_path, LeasingCloud)
    reporter = Recorded()
    lab.cloud.interrupt_after_create = True
    with pytest.raises(InterruptError) as interrupted:
        up(lab, reporter=reporter)
    assert interrupted.value.why == "the server may already be leased"
    lab.cloud.interrupt_after_create = False
    up(lab, reporter=reporter)
    names = [event.name for event in reporter.events if isinstance(event, Step)]
    assert any(name.startswith("leasing a machine: ") for name in names)
    assert not any("creating" in name for name in names)
