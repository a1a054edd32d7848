"""ClientToken: a repeated request returns the same instances, until a day after their end."""

from __future__ import annotations

import hashlib
import threading

from labctl.rehearsal.aws.calls import Call, build_refusal
from labctl.rehearsal.core.replies import HttpReply

VOLATILE = ("ClientToken", "AWSAccessKeyId", "Signature", "Timestamp")


class Tokens:
    """The used tokens: each with its parameters' hash and the resulting instances."""

    def __init__(self) -> None:
        # Held during a whole RunInstances, so that two calls with one token have one effect.
        self.lock = threading.Lock()
        self._used: dict[tuple[str, str], tuple[str, list[str]]] = {}

    def replay(self, call: Call) -> list[str] | HttpReply | None:
        """Return the instances of an earlier call with this token, or a refusal if it differs."""
        earlier = self._used.get((call.region, call.form.get("ClientToken", "")))
        if earlier is None:
            return None
        if earlier[0] != _hash(call):
            return build_refusal(
                call,
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in "
                "previous request(s).",
            )
        return earlier[1]

    def remember(self, call: Call, instance_ids: list[str]) -> None:
        if token := call.form.get("ClientToken"):
            self._used[call.region, token] = (_hash(call), instance_ids)


def _hash(call: Call) -> str:
    parameters = sorted((key, value) for key, value in call.form.items() if key not in VOLATILE)
    return hashlib.sha256(repr(parameters).encode()).hexdigest()
