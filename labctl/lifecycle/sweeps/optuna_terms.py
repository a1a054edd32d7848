"""Values of a sweep in Optuna's terms: pruners, suggestions, states of trials."""

from __future__ import annotations

from typing import Any

from labctl.config.sweep import Kind, Parameter, format_number
from labctl.lazy import lazy_imports
from labctl.lifecycle.sweeps.plan import SweepPlan
from labctl.lifecycle.sweeps.trials import TrialState

with lazy_imports(__name__):
    import optuna


def make_pruner(plan: SweepPlan) -> Any:
    """Create the pruner that a plan names."""
    pruners = optuna.pruners
    if plan.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=plan.startup, n_warmup_steps=plan.warmup)
    if plan.pruner == "halving":
        return pruners.SuccessiveHalvingPruner()
    return pruners.NopPruner()


def suggest_value(trial: Any, name: str, parameter: Parameter) -> None:
    """Let Optuna choose a value of a parameter for a trial."""
    low, high = parameter.low, parameter.high
    if parameter.kind == "choice":
        trial.suggest_categorical(name, list(parameter.values))
    elif parameter.kind == "int":
        whole_step = int(parameter.step) or 1
        trial.suggest_int(name, int(low), int(high), log=parameter.log, step=whole_step)
    else:
        trial.suggest_float(name, low, high, log=parameter.log, step=parameter.step or None)


def format_value(space: dict[str, Parameter], name: str, value: Any) -> str:
    """Write a parameter's value as the word of a command line."""
    parameter = space.get(name)
    kind: Kind = parameter.kind if parameter else "choice"
    return str(value) if kind == "choice" else format_number(value, kind)


def name_state(state: Any) -> TrialState:
    """Return the name of a state of Optuna's."""
    states = optuna.trial.TrialState
    names: dict[Any, TrialState] = {
        states.COMPLETE: "complete",
        states.PRUNED: "pruned",
        states.FAIL: "failed",
    }
    return names.get(state, "running")
