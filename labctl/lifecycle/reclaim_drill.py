"""A reclaim drill: take the lab's server away on purpose, and measure what that costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from labctl.errors import (
    BusyError,
    ConnectError,
    NotFoundError,
    PolicyError,
    ProviderError,
    UsageError,
)
from labctl.events import Note, Question, Step
from labctl.lifecycle import restore
from labctl.lifecycle.recover import recover
from labctl.model import Run, Server, Value
from labctl.retry import poll_until
from labctl.runs import runs
from labctl.servers import disk_retention, guard
from labctl.servers.accounts import ENDED
from labctl.servers.context import LabContext
from labctl.servers.reclaimer import Reclaimer, find_reclaimer
from labctl.wire.files import MANIFEST, ManifestRequest
from labctl.wire.runs import STATUS, RunRecord, StatusRequest
from labctl.wire.watchdog import (
    READ_RECLAIM,
    RECLAIM_NOTICE,
    ReadReclaimRequest,
    ReclaimNoticeRequest,
    RunReclaimRecord,
)

POLL_S = 0.2
SAMPLE_S = 0.5
# how long a run is watched to measure its speed, at most
SPEED_WITHIN_S = 5.0
GONE_WITHIN_S = 180.0
STEP_WITHIN_S = 900.0
BEFORE_END_S = 0.5
REASON = "its server was reclaimed (drill)"


class Drill(Value, frozen=True):
    """What one reclaim cost. Times are Unix seconds of this machine's clock.

    Steps are those that the run writes to logs/progress.json, None if it writes none. `lost_steps`
    had to be repeated, which took `lost_s` at the earlier speed. `recover_s` is from the kill to
    the first new step. `cost_usd` covers the lost steps, the rest of the notice after the run had
    ended, and the new server until its first step.
    """

    run: str
    server_id: str
    notice_s: float
    began_at: float
    announced: bool
    notice_at: float | None = None
    sigterm_at: float | None = None
    checkpoint: str = ""
    checkpoint_at: float | None = None
    mirrored_at: float | None = None
    gone_at: float = 0.0
    new_server_id: str = ""
    first_step_at: float | None = None
    last_step_before: float | None = None
    first_step_after: float | None = None
    steps_per_s: float | None = None
    lost_steps: float | None = None
    lost_s: float | None = None
    recover_s: float | None = None
    cost_usd: float | None = None


class _RunMonitor:
    """Polls the run until its server is gone. Samples are (Unix second of the server, step)."""

    def __init__(self, context: LabContext, server: Server, run_id: str) -> None:
        self.context, self.server = context, server
        self.about = {"lab": context.config.name, "lab_id": context.lab_id}
        self.run_id = run_id
        self.samples: list[tuple[float, float]] = []
        self.clock_offset_s = 0.0
        self.reclaim = RunReclaimRecord()

    def poll(self) -> RunRecord:
        """Return the run's current state from the server, and sample its step. Raises LabErrors."""
        remote = self.context.open_agent(self.server)
        request = StatusRequest(self.context.config.name, self.context.lab_id, (self.run_id,))
        reply = remote.call(STATUS, request)
        if not reply.runs:
            raise NotFoundError(
                f"{self.server.alias} has no run {self.run_id}",
                hint="labctl status --refresh",
            )
        run = reply.runs[0]
        self.clock_offset_s = reply.now - time.time()
        at, step = run.progress_at, run.progress.get("step")
        if at and step is not None and (not self.samples or at > self.samples[-1][0]):
            self.samples.append((at, step))
        return run

    def poll_notice(self) -> None:
        """Sample the step, and fetch the shutdown's progress. An ended run has no more steps."""
        self.poll()
        request = ReadReclaimRequest(self.context.config.name, self.context.lab_id, self.run_id)
        reply = self.context.open_agent(self.server).call(READ_RECLAIM, request)
        self.reclaim = reply.reclaim or RunReclaimRecord()

    @property
    def step(self) -> float | None:
        return self.samples[-1][1] if self.samples else None

    @property
    def steps_per_s(self) -> float | None:
        """The speed between the first and the last sample; None for fewer than two."""
        if len(self.samples) < 2:
            return None
        (first_at, first), (last_at, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_at - first_at) if last > first else None

    def to_local_time(self, at: float | None) -> float | None:
        """Convert a Unix second of the server's clock to this machine's."""
        return None if at is None else at - self.clock_offset_s


