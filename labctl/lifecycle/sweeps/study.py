"""The record of a sweep: Optuna's study in a journal file below labctl's state directory.

Every change is on disk before anything follows from it, so that a sweep continues after its process
was killed at whatever moment. The file is input like any other: it may be damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from labctl.config.installation import install_command
from labctl.decoding import convert_value
from labctl.errors import LabError, NotFoundError, PolicyError
from labctl.lazy import lazy_imports
from labctl.lifecycle.sweeps.optuna_terms import (
    format_value,
    make_pruner,
    name_state,
    suggest_value,
)
from labctl.lifecycle.sweeps.plan import NO_OPTIONS, SweepOptions, SweepPlan, describe_changes
from labctl.lifecycle.sweeps.trials import Placement, Trial, TrialState
from labctl.model import Value

with lazy_imports(__name__):
    import optuna
    from optuna.storages import journal

EXTRA = "sweep"
# keys of the study's and the trials' attributes
PLAN, PLACEMENT, STOPPING, WHY, SECONDS = "plan", "placement", "stopping", "why", "seconds"
MOST_BYTES = 256 * 1024**2
MOST_WHY = 500
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError)


class Importances(Value, frozen=True):
    """How much each parameter matters, as shares of 1, by the evaluator that was used.

    Without shares, `why` says why.
    """

    shares: dict[str, float] = msgspec.field(default_factory=dict)
    evaluator: str = ""
    why: str = ""


class StudyDamagedError(LabError):
    """The file of a study cannot be read."""


def require_optuna() -> None:
    """LabError with the command that installs Optuna if it is missing."""
    if find_spec("optuna") is None:
        raise LabError(
            "a sweep needs Optuna, which is not installed",
            why=f"it is in the extra `{EXTRA}` of labctl",
            hint=install_command(EXTRA),
        )


class _HeldLock:
    """Optuna's lock of the journal. labctl holds a lock of its own, which ends with its process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def drop_partial_line(file: Path) -> None:
    """Remove the end of a journal that a power cut left without its end of line.

    Optuna would append to it, and neither line could be read.
    """
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as journal_file:
        content = journal_file.read(MOST_BYTES)
        if content and not content.endswith(b"\n") and len(content) < MOST_BYTES:
            journal_file.truncate(content.rfind(b"\n") + 1)


