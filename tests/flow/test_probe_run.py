"""A short run before the whole one, against a server that says how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from lab_world import LAB_ID, Recorded, World

from labctl.agent import reply
from labctl.errors import InterruptError, LabError, LinkLostError, NoOfferError, UsageError
from labctl.events import Progress
from labctl.lifecycle.up import up
from labctl.model import Need, Offer, Run
from labctl.runs import probe
from labctl.runs.probe import (
    ProbeAmount,
    ProbeResult,
    compare_offer,
    find_earlier_limit,
    parse_amount,
)
from labctl.servers.context import LabContext
from labctl.state.measured_runs import list_measured
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.verbs import ErrorReply
from labctl.wire.watchdog import WatchRecord

BEGAN = 1_763_700_000.0
TOTAL = 1000.0


@dataclass
class Program:
    """The server's program: a run that does so many steps a second, and is ended when told to.

    `ends_at` is the step at which it ends by itself, with `code`. `cuts` calls find no link.
    With `cuts_start`, Ctrl-C comes before the server has the run.
    """

    steps_per_s: float = 2.0
    progress: tuple[str, ...] = ("step", "total_steps")
    ends_at: float = float("inf")
    code: int = 0
    cuts: int = 0
    cuts_start: bool = False
    watch: dict[str, Any] = field(default_factory=dict)
    now: float = BEGAN
    cancelled: bool = False
    verbs: list[str] = field(default_factory=list)
    run_id: str = ""

    def transport(self, server_id: str = "") -> FakeTransport:
        return FakeTransport().reply(r" (start|status|cancel)$", self._answer)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, line: str, stdin: bytes) -> Result:
        verb = line.split()[-1]
        request = json.loads(stdin.split(b"\n")[0])
        self.verbs.append(verb)
        if verb == "status" and self.cuts:
            self.cuts -= 1
            raise LinkLostError("the link died")
        if verb == "start" and self.cuts_start:
            raise KeyboardInterrupt
        if verb == "cancel" and not self.run_id:
            refusal = reply.encode_line(ErrorReply(reply.Failure("missing", "no such run").report))
            return Result(code=0, stdout=refusal.decode())
        if verb == "start":
            self.run_id = request["spec"]["id"]
            body: dict[str, Any] = {"run": self._run(), "found": False}
        elif verb == "cancel":
            self.cancelled = True
            body = {"run": self._run(), "already": False}
        else:
            assert request["runs"] == [self.run_id]
            disk = {"free_bytes": 1, "total_bytes": 2}
            times = {"uptime_s": self.now - BEGAN, "now": self.now}
            body = {"runs": [self._run()], "watch": self.watch, "disk": disk, **times}
        return Result(code=0, stdout=reply.encode_line(body).decode())

    def _run(self) -> dict[str, Any]:
        step = min(self.ends_at, (self.now - BEGAN) * self.steps_per_s)
        over = step >= self.ends_at
        said = {"step": step, "total_steps": TOTAL}
        found: dict[str, Any] = {
            "id": self.run_id,
            "lab_id": LAB_ID,
            "state": "cancelled" if self.cancelled else "exited" if over else "running",
            "started_at": BEGAN,
            "progress": {key: said[key] for key in self.progress},
            "progress_at": self.now,
        }
        if over:
            ended = {"exit_code": self.code, "told": f"exit {self.code}", "ended_at": self.now}
            found.update(ended)
        elif self.cancelled:  # it wrote a checkpoint, and ended well
            found.update({"exit_code": 0, "told": "cancelled", "ended_at": self.now})
        return found


def start_probe(
    context: LabContext,
    amount: ProbeAmount,
    pause: Callable[[float], None] = time.sleep,
    on_start: Callable[[Run], None] = lambda run: None,
) -> ProbeResult:
    job = probe.build_job(context, (), push=False, on_start=on_start)
    return probe.probe(context, job, amount, pause=pause)


def probed(
    lab: World,
    program: Program,
    steps: float = 20,
    reporter: Recorded | None = None,
) -> ProbeResult:
    context = made(lab, program, reporter)
    return start_probe(context, ProbeAmount(steps=steps), pause=program.passes)


def made(lab: World, program: Program, reporter: Recorded | None = None) -> LabContext:
    text = "lab: digits\nrun: [python, train.py]\nimage: debian:12\n"
    (lab.home / "lab" / "lab.yaml").write_text(text)
    context = lab.context(reporter)
    up(context)
    context.connections.__dict__["open"] = lambda server: program.transport()
    return context


def test_the_whole_run_s_time_is_told_and_the_probe_ended(lab: World) -> None:
    program, reporter = Program(), Recorded()
    found = probed(lab, program, reporter=reporter)
    assert found.pace is not None
    assert found.time.seconds == pytest.approx(TOTAL / 2.0)
    assert found.time.low_s < found.time.seconds < found.time.high_s
    assert (found.total_steps, found.finished, found.usd) == (TOTAL, False, 0.0)
    assert program.cancelled
    assert program.verbs[0] == "start"
    assert program.verbs[-1] == "cancel"
    assert found.run.id.startswith("probe-")
    assert found.run.state == "cancelled"
    told = [one for one in reporter.events if isinstance(one, Progress)]
    assert told[-1].done == told[-1].total == 20
    assert list_measured(lab.context().state, LAB_ID) == (found.run.id,)


def test_a_share_is_of_all_steps(lab: World) -> None:
    program = Program()
    context = made(lab, program)
    start_probe(context, ProbeAmount(share=0.1), pause=program.passes)
    assert (program.now - BEGAN) * program.steps_per_s == pytest.approx(100, abs=3)


def test_too_short_a_probe_goes_on_until_it_can_tell(lab: World) -> None:
    program = Program()
    assert probed(lab, program, 1).pace is not None
    assert program.now - BEGAN > 5


def test_a_cut_link_is_taken_up_again(lab: World) -> None:
    program, reporter = Program(cuts=3), Recorded()
    assert probed(lab, program, reporter=reporter).pace is not None
    assert "the link died; the probe is still running" in reporter.said


def test_a_run_that_is_over_first_has_its_own_time(lab: World) -> None:
    program = Program(ends_at=8)
    found = probed(lab, program)
    assert found.finished
    assert found.pace is None
    assert found.time.seconds == found.time.low_s == pytest.approx(4.0)
    assert not program.cancelled


def test_a_run_that_fails_is_told_with_its_log(lab: World) -> None:
    with pytest.raises(LabError, match="exit 7") as told:
        probed(lab, Program(ends_at=8, code=7))
    assert told.value.hint.startswith("labctl logs probe-")


@pytest.mark.parametrize("progress", [(), ("step",)])
def test_a_script_that_does_not_say_how_far_it_is(lab: World, progress: tuple[str, ...]) -> None:
    program = Program(progress=progress)
    with pytest.raises(LabError, match="cannot be probed") as told:
        probed(lab, program)
    assert "total_steps" in told.value.why
    assert program.cancelled


def interrupt(*moment: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_probe_does_not_go_on(lab: World) -> None:
    program = Program()
    context = made(lab, program)
    with pytest.raises(InterruptError, match="the probe run was canceled"):
        start_probe(context, ProbeAmount(steps=20), pause=interrupt)
    assert program.cancelled
    assert list_measured(context.state, LAB_ID) == ()


def test_a_probe_that_is_interrupted_while_it_starts_does_not_go_on(lab: World) -> None:
    program = Program()
    context = made(lab, program)
    with pytest.raises(InterruptError, match="the probe run was canceled"):
        start_probe(context, ProbeAmount(steps=20), on_start=interrupt)
    assert program.cancelled


def test_a_probe_that_is_interrupted_before_its_start_says_so(lab: World) -> None:
    program = Program(cuts_start=True)
    context = made(lab, program)
    with pytest.raises(InterruptError, match="before the probe run started"):
        start_probe(context, ProbeAmount(steps=20))
    assert program.verbs == ["start", "cancel"]


def test_what_it_costs_here_and_elsewhere(lab: World) -> None:
    lab.cloud.price = 0.36
    program = Program(watch={"ttl_left_s": 60.0, "budget_left_s": 9e9})
    context = made(lab, program)
    there = [
        Offer(provider="cloud", type="small", price_usd_per_hour=0.30, spot=True),
        Offer(provider="cloud", type="small", price_usd_per_hour=0.36),
        Offer(provider="cloud", type="big", price_usd_per_hour=9.0, gpu_name="T4", gpu_count=1),
    ]
    lab.cloud.__dict__["offers"] = lambda need: there
    found = start_probe(context, ProbeAmount(steps=20), pause=program.passes)
    assert found.usd == pytest.approx(500 / 3600 * 0.36)
    assert found.low_usd < found.usd < found.high_usd
    assert [(one.offer.type, one.offer.spot) for one in found.elsewhere] == [
        ("small", True),
        ("big", False),
    ]
    assert found.elsewhere[0].usd == pytest.approx(500 / 3600 * 0.30)
    assert found.elsewhere[1].seconds is None
    assert found.ends_before == "ttl"


@pytest.mark.parametrize("error", [NoOfferError("nothing fits"), LabError("no credentials")])
def test_offers_that_are_not_known_are_no_failure(lab: World, error: LabError) -> None:
    lab.cloud.price = 0.36
    program = Program()
    context = made(lab, program)

    def refused(need: Need) -> list[Offer]:
        raise error

    lab.cloud.__dict__["offers"] = refused
    found = start_probe(context, ProbeAmount(steps=20), pause=program.passes)
    assert found.elsewhere == ()
    assert ("no credentials" in found.offers_note) == ("no credentials" in error.what)


GIB = 1024**3


def test_other_gpus_are_compared_by_their_peaks() -> None:
    t4 = Offer(
        provider="aws", type="g4dn.xlarge", gpu_name="T4", gpu_count=1, gpu_memory_bytes=16 * GIB
    )
    fast = msgspec.structs.replace(
        t4, type="p5", gpu_name="H100", gpu_memory_bytes=80 * GIB, price_usd_per_hour=4.0
    )
    found = compare_offer(t4, fast, 3600.0)
    assert found.seconds == pytest.approx(3600 * 65.0 / 989.0)
    assert found.usd == pytest.approx(65.0 / 989.0 * 4.0)
    unknown = msgspec.structs.replace(fast, gpu_name="Voodoo 2")
    assert compare_offer(t4, unknown, 3600.0).seconds is None
    two = msgspec.structs.replace(fast, gpu_count=2)
    assert compare_offer(t4, two, 3600.0).usd is None
    assert compare_offer(t4, msgspec.structs.replace(t4, spot=True), 60.0).seconds == 60.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1%", ProbeAmount(share=0.01)),
        (" 0.5% ", ProbeAmount(share=0.005)),
        ("200", ProbeAmount(steps=200)),
    ],
)
def test_amounts(text: str, wanted: ProbeAmount) -> None:
    assert parse_amount(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "x", "%", "100%", "1%%", "nan", "inf", "1e999", "5 %x"]
)
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError, match="not a valid amount"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("watch", "limit"),
    [
        (None, ""),
        (WatchRecord(), ""),
        (WatchRecord(ttl_left_s=101.0), ""),
        (WatchRecord(ttl_left_s=99.0), "ttl"),
        (WatchRecord(ttl_left_s=101.0, budget_left_s=99.0), "budget"),
    ],
)
def test_limits_that_come_first(watch: WatchRecord | None, limit: str) -> None:
    assert find_earlier_limit(watch, 100.0) == limit


def test_a_probe_that_could_not_be_ended_says_so(lab: World) -> None:
    def start() -> Run:
        raise LabError("the second server could not start it")

    def cancel() -> Run:
        raise LabError("two does not answer")

    job = probe.ProbeJob(run_id="probe-1", start=start, cancel=cancel, servers=2)
    with pytest.raises(LabError, match="could not start it") as told:
        probe.probe(made(lab, Program()), job, ProbeAmount(steps=20))
    assert told.value.why == "it may go on: two does not answer"