def run_drill(context: LabContext, run_id: str, notice_s: float) -> Drill:
    """Reclaim the server of an active run, after a question, and recover the run.

    `notice_s` 0 means without notice. PolicyError if the user declines; NotFoundError if no run is
    active, or nothing is saved to recover it from.
    """
    server = context.get_server()
    reclaimer = _require_reclaimer(context)
    runs.refresh(context, server)
    run = _find_active_run(context, run_id)
    restore.read_saved_run(context, run.id)  # a run that could not be recovered is not killed
    monitor = _RunMonitor(context, server, run.id)
    _measure_speed(context, monitor)
    _require_consent(context, server, run, monitor, notice_s)
    watch = guard.read_watchdog(context, server) if notice_s else None
    if notice_s and not (watch and watch.alive):
        guard.arm(context, server, always=True)
    began_at = time.time()
    announced = _reclaim(context, server, reclaimer, monitor, notice_s)
    gone_at = _await_end(context, server)
    context.state.record("reclaimed", lab_id=context.lab_id, server_id=server.id, run_id=run.id)
    recovery = recover(context, run.id, reason=REASON)
    new = context.get_server()
    first_at, first_step = _await_first_step(context, new, monitor)
    result = Drill(
        run=run.id,
        server_id=server.id,
        notice_s=notice_s,
        began_at=began_at,
        announced=announced,
        gone_at=gone_at,
        new_server_id=recovery.server_id,
        first_step_at=first_at,
        first_step_after=first_step,
    )
    return _add_costs(result, monitor, server, new)


def _require_reclaimer(context: LabContext) -> Reclaimer:
    if reclaimer := find_reclaimer(context):
        return reclaimer
    raise UsageError(
        f"servers of {context.provider.name} are never reclaimed",
        why="a drill needs a provider that can take a server back",
        hint="labctl rehearse reclaim   # in a lab on local or a cloud",
    )


def _find_active_run(context: LabContext, run_id: str) -> Run:
    if run_id:
        run = runs.find_run(context, run_id)
        if run.state == "running":
            return run
        raise NotFoundError(
            f"run {run_id} is not active", why=run.summary, hint="labctl run --detach"
        )
    server_id = context.get_server().id
    all_runs = context.state.list_runs(context.lab_id)
    live = [run for run in all_runs if run.state == "running" and run.server_id == server_id]
    if not live:
        raise NotFoundError(
            "no run is active", why="a drill needs one to recover", hint="labctl run --detach"
        )
    return live[-1]


def _measure_speed(context: LabContext, monitor: _RunMonitor) -> None:
    """Poll the run for up to SPEED_WITHIN_S seconds, until three steps are sampled."""

    def has_speed() -> bool:
        monitor.poll()
        return len(monitor.samples) >= 3

    with _step(context, "measuring the run's speed"):
        poll_until(has_speed, pause_s=POLL_S, deadline_s=SPEED_WITHIN_S)


def _require_consent(
    context: LabContext, server: Server, run: Run, monitor: _RunMonitor, notice_s: float
) -> None:
    keeps_disk = disk_retention.is_kept(context, server)
    lost = "" if context.config.store or keeps_disk else _describe_losses(context, server)
    step = "" if monitor.step is None else f" at step {monitor.step:.0f}"
    when = f"{notice_s:.0f} s after a notice" if notice_s else "without notice"
    detail = f"{run.id} is running there{step} and resumes on another server. {lost}".strip()
    disk = "its disk is kept" if keeps_disk else "its disk is deleted"
    question = f"reclaim {server.alias} ({server.id}) {when}, {disk}?"
    if not context.reporter.confirm(Question(question=question, detail=detail)):
        raise PolicyError(
            "nothing was reclaimed",
            why=f"{run.id} is still running",
            hint="labctl status   # shows what runs there",
        )


def _describe_losses(context: LabContext, server: Server) -> str:
    request = ManifestRequest(context.config.name, context.lab_id)
    reply = context.open_agent(server).call(MANIFEST, request)
    count = sum(run.unpulled for run in reply.runs.values())
    return (
        f"The lab has no store: {count} files that were not pulled will be LOST." if count else ""
    )


