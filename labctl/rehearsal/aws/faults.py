"""Injected faults, before a call is applied and after it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from labctl.rehearsal.aws.calls import Call, build_refusal
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.faults import FaultCounts
from labctl.rehearsal.core.replies import HttpReply

THROTTLED = {"ec2": ("RequestLimitExceeded", 503)}
EXPIRED = {
    "ec2": ("RequestExpired", "Request has expired."),
    "sts": ("ExpiredToken", "The security token included in the request is expired"),
}
DENIED = {
    "ec2": ("UnauthorizedOperation", 403),
    "sts": ("AccessDenied", 403),
    "s3": ("AccessDenied", 403),
}


class Faults:
    """Injects faults, and counts losses and call rates. Safe to use from many threads."""

    def __init__(self) -> None:
        self._counts = FaultCounts()

    def intercept(self, call: Call, scenario: Scenario) -> HttpReply | None:
        """Return the response to send instead of applying the call, if any."""
        matches = partial(is_match, call)
        if (loss := self._counts.take("dropped", scenario.dropped, matches)) is not None:
            return HttpReply(status=0, hold_s=loss.hold)
        if scenario.expired:
            default = ("ExpiredTokenException", EXPIRED["sts"][1])
            return build_refusal(call, *EXPIRED.get(call.service, default), status=400)
        if any(is_match(call, pattern) for pattern in scenario.denied):
            return _build_denial(call)
        if self._counts.is_throttled(scenario.throttle, matches):
            code, status = THROTTLED.get(call.service, ("ThrottlingException", 400))
            return build_refusal(call, code, "Request limit exceeded.", status)
        return None

    def lose_reply(self, call: Call, scenario: Scenario, reply: HttpReply) -> HttpReply:
        """Return the response to a call that was applied, or its loss."""
        loss = self._counts.take("lost", scenario.lost, partial(is_match, call))
        return reply if loss is None else HttpReply(status=0, hold_s=loss.hold)

    def reset(self) -> None:
        """Reset the counts, for example after a change of the scenario."""
        self._counts.reset()


def is_match(call: Call, pattern: str) -> bool:
    """Return whether `RunInstances`, `Describe*` or `ec2:RunInstances` matches this call."""
    return fnmatchcase(call.name if ":" in pattern else call.action, pattern)


def _build_denial(call: Call) -> HttpReply:
    code, status = DENIED.get(call.service, ("AccessDeniedException", 400))
    words = f"User: arn:aws:iam::rehearsal:user/student is not authorized to perform: {call.name}"
    if call.service == "ec2":
        words = f"You are not authorized to perform this operation. {words}"
    return build_refusal(call, code, words, status)
