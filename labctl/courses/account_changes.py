"""What became of requested changes of accounts, for all threads that wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from labctl.courses.seat_accounts import SeatAccounts, SharedServerAccount
from labctl.errors import PolicyError


@dataclass(frozen=True)
class AccountChanges:
    """What was not done: the machines that cannot be used now, and the accounts that failed."""

    unusable: tuple[str, ...] = ()
    errors: dict[str, PolicyError] = field(default_factory=dict)


class AccountOutcomes:
    """The accounts that were tried and remain to be done: when, and why not."""

    def __init__(self, seating: SeatAccounts) -> None:
        self._seating = seating
        self._tried: dict[str, float] = {}
        self._refusals: dict[str, PolicyError] = {}

    def list_due(
        self, accounts: Iterable[SharedServerAccount], state: str, since: float
    ) -> list[SharedServerAccount]:
        """List the accounts in this state that no other thread has tried since then."""
        return [
            account
            for account in accounts
            if account.state == state and self._tried.get(account.token, 0.0) < since
        ]

    def record(
        self,
        coming: Sequence[SharedServerAccount],
        leaving: Sequence[SharedServerAccount],
        changes: AccountChanges,
    ) -> None:
        """Store the new states. An account that failed, or did not end everywhere, keeps its own.

        No error hides that of another account: each is for the thread that waits for it.
        """
        for accounts, state in ((coming, "there"), (leaving, "gone")):
            done = []
            for account in accounts:
                error = changes.errors.get(account.account)
                if error or (changes.unusable and state == "gone"):
                    self._tried[account.token] = time.monotonic()
                else:
                    self._tried.pop(account.token, None)
                    done.append(account.token)
                if error:
                    self._refusals[account.token] = error
                else:
                    self._refusals.pop(account.token, None)
            self._seating.set_state(done, state)

    def get_refusal(self, account: SharedServerAccount) -> PolicyError | None:
        """Return why the last try could not create or end this account."""
        return self._refusals.get(account.token)
