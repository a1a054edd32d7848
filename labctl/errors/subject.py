"""What a flow works on, so that its errors name the command that the user can type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from labctl.wire.verbs import HintPart


class Subject(NamedTuple):
    """A lab, a seat of a course, or a course: it knows the commands for itself.

    `seat` is the name by which `labctl course` selects a seat, "" for the others. `is_checked` is
    set while `check` itself shows the error, and so must not name itself as the next command.
    `is_moving`: the lab gets another server, so that `labctl move` continues.
    """

    kind: Literal["lab", "seat", "course"] = "lab"
    seat: str = ""
    is_checked: bool = False
    is_moving: bool = False

    @property
    def config_file(self) -> str:
        return "lab.yaml" if self.kind == "lab" else "course.yaml"

    @property
    def up(self) -> str:
        return "labctl move" if self.is_moving else self._command("up")

    @property
    def down(self) -> str:
        return "labctl move --cancel" if self.is_moving else self._command("down")

    @property
    def end_all(self) -> str:
        """The command that ends every cost: once a move is over, only this one ends its server."""
        return self._command("down")

    @property
    def forget(self) -> str:
        """The command that drops records; a course has it only for all seats."""
        return "labctl down --forget" if self.kind == "lab" else "labctl course down --forget"

    @property
    def check(self) -> str:
        """The command that finds out what is wrong; within it, the one that tries again."""
        if self.is_checked:
            return self.up
        return "labctl doctor" if self.kind == "lab" else "labctl course check"

    @property
    def offers(self) -> str:
        """The command to type where no offer was accepted: a course tries the same again."""
        return "labctl offers" if self.kind == "lab" else self.up

    @property
    def raise_budget(self) -> str:
        if self.kind == "lab":
            return "labctl cost\nlabctl up --budget 5   # or raise `budget:` in lab.yaml"
        return f"labctl course budget {self.seat or 'NAME'} +5\n{self.up}"

    def ssh(self, line: str) -> str:
        """The command that runs a line on the server."""
        if self.kind == "lab":
            return f"labctl ssh -- {line}"
        return f"labctl course ssh {self.seat or 'NAME'} -- {line}"

    @property
    def push(self) -> str:
        """The command that sends files again: `course up` sends what a seat's server lacks."""
        return "labctl push" if self.kind == "lab" else self.up

    @property
    def status(self) -> str:
        """The command that shows the server and its runs; a course asks the servers themselves."""
        return "labctl status" if self.kind == "lab" else self.refresh

    @property
    def refresh(self) -> str:
        """The command that asks the provider and the servers for their state."""
        return f"{self._command('status')} --refresh"

    def render(self, parts: Sequence[HintPart], otherwise: str) -> str:
        """Return the hint that an agent sent, for this subject.

        `otherwise` is the agent's own text. It is right for a lab, and the best there is from an
        agent that sends no parts, or one of a kind that only later versions know.
        """
        commands = {
            "config": self.config_file,
            "up": self.up,
            "push": self.push,
            "status": self.status,
        }
        words = []
        for part in parts:
            if part.kind == "text":
                words.append(part.text)
            elif part.kind == "ssh":
                words.append(self.ssh(part.text))
            elif part.kind in commands:
                words.append(commands[part.kind])
            else:
                return otherwise
        return otherwise if self.kind == "lab" or not words else "".join(words)

    def _command(self, verb: str) -> str:
        if self.kind == "lab":
            return f"labctl {verb}"
        return f"labctl course {verb}" + (f" --only {self.seat}" if self.seat else "")


LAB, COURSE = Subject("lab"), Subject("course")
# A text of an error: fixed, or rendered for the subject by code that does not know it.
Text = str | Callable[[Subject], str]


def render_text(text: Text, subject: Subject) -> str:
    return text if isinstance(text, str) else text(subject)
