"""A student of the roster."""

from __future__ import annotations

from labctl.model import Value

SECTION_SEPARATOR = "; "


class Student(Value, frozen=True):
    """A student. `id` and `team` are names as for labs; `team` is "" for a student alone.

    `section` has several sections with a separator between them.
    A student who has left stays in the roster, not `active`, with their costs and grades.
    """

    id: str
    name: str = ""
    email: str = ""
    team: str = ""
    section: str = ""
    active: bool = True

    @property
    def sections(self) -> tuple[str, ...]:
        names = (name.strip() for name in self.section.split(SECTION_SEPARATOR.strip()))
        return tuple(name for name in names if name)

    @property
    def seat(self) -> str:
        """The name of the seat: the team's, or the student's own."""
        return self.team or self.id
