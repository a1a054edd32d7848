"""The keeper's rounds: quiet, patient, one lab's trouble never another's; and what it sweeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from keeper_context import NAME, Pair, cut, pair
from lab_world import LAB_ID, DiskCloud, Recorded, world

from labctl.errors import BusyError, CapacityError, LabError, NotFoundError
from labctl.events import Note, Question, Step
from labctl.keeper import labs
from labctl.keeper.labs import (
    ENDED,
    SWEPT,
    TROUBLE,
    WELL,
    Keeper,
    check_lab,
    is_running,
    make_log_reporter,
)
from labctl.keeper.recovery_worker import recover_lab, sweep
from labctl.keeper.workers import RecoveryWorkers
from labctl.lifecycle import kept_labs
from labctl.lifecycle.kept_labs import KeptLab
from labctl.model import Offer, Resource, Run
from labctl.servers import disks
from labctl.servers.context import LabContext
from labctl.state.disks import SEEN


class Kept:
    """A keeper whose rounds the test makes, and a lab in its care."""

    def __init__(self, two: Pair) -> None:
        self.two = two
        self.log: list[str] = []
        self.closer: list[str] = []
        self.attend: Callable[[str], None] = lambda name: None
        self.contexts: Callable[[KeptLab], LabContext] = self.context
        self.keeper = Keeper(
            two.places,
            two.state,
            two.environ,
            notify=lambda name, text: self.log.append(f"{name}: {text}"),
            attend=self._attend,
            context=lambda one: self.contexts(one),
        )

    def context(self, one: KeptLab) -> LabContext:
        two = self.two
        return kept_labs.make_context(one, two.places, two.state, Recorded(), two.environ)

    def _attend(self, name: str) -> None:
        self.closer.append(name)
        self.attend(name)

    def round(self, count: int = 1) -> None:
        """So many rounds, each to its end."""
        for _ in range(count):
            self.keeper.make_all_due()
            for thread in self.keeper.tick():
                thread.join()

    @property
    def state(self) -> str:
        return self.keeper.checks[NAME].state


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    lab = world(tmp_path)
    lab.cloud.settle_s = 0.0
    root = lab.home / "lab"
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(f'{{"id": "{LAB_ID}"}}')
    made = pair(lab, tmp_path / "keeper", monkeypatch)
    made.hand_over()
    return made


@pytest.fixture
def kept(two: Pair) -> Kept:
    return Kept(two)


def over(two: Pair) -> None:
    run = Run(id="night", lab_id=LAB_ID, server_id="srv", state="exited", exit_code=0)
    two.state.save_run(msgspec.structs.replace(run, seen_at=time.time()))


# Looks


def test_what_a_run_makes_comes_here_and_a_quiet_round_says_nothing(kept: Kept) -> None:
    kept.two.lab.machine.run_with("night", **{"model.pt": "weights"})
    kept.round()
    home = kept.two.ward / "runs" / "night"
    assert (home / "checkpoints" / "model.pt").read_text() == "weights"
    assert kept.state == ENDED
    assert kept.log == [f"{NAME}: night: done"]
    kept.log.clear()
    kept.round(3)
    assert kept.log == []
    assert kept.closer == []


def test_a_server_that_does_not_answer_is_looked_at_more_closely(kept: Kept) -> None:
    kept.two.lab.machine.error = cut()
    kept.round()
    assert kept.closer == [NAME]
    assert "starting recovery" in kept.log[0]


def test_a_lab_in_trouble_is_asked_more_and_more_rarely_and_said_once(kept: Kept) -> None:
    kept.two.lab.machine.error = cut()

    def no(name: str) -> None:
        raise CapacityError("no machine left", hint="labctl offers")

    kept.attend = no
    pauses = []
    for _ in range(8):
        kept.round()
        seen = kept.keeper.checks[NAME]
        pauses.append(seen.next_at - seen.at)
    assert kept.state == TROUBLE
    told = [line for line in kept.log if "no machine left" in line]
    assert len(told) == 1
    assert "next: labctl offers" in told[0]
    assert 15 * 0.8 <= pauses[0] <= 15 * 1.2
    assert pauses[2] > pauses[0]
    assert max(pauses) <= 300 * 1.2
    assert pauses[-1] >= 300 * 0.8
    over(kept.two)
    kept.two.lab.machine.error = None
    kept.round()
    assert kept.log[-1] == f"{NAME}: working again"


def other_ward(two: Pair, lab_id: str = "ffffffffffff") -> str:
    """A second lab in the keeper's care, which it can say nothing of: its lab.yaml is broken."""
    one = KeptLab(lab="other", lab_id=lab_id, by="bob@elsewhere", at=0.0, runs=("one",))
    root = kept_labs.lab_directory(two.places, one.name)
    root.mkdir(parents=True)
    (root / kept_labs.RECORD).write_bytes(msgspec.json.encode(one))
    (root / "lab.yaml").write_text("lab: [")
    return one.name


