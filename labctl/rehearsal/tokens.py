"""ClientToken: the same request gives the same instances for a day after they have ended."""

from __future__ import annotations

import hashlib
import threading

from labctl.rehearsal.calls import Call, Reply, refusal

VOLATILE = ("ClientToken", "AWSAccessKeyId", "Signature", "Timestamp")


class Tokens:
    """What each token was used for: the parameters' hash, and the instances that came of it."""

    def __init__(self) -> None:
        # Held over a whole RunInstances: two with one token make one.
        self.lock = threading.Lock()
        self._used: dict[tuple[str, str], tuple[str, list[str]]] = {}

    def replayed(self, call: Call) -> list[str] | Reply | None:
        """The instances of an earlier call with this token; a refusal where it was another."""
        found = self._used.get((call.region, call.form.get("ClientToken", "")))
        if found is None:
            return None
        if found[0] != _hash(call):
            return refusal(
                call,
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in "
                "previous request(s).",
            )
        return found[1]

    def keep(self, call: Call, instance_ids: list[str]) -> None:
        if token := call.form.get("ClientToken"):
            self._used[call.region, token] = (_hash(call), instance_ids)


def _hash(call: Call) -> str:
    said = sorted((key, value) for key, value in call.form.items() if key not in VOLATILE)
    return hashlib.sha256(repr(said).encode()).hexdigest()
