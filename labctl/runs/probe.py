"""Probe runs: run a small part of a training, and predict time and cost of the whole.

A probe is a normal run of the same command on the same servers, stopped after enough steps. The
training script must report "step" and "total_steps" in logs/progress.json; without them it cannot
be probed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from labctl.errors import BusyError, LabError, NoOfferError, NotFoundError, UsageError
from labctl.estimate.cards import find_peak_speed
from labctl.estimate.pace import PredictedTime, StepCount, StepPace, compute_pace, predict_time
from labctl.events import Note, Progress, report_wait
from labctl.model import Offer, Run, Server, Value
from labctl.runs import first_run, run_specs, runs
from labctl.runs.active_runs import describe_runs_beside_probe
from labctl.servers.context import LabContext
from labctl.servers.watch_reports import parse_watch
from labctl.state.measured_runs import record_measured
from labctl.sync import lab_files, transfer_lock
from labctl.text import duration_text
from labctl.wire.run_ids import PROBE_PREFIX
from labctl.wire.runs import STATUS, StatusRequest
from labctl.wire.watchdog import WatchRecord

HOUR_S = 3600.0
POLL_S = 1.0
GRACE_S = 5
# seconds a run may take until it reports a step: it may have to read data first
PATIENCE_S = 900.0
SHOWN_OFFERS = 6
FILE = "logs/progress.json"
STEP = "probing"


class ProbeAmount(Value, frozen=True):
    """How much of the run the probe does at least: a share of its steps, or a number of steps."""

    share: float = 0.0
    steps: float = 0.0

    def to_steps(self, total_steps: float) -> float:
        return self.steps or self.share * total_steps


class OfferComparison(Value, frozen=True):
    """The whole run on another offer. `seconds` and `usd` are None if its speed is unknown."""

    offer: Offer
    seconds: float | None
    usd: float | None


class ProbeResult(Value, frozen=True):
    """The result of a probe.

    If the whole run ended before the probe did, `finished` is true, `time` is what it took, without
    a range, and `pace` is None. Costs are at the price of all servers. `ends_before` names the
    limit that would end the server before the run ("ttl" or "budget"), or is "".
    """

    run: Run
    server: Server
    finished: bool
    total_steps: float
    time: PredictedTime
    pace: StepPace | None
    usd: float
    low_usd: float
    high_usd: float
    elsewhere: tuple[OfferComparison, ...] = ()
    offers_note: str = ""
    ends_before: str = ""


def parse_amount(text: str) -> ProbeAmount:
    """Parse `1%` or `200` (steps). UsageError for anything else."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if rest or not 0 < value < float("inf") or (percent and value >= 100):
        raise UsageError(
            f"--probe {text!r} is not a valid amount",
            why="expected a percentage of the steps below 100%, or a number of steps",
            hint="labctl run --probe 1%   # or --probe 200",
        )
    return ProbeAmount(share=value / 100) if percent else ProbeAmount(steps=value)


class ProbeJob(Value, frozen=True):
    """The run of a probe: what starts it, what ends it, and on how many servers it is.

    Its progress is that of the server of the context that `probe` gets. `require_whole` raises
    LabError if another server's part of it has failed.
    """

    run_id: str
    start: Callable[[], Run]
    cancel: Callable[[], Run]
    servers: int = 1
    require_whole: Callable[[], None] = lambda: None


def build_job(
    context: LabContext,
    command: tuple[str, ...],
    *,
    push: bool = True,
    on_start: Callable[[Run], None] = lambda run: None,
) -> ProbeJob:
    """Return the probe of `command` (lab.yaml's, if empty) on the lab's one server."""
    server = context.get_server()
    run_id = make_probe_id()
    spec = run_specs.build_spec(context, server, command, run_id, False)

    def start() -> Run:
        with transfer_lock.name_command("run"):
            if push and first_run.has_run_on_server(context, server, spec.image):
                lab_files.push(context, server, force=False)
            elif push:
                first_run.push_with_image(context, server, spec.image)
        return runs.start(
            context,
            server,
            spec,
            follow=False,
            on_start=lambda run, _: on_start(run),
            on_log=lambda block: None,
            describe_beside=describe_runs_beside_probe,
        )

    def cancel() -> Run:
        return runs.cancel(context, server, run_id, GRACE_S)[0]

    return ProbeJob(run_id=run_id, start=start, cancel=cancel)


