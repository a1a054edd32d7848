"""What the keeper's requests need of a seat's server and money."""

from __future__ import annotations

from typing import Protocol

from labctl.courses.records.folder import Seat
from labctl.courses.seat_claims import ServerActions
from labctl.courses.seat_operations import SeatMoney
from labctl.model import Offer, Server
from labctl.wire.keeper import SeatEndRecord


class SeatActions(ServerActions, Protocol):
    """`ServerActions` with what requests need besides: limits, offers and money."""

    def check(self, seat: Seat) -> None:
        """Raise PolicyError if the seat must not get a server now."""

    def offers(self, seat: Seat) -> list[Offer]:
        """Return the offers for this seat, the best first."""

    def money(self, seat: Seat) -> SeatMoney:
        """Return what the seat may spend and has spent."""

    def extend(self, seat: Seat, server: Server, span_s: int, by: str) -> None:
        """Give the server more time; PolicyError beyond a limit."""

    def explain_stop(self, seat: Seat) -> SeatEndRecord | None:
        """Return why the seat's server is stopped; None if it is not."""
