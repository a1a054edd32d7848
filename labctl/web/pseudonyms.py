"""Through which people are seen: by their names, or, on a projector, by pseudonyms."""

from __future__ import annotations

from labctl.model import Value
from labctl.web.view import Person, Seat, Snapshot


class Lens(Value, frozen=True):
    """With `hidden`, nothing that is shown says who somebody is."""

    hidden: bool = False

    def person(self, one: Person | None) -> str:
        if one is None:
            return "somebody"
        return one.key if self.hidden else one.name or one.id

    def seat(self, snapshot: Snapshot, one: Seat) -> str:
        """A team by its name, anybody else by their own."""
        if self.hidden:
            return one.key
        if one.team or len(one.students) != 1:
            return one.name
        return self.person(snapshot.person_by_id.get(one.students[0])) or one.name

    def about(self, one: Seat) -> str:
        """A second line below a seat's name."""
        if self.hidden:
            return f"{len(one.students)} students" if one.team else ""
        return ", ".join(one.students)

    def text(self, text: str, instead: str = "not shown here") -> str:
        """Words that may name somebody: an error, a reason, a command."""
        return instead if self.hidden and text else text
