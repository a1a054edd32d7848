"""What a flow works on, so that its errors name the command that the user can type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Subject:
    """A lab, a seat of a course, or a course: it knows the commands for itself.

    `seat` is the name by which `labctl course` selects a seat, "" for the others.
    """

    kind: Literal["lab", "seat", "course"] = "lab"
    seat: str = ""

    @property
    def config_file(self) -> str:
        return "lab.yaml" if self.kind == "lab" else "course.yaml"

    @property
    def up(self) -> str:
        return self._command("up")

    @property
    def down(self) -> str:
        return self._command("down")

    @property
    def forget(self) -> str:
        """The command that drops records; a course has it only for all seats."""
        return "labctl down --forget" if self.kind == "lab" else "labctl course down --forget"

    @property
    def offers(self) -> str:
        """The command to type where no offer was accepted: a course tries the same again."""
        return "labctl offers" if self.kind == "lab" else self.up

    @property
    def raise_budget(self) -> str:
        if self.kind == "lab":
            return "labctl cost; then raise `budget:` in lab.yaml, or labctl up --budget 5"
        return f"labctl course budget {self.seat or 'NAME'} +5   # then {self.up}"

    def ssh(self, line: str) -> str:
        """The command that runs a line on the server."""
        if self.kind == "lab":
            return f"labctl ssh -- {line}"
        return f"labctl course ssh {self.seat or 'NAME'} -- {line}"

    def _command(self, verb: str) -> str:
        if self.kind == "lab":
            return f"labctl {verb}"
        return f"labctl course {verb}" + (f" --only {self.seat}" if self.seat else "")


LAB, COURSE = Subject("lab"), Subject("course")
# A next command: fixed, or rendered for the subject by code that does not know it.
Hint = str | Callable[[Subject], str]
