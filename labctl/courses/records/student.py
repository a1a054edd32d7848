"""One person of the roster."""

from __future__ import annotations

from labctl.model import Value


class Student(Value, frozen=True):
    """`id` is a name as labs have them; `team` too, "" for somebody alone.

    Who has left the course stays in the roster as not `active`: their costs and grades stay theirs.
    """

    id: str
    name: str = ""
    email: str = ""
    team: str = ""
    section: str = ""
    active: bool = True

    @property
    def seat(self) -> str:
        """The name of the seat: the team's, else the student's own."""
        return self.team or self.id
