"""Run a sweep, or show what its study has, as one result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from labctl.config.sweep import Direction
from labctl.errors import LabError
from labctl.events import Note, Step
from labctl.lifecycle import up
from labctl.lifecycle.sweeps import page, trial_servers
from labctl.lifecycle.sweeps.costs import SweepCost, compute_cost, find_interval, list_trial_runs
from labctl.lifecycle.sweeps.plan import (
    DEFAULT_STUDY,
    SweepOptions,
    SweepPlan,
    require_study_name,
)
from labctl.lifecycle.sweeps.scheduler import TrialScheduler
from labctl.lifecycle.sweeps.study import Importances, Study, require_optuna
from labctl.lifecycle.sweeps.trials import Trial, find_best, sort_best_first
from labctl.model import Run, Value
from labctl.runs import outputs
from labctl.servers.context import LabContext
from labctl.state.locks import hold_lock

# The directory of pulled results, which no push sends.
RESULTS = "runs"


class SweepResult(Value, frozen=True):
    """The state of a study: its `trials`, best first, and what was computed from them.

    `best` is the number of the best trial, None without a complete one. `stopped` is the limit that
    ended the sweep before its last trial. `page` is the path of the results as HTML.
    """

    study: str
    metric: str
    direction: Direction
    wanted: int
    trials: tuple[Trial, ...]
    best: int | None
    importances: Importances
    cost: SweepCost
    stopped: str = ""
    page: str = ""


def find_study_file(context: LabContext, name: str) -> Path:
    """Return the journal of a study: in the state directory, below the lab's id."""
    require_study_name(name)
    return context.paths.state_dir / "sweeps" / context.lab_id / f"{name}.journal"


@contextmanager
def open_study(context: LabContext, plan: SweepPlan, options: SweepOptions) -> Iterator[Study]:
    """Open the plan's study for changes; LockHeldError if another process has it open."""
    require_optuna()
    file = find_study_file(context, plan.study)
    with hold_lock(file.with_suffix(".lock"), "sweep", wait_s=0.0):
        yield Study(file, plan, plan.study, options)


def list_studies(context: LabContext) -> list[str]:
    """List the names of the lab's studies, the one that changed last first."""
    directory = find_study_file(context, DEFAULT_STUDY).parent
    changed = []
    for file in directory.glob("*.journal"):
        with suppress(OSError):
            changed.append((file.stat().st_mtime_ns, file.stem))
    return [name for _, name in sorted(changed, reverse=True)]


def find_newest_study(context: LabContext) -> str:
    """Return the study that changed last, which a command without a study's name means."""
    return next(iter(list_studies(context)), DEFAULT_STUDY)


def read_study(context: LabContext, name: str) -> Study:
    """Open a study to read it; NotFoundError if it does not exist."""
    return Study(find_study_file(context, name), None, name)


def run_sweep(
    context: LabContext, plan: SweepPlan, options: SweepOptions, *, starts: bool, version: str
) -> SweepResult:
    """Run the trials of a plan that its study has not, and return all results.

    With `starts`, servers that the lab lacks are started first, and those that are lost replaced.
    Repeated after an interrupt at whatever moment, this continues; KeyboardInterrupt leaves the
    runs as they are. Errors name the command with the `options` that the plan was made from.
    """
    with open_study(context, plan, options) as study:
        stopped = ""
        if has_work(study, plan):
            if starts:
                up.up(context)
            servers = trial_servers.open_servers(context, plan.parallel)
            trial_servers.push_to_all(servers)
            scheduler = TrialScheduler(context, plan, study, servers, replaces=starts)
            stopped = scheduler.run()
            _pull_best(context, study, scheduler)
        result = summarize(context, study)
        return msgspec.structs.replace(
            result, stopped=stopped, page=str(_write_page(context, study, result, version))
        )


def has_work(study: Study, plan: SweepPlan) -> bool:
    """Whether the study lacks trials, or has some that have not ended."""
    trials = study.trials
    return len(trials) < plan.trials or any(trial.state == "running" for trial in trials)


def show_sweep(context: LabContext, name: str, *, version: str) -> SweepResult:
    """Return the results that a study has so far, and write its page; nothing is started."""
    study = read_study(context, name)
    result = summarize(context, study)
    return msgspec.structs.replace(result, page=str(_write_page(context, study, result, version)))


def summarize(context: LabContext, study: Study) -> SweepResult:
    """Return the results that a study has so far, without a page."""
    plan, trials = study.plan, _add_ends(context, study)
    best = find_best(trials, plan.direction)
    return SweepResult(
        study=study.name,
        metric=plan.metric,
        direction=plan.direction,
        wanted=plan.trials,
        trials=tuple(sort_best_first(trials, plan.direction)),
        best=None if best is None else best.number,
        importances=study.compute_importances(),
        cost=compute_cost(context, study.name, trials),
    )


def _add_ends(context: LabContext, study: Study) -> list[Trial]:
    """Return the trials; of open ones, with the end of their runs as this machine knows it."""
    trials = study.trials
    open_trials = [trial for trial in trials if trial.state == "running"]
    ended = {
        run.id: run for run in list_trial_runs(context, study.name, open_trials) if run.has_ended
    }
    return [
        _end_trial(trial, ended[trial.run])
        if trial.state == "running" and trial.run in ended
        else trial
        for trial in trials
    ]


def _end_trial(trial: Trial, run: Run) -> Trial:
    start, end = find_interval(run, time.time())
    return msgspec.structs.replace(trial, run_has_ended=True, seconds=end - start)


def _pull_best(context: LabContext, study: Study, scheduler: TrialScheduler) -> None:
    """Download everything of the best trial. Other trials stay on their servers."""
    best = find_best(study.trials, study.plan.direction)
    server = next(
        (
            one
            for one in scheduler.servers
            if best and best.placement and one.server.id == best.placement.server_id
        ),
        None,
    )
    if best is None or server is None:
        return
    name = f"downloading {best.run}, the best trial"
    context.reporter.emit(Step(name=name))
    try:
        outputs.pull(server.context, server.current, [best.run])
    except LabError as error:
        text = f"the best trial was not downloaded: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
    with suppress(LabError):
        context.reporter.emit(Step(name=name, done=True))


def _write_page(context: LabContext, study: Study, result: SweepResult, version: str) -> Path:
    file = context.config.root / RESULTS / f"{study.name}.html"
    page.write_page(
        file,
        page.build_page(
            context.config.name, study.plan, result.trials, result.importances, version
        ),
        context.paths.data_dir / "templates",
    )
    return file
