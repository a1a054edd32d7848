"""When a run on several servers stalls, and which of its ranks is named."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.errors import UnreachableError
from labctl.events import Event, Note
from labctl.lifecycle import gang_stall
from labctl.lifecycle.fleet import LabOutcome
from labctl.lifecycle.gang_stall import Stall, StallCheck
from labctl.wire.runs import ProcessOutput, StallReply

STALL_S = 600.0
# 09:00:00 UTC, when all ranks began
BEGIN = 32_400.0
SILENT = UnreachableError("no answer")


class Member:
    """What the check reads of a server's context. It keeps events."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.config = type("Config", (), {"name": f"two-{rank}"})
        self.reporter = self
        self.notes: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.notes.append(event.text)


def make_reply(stalled_s: float | None, now: float, *printed_at: float) -> StallReply:
    """Reply of a server whose processes printed last at these seconds after they began."""
    outputs = tuple(
        ProcessOutput(process, BEGIN, BEGIN + at) for process, at in enumerate(printed_at)
    )
    return StallReply(stalled_s, outputs if stalled_s is not None else (), BEGIN + now)


class Checked:
    """A check of two servers; `find` has them reply so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members = [Member(0), Member(1)]
        self.check = StallCheck(self.members, "night", STALL_S)  # type: ignore[arg-type]
        self.monkeypatch = monkeypatch
        self.calls = 0

    def find(self, *replies: StallReply | UnreachableError, at_s: float = 1e6) -> Stall | None:
        outcomes: list[LabOutcome[Any]] = [
            LabOutcome(None, error=reply)  # type: ignore[arg-type]
            if isinstance(reply, UnreachableError)
            else LabOutcome(None, reply)  # type: ignore[arg-type]
            for reply in replies
        ]

        def reply_all(*_: object) -> list[LabOutcome[Any]]:
            self.calls += 1
            return outcomes

        self.monkeypatch.setattr(gang_stall, "run_for_each", reply_all)
        self.monkeypatch.setattr(gang_stall.time, "monotonic", lambda: at_s)
        # The first server has this machine's clock.
        now = next(reply.now for reply in replies if isinstance(reply, StallReply))
        self.monkeypatch.setattr(gang_stall.time, "time", lambda: now)
        return self.check.find()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(monkeypatch)


def test_progress_on_one_server_is_enough(checked: Checked) -> None:
    assert checked.find(make_reply(599, 900, 300), make_reply(3600, 900, 300)) is None


def test_a_server_that_does_not_answer_is_no_stall(checked: Checked) -> None:
    assert checked.find(make_reply(3600, 900, 300), SILENT) is None


def test_a_part_that_has_ended_does_not_count(checked: Checked) -> None:
    assert checked.find(make_reply(None, 900), make_reply(10, 900, 890)) is None
    assert checked.find(make_reply(None, 900), make_reply(None, 900), at_s=2e6) is None
    stall = checked.find(make_reply(None, 900), make_reply(601, 900, 290), at_s=3e6)
    assert stall is not None
    assert stall.rank == 1


def test_the_rank_that_fell_silent_first_is_named(checked: Checked) -> None:
    stall = checked.find(make_reply(660, 1000, 340, 340.2), make_reply(601, 1000, 330, 340.1))
    assert stall == Stall(
        1,
        "stalled: no rank has shown any progress for 10 min; the last was rank 1 (two-0) at "
        "09:05:40 UTC; rank 2 (two-1) fell silent first, at 09:05:30 UTC",
    )


@pytest.mark.parametrize(
    "second_at",
    [
        339.5,  # it has printed together with the others
        20.0,  # its first lines alone, as those of most ranks but the first
        0.0,  # nothing
    ],
)
def test_without_evidence_only_the_last_one_is_named(checked: Checked, second_at: float) -> None:
    stall = checked.find(make_reply(601, 1000, 340), make_reply(980, 1000, second_at))
    assert stall is not None
    assert stall.reason.endswith("; the last was rank 0 (two-0) at 09:05:40 UTC")


def test_another_clock_on_a_server_accuses_no_rank(checked: Checked) -> None:
    late = StallReply(601, (ProcessOutput(0, BEGIN - 900, BEGIN - 561),), BEGIN + 100)
    stall = checked.find(make_reply(601, 1000, 340), late)
    assert stall is not None
    assert "fell silent first" not in stall.reason


def test_a_run_that_has_never_printed_says_so(checked: Checked) -> None:
    stall = checked.find(make_reply(601, 601, 0), make_reply(601, 601, 0))
    assert stall is not None
    assert stall.reason.endswith(" for 10 min; none has printed anything")


def test_one_silent_rank_among_others_is_named_once_and_ends_nothing(checked: Checked) -> None:
    for at_s in (1e6, 2e6):
        replies = make_reply(0, 2000, 1999), make_reply(0, 2000, 1300)
        assert checked.find(*replies, at_s=at_s) is None
    text = "rank 1 (two-1) has printed nothing for 12 min, while every other rank still prints"
    assert checked.members[0].notes == [text]


def test_ranks_that_hardly_ever_print_are_no_news(checked: Checked) -> None:
    checked.find(make_reply(0, 2000, 1999), make_reply(0, 2000, 20))
    assert checked.members[0].notes == []


def test_a_check_is_due_every_30_seconds_and_at_once_after_a_stall(checked: Checked) -> None:
    well = make_reply(0, 10, 10), make_reply(0, 10, 10)
    stalled = make_reply(601, 700, 10), make_reply(601, 700, 10)
    checked.find(*well, at_s=100)
    checked.find(*stalled, at_s=129)
    assert checked.calls == 1
    assert checked.find(*stalled, at_s=130)
    assert checked.find(*stalled, at_s=130)
    assert checked.calls == 3


def test_without_a_time_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked(monkeypatch)
    checked.check = StallCheck(checked.members, "night", 0.0)  # type: ignore[arg-type]
    assert checked.find(make_reply(1e6, 1e6, 0), make_reply(1e6, 1e6, 0)) is None
    assert checked.calls == 0