def test_one_labs_trouble_is_not_anothers(kept: Kept) -> None:
    other = other_ward(kept.two)
    kept.two.lab.machine.run_with("night")
    kept.round(2)
    assert kept.state == ENDED
    assert kept.keeper.checks[other].state == TROUBLE
    assert len([line for line in kept.log if other in line]) == 1


def test_a_lab_that_comes_or_goes_is_noticed(kept: Kept) -> None:
    kept.two.lab.machine.run_with("night")
    kept.round()
    other = other_ward(kept.two)
    kept.round()
    assert f"{other}: was handed over" in kept.log
    kept_labs.drop(kept.two.places, kept.two.state, other)
    kept.round()
    assert f"{other}: is no longer kept" in kept.log
    assert set(kept_labs.read_checks(kept.two.places)) == {NAME}


def test_what_it_saw_is_listed_by_others(kept: Kept) -> None:
    kept.two.lab.machine.run_with("night")
    kept.round()
    (one,) = labs.describe_kept_labs(kept.two.places, kept.two.state)
    assert (one.name, one.by.count("@")) == (NAME, 1)
    assert one.server is not None
    assert one.server.id == kept.two.server().id
    assert [run.state for run in one.runs if not isinstance(run, str)] == ["exited"]
    assert one.round is not None
    assert one.round.state == ENDED
    assert one.round.error == ""


def test_a_lab_at_work_is_not_dropped_and_is_afterwards(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_labs, "DROP_S", 0.1)
    kept.two.lab.machine.error = cut()
    working, go_on = threading.Event(), threading.Event()

    def recovering(name: str) -> None:
        working.set()
        assert go_on.wait(120)

    kept.attend = recovering
    (thread,) = kept.keeper.tick()
    assert working.wait(120)
    with pytest.raises(BusyError, match="is being recovered right now"):
        kept_labs.drop(kept.two.places, kept.two.state, "digits")
    assert kept.two.ward.is_dir()
    go_on.set()
    thread.join()
    assert kept_labs.drop(kept.two.places, kept.two.state, "digits").name == NAME
    with pytest.raises(NotFoundError, match="no lab digits is kept here"):
        kept_labs.drop(kept.two.places, kept.two.state, "digits")


def test_there_is_one_keeper_and_the_second_says_who(two: Pair) -> None:
    assert not is_running(two.places)
    with labs.only_keeper(two.places):
        assert is_running(two.places)
        with (
            pytest.raises(BusyError, match="already running here") as caught,
            labs.only_keeper(two.places),
        ):
            pass
        assert "pid" in caught.value.why
    assert not is_running(two.places)


def test_only_prices_are_agreed_to() -> None:
    lines: list[str] = []
    journal = make_log_reporter(lambda name, text: lines.append(f"{name}: {text}"), "digits")
    assert journal.confirm(Question(question="start it for 1 dollar?", about="price"))
    assert not journal.confirm(Question(question="is this its host key?"))
    journal.emit(Note(text="so it is"))
    journal.emit(Step(name="waiting", done=True, detail="srv"))
    assert lines == ["digits: so it is", "digits: waiting: done (srv)"]


def test_looks_tell_what_is_needed(kept: Kept) -> None:
    two = kept.two
    one = kept_labs.find_kept_lab(two.places, NAME)
    context = kept.context(one)
    assert check_lab(context, one) == TROUBLE, "the server does not know the run"
    two.lab.machine.run_with("night")
    assert check_lab(context, one) == ENDED
    two.state.drop_server(two.server().id)
    assert check_lab(context, one) == TROUBLE, "to be swept"
    assert check_lab(context, one, swept=True) == SWEPT
    assert WELL not in (TROUBLE, ENDED, SWEPT)


# Sweeping


