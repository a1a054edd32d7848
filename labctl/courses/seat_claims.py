"""What is stored about a seat's server: the labs that hold it, and what is done for it."""

from __future__ import annotations

from typing import Protocol

from labctl.courses.records.folder import Seat
from labctl.model import Offer, Server, Value


class SeatClaim(Value, frozen=True):
    """A lab's hold on its seat's server. `leaving` means released: the server is to end."""

    token: str
    student: str
    lab: str
    lab_id: str
    public_key: str
    offer: Offer
    at: float
    leaving: bool = False


class EndFailure(Value, frozen=True):
    """Why a seat's server could not be saved and ended, at Unix time `at`."""

    what: str
    why: str
    at: float


class SeatState(Value, frozen=True):
    """What is stored about one seat: its claims, the tokens that can log in, its server.

    `ending_since` is the Unix time at which its server was to be saved and ended, 0 before, and
    `end_failure` why that failed the last time.
    """

    claims: tuple[SeatClaim, ...] = ()
    ready: tuple[str, ...] = ()
    server: Server | None = None
    ending_since: float = 0.0
    end_failure: EndFailure | None = None


class ServerActions(Protocol):
    """The work at the provider and on servers for one seat. Every method may raise LabError."""

    def create_server(self, seat: Seat) -> Server:
        """Return a ready server, the seat's own or a new one; this may take minutes."""

    def authorize_keys(self, seat: Seat, server: Server, claims: tuple[SeatClaim, ...]) -> Server:
        """Allow only these claims' keys to log in; return the server with the endpoint to use."""

    def check_server(self, seat: Seat, server: Server) -> Server | None:
        """Return the server as its provider shows it now, or None if it is gone."""

    def save_and_remove_server(self, seat: Seat, server: Server) -> None:
        """Save what is on the server, end it, and wait until its provider confirms that."""
