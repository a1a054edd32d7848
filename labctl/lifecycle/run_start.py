"""What `labctl run` does besides the start on one server: check, continue, start on several."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.lifecycle import gang
from labctl.model import Run
from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from labctl.lifecycle import (
        export_lab,
        follow,
        gang_follow,
        gang_keeper,
        gang_restart,
        gang_runs,
        keeper_host,
        recover,
        run_server,
        spending_policy,
    )
    from labctl.runs import command_mistakes, run_specs, runs


class RunChoice(NamedTuple):
    """What `labctl run` was asked for; `Lab.run` describes each value."""

    command: tuple[str, ...] = ()
    id: str = ""
    follow: bool = False
    tty: bool = False
    held: bool = False
    push: bool = True
    recover: bool = False
    keeper: str = ""
    gpus: int = 0


class RunListener(NamedTuple):
    """What hears of a run: its start (and whether it was found), its log, and warnings."""

    on_start: Callable[[Run, bool], None]
    on_log: Callable[[bytes], None]
    on_warning: Callable[[str], None]


def check_run(context: LabContext, choice: RunChoice) -> None:
    """Raise the errors of `Lab.run` that this machine can find, before a server costs money."""
    run_id = choice.id
    recorded = context.state.get_run(context.lab_id, run_id) if run_id else None
    if recorded is not None and choice.recover and recover.is_unfinished(context, run_id):
        _require_same_command(recorded, choice.command)
    elif recorded is not None:
        run_server.require_not_ended(context, recorded)
    if gang.has_several_servers(context):
        gang_keeper.require_one_watcher(
            context, run_id, recover=choice.recover, keeper=choice.keeper
        )
    run_server.check_inputs(context, choice.command, run_id, choice.keeper)


def is_continued(context: LabContext, choice: RunChoice) -> bool:
    """Whether the choice is to follow, or to hand over, a run that has not finished."""
    is_watched = choice.recover and (choice.follow or choice.keeper)
    return bool(is_watched and choice.id and recover.is_unfinished(context, choice.id))


def continue_run(context: LabContext, choice: RunChoice, listener: RunListener) -> Run:
    """Follow an unfinished run; this machine has no record of it if another one started it."""
    recorded = context.state.get_run(context.lab_id, choice.id)
    if recorded is not None:
        _require_same_command(recorded, choice.command)
        listener.on_start(recorded, True)
    hand_over(context, choice.keeper, choice.id)
    if choice.follow:
        return follow.follow(context, choice.id, on_log=listener.on_log)
    return runs.find_run(context, choice.id)


def start_on_several(context: LabContext, choice: RunChoice, listener: RunListener) -> Run:
    """Start the run on all servers of the lab, or restart it; follow it if asked."""
    gang_runs.require_supported(context, tty=choice.tty, gpus=choice.gpus)
    run_specs.require_valid(context, choice.command, choice.id or "new")
    gang_keeper.require_one_watcher(
        context, choice.id, recover=choice.recover, keeper=choice.keeper
    )
    if choice.keeper:
        export_lab.check_export(context, keeper_host.KeeperHost(context, choice.keeper))
    run = _start_or_restart_parts(context, choice, listener)
    if choice.recover:
        spending_policy.record_price_limit(context, context.get_server(), run.id)
    if choice.keeper:
        with gang_runs.hold_watch(context, f"run --keeper {choice.keeper}"):
            hand_over(context, choice.keeper, run.id)
    if choice.follow:
        return gang_follow.follow(context, run.id, recovers=choice.recover, on_log=listener.on_log)
    return run


def _start_or_restart_parts(context: LabContext, choice: RunChoice, listener: RunListener) -> Run:
    """Start the run's part on each server; restart them if the run began and did not go on."""
    recovers = choice.recover
    recorded = context.state.get_run(context.lab_id, choice.id) if choice.id else None
    if recorded is None or not gang_runs.needs_restart(context, recorded, recover=recovers):
        _warn_of_command(context, choice, listener)
        run_id = choice.id or run_specs.make_run_id()
        return gang_runs.start(
            context, choice.command, run_id, push=choice.push, on_start=listener.on_start
        )
    _require_same_command(recorded, choice.command)
    gang_keeper.require_not_kept(context, choice.id)
    listener.on_start(recorded, True)
    reason = "restarted by its user" if recovers else "its start was interrupted"
    return gang_restart.restart(context, choice.id, reason, recovers=recovers).run


def hand_over(context: LabContext, keeper: str, run_id: str) -> None:
    """Hand the lab and its run over to the keeper, if one is named."""
    if keeper:
        host = keeper_host.KeeperHost(context, keeper)
        export_lab.export_lab(context, host, context.get_server(), run_id)


def _warn_of_command(context: LabContext, choice: RunChoice, listener: RunListener) -> None:
    mistakes = command_mistakes.list_mistakes(context.config, choice.command, push=choice.push)
    for text in mistakes:
        listener.on_warning(text)


def _require_same_command(run: Run, command: tuple[str, ...]) -> None:
    """UsageError if `command` is given and is not that of the unfinished `run`."""
    if command and command != run.command:
        raise UsageError(
            f"run {run.id} has not finished, and its command is different",
            why=f"its command is: {shlex.join(run.command)}",
            hint=f"labctl run --recover --id {run.id}   # continues it\n"
            f"labctl run -- {shlex.join(command)}   # starts a new run with another id",
        )
