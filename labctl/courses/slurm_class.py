"""A class whose engine is Slurm: its accounts' associations and limits, and the use of GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from labctl.commands import slurm_accounting
from labctl.commands.slurm_accounting import ClassAccounting, ClassLimits
from labctl.config import CourseConfig
from labctl.errors import BusyError, LabError
from labctl.model import Server
from labctl.servers.context import LabContext

# Seconds for all changes: those of a class of hundreds, and jobs that end first.
APPLY_S = 300.0
QUERY_S = 60.0


def build_limits(config: CourseConfig) -> ClassLimits:
    """Return the limits that course.yaml gives each account."""
    shared = config.shared
    assert shared is not None, "used only for courses with shared servers"
    return ClassLimits(gpus=shared.gpus, gpu_minutes=shared.gpu_minutes, wall_s=shared.wall)


def read_accounting(context: LabContext, server: Server, course: str) -> ClassAccounting:
    """Return what Slurm on the server has of the class. LabError if it does not answer."""
    account = slurm_accounting.class_account(course)
    output = _run(context, server, slurm_accounting.build_query(account), QUERY_S)
    return slurm_accounting.parse_accounting(output)


def update_accounting(
    context: LabContext, server: Server, config: CourseConfig, names: Sequence[str]
) -> int:
    """Give these accounts their associations and limits, and take them from all others.

    Returns the number of changes; a second call makes none. LabError if Slurm refuses one.
    """
    account, limits = slurm_accounting.class_account(config.name), build_limits(config)
    present = read_accounting(context, server, config.name)
    changes = slurm_accounting.build_changes(account, limits, names, present)
    if changes:
        _run(context, server, " && ".join(changes), APPLY_S)
        present = read_accounting(context, server, config.name)
        if slurm_accounting.build_changes(account, limits, names, present):
            raise LabError(
                f"Slurm on {server.alias} did not take over the limits of {config.name}",
                why="its accounting differs from course.yaml after the change",
                hint=f"sacctmgr show assoc account={account}   # on {server.endpoint.host}",
            )
    return len(changes)


def cancel_jobs(context: LabContext, server: Server, course: str, names: Sequence[str]) -> None:
    """Cancel the jobs of accounts that end. What they have used stays counted."""
    account = slurm_accounting.class_account(course)
    script = "; ".join(slurm_accounting.build_cancel(account, name) for name in names)
    _run(context, server, script, APPLY_S)


def _run(context: LabContext, server: Server, script: str, timeout_s: float) -> str:
    """Run a script on the server as root, and return what it prints."""
    sudo = "" if server.endpoint.user == "root" else "sudo -n "
    transport = context.connections.open(server)
    line = f"{sudo}sh -c {shlex.quote(script)}"
    result = transport.run(line, timeout_s=timeout_s, check=False)
    if result.code:
        raise BusyError(
            f"Slurm on {server.alias} does not do what {context.name} needs",
            why=result.stderr.strip()[-1000:] or result.stdout.strip()[-1000:],
            hint=f"systemctl status slurmctld slurmdbd   # on {server.endpoint.host}",
        )
    output: str = result.stdout
    return output
