"""Adapt the commands of an explanation to the run's server, which may be stopped or have ended."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from labctl.insight.explain.evidence import Finding, Unknown
from labctl.model import Server, Value

# These show or change what is on the run's own server.
OF_THE_SERVER = frozenset(("attach", "cancel", "exec", "extend", "ssh", "top"))
# These work on any server of the lab, and need one.
ON_A_SERVER = frozenset(("forward", "profile", "run"))
# With these, `labctl run` gets a server itself.
GETS_SERVER = frozenset(("--recover", "--up"))
AnyAnswer = TypeVar("AnyAnswer", Finding, Unknown)
IN_NEXT_RUN = "this run's server has ended; during the next run:"


class ServerCommands(Value, frozen=True):
    """Rewrites commands. `server` is the run's, `lab_server` the lab's newest; None if ended."""

    server: Server | None
    lab_server: Server | None

    def adapt(self, answer: AnyAnswer) -> AnyAnswer:
        """Return the answer with a `next` whose commands work as they are typed."""
        adapted = msgspec.structs.replace(answer, next=self.adapt_text(answer.next))
        if isinstance(adapted, Unknown) or not adapted.levers:
            return adapted
        levers = (
            msgspec.structs.replace(lever, next=self.adapt_text(lever.next))
            for lever in adapted.levers
        )
        return msgspec.structs.replace(adapted, levers=tuple(levers))

    def adapt_text(self, text: str) -> str:
        lines: list[str] = []
        for line in text.split("\n"):
            if self.server is None and _read_name(line) in OF_THE_SERVER:
                if IN_NEXT_RUN not in lines:
                    lines.append(IN_NEXT_RUN)
                lines.append(line)
            else:
                lines.append(self._start_server(line))
        return "\n".join(lines)

    def _start_server(self, line: str) -> str:
        gets_server = GETS_SERVER & set(line.split(" -- ")[0].split())
        if gets_server or _read_name(line) not in OF_THE_SERVER | ON_A_SERVER:
            return line
        if self.lab_server is None:
            return f"labctl up && {line}"
        return f"labctl start && {line}" if self.lab_server.state == "stopped" else line


def _read_name(line: str) -> str:
    """Return the name of labctl's command in a line that is one, else ""."""
    first, _, rest = line.partition(" ")
    return rest.split(" ")[0] if first == "labctl" else ""
