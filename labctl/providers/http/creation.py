"""Create a machine exactly once at a cloud whose creation is not idempotent.

Each machine carries its attempt's token. A call first lists the machines with this token, and
creates one only if the list is empty; afterwards it lists them again, keeps the oldest and ends the
others. After a lost reply, the same process creates none for `settle_s`, in which the cloud may not
list the machine yet. Another process waits for the list before it calls: `CreatesByList`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from labctl.errors import BusyError, ConnectError, LabError
from labctl.providers.http.description import CloudDescription

Machine = TypeVar("Machine")
# Two calls with one token in one process do not create at the same time.
_CREATING = threading.Lock()
# When the reply to the creation for a token was lost, by the monotonic clock.
_lost_at: dict[str, float] = {}


class AttemptMachines(ABC, Generic[Machine]):
    """The machines that a cloud created for the attempts of labctl."""

    cloud: ClassVar[CloudDescription]
    # What the cloud calls a machine, for error messages.
    noun: ClassVar[str] = "instance"

    @abstractmethod
    def list_attempts(self, token: str) -> list[Machine]:
        """List the live machines that were created for a token."""

    @abstractmethod
    def get_id(self, machine: Machine) -> str: ...

    @abstractmethod
    def get_age_key(self, machine: Machine) -> Any:
        """Return what sorts the machines of one attempt, the oldest first."""

    @abstractmethod
    def end(self, machine: Machine) -> None: ...

    def create_once(
        self, token: str, settle_s: float, prepare: Callable[[], Callable[[], Machine]]
    ) -> Machine:
        """Return the machine of an attempt, after creating it unless it exists.

        `prepare` does whatever may be repeated, and returns the one call that may not. BusyError if
        the reply to that call was lost, or if the list after it fails.
        """
        with _CREATING:
            attempts = self.list_attempts(token)
            if attempts:
                return self._keep_oldest(attempts)
            lost_at = _lost_at.get(token)
            if lost_at is not None and time.monotonic() < lost_at + settle_s:
                raise self._make_unknown_error("its reply was lost a moment ago")
            created = self._send(token, prepare())
            try:
                listed = {self.get_id(one): one for one in self.list_attempts(token)}
                return self._keep_oldest(list({self.get_id(created): created, **listed}.values()))
            except LabError as error:
                # Raised as it is, a refusal of this call would say that nothing was created.
                _lost_at[token] = time.monotonic()
                raise self._make_unknown_error(error.what) from error

    def _send(self, token: str, create: Callable[[], Machine]) -> Machine:
        try:
            return create()
        except (ConnectError, BusyError) as error:
            _lost_at[token] = time.monotonic()
            raise self._make_unknown_error(error.why) from error

    def _keep_oldest(self, attempts: list[Machine]) -> Machine:
        oldest, *younger = sorted(attempts, key=self.get_age_key)
        for machine in younger:
            self.end(machine)
        return oldest

    def _make_unknown_error(self, why: str) -> BusyError:
        return BusyError(
            f"{self.cloud.name} has not said whether it created the {self.noun}",
            why=why,
            hint=f"run the same command again: it finds the {self.noun}, or creates one",
        )
