"""What becomes of a run on several servers when a part has failed: another attempt, or its end.

It follows from the records alone, so that a keeper and the machine of the run's user agree on it.
"""

from __future__ import annotations

import msgspec

from labctl.config.member_ids import make_member_id
from labctl.lifecycle import gang_runs
from labctl.lifecycle.gang_restart import Restart
from labctl.lifecycle.gang_watch import PartFailure
from labctl.model import Run
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.state.ledgers import CANCELED, KEPT

# Kind of the ledger's line about a run that was started again on all of its servers.
RESTARTED = "restarted"
# Kind of the line about one whose server was lost.
RECOVERED = "recovered"
# Kind of the line that a keeper writes before it starts the run again. The records of the parts do
# not tell that this was interrupted: those that it has ended look like those of a failed program.
RESTARTING = "restarting"


def can_restart(context: LabContext, run_id: str, failure: PartFailure, *, recovers: bool) -> bool:
    """Whether the run starts again after this failure; with `recovers`, on another server too."""
    if failure.is_lost:
        return recovers
    return failure.run is not None and has_restarts_left(context, failure.run)


def has_restarts_left(context: LabContext, run: Run) -> bool:
    """Whether the run has started again less often than `restarts` under `launch:` allows.

    Never for one with which labctl measures something.
    """
    if run.is_auxiliary:
        return False
    done = context.state.list_events(lab_id=context.lab_id, run_id=run.id, kind=RESTARTED)
    return len(done) < context.config.launch.restarts


def record_restart_begun(context: LabContext, run_id: str, failure: PartFailure) -> None:
    """Write to the ledger that the run is being started again, so that an interrupt is noticed."""
    detail = {"told": failure.reason, "lost": failure.is_lost}
    context.state.record(RESTARTING, lab_id=context.lab_id, run_id=run_id, detail=detail)


def find_unfinished_restart(context: LabContext, run_id: str) -> PartFailure | None:
    """Find the failure after which a keeper began to start the run again, and was interrupted.

    None also if a user has canceled the run, or has handed it over, since then.
    """
    begun = gang_runs.find_last_line(context, run_id, RESTARTING)
    if begun is None:
        return None
    for kind in (RESTARTED, RECOVERED, CANCELED, KEPT):
        line = gang_runs.find_last_line(context, run_id, kind)
        if line is not None and line.number > begun.number:
            return None
    return PartFailure(rank=0, reason=begun.detail["told"], is_lost=begun.detail["lost"])


def record_restart(
    context: LabContext, run_id: str, failure: PartFailure, restarted: Restart
) -> None:
    """Write the new attempt to the ledger."""
    context.state.record(
        RECOVERED if failure.is_lost else RESTARTED,
        lab_id=context.lab_id,
        server_id=restarted.run.server_id,
        run_id=run_id,
        detail={"told": failure.reason, "step": restarted.step},
    )


def save_failure(context: LabContext, run: Run, failure: PartFailure) -> Run:
    """Record that the run failed because one of its parts did; return it."""
    code = failure.run.exit_code if failure.run else None
    state = "lost" if failure.is_lost else "exited"
    result = msgspec.structs.replace(run, state=state, exit_code=code or 1, summary=failure.reason)
    context.state.save_run(result)
    return result


def is_over(context: LabContext, run_id: str) -> bool:
    """Whether a keeper has nothing left to do for the run, as the records of its parts say.

    It replaces lost servers: a lost part ends the run only if a limit stopped it. The part of the
    first server alone does not tell: it ends with every attempt.
    """
    if gang_runs.is_canceled(context, run_id):
        return True
    parts = _list_parts(context, run_id)
    known = [part for part in parts if part is not None]
    if any(part.state == "cancelled" or part.stopped_by for part in known):
        return True
    if len(known) < len(parts) or not all(part.state == "exited" for part in known):
        return False
    if all(part.exit_code == 0 for part in known):
        return True
    if find_unfinished_restart(context, run_id):
        return False
    return not has_restarts_left(context, known[0])


def save_outcome(context: LabContext, run_id: str) -> Run:
    """Record the first failure of a run that a keeper has ended as the run's own; return the run.

    The part of the first server only says that labctl ended it.
    """
    run = runs.find_run(context, run_id)
    known = [part for part in _list_parts(context, run_id) if part is not None]
    failed = [part for part in known if part.state == "exited" and part.exit_code]
    if not failed or any(part.state == "cancelled" or part.stopped_by for part in known):
        return run
    cause = min(failed, key=lambda part: part.ended_at or 0.0)
    summary = run.summary if run.exit_code else cause.summary
    result = msgspec.structs.replace(run, exit_code=cause.exit_code, summary=summary)
    context.state.save_run(result)
    return result


def _list_parts(context: LabContext, run_id: str) -> list[Run | None]:
    """List the parts of the run as recorded, by rank; None for one that is not on record."""
    ranks = range(gang_runs.count_parts(context, run_id))
    return [context.state.get_run(make_member_id(context.lab_id, rank), run_id) for rank in ranks]
