"""Open attempts: requests for servers whose replies were lost. Which of them may become servers?"""

from __future__ import annotations

import time
from contextlib import suppress

from labctl.errors import LockHeldError
from labctl.servers import accounts, adoption
from labctl.servers.context import LabContext
from labctl.state import Attempt


def list_pending_attempts(context: LabContext, *, every_lab: bool = False) -> list[Attempt]:
    """List the attempts that may still become servers here: recent ones without a reply.

    Recent by this machine's clock, since a request may be older than this boot. If the clock was
    set back, they look recent for too long, so a caller waits for at most `settle_s`. If it was set
    forward, they look old too soon. A server that the provider shows only later has a deadline, and
    the lab's tag, by which the next `up`, `status --refresh` and `orphans` find it.
    """
    horizon = time.time() - context.provider.settle_s
    attempts = context.state.list_open_attempts(None if every_lab else context.lab_id)
    return [
        attempt
        for attempt in attempts
        if attempt.provider == context.provider.name
        and (every_lab or attempt.request.moving == context.moving)
        and attempt.created_at >= horizon
        and not accounts.is_elsewhere(context, attempt.account)
    ]


def close_unseen_attempts(context: LabContext) -> None:
    """Close the lab's open attempts at its provider, which has shown no server of them in time.

    The caller holds the lab's lock, has found no server of the lab at the provider since, and
    knows that no attempt is pending.
    """
    for attempt in context.state.list_open_attempts(context.lab_id):
        if attempt.provider == context.provider.name and attempt.request.moving == context.moving:
            context.state.end_attempt(attempt.token, "never seen")


def settle_attempts(context: LabContext) -> None:
    """Close the lab's open attempts if its provider confirms that they led to no server.

    An `up` that is at work, or a server that may still appear, leaves them open.
    """
    name = context.provider.name
    opened = context.state.list_open_attempts(context.lab_id)
    if not any(attempt.provider == name for attempt in opened) or list_pending_attempts(context):
        return
    with suppress(LockHeldError), context.state.lock(context.lab_id, "status", wait_s=0.0):
        # Query the provider again: the last `up` may have ended after the query of the caller.
        if adoption.adopt(context) is None and not list_pending_attempts(context):
            close_unseen_attempts(context)
