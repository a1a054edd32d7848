"""Which failure of a part ends a run on several servers, and when silence is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from labctl.errors import LabError, UnreachableError
from labctl.lifecycle import gang_watch
from labctl.lifecycle.fleet import LabOutcome
from labctl.lifecycle.gang_watch import GangWatch, PartFailure
from labctl.model import Run


class Member:
    """What the watch reads of a server's context."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.config = type("Config", (), {"name": f"two-{rank}"})


def make_run(state: str = "running", code: int | None = None, at: float = 0.0, by: str = "") -> Run:
    return Run(
        id="night", lab_id="0f1e2d3c4b5a", server_id="srv", state=state, exit_code=code,
        ended_at=at or None, stopped_by=by,
    )  # fmt: skip


def fail(rank: int, run: Run | None = None, *, lost: bool = False) -> PartFailure:
    return PartFailure(rank=rank, reason=f"two-{rank}: failed", run=run, is_lost=lost)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PartFailure | None]:
    """`watch(seconds, part, part)` checks once: a part is a Run, a PartFailure or an error."""
    made = GangWatch([Member(0), Member(1)], "night", silence_s=10.0)  # type: ignore[list-item]
    made._checked_s = 0.0
    clock = [0.0]

    def check(seconds: float, *parts: object) -> PartFailure | None:
        clock[0] += seconds
        outcomes = [
            LabOutcome(None, error=part) if isinstance(part, LabError) else LabOutcome(None, part)
            for part in parts
        ]
        monkeypatch.setattr(gang_watch, "run_for_each", lambda *_: outcomes)
        monkeypatch.setattr(gang_watch.time, "monotonic", lambda: clock[0])
        return made.find_failure(10.0)

    check.made = made  # type: ignore[attr-defined]
    return check


SILENT = UnreachableError("no answer")


def test_a_part_that_runs_or_ended_well_is_no_failure(watch: Callable[..., object]) -> None:
    assert watch(2, make_run(), make_run("exited", 0)) is None
    assert watch.made.is_done is False  # type: ignore[attr-defined]
    assert watch(2, make_run("exited", 0), make_run("exited", 0)) is None
    assert watch.made.is_done is True  # type: ignore[attr-defined]


def test_the_first_failure_matters_and_all_reasons_are_named(
    watch: Callable[..., PartFailure | None],
) -> None:
    late, early = fail(0, make_run("exited", 1, at=9.0)), fail(1, make_run("exited", 7, at=5.0))
    failure = watch(2, late, early)
    assert failure is not None
    assert (failure.rank, failure.reason) == (1, "two-1: failed; two-0: failed")


@pytest.mark.parametrize(
    "cause",
    [
        fail(1, lost=True),
        fail(1, make_run("cancelled", 143, at=9.0)),
        fail(1, make_run("lost", None, at=9.0, by="ttl"), lost=True),
    ],
)
def test_a_lost_server_a_cancel_and_a_limit_are_causes(
    watch: Callable[..., PartFailure | None], cause: PartFailure
) -> None:
    failure = watch(2, fail(0, make_run("exited", 1, at=5.0)), cause)
    assert failure is not None
    assert failure.rank == 1


def test_what_a_user_or_a_limit_ended_is_final() -> None:
    assert fail(0, make_run("cancelled", 143)).is_final
    assert fail(0, make_run("lost", by="ttl"), lost=True).is_final
    assert not fail(0, make_run("lost"), lost=True).is_final
    assert not fail(0, make_run("exited", 1)).is_final


def test_silence_counts_only_while_another_server_answers(
    watch: Callable[..., PartFailure | None],
) -> None:
    assert watch(600, SILENT, SILENT) is None  # this machine was offline
    assert watch(2, make_run(), SILENT) is None
    assert watch(6, make_run(), SILENT) is None
    assert watch(2, make_run(), make_run()) is None  # it answers again
    assert watch(8, make_run(), SILENT) is None
    failure = watch(3, make_run(), SILENT)
    assert failure is not None
    assert (failure.rank, failure.is_lost) == (1, True)
    assert failure.reason == "two-1: no answer for 11 s (no answer)"


def test_what_was_before_the_first_check_is_no_silence(
    watch: Callable[..., PartFailure | None],
) -> None:
    watch.made._checked_s = None  # type: ignore[attr-defined]
    assert watch(600, make_run(), SILENT) is None
    assert watch(9, make_run(), SILENT) is None
    assert watch(2, make_run(), SILENT) is not None
