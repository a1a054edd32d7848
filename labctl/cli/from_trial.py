"""`labctl run --from-trial`: the command of a sweep's trial as a normal run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from labctl.errors import NotFoundError, UsageError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from labctl.cli.run_options import RunOptions
    from labctl.lab import Lab

with lazy_imports(__name__):
    from labctl.lifecycle.sweeps import plan, sweep

FROM_TRIAL = click.option(
    "--from-trial",
    default="",
    metavar="N|STUDY:N",
    help="Run the command of this trial of a sweep, with its parameters. N alone is of the study "
    "that changed last.",
)
_TRIAL = re.compile(r"(?:([^:]+):)?([0-9]{1,9})")


def require_trial(options: RunOptions) -> None:
    """UsageError for a --from-trial that names no trial, or beside a command."""
    if options.from_trial and _TRIAL.fullmatch(options.from_trial) is None:
        raise UsageError(
            f"--from-trial {options.from_trial!r} is not the number of a trial",
            why="write 7, or STUDY:7 for a study with another name",
            hint="labctl sweep --show",
        )
    if options.from_trial and options.command:
        raise UsageError(
            "--from-trial cannot be combined with a command",
            why="it runs the command of the trial",
            hint=f"labctl run --from-trial {options.from_trial}",
        )


def choose_command(lab: Lab, options: RunOptions) -> RunOptions:
    """Return the options with the command of the trial that --from-trial names."""
    match = _TRIAL.fullmatch(options.from_trial)
    if match is None:
        return options
    name, number = match.groups()
    study = sweep.read_study(lab.context, name or sweep.find_newest_study(lab.context))
    trial = study.get_trial(int(number))
    if len(trial.params) < len(study.plan.space):
        raise NotFoundError(
            f"trial {number} has no parameters yet",
            why="labctl was interrupted before it had chosen all of them",
            hint=f"labctl sweep --study {study.name}   # continues",
        )
    return options._replace(command=plan.build_command(study.plan.command, trial.params))
