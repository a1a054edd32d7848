"""The result of a course's flow for each seat, with what failed in a form that can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from labctl.errors import LabError
from labctl.errors.subject import Subject, Text, render_text
from labctl.model import Value


class FailureText(NamedTuple):
    """What failed, why, and the next command."""

    what: str = ""
    why: str = ""
    hint: str = ""


@dataclass(frozen=True)
class SeatFailure:
    """An error of one seat, and the next command for it, if not the error's own.

    `subject` names the seat. The texts of equal failures are equal for any other common subject.
    """

    subject: Subject
    error: LabError
    hint: Text = ""

    def render(self, subject: Subject) -> FailureText:
        hint = self.hint or self.error.next_step
        return FailureText(
            render_text(self.error.failed_step, subject),
            self.error.why,
            render_text(hint, subject),
        )


class SeatResult(Value, frozen=True):
    """What a flow did for one seat, or why it failed."""

    seat: str
    students: tuple[str, ...]
    failure: SeatFailure | None = None

    @property
    def error(self) -> str:
        return self._text.what

    @property
    def why(self) -> str:
        return self._text.why

    @property
    def hint(self) -> str:
        return self._text.hint

    @property
    def _text(self) -> FailureText:
        return self.failure.render(self.failure.subject) if self.failure else FailureText()

    def as_json(self) -> dict[str, object]:
        """Return the fields for --json, with the failure as three texts."""
        names = [name for name in self.__struct_fields__ if name != "failure"]
        fields = {name: msgspec.to_builtins(getattr(self, name)) for name in names}
        return fields | {"error": self.error, "why": self.why, "hint": self.hint}
