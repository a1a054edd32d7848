"""Stop a lab's server and keep its disk, and start it again."""

from __future__ import annotations

import time
from contextlib import suppress

from labctl.errors import (
    BudgetError,
    EngineError,
    HostKeyError,
    LabError,
    NotFoundError,
    PolicyError,
)
from labctl.events import Note, Question, report_wait
from labctl.lifecycle import gang_runs, reconcile, up
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.model import Run, Server, Value
from labctl.runs import runs
from labctl.servers import adoption, affordable_offers, power
from labctl.servers.context import LabContext
from labctl.servers.cost import spent_usd
from labctl.servers.open_costs import explain_open_costs
from labctl.services import lab_services
from labctl.state.disks import StoppedDisk, find_stopped_disk
from labctl.state.uses import is_used
from labctl.text import dollars_text, names_text, price_or_free_text, price_text

GRACE_S = 60
# how long a timer at the provider lets a stopped server be
KEPT_S = 30 * 86_400
WAIT_S = 10.0


class StopResult(Value, frozen=True):
    """A stopped server, and its disk. `canceled` are the runs that this ended.

    `with_checkpoints` are those of them that left checkpoints, the newest first.
    `closed_forwards` are the services whose background forwards this closed. `was_stopped`: it was
    stopped before, and nothing was done.
    """

    server: Server
    disk: StoppedDisk | None
    canceled: tuple[str, ...] = ()
    with_checkpoints: tuple[str, ...] = ()
    closed_forwards: tuple[str, ...] = ()
    was_stopped: bool = False


def stop(context: LabContext) -> StopResult:
    """Cancel the server's runs, stop it, and keep its disk with everything on it.

    PolicyError if the user declines, if the server cannot be stopped, or if a keeper has the lab:
    it would replace the server. NotFoundError if the lab has no server. UsageError if the lab has
    several servers.
    """
    gang_runs.require_one_server(context, "stop", "labctl down")
    with context.state.lock(context.lab_id, "stop", wait_s=WAIT_S), explain_open_costs(context):
        reconcile.merge_keeper_records(context)
        server = _find_server(context)
        if server.state == "stopped":
            disk = find_stopped_disk(context.state, server)
            return StopResult(server=server, disk=disk, was_stopped=True)
        power.require_stoppable(context, server)
        _require_no_keeper(context)
        price = power.sum_disk_price_usd(context, server)
        active = _list_active(context, server)
        _ask_for_consent(context, server, active, price)
        forwards = lab_services.stop_forwards(context, server)
        canceled = () if active is None else _end_work(context, server, active)
        context.connections.close(server)
        until = time.time() + KEPT_S
        with report_wait(context.reporter, f"stopping {server.alias}"):
            power.stop_server(
                context, server, keep_until=until, usd_per_month=price, forwards=forwards
            )
        server = context.state.get_server(server.id) or server
        disk = find_stopped_disk(context.state, server)
        return StopResult(
            server=server,
            disk=disk,
            canceled=tuple(run.id for run in canceled),
            with_checkpoints=tuple(run.id for run in reversed(canceled) if run.has_checkpoints),
            closed_forwards=forwards,
        )


def start(context: LabContext) -> Server:
    """Start the lab's stopped server and wait until it is ready; one that runs is made ready.

    NotFoundError if the lab has no server: this never creates one. BudgetError if the budget is
    spent. PolicyError if the user declines the price. UsageError if the lab has several servers.
    """
    gang_runs.require_one_server(context, "start", "labctl up")
    with context.state.lock(context.lab_id, "start"), explain_open_costs(context, LabError):
        server = _find_server(context)
        if server.state == "stopped":
            _require_budget(context)
            _confirm_price(context, server)
        return up.use_server(context, server)


def _find_server(context: LabContext) -> Server:
    server = adoption.adopt(context)
    if server is None:
        raise NotFoundError(
            f"{context.name} has no server",
            why="only a server that exists can be stopped or started again",
            hint=f"{context.subject.up}   # gets one",
        )
    return server


def _require_no_keeper(context: LabContext) -> None:
    if keeper := find_keeper(context):
        raise PolicyError(
            f"the server of {context.name} was not stopped",
            why=f"the keeper at {keeper} looks after the lab, and would replace a stopped server",
            hint=f"{context.subject.down}   # downloads the results, and ends the keeper's watch",
        )


def _list_active(context: LabContext, server: Server) -> list[str] | None:
    """List the active runs; None if the server does not answer, so that nobody knows."""
    try:
        with report_wait(context.reporter, f"reading the runs on {server.alias}"):
            runs.refresh(context, server)
    except HostKeyError:
        raise
    except LabError:
        return None
    every = context.state.list_runs(context.lab_id)
    active = ("starting", "running")
    return [run.id for run in every if run.server_id == server.id and run.state in active]


def _ask_for_consent(
    context: LabContext, server: Server, active: list[str] | None, usd_per_month: float
) -> None:
    if active is None:
        lost = f"{server.alias} does not answer: active runs would end without a last checkpoint. "
    elif active:
        verb = "is" if len(active) == 1 else "are"
        lost = f"{names_text(active, 5)} {verb} still running and would be canceled; "
    else:
        lost = ""
    if is_used(context.state, context.lab_id, "run") and not active:
        lost += "Another `labctl run` of this lab is using the server. "
    question = f"{lost}stop the server {server.alias} ({server.provider})?"
    detail = "Its disk is kept, with all runs, data and images.\n"
    detail += _describe_price(server, usd_per_month)
    if not context.reporter.confirm(Question(question=question, detail=detail)):
        raise PolicyError(
            "nothing was stopped",
            why=f"{server.alias} is still running "
            f"({price_or_free_text(server.offer.price_usd_per_hour)})",
            hint="labctl status   # shows what runs there",
        )


def _describe_price(server: Server, usd_per_month: float) -> str:
    if usd_per_month:
        return f"While it is stopped it costs {dollars_text(usd_per_month)} a month, for its disk."
    if server.offer.price_usd_per_hour:
        return f"{server.provider} shows no price for its disk, and may charge for it."
    return "The server is free, running or stopped."


def _end_work(context: LabContext, server: Server, active: list[str]) -> tuple[Run, ...]:
    """Cancel these runs and stop the services, so that nothing is cut off halfway."""
    canceled = []
    for run_id in active:
        run, _ = runs.cancel(context, server, run_id, GRACE_S)
        context.reporter.emit(Note(text=f"{run.id}: {run.summary}"))
        canceled.append(run)
    with suppress(EngineError), report_wait(context.reporter, "stopping the services"):
        lab_services.stop_services(context, server)
    return tuple(canceled)


def _require_budget(context: LabContext) -> None:
    need = context.config.server.need
    left = affordable_offers.budget_left_usd(context, need)
    if left is not None and left <= 0:
        spent = spent_usd(context.state, context.lab_id, time.time())
        raise BudgetError(
            f"the budget of {context.name} is used up",
            why=f"{dollars_text(spent)} of {dollars_text(need.budget_usd or 0.0)} are spent",
            hint=context.subject.raise_budget,
        )


def _confirm_price(context: LabContext, server: Server) -> None:
    price = server.offer.price_usd_per_hour
    if not price:
        return
    question = Question(
        question=f"start {server.alias} again for {price_text(price)}?", about="price"
    )
    if not context.reporter.confirm(question):
        raise PolicyError(
            "nothing was started",
            why="the price was not confirmed",
            hint="labctl status   # shows what the stopped server costs",
        )