def _reclaim(
    context: LabContext, server: Server, reclaimer: Reclaimer, monitor: _RunMonitor, notice_s: float
) -> bool:
    """Reclaim the server after the notice; return whether the provider itself gave the notice."""
    if not notice_s:
        monitor.poll()
        reclaimer.reclaim(server.id, 0)
        return False
    announced = reclaimer.reclaim(server.id, notice_s)
    end = time.monotonic() + notice_s
    if not announced:
        if reclaimer.no_notice:
            text = f"{reclaimer.no_notice}: labctl sends one to the server's watchdog instead"
            context.reporter.emit(Note(text=text))
        request = ReclaimNoticeRequest(context.lab_id, notice_s, source="labctl's drill")
        context.open_agent(server).call(RECLAIM_NOTICE, request)
    with _step(context, f"notice given, {notice_s:.0f} s"):
        while (left_s := end - time.monotonic()) > 0:
            if left_s > BEFORE_END_S:
                with suppress(ConnectError):
                    monitor.poll_notice()
            time.sleep(min(SAMPLE_S, max(0.0, end - time.monotonic())))
    if not announced:
        try:
            reclaimer.reclaim(server.id, 0)
        except (ProviderError, NotFoundError):
            # A process that follows the run may have seen the notice and terminated the server.
            if context.provider.find(server.id) is not None:
                raise
    return announced


def _await_end(context: LabContext, server: Server) -> float:
    """Wait until the provider reports the server's end; return that Unix second."""

    def has_ended() -> bool:
        current = context.provider.find(server.id)
        return current is None or current.state in ENDED

    with _step(context, "waiting for the server to end"):
        if poll_until(has_ended, pause_s=POLL_S, deadline_s=GONE_WITHIN_S):
            return time.time()
    raise BusyError(
        f"{server.id} still exists {GONE_WITHIN_S:.0f} s after it was reclaimed",
        hint="labctl status --refresh",
    )


def _await_first_step(
    context: LabContext, server: Server, earlier: _RunMonitor
) -> tuple[float | None, float | None]:
    """Return (Unix second, step) of the run's first new step; Nones if it ended without one.

    `earlier` watched the run before the reclaim. If it saw no step, there is nothing to wait for.
    """
    run_id = earlier.run_id
    if earlier.step is None:
        text = f"{run_id} writes no steps to logs/progress.json, so the loss cannot be measured"
        context.reporter.emit(Note(text=text))
        return None, None
    monitor = _RunMonitor(context, server, run_id)

    def read_first_step() -> tuple[float | None, float | None] | None:
        with suppress(ConnectError):
            run = monitor.poll()
            at = run.progress_at
            if at and run.started_at and at > run.started_at:
                return monitor.to_local_time(at), run.progress.get("step")
            if run.state in ("exited", "lost", "cancelled"):
                return None, None
        return None

    with _step(context, f"waiting for the first new step of {run_id}"):
        step = poll_until(read_first_step, pause_s=POLL_S, deadline_s=STEP_WITHIN_S)
    return step or (None, None)


def _add_costs(result: Drill, monitor: _RunMonitor, old: Server, new: Server) -> Drill:
    """Complete the drill with the times of the reclaim, the lost steps and their price."""
    reclaim, checkpoint = monitor.reclaim, monitor.reclaim.whole
    before, after = monitor.step, result.first_step_after
    lost = None if before is None or after is None else max(0.0, before - after + 1)
    rate = monitor.steps_per_s
    lost_s = 0.0 if lost == 0 else (lost / rate if lost is not None and rate else None)
    first_at, ended_at = result.first_step_at, monitor.to_local_time(reclaim.ended_at)
    cost = None
    if first_at is not None and lost_s is not None:
        idle_s = max(0.0, result.gone_at - ended_at) if ended_at else 0.0
        paid = old.offer.price_usd_per_hour * (lost_s + idle_s)
        paid += new.offer.price_usd_per_hour * max(0.0, first_at - new.created_at)
        cost = round(paid / 3600, 6)
    return replace(
        result,
        notice_at=monitor.to_local_time(reclaim.notice.heard_at or None),
        sigterm_at=monitor.to_local_time(reclaim.sigterm_at),
        checkpoint=checkpoint.checkpoint if checkpoint else "",
        checkpoint_at=monitor.to_local_time(checkpoint.at if checkpoint else None),
        mirrored_at=monitor.to_local_time(reclaim.mirrored_at),
        last_step_before=before,
        steps_per_s=rate,
        lost_steps=lost,
        lost_s=lost_s,
        recover_s=None if first_at is None else first_at - result.gone_at,
        cost_usd=cost,
    )


@contextmanager
def _step(context: LabContext, name: str) -> Iterator[None]:
    context.reporter.emit(Step(name=name))
    yield
    context.reporter.emit(Step(name=name, done=True))
