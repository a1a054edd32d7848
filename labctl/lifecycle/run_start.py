"""Start a run on the lab's server or servers, exactly once for each id, or continue one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.lifecycle import gang
from labctl.model import Run, Server
from labctl.servers.context import LabContext
from labctl.wire.runs import RunSpec

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
        restore,
        run_server,
        spending_policy,
    )
    from labctl.runs import command_mistakes, first_run, run_specs, runs
    from labctl.servers import adoption
    from labctl.sync import lab_files, transfer_lock


class RunRequest(NamedTuple):
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


def check_run(context: LabContext, request: RunRequest) -> None:
    """Raise the errors of `start_run` that this machine can find, before a server costs money."""
    run_id = request.id
    recorded = context.state.get_run(context.lab_id, run_id) if run_id else None
    if recorded is not None and request.recover and recover.is_unfinished(context, run_id):
        _require_same_command(recorded, request.command)
    elif recorded is not None:
        run_server.require_not_ended(context, recorded)
    if gang.has_several_servers(context):
        gang_keeper.require_one_watcher(
            context, run_id, recover=request.recover, keeper=request.keeper
        )
    run_server.check_inputs(context, request.command, run_id, request.keeper)


def start_run(context: LabContext, request: RunRequest, listener: RunListener) -> Run:
    """Push and start the run, or find or continue the one with its id; follow it if asked."""
    if gang.has_several_servers(context):
        gang_runs.require_supported(context, tty=request.tty, gpus=request.gpus)
        return _start_on_several(context, request, listener)
    if request.keeper:
        gang_keeper.require_enough_servers(context, request.id)
    is_watched = request.recover and (request.follow or request.keeper)
    if is_watched and request.id and recover.is_unfinished(context, request.id):
        return _continue_run(context, request, listener)
    return _start_on_one(context, request, listener)


def _continue_run(context: LabContext, request: RunRequest, listener: RunListener) -> Run:
    """Follow an unfinished run; this machine has no record of it if another one started it."""
    recorded = context.state.get_run(context.lab_id, request.id)
    if recorded is not None:
        _require_same_command(recorded, request.command)
        listener.on_start(recorded, True)
    _hand_over(context, request.keeper, request.id)
    if request.follow:
        return follow.follow(context, request.id, on_log=listener.on_log)
    return runs.find_run(context, request.id)


def _start_on_one(context: LabContext, request: RunRequest, listener: RunListener) -> Run:
    run_id = request.id or run_specs.make_run_id()
    if request.recover and request.id:
        runs.require_known_without_server(context, request.id)
    # A mistake in the command is reported before a missing server.
    run_specs.require_valid(context, request.command, run_id)
    server = context.get_server()
    if request.keeper:
        export_lab.check_export(context, keeper_host.KeeperHost(context, request.keeper))
    adoption.renew(context, server)
    spec = run_specs.build_spec(context, server, request.command, run_id, request.tty, request.gpus)
    _warn_of_command(context, request, listener)
    if request.push:
        _push_for_run(context, server, spec)
    if request.recover:
        restore.keep_code(context, spec)
    run = runs.start(
        context,
        server,
        spec,
        follow=request.follow and not request.recover,
        held=request.held,
        on_start=listener.on_start,
        on_log=listener.on_log,
    )
    if request.recover:
        spending_policy.record_price_limit(context, server, run.id)
    _hand_over(context, request.keeper, run.id)
    if request.recover and request.follow:
        return follow.follow(context, run.id, on_log=listener.on_log)
    return run


def _start_on_several(context: LabContext, request: RunRequest, listener: RunListener) -> Run:
    run_specs.require_valid(context, request.command, request.id or "new")
    gang_keeper.require_one_watcher(
        context, request.id, recover=request.recover, keeper=request.keeper
    )
    if request.keeper:
        export_lab.check_export(context, keeper_host.KeeperHost(context, request.keeper))
    run = _start_or_restart_parts(context, request, listener)
    if request.recover:
        spending_policy.record_price_limit(context, context.get_server(), run.id)
    if request.keeper:
        with gang_runs.hold_watch(context, f"run --keeper {request.keeper}"):
            _hand_over(context, request.keeper, run.id)
    if request.follow:
        return gang_follow.follow(context, run.id, recovers=request.recover, on_log=listener.on_log)
    return run


def _start_or_restart_parts(context: LabContext, request: RunRequest, listener: RunListener) -> Run:
    """Start the run's part on each server; restart them if the run began and did not go on."""
    recovers = request.recover
    recorded = context.state.get_run(context.lab_id, request.id) if request.id else None
    if recorded is None or not gang_runs.needs_restart(context, recorded, recover=recovers):
        _warn_of_command(context, request, listener)
        run_id = request.id or run_specs.make_run_id()
        return gang_runs.start(
            context, request.command, run_id, push=request.push, on_start=listener.on_start
        )
    _require_same_command(recorded, request.command)
    gang_keeper.require_not_kept(context, request.id)
    listener.on_start(recorded, True)
    reason = "restarted by its user" if recovers else "its start was interrupted"
    return gang_restart.restart(context, request.id, reason, recovers=recovers).run


def _push_for_run(context: LabContext, server: Server, spec: RunSpec) -> None:
    """Push code and data; before the first run of an image, side by side with the image."""
    with transfer_lock.name_command("run"):
        if first_run.has_run_on_server(context, server, spec.image):
            lab_files.push(context, server, force=False)
        else:
            first_run.push_with_image(context, server, spec.image)


def _hand_over(context: LabContext, keeper: str, run_id: str) -> None:
    if keeper:
        host = keeper_host.KeeperHost(context, keeper)
        export_lab.export_lab(context, host, context.get_server(), run_id)


def _warn_of_command(context: LabContext, request: RunRequest, listener: RunListener) -> None:
    mistakes = command_mistakes.list_mistakes(context.config, request.command, push=request.push)
    for text in mistakes:
        listener.on_warning(text)


def _require_same_command(run: Run, command: tuple[str, ...]) -> None:
    """UsageError if `command` is given and is not that of the unfinished `run`."""
    if command and command != run.command:
        raise UsageError(
            f"run {run.id} has not finished, and its command is different",
            why=f"its command is: {shlex.join(run.command)}",
            hint=f"labctl run --recover --id {run.id}   # continues it; or choose another --id",
        )
