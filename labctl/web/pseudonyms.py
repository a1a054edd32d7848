"""Names of people on the pages: their own, or pseudonyms, for example on a projector."""

from __future__ import annotations

from labctl.model import Value
from labctl.web.view import PersonView, SeatView, Snapshot


class Pseudonyms(Value, frozen=True):
    """How people are named. With `hidden`, no page shows who somebody is."""

    hidden: bool = False

    def person(self, person: PersonView | None) -> str:
        """Return the name to show for a person."""
        if person is None:
            return "somebody"
        return person.key if self.hidden else person.name or person.id

    def seat(self, snapshot: Snapshot, seat: SeatView) -> str:
        """Return the name to show for a seat: the team's, or its student's."""
        if self.hidden:
            return seat.key
        if seat.team or len(seat.students) != 1:
            return seat.name
        return self.person(snapshot.person_by_id.get(seat.students[0])) or seat.name

    def seat_details(self, seat: SeatView) -> str:
        """Return the second line below a seat's name."""
        if self.hidden:
            return f"{len(seat.students)} students" if seat.team else ""
        return ", ".join(seat.students)

    def text(self, text: str, instead: str = "not shown here") -> str:
        """Return a text that may name people (an error, a reason), or `instead` if hidden."""
        return instead if self.hidden and text else text
