"""A student of the roster."""

from __future__ import annotations

from labctl.model import Value


class Student(Value, frozen=True):
    """A student. `id` and `team` are names as for labs; `team` is "" for a student alone.

    A student who has left stays in the roster, not `active`, with their costs and grades.
    """

    id: str
    name: str = ""
    email: str = ""
    team: str = ""
    section: str = ""
    active: bool = True

    @property
    def seat(self) -> str:
        """The name of the seat: the team's, or the student's own."""
        return self.team or self.id
