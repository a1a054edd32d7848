"""The flow of a sweep: start trials, watch what they report, prune, retry, and stop in time.

What a trial is doing is in three places: the study (asked for, placed, ended), the directory of its
run on a server, and this process, which may die at any moment. So every step is recorded in the
study before it is done, and each check of a server does again what is missing there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from labctl.errors import ConnectError, HostKeyError, LabError, PolicyError
from labctl.events import Note
from labctl.lifecycle.server_loss import FailedChecks, ServerGoneError, require_alive
from labctl.lifecycle.sweeps import trial_servers
from labctl.lifecycle.sweeps.active_trial import ActiveTrial
from labctl.lifecycle.sweeps.costs import compute_cost, describe_exhausted_budget
from labctl.lifecycle.sweeps.downloads import (
    describe_missing_metric,
    download_curve,
    read_unreported,
)
from labctl.lifecycle.sweeps.endings import (
    FailureStreak,
    TrialFailure,
    describe_failure,
    make_metric_error,
)
from labctl.lifecycle.sweeps.metric import Reading, StepSeries, as_number, read_progress
from labctl.lifecycle.sweeps.plan import SweepPlan, build_command, describe_params, make_run_id
from labctl.lifecycle.sweeps.study import Study
from labctl.lifecycle.sweeps.trial_servers import TrialServer
from labctl.lifecycle.sweeps.trials import Placement, Trial, find_best
from labctl.model import Run
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.text import duration_text
from labctl.wire.runs import RunRecord

# seconds between two checks of the servers
POLL_S = 2.0
# seconds between two downloads of a running trial's event files, for the pruner
CURVES_S = 15.0
# seconds between SIGTERM and SIGKILL for a pruned trial, whose checkpoint nobody needs
GRACE_S = 10
# A trial whose servers were lost this often has failed.
MOST_ATTEMPTS = 5


class TrialScheduler:
    """One session of a sweep, in the process that holds the study's lock."""

    def __init__(
        self,
        context: LabContext,
        plan: SweepPlan,
        study: Study,
        servers: list[TrialServer],
        *,
        replaces: bool,
    ) -> None:
        """`servers` have the code. With `replaces`, a new server is started for a lost one."""
        self.context, self.plan, self.study = context, plan, study
        self.servers, self.replaces = servers, replaces
        self.active: dict[int, ActiveTrial] = {}
        self.waiting: list[int] = []
        self.stopped = ""
        self.parallel = plan.parallel or len(servers)
        self._silences = FailedChecks()
        self._streak = FailureStreak()
        self._is_budget_noted = False

    def run(self) -> str:
        """Run trials until all have ended or a limit stops new ones; return the limit, or "".

        KeyboardInterrupt leaves the runs as they are. LabError if the sweep cannot go on.
        """
        self._find_running()
        while True:
            for server in list(self.servers):
                self._check_server(server)
            while self._can_start():
                self._start_next()
            if not self.active:
                return self.stopped
            time.sleep(POLL_S)

    def _note(self, text: str, level: str = "info") -> None:
        self.context.reporter.emit(Note(text=text, level=level))

    def _find_running(self) -> None:
        """Continue the trials that an earlier process has left running."""
        for trial in self.study.trials:
            if trial.state != "running":
                continue
            if len(trial.params) < len(self.plan.space):
                trial = self.study.complete_parameters(trial.number)
            server = self._find_server(trial.placement)
            if trial.placement is None or server is None:
                self.waiting.append(trial.number)
            else:
                self._activate(trial, trial.placement, server)

    def _find_server(self, placement: Placement | None) -> TrialServer | None:
        """Return the server that a trial was placed on; None if it is another one by now."""
        return next(
            (one for one in self.servers if placement and one.server.id == placement.server_id),
            None,
        )

    def _activate(self, trial: Trial, placement: Placement, server: TrialServer) -> ActiveTrial:
        active = ActiveTrial(trial, placement, server, StepSeries(trial.reached))
        self.active[trial.number] = active
        return active

    def _can_start(self) -> bool:
        if len(self.active) >= self.parallel or self._choose_place() is None:
            return False
        trials = self.study.trials
        if not self.waiting and len(trials) >= self.plan.trials:
            return False
        self.stopped = self.stopped or self._find_exhausted_budget(trials)
        return not self.stopped

    def _find_exhausted_budget(self, trials: list[Trial]) -> str:
        """Return why the budget allows no new trial, or ""."""
        budget_usd = self.plan.budget_usd
        if budget_usd is None:
            return ""
        cost = compute_cost(self.context, self.plan.study, trials)
        if not any(one.server.offer.price_usd_per_hour for one in self.servers) and cost.is_free:
            if not self._is_budget_noted:
                self._note("The servers are free, so the budget is not used.")
                self._is_budget_noted = True
            return ""
        return describe_exhausted_budget(cost, budget_usd, len(self.active))

    def _choose_place(self) -> tuple[TrialServer, int] | None:
        """Return the free place on the server with the fewest trials; None without one."""
        free = []
        for server in self.servers:
            taken = [one.placement.place for one in self.active.values() if one.server is server]
            left = [place for place in range(len(server.gpus)) if place not in taken]
            if left and len(taken) < len(server.gpus):
                free.append((len(taken), server.rank, server, left[0]))
        if not free:
            return None
        _, _, server, place = min(free, key=lambda one: one[:2])
        return server, place

    def _start_next(self) -> None:
        """Start a trial that waits for another try, or a new one."""
        chosen = self._choose_place()
        assert chosen is not None
        server, place = chosen
        is_retry = bool(self.waiting)
        trial = self.study.get_trial(self.waiting.pop(0)) if is_retry else self.study.add_trial()
        attempt = trial.placement.attempt + 1 if trial.placement else 1
        if attempt > MOST_ATTEMPTS:
            self._finish_failed(trial, f"its servers were lost {MOST_ATTEMPTS} times")
            return
        run = make_run_id(self.plan.study, trial.number, attempt)
        placement = Placement(attempt, server.rank, server.server.id, place, run)
        self.study.place(trial.number, placement)
        active = self._activate(trial, placement, server)
        again = " again" if attempt > 1 else ""
        options = describe_params(trial.params)
        self._note(f"trial {trial.number} starts{again} on {server.name}: {options}")
        try:
            self._request(active)
        except (ConnectError, HostKeyError) as error:
            self._handle_silence(server, error)

    def _request(self, active: ActiveTrial) -> None:
        """Start the trial's run, or find it."""
        active.server.start(active.placement, build_command(self.plan.command, active.trial.params))
        active.is_confirmed = True

    def _check_server(self, server: TrialServer) -> None:
        """Handle what has happened to a server and to the trials on it."""
        trials = [one for one in self.active.values() if one.server is server]
        if not trials:
            return
        try:
            reply = runs.refresh(server.context, server.current)
            self._silences.reset(server.server.id)
            records = {record.id: record for record in reply.runs}
            for active in trials:
                if active.number in self.active:
                    self._check_trial(active, records)
        except (ConnectError, HostKeyError) as error:
            self._handle_silence(server, error)

    def _handle_silence(self, server: TrialServer, error: LabError) -> None:
        """Find out whether a server that cannot be reached is lost."""
        try:
            require_alive(server.context, server.current, self._silences)
        except ServerGoneError as gone:
            self._handle_loss(server, gone.what)
            return
        moved = runs.has_moved(server.context, server.server)
        if isinstance(error, HostKeyError) and not moved:
            raise error

    def _handle_loss(self, server: TrialServer, what: str) -> None:
        """Let the trials of a lost server wait for another one."""
        lost = [number for number, one in self.active.items() if one.server is server]
        names = ", ".join(map(str, lost))
        self._note(f"{what}; to be tried again: trial {names}", "warning")
        for number in lost:
            del self.active[number]
            self.waiting.append(number)
        self.servers.remove(server)
        if self.replaces:
            try:
                self.servers.append(trial_servers.replace_server(server))
            except LabError as error:
                self._note(f"no server replaces {server.name}: {error.what}", "warning")
        if not self.servers:
            raise PolicyError(
                f"the sweep has no server left; {len(self.waiting)} trials wait for one",
                why=what,
                hint=f"{self.study.options.format_call(self.study.name, '--up')}   # continues",
            )

    def _check_trial(self, active: ActiveTrial, records: Mapping[str, RunRecord]) -> None:
        record = records.get(active.placement.run)
        if record is None or (record.state == "claimed" and not active.is_confirmed):
            # The process before this one, or its connection, ended between record and request.
            self._request(active)
            return
        run = runs.to_run(record, active.server.server.id)
        if run.state == "lost":
            self._handle_lost_run(active, run)
            return
        active.is_confirmed = True
        if active.trial.is_stopping and not run.has_ended:
            self._stop(active)
            return
        reading = self._read(active, run)
        if run.has_ended:
            self._end(active, run, reading)
        elif self._is_worse(active, reading):
            self.study.mark_stopping(active.number)
            self._stop(active)

    def _handle_lost_run(self, active: ActiveTrial, run: Run) -> None:
        """Try a run again that ended with its server, or with the limit of its server."""
        if run.stopped_by and active.is_confirmed:
            self._handle_loss(
                active.server, f"the {run.stopped_by} of {active.server.name} is over"
            )
            return
        self._note(f"trial {active.number}: {run.summary}; it is tried again", "warning")
        del self.active[active.number]
        self.waiting.append(active.number)

    def _read(self, active: ActiveTrial, run: Run) -> Reading:
        """Read the metric, and record its new steps for the pruner."""
        reading = read_progress(run.progress, self.plan.metric)
        if reading.last is not None:
            steps = active.series.add_progress(reading.points)
            steps += active.series.finish() if run.has_ended else []
        else:
            curve = self._read_curve(active, run)
            names = (*reading.names, *curve.names)
            last = curve.last
            if last is None and run.has_ended:
                last = as_number(read_unreported(self.context, run, self.plan.metric))
            reading = Reading(points=curve.points, last=last, names=names)
            steps = active.series.add_curve(curve.points)
        for step, value in steps:
            self.study.report(active.number, step, value)
        return Reading(points=tuple(steps), last=reading.last, names=reading.names)

    def _read_curve(self, active: ActiveTrial, run: Run) -> Reading:
        """Download the logs if it is time, and read the metric's curve."""
        is_due = time.monotonic() - active.curves_at_s >= CURVES_S
        if not run.has_ended and (self.plan.pruner == "none" or not is_due):
            return Reading()
        active.curves_at_s = time.monotonic()
        return download_curve(self.context, active.server, run, self.plan.metric)

    def _is_worse(self, active: ActiveTrial, reading: Reading) -> bool:
        return bool(reading.points) and self.study.should_prune(active.number)

    def _stop(self, active: ActiveTrial) -> None:
        """Cancel the run of a trial that the pruner has ended."""
        server = active.server
        with contextlib.suppress(ConnectError):  # the next check does it again
            run, _ = runs.cancel(server.context, server.current, active.placement.run, GRACE_S)
            active.trial = self.study.get_trial(active.number)
            self._end(active, run, self._read(active, run))

    def _end(self, active: ActiveTrial, run: Run, reading: Reading) -> None:
        """Record the end of a trial, and say it."""
        seconds = (run.ended_at or 0.0) - (run.started_at or run.ended_at or 0.0)
        failure: TrialFailure | None = None
        if active.trial.is_stopping and run.exit_code != 0:
            self._finish_pruned(active, seconds)
        elif failure := describe_failure(self.context, active.server, run, reading):
            del self.active[active.number]
            self._finish_failed(active.trial, failure.text, seconds)
            self._streak.add(active.trial, failure, self.study)
        elif reading.last is None:
            self._handle_missing_metric(active, run, reading, seconds)
        else:
            self._finish_complete(active, reading.last, seconds)

    def _handle_missing_metric(
        self, active: ActiveTrial, run: Run, reading: Reading, seconds: float
    ) -> None:
        """Record the trial as failed if others have the metric; else LabError, and it stays open.

        If no trial has it, its name is most likely wrong.
        """
        text = describe_missing_metric(self.context, run, self.plan.metric)
        if not self.study.has_values:
            self.study.note_missing_metric(active.number, text)
            raise make_metric_error(self.study, text, reading, run, len(self.active) - 1)
        del self.active[active.number]
        self._finish_failed(active.trial, text, seconds)
        self._streak.add(active.trial, TrialFailure(text=text), self.study)

    def _finish_pruned(self, active: ActiveTrial, seconds: float) -> None:
        del self.active[active.number]
        self._streak.reset()
        trial = self.study.finish(active.number, "pruned", seconds=seconds)
        at = "" if trial.reached is None else f" at step {trial.reached}"
        self._note(f"trial {trial.number}: pruned{at}, after {duration_text(seconds)}")

    def _finish_complete(self, active: ActiveTrial, value: float, seconds: float) -> None:
        del self.active[active.number]
        self._streak.reset()
        self.study.finish(active.number, "complete", value=value, seconds=seconds)
        best = find_best(self.study.trials, self.plan.direction)
        is_best = ", the best so far" if best and best.number == active.number else ""
        took = duration_text(seconds)
        self._note(f"trial {active.number}: {self.plan.metric} {value:.5g} in {took}{is_best}")

    def _finish_failed(self, trial: Trial, why: str, seconds: float = 0.0) -> None:
        self.study.finish(trial.number, "failed", why=why, seconds=seconds)
        self._note(f"trial {trial.number} failed: {why}", "warning")
