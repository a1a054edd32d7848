"""Injected faults, before a call is applied and after it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from fnmatch import fnmatchcase

from labctl.model import Value
from labctl.rehearsal.calls import Call, HttpReply, build_refusal
from labctl.rehearsal.scenario import Loss, Scenario, Throttle

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
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, Value]] = Counter()
        self._buckets: dict[Throttle, tuple[float, float]] = {}

    def intercept(self, call: Call, scenario: Scenario) -> HttpReply | None:
        """Return the response to send instead of applying the call, if any."""
        if (loss := self._take_loss("dropped", call, scenario.dropped)) is not None:
            return HttpReply(status=0, hold_s=loss.hold)
        if scenario.expired:
            default = ("ExpiredTokenException", EXPIRED["sts"][1])
            return build_refusal(call, *EXPIRED.get(call.service, default), status=400)
        if any(is_match(pattern, call) for pattern in scenario.denied):
            return _build_denial(call)
        if self._is_throttled(call, scenario):
            code, status = THROTTLED.get(call.service, ("ThrottlingException", 400))
            return build_refusal(call, code, "Request limit exceeded.", status)
        return None

    def lose_reply(self, call: Call, scenario: Scenario, reply: HttpReply) -> HttpReply:
        """Return the response to a call that was applied, or its loss."""
        loss = self._take_loss("lost", call, scenario.lost)
        return reply if loss is None else HttpReply(status=0, hold_s=loss.hold)

    def _take_loss(self, kind: str, call: Call, losses: tuple[Loss, ...]) -> Loss | None:
        with self._lock:
            for loss in losses:
                if not is_match(loss.action, call):
                    continue
                self._seen[kind, loss] += 1
                if loss.skip < self._seen[kind, loss] <= loss.skip + loss.count:
                    return loss
        return None

    def _is_throttled(self, call: Call, scenario: Scenario) -> bool:
        with self._lock:
            for throttle in scenario.throttle:
                if not is_match(throttle.action, call):
                    continue
                now = time.monotonic()
                tokens, since = self._buckets.get(throttle, (float(throttle.burst), now))
                tokens = min(float(throttle.burst), tokens + (now - since) * throttle.rate)
                self._buckets[throttle] = (tokens - 1 if tokens >= 1 else tokens, now)
                if tokens < 1:
                    return True
        return False

    def reset(self) -> None:
        """Reset the counts, for example after a change of the scenario."""
        with self._lock:
            self._seen.clear()
            self._buckets.clear()


def is_match(pattern: str, call: Call) -> bool:
    """Return whether `RunInstances`, `Describe*` or `ec2:RunInstances` matches this call."""
    return fnmatchcase(call.name if ":" in pattern else call.action, pattern)


def _build_denial(call: Call) -> HttpReply:
    code, status = DENIED.get(call.service, ("AccessDeniedException", 400))
    words = f"User: arn:aws:iam::rehearsal:user/student is not authorized to perform: {call.name}"
    if call.service == "ec2":
        words = f"You are not authorized to perform this operation. {words}"
    return build_refusal(call, code, words, status)