class Study:
    """A study that this process alone changes: the caller holds its lock."""

    def __init__(
        self,
        file: Path,
        plan: SweepPlan | None,
        name: str,
        options: SweepOptions = NO_OPTIONS,
    ) -> None:
        """Open the study, or create it for `plan`; without one, it must exist.

        `options` are those of the command line, which the next command repeats.
        """
        require_optuna()
        self.file, self.name, self.options = file, name, options
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if plan is not None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if file.is_file():
                drop_partial_line(file)
        elif not file.is_file():
            raise NotFoundError(
                f"no study is called {name}", why="no sweep has created it", hint="labctl sweep"
            )
        if file.exists() and file.stat().st_size > MOST_BYTES:
            raise self._make_damage_error(f"it is larger than {MOST_BYTES} bytes")
        if file.exists() and not file.is_file():
            raise self._make_damage_error("it is not a file")
        with self._translate_damage():
            backend = journal.JournalFileBackend(str(file), lock_obj=_HeldLock())
            self._storage = optuna.storages.JournalStorage(backend)
            if plan is None:
                self._study = optuna.load_study(study_name=name, storage=self._storage)
            else:
                self._study = self._create(plan)
        self._open_trials: dict[int, Any] = {}
        self._choose_plan(plan)

    def _create(self, plan: SweepPlan) -> Any:
        """Return Optuna's study of this name, which is created if it is missing."""
        return optuna.create_study(
            study_name=self.name,
            storage=self._storage,
            direction=plan.direction,
            load_if_exists=True,
            pruner=make_pruner(plan),
        )

    def _choose_plan(self, plan: SweepPlan | None) -> None:
        """Take the plan, or the recorded one; PolicyError if their trials do not compare."""
        with self._translate_damage():
            recorded = self._study.user_attrs.get(PLAN)
            before = None if recorded is None else convert_value(recorded, SweepPlan)
        if plan is None:
            if before is None:
                raise self._make_damage_error("it has no plan")
            self.plan = before
            return
        self.plan = before or plan
        if before is not None and describe_changes(before, plan) and not self.trials:
            # Nothing to compare with. Optuna never changes the direction of a study.
            optuna.delete_study(study_name=self.name, storage=self._storage)
            self._study = self._create(plan)
        elif before is not None:
            self._require_comparable(before, plan)
        if before != plan:
            self._study.set_user_attr(PLAN, msgspec.to_builtins(plan))
            self.plan = plan

    def _require_comparable(self, before: SweepPlan, plan: SweepPlan) -> None:
        if not (changes := describe_changes(before, plan)):
            return
        # A misspelled metric costs no trial: their runs are read again.
        metric_alone = msgspec.structs.replace(before, metric=plan.metric)
        if not describe_changes(metric_alone, plan) and not self.has_values:
            return
        raise PolicyError(
            f"the trials of the study {self.name} do not fit what is to be tried now",
            why="\n".join([*changes, "trials of both would not be comparable"]),
            hint=f"{self.options.format_call(self.find_free_name())}   # starts a new study\n"
            f"labctl sweep --study {self.name}   # with the earlier settings again",
        )

    @property
    def has_values(self) -> bool:
        """Whether any trial has reported the metric."""
        return any(trial.value is not None or trial.reached is not None for trial in self.trials)

    def find_free_name(self) -> str:
        """Return the name of a study that does not exist yet."""
        base = self.name[:20].rstrip("-")
        names = (f"{base}-{number}" for number in range(2, 10_000))
        return next(name for name in names if not self.file.with_name(f"{name}.journal").exists())

    @contextmanager
    def _translate_damage(self) -> Iterator[None]:
        try:
            yield
        except (*_DAMAGE, msgspec.ValidationError, RecursionError) as error:
            raise self._make_damage_error(f"{type(error).__name__}: {error}") from error

    def _make_damage_error(self, why: str) -> StudyDamagedError:
        return StudyDamagedError(
            f"the file of the study {self.name} cannot be read",
            why=f"{self.file}: {why[:300]}",
            hint=f"{self.options.format_call(self.find_free_name())}   # a new study",
        )

    @property
    def trials(self) -> list[Trial]:
        """All trials, by their numbers."""
        with self._translate_damage():
            return [self._as_trial(one) for one in self._study.get_trials(deepcopy=False)]

    def _as_trial(self, frozen: Any) -> Trial:
        attrs = frozen.user_attrs
        placement = attrs.get(PLACEMENT)
        steps = frozen.intermediate_values
        return Trial(
            number=frozen.number,
            state=name_state(frozen.state),
            params={
                name: format_value(self.plan.space, name, value)
                for name, value in frozen.params.items()
            },
            value=frozen.value,
            reached=max(steps) if steps else None,
            placement=None if placement is None else convert_value(placement, Placement),
            is_stopping=bool(attrs.get(STOPPING)),
            why=str(attrs.get(WHY, ""))[:MOST_WHY],
            seconds=float(attrs.get(SECONDS, 0.0)),
        )

    def add_trial(self) -> Trial:
        """Choose parameters by the trials so far, and record the trial before anything runs."""
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = self._make_sampler(number)
        return self._fill(self._study.ask())

    def complete_parameters(self, number: int) -> Trial:
        """Choose what is missing of a trial that a killed process has only begun to record."""
        self._study.sampler = self._make_sampler(number)
        return self._fill(self._open(number))

    def _fill(self, trial: Any) -> Trial:
        _ = trial.relative_params  # those that TPE draws together, with the trial's own seed
        for name, parameter in self.plan.space.items():
            self._study.sampler = self._make_sampler(trial.number, name)
            suggest_value(trial, name, parameter)
        self._open_trials[trial.number] = trial
        return self.get_trial(trial.number)

    def get_trial(self, number: int) -> Trial:
        """Return a trial as recorded; NotFoundError without it."""
        trials = self.trials
        if not 0 <= number < len(trials):
            known = f"it has the trials 0 to {len(trials) - 1}" if trials else "it has no trials"
            raise NotFoundError(
                f"the study {self.name} has no trial {number}",
                why=known,
                hint=f"labctl sweep --study {self.name} --show",
            )
        return trials[number]

    def _open(self, number: int) -> Any:
        """Return Optuna's object of a running trial, also of one that an earlier process began."""
        if number not in self._open_trials:
            frozen = self._study.get_trials(deepcopy=False)[number]
            # Documented as the trial's id in the storage; nothing public leads from a number to it.
            self._open_trials[number] = optuna.trial.Trial(self._study, frozen._trial_id)
        return self._open_trials[number]

    def place(self, number: int, placement: Placement) -> None:
        """Record where the next attempt of a trial runs, before it is requested."""
        self._open(number).set_user_attr(PLACEMENT, msgspec.to_builtins(placement))

    def report(self, number: int, step: int, value: float) -> None:
        """Record the metric at a step. Each step counts once."""
        self._open(number).report(value, step)

    def should_prune(self, number: int) -> bool:
        """Whether the pruner would end the trial."""
        return bool(self._open(number).should_prune())

    def mark_stopping(self, number: int) -> None:
        """Record that the pruner ends the trial, before its run is canceled."""
        self._open(number).set_user_attr(STOPPING, True)

    def note_missing_metric(self, number: int, why: str) -> None:
        """Record that the run of a trial has ended without the metric. The trial stays open."""
        self._open(number).set_user_attr(WHY, why[:MOST_WHY])

    def finish(
        self,
        number: int,
        state: TrialState,
        *,
        value: float | None = None,
        why: str = "",
        seconds: float = 0.0,
    ) -> Trial:
        """Record the end of a trial."""
        trial = self._open_trials.pop(number, None) or self._open(number)
        trial.set_user_attr(WHY, why[:MOST_WHY])
        trial.set_user_attr(SECONDS, seconds)
        self._open_trials.pop(number, None)
        states = optuna.trial.TrialState
        if state == "complete":
            self._study.tell(number, value)
        else:
            self._study.tell(number, state=states.PRUNED if state == "pruned" else states.FAIL)
        return self.get_trial(number)

    def _make_sampler(self, number: int, name: str = "") -> Any:
        """Create the sampler of one trial, or of one parameter of it, with a seed of its own.

        So a sweep that continues draws the same parameters as one that was not interrupted.
        """
        digest = hashlib.sha256(f"{self.plan.seed}:{number}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:4])
        if self.plan.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed)

    def compute_importances(self) -> Importances:
        """Compute how much each parameter matters. fANOVA needs scikit-learn; PED-ANOVA nothing."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        if len(complete) < 2 or len({trial.value for trial in complete}) < 2:
            return Importances(why="needs at least two complete trials with different values")
        has_forest = find_spec("sklearn") is not None
        kinds = optuna.importance
        evaluator = (
            kinds.FanovaImportanceEvaluator(seed=0)
            if has_forest
            else kinds.PedAnovaImportanceEvaluator()
        )
        try:
            found = kinds.get_param_importances(self._study, evaluator=evaluator)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return Importances(why=str(error))
        name = "fANOVA" if has_forest else "PED-ANOVA; with scikit-learn: fANOVA"
        return Importances(
            shares={key: float(share) for key, share in found.items()}, evaluator=name
        )