def make_probe_id() -> str:
    return PROBE_PREFIX + run_specs.make_run_id()


def probe(
    context: LabContext,
    job: ProbeJob,
    wanted: ProbeAmount,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> ProbeResult:
    """Run `job` until it has done `wanted`, then stop it.

    LabError if the run fails or does not report its steps. The probe is stopped in any case, also
    after an error. InterruptError after Ctrl-C, at whatever moment of the run or of its start.
    """
    try:
        monitor = _follow(context, job, wanted, pause)
    except KeyboardInterrupt:
        raise runs.cancel_interrupted(job.cancel, "probe") from None
    return _summarize(context, job.servers, monitor)


def _follow(
    context: LabContext, job: ProbeJob, wanted: ProbeAmount, pause: Callable[[float], None]
) -> _ProbeMonitor:
    """Start the run, let it do `wanted`, and end what is left of it, also after an error."""
    try:
        monitor = _ProbeMonitor(context, job)
        monitor.run_until(wanted, pause)
    except LabError as error:
        # Some parts may be active although the first one has ended, or could not start.
        try:
            job.cancel()
        except NotFoundError:
            pass  # no server has it
        except LabError as second:
            error.why = "\n".join(filter(None, [error.why, f"it may go on: {second.what}"]))
        raise
    had_ended = monitor.run.has_ended
    if job.servers > 1 or not had_ended:
        with report_wait(context.reporter, "ending the probe"):
            monitor.run = job.cancel()
    if not had_ended:
        record_measured(context.state, monitor.run)
    return monitor


class _ProbeMonitor:
    """Starts the probe's run and follows it: its progress, and the server's time and budget."""

    def __init__(self, context: LabContext, job: ProbeJob) -> None:
        self.context = context
        self.job = job
        self.server = context.get_server()
        self.run = job.start()
        self.points: list[StepCount] = []
        self.watch: WatchRecord | None = None
        self.total_steps = 0.0
        self.pace: StepPace | None = None

    def run_until(self, wanted: ProbeAmount, pause: Callable[[float], None]) -> None:
        silent_s = 0.0
        while True:
            silent_s = 0.0 if self._poll() else silent_s + POLL_S
            self.job.require_whole()
            if self.run.has_ended:
                self._require_success()
                self.pace = None
                return
            target = wanted.to_steps(self.total_steps)
            done = self.points[-1].step - self.points[0].step if self.points else 0.0
            self.pace = compute_pace(self.points, self.run.started_at or self.run.created_at)
            is_enough = self.pace is not None and done >= target
            # The bar stays until the pace is known, which may take more steps than were asked for.
            self._report_progress(done, done if is_enough else max(target, done + 1))
            if is_enough:
                return
            if silent_s > PATIENCE_S:
                silence = duration_text(PATIENCE_S)
                raise self._make_no_progress_error(f"it has not reported a step for {silence}")
            pause(POLL_S)

    def _poll(self) -> bool:
        """Ask the server; return whether the run has made progress. False for a lost connection."""
        request = StatusRequest(self.context.config.name, self.context.lab_id, (self.run.id,))
        try:
            reply = self.context.open_agent(self.server).call(STATUS, request)
        except BusyError as error:
            text = f"{error.what}; the probe is still running, trying again"
            self.context.reporter.emit(Note(text=text, level="warning"))
            return False
        (record,) = reply.runs
        self.run = runs.record_run(self.context, self.server, record)
        self.watch = parse_watch(reply.watch)
        step, at = self.run.progress.get("step"), record.progress_at
        self.total_steps = self.run.progress.get("total_steps", 0.0)
        if step is None or at is None:
            return False
        if step and self.total_steps <= 0:
            raise self._make_no_progress_error(
                'it does not report "total_steps", the steps of the run'
            )
        fresh = not self.points or step != self.points[-1].step
        if fresh:
            self.points.append(StepCount(at, step))
        return fresh

    def _report_progress(self, done: float, total: float) -> None:
        event = Progress(name=STEP, done=done, total=total, unit="steps")
        self.context.reporter.emit(event)

    def _make_no_progress_error(self, why: str) -> LabError:
        return LabError(
            f"run {self.run.id} cannot be probed",
            why=f"{why}. A training script reports its progress by regularly writing\n"
            f'{{"step": 12, "total_steps": 4000}} to $LABCTL_RUN_DIR/{FILE}',
            hint="labctl run   # without a probe",
        )

    def _require_success(self) -> None:
        if self.run.exit_code != 0:
            raise LabError(
                f"the probe failed: {self.run.summary}",
                hint=f"labctl logs {self.run.id}",
            )


def _summarize(context: LabContext, servers: int, monitor: _ProbeMonitor) -> ProbeResult:
    """Predict the whole run on so many servers from the probe's progress."""
    server = monitor.server
    run, measured = monitor.run, monitor.pace
    finished = measured is None
    if measured is None:
        took = max(0.0, (run.ended_at or time.time()) - (run.started_at or run.created_at))
        times = PredictedTime(seconds=took, low_s=took, high_s=took)
    else:
        times = predict_time(measured, monitor.total_steps)
    price = servers * server.offer.price_usd_per_hour
    elsewhere, note = ((), "") if finished else _compare_offers(context, server, servers, times)
    return ProbeResult(
        run=run,
        server=server,
        finished=finished,
        total_steps=monitor.total_steps,
        time=times,
        pace=measured,
        usd=times.seconds / HOUR_S * price,
        low_usd=times.low_s / HOUR_S * price,
        high_usd=times.high_s / HOUR_S * price,
        elsewhere=elsewhere,
        offers_note=note,
        ends_before="" if finished else find_earlier_limit(monitor.watch, times.seconds),
    )


def find_earlier_limit(watch: WatchRecord | None, seconds: float) -> str:
    """Return the server's limit that comes before the run's end; "" if none is known."""
    if watch is None:
        return ""
    limits = {"ttl": watch.ttl_left_s, "budget": watch.budget_left_s}
    earlier = (name for name, left_s in limits.items() if left_s is not None and left_s < seconds)
    return next(earlier, "")


def _compare_offers(
    context: LabContext, server: Server, servers: int, times: PredictedTime
) -> tuple[tuple[OfferComparison, ...], str]:
    """Compare other offers for the same need, the cheapest whole run first."""
    if not server.offer.price_usd_per_hour:
        return (), ""
    try:
        offers = context.provider.offers(context.config.server.need)
    except NoOfferError:
        return (), ""
    except LabError as error:
        return (), f"cannot list other offers: {error.what}"
    rows = [compare_offer(server.offer, offer, times.seconds, servers) for offer in offers]
    best: dict[tuple[str, bool], OfferComparison] = {}
    for row in sorted(rows, key=_rank):
        key = (row.offer.type, row.offer.spot)
        if key != (server.offer.type, server.offer.spot):
            best.setdefault(key, row)
    return tuple(best.values())[:SHOWN_OFFERS], ""


def _rank(row: OfferComparison) -> tuple[bool, float]:
    return row.usd is None, row.offer.price_usd_per_hour if row.usd is None else row.usd


def compare_offer(here: Offer, there: Offer, seconds: float, servers: int = 1) -> OfferComparison:
    """Predict the run's time and cost on as many servers of another offer.

    The same type takes the same time. Another GPU's time scales with the ratio of the fp16 peaks,
    which is right for runs limited by the GPU. Otherwise, both are None.
    """
    factor: float | None = 1.0 if here.type == there.type else None
    if factor is None and here.gpu_count and here.gpu_count == there.gpu_count:
        own = find_peak_speed(here.gpu_name, here.gpu_memory_bytes, "fp16")
        other = find_peak_speed(there.gpu_name, there.gpu_memory_bytes, "fp16")
        factor = own / other if own and other else None
    took = None if factor is None else seconds * factor
    usd = None if took is None else took / HOUR_S * servers * there.price_usd_per_hour
    return OfferComparison(offer=there, seconds=took, usd=usd)
