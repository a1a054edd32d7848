"""What a student can submit whose run's results were lost with its server."""

from __future__ import annotations

from labctl.errors import NotFoundError
from labctl.model import Run
from labctl.servers.context import LabContext
from labctl.state.disks import list_kept_disks
from labctl.state.ledgers import HANDED
from labctl.state.server_ends import find_end_reason


def explain_missing_results(context: LabContext, run: Run, other: str) -> NotFoundError:
    """Return the error for a run without results on this machine; `other` is one that has them."""
    what = f"the results of run {run.id} are not on this machine"
    if (why := describe_loss(context, run)) is None:
        return NotFoundError(what, hint=f"labctl pull {run.id}")
    return NotFoundError(what, why=why, hint=suggest_other_run(context, other))


def describe_loss(context: LabContext, run: Run) -> str | None:
    """Say that the results ended with their server; None if a pull may bring them."""
    reason = find_end_reason(context.state, run.server_id)
    is_lost = reason is not None or run.state == "lost"
    has_handed = context.state.list_events(lab_id=context.lab_id, kind=HANDED, limit=1)
    may_have_copy = context.config.store or list_kept_disks(context.state, context.lab_id)
    if not is_lost or may_have_copy or has_handed:
        return None
    lost = "they were on the server that ended, and no copy was saved"
    return "\n".join(filter(None, [lost, reason]))


def suggest_other_run(context: LabContext, other: str) -> str:
    """Return the command that submits another run, or those that make one."""
    if other:
        return f"labctl submit {other}   # the latest run whose results are on this machine"
    run = "labctl run --up" if context.config.run else "labctl run --up -- COMMAND"
    return f"{run}\nlabctl pull && labctl submit"