DISK = Resource(
    provider="cloud",
    kind="volume",
    id="vol-1",
    lab="digits",
    lab_id=LAB_ID,
    price_usd_per_month=8.0,
)


def test_what_an_ended_server_left_is_taken_away_but_no_results(two: Pair) -> None:
    group = msgspec.structs.replace(DISK, kind="group", id="sg-1", price_usd_per_month=0.0)
    young = msgspec.structs.replace(DISK, id="vol-2", expires_at=time.time() + 9999)
    old = msgspec.structs.replace(DISK, id="vol-3", expires_at=time.time() - 9999)
    others = msgspec.structs.replace(old, id="vol-4", lab_id="ffffffffffff")
    two.cloud.left += [group, young, old, others]
    two.cloud.machines.clear()
    context = two.kept()
    sweep(context)
    assert two.cloud.left == [young, others]
    assert context.state.list_servers(LAB_ID) == []
    assert "1 kept disks stay" in context.reporter.said


def test_a_server_that_lives_is_left_alone_and_doubles_are_named(two: Pair) -> None:
    two.cloud.left.append(DISK)
    two.cloud.add("srv-double", "digits", LAB_ID, Offer(provider="cloud", type="small"))
    context = two.kept()
    sweep(context)
    assert len(two.cloud.machines) == 2
    assert two.cloud.left == [DISK]
    assert "more than one server bills" in context.reporter.said
    assert "terminate" not in two.cloud.calls


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud is one whose disks can outlive their servers."""
    monkeypatch.setattr(DiskCloud, "can_keep_itself", False, raising=False)
    for name in ("keep_disk", "release_disk", "attach_kept_disk"):
        monkeypatch.setattr(DiskCloud, name, lambda *_: [], raising=False)


@pytest.mark.usefixtures("keeps")
def test_a_disk_whose_time_is_over_goes_beside_a_server_that_lives(kept: Kept) -> None:
    two = kept.two
    two.lab.machine.run_with("night")
    old = msgspec.structs.replace(DISK, id="vol-3", expires_at=time.time() - 9999)
    two.cloud.left.append(old)
    disks.record_shown(two.kept(), two.cloud.left, LAB_ID)
    kept.attend = lambda name: recover_lab(two.kept(), kept_labs.find_kept_lab(two.places, name))
    kept.keeper._attend(NAME)
    assert two.cloud.left == []
    assert len(two.cloud.machines) == 1


def test_a_keeper_looks_for_such_disks_once_an_hour(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = kept.two
    two.lab.machine.run_with("night")
    kept.round()
    assert kept.closer == []
    kept.keeper._disks_due.clear()
    old = msgspec.structs.replace(DISK, provider="local", expires_at=time.time() - 9999)
    detail = {"disk": msgspec.to_builtins(old)}
    two.state.record(SEEN, lab_id=LAB_ID, detail=detail)
    kept.round(3)
    assert kept.closer == [NAME]


def test_when_all_is_over_and_swept_nobody_is_asked_any_more(kept: Kept) -> None:
    two = kept.two
    over(two)
    two.cloud.machines.clear()
    two.lab.machine.error = cut()
    kept.attend = lambda name: recover_lab(two.kept(), kept_labs.find_kept_lab(two.places, name))
    kept.round()
    assert kept.state == SWEPT
    assert kept.closer == [NAME]
    kept.round(3)
    assert kept.closer == [NAME]
    seen = kept.keeper.checks[NAME]
    assert seen.next_at - seen.at > 2000


def test_a_run_whose_server_is_silent_is_looked_at_until_it_answers(two: Pair) -> None:
    two.lab.machine.error = cut()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            two.lab.machine.error = None
            two.lab.machine.run_with("night")

    recover_lab(two.kept(), kept_labs.find_kept_lab(two.places, NAME), pause=pause)
    assert len(pauses) == 3
    run = two.state.get_run(LAB_ID, "night")
    assert run is not None
    assert run.state == "exited"


# Processes of their own


def test_a_process_that_helps_tells_its_error_and_ends_with_the_keeper(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in two.environ.items():
        monkeypatch.setenv(name, value)
    attendants = RecoveryWorkers()
    with pytest.raises(NotFoundError, match="no lab nobody is kept here"):
        attendants.run_worker("nobody")
    attendants.end_all()
    with pytest.raises(LabError, match="is ending"):
        attendants.run_worker("nobody")
