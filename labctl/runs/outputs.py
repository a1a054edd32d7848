"""Pull outputs of runs from their server: once, or repeatedly while a run is active."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

import msgspec

from labctl.errors import BusyError, LabError, NotFoundError
from labctl.events import Note, report_wait
from labctl.model import Server
from labctl.retry import ReconnectPolicy
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.sync import pull as transfer
from labctl.sync.local_results import MissingFile
from labctl.sync.pull import PulledRun
from labctl.sync.transfer_lock import WAIT_S

CODE = "code"
# An output that YAML reads as a text without quotes.
PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
MOST_ADDED = 5
EVERY_S = 15.0
LONGEST_PAUSE_S = 60.0
# Seconds to wait for a lost run: `run --recover` or a keeper may resume it on another server.
RECOVERED_WITHIN_S = 600.0


def pull(
    context: LabContext,
    server: Server,
    run_ids: list[str],
    *,
    everything: bool = False,
    only: Sequence[str] = (),
    wait_s: float = WAIT_S,
    hint: str = "",
) -> list[PulledRun]:
    """Pull the outputs of these runs (all, if empty) to `<lab>/runs/` and verify them.

    With `only`, pull only these directories of the runs. BusyError if another transfer of the lab
    lasts longer than `wait_s` seconds. `hint` is the command that continues the pull, if it is not
    `labctl pull` itself.
    """
    remote = context.open_agent(server)
    with report_wait(context.reporter, f"reading the runs on {server.alias}"):
        runs.refresh(context, server, remote)
    result = transfer.pull(
        remote,
        context.config.name,
        context.lab_id,
        run_ids,
        context.config.root,
        reporter=context.reporter,
        everything=everything,
        only=only,
        records=context.state.list_runs(context.lab_id),
        wait_s=wait_s,
        hint=hint,
    )
    return list(result.runs)


def add_left_files(context: LabContext, server: Server, pulled: PulledRun) -> PulledRun:
    """Add the files that an ended run wrote outside its outputs and that are not here."""
    run = context.state.get_run(context.lab_id, pulled.run)
    if run is None or not run.new_files:
        return pulled
    source = (context.open_agent(server), context.config.name, context.lab_id)
    left = transfer.list_left_files(*source, run.id, context.config.root)
    return msgspec.structs.replace(pulled, left=left)


def extend_outputs(outputs: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """Return `outputs` with what would include these files of a run.

    That is the file itself, or its directory below the run's directory or its code. Names that
    need quotes in lab.yaml are left out.
    """
    added: list[str] = []
    for name in files:
        parts = name.split("/")
        output = "/".join(parts[: 2 if parts[0] == CODE else 1])
        if PLAIN_NAME.fullmatch(output) and output not in (*outputs, *added):
            added.append(output)
    return (*outputs, *added[:MOST_ADDED])


def list_missing(context: LabContext, server: Server) -> tuple[MissingFile, ...]:
    """List the files of runs that are on the server but not on this machine's disk."""
    source = (context.open_agent(server), context.config.name, context.lab_id)
    with report_wait(context.reporter, "checking that all results are on this machine"):
        return transfer.verify(*source, [], context.config.root, everything=True)


def list_new_checkpoints(context: LabContext, server: Server, run_id: str) -> tuple[str, ...]:
    """List the whole checkpoints of a run that the server has and this machine has not."""
    source = (context.open_agent(server), context.config.name, context.lab_id)
    return transfer.list_new_checkpoints(*source, run_id, context.config.root)


def follow_outputs(
    context: LabContext,
    run_id: str,
    *,
    every_s: float = EVERY_S,
    on_round: Callable[[PulledRun], None] = lambda pulled: None,
) -> PulledRun:
    """Pull the run every `every_s` seconds until it has ended and all its outputs are here.

    Retries if the server does not answer, and switches to a replacement once it is on record.
    NotFoundError if the lab has no server at the start, or for RECOVERED_WITHIN_S seconds.
    """
    last_active_s, may_recover = -math.inf, False

    def pull_round() -> PulledRun:
        nonlocal may_recover
        may_recover = time.monotonic() - last_active_s < RECOVERED_WITHIN_S
        return _pull_run(context, run_id)

    def handle_failure(error: LabError, pause_s: float) -> None:
        if isinstance(error, NotFoundError) and not may_recover:
            raise error
        context.reporter.emit(Note(text=f"{error.what}; trying again", level="warning"))

    policy = ReconnectPolicy(
        (BusyError, NotFoundError),
        on_cut=handle_failure,
        pause_s=2 * every_s,
        longest_pause_s=LONGEST_PAUSE_S,
    )
    while True:
        pulled = policy(pull_round)
        on_round(pulled)
        run = runs.find_run(context, run_id)
        may_resume = may_recover and run.state == "lost" and not run.stopped_by
        if not may_resume and (pulled.complete or run.has_ended):
            return pulled
        if not run.has_ended:
            last_active_s = time.monotonic()
        time.sleep(every_s)


def _pull_run(context: LabContext, run_id: str) -> PulledRun:
    """Pull a run from the server that the lab has now."""
    server = context.get_server()
    (pulled,) = pull(context, server, [run_id], hint=f"labctl pull --follow {run_id}")
    return add_left_files(context, server, pulled)
