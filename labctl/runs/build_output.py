"""Progress of `docker build` from its output, for the classic builder and BuildKit."""

from __future__ import annotations

import re

from labctl.events import Note, Progress, Reporter

STEP = re.compile(r"^(?:Step (\d+)/(\d+) : (.*)|#\d+ \[[^\]]*?(\d+)/(\d+)\] (.*))")


class BuildLines:
    """Takes a build's output in pieces of any size, and reports each step that begins."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter = reporter
        self._name = name
        self._rest = b""

    def feed(self, block: bytes) -> None:
        *lines, self._rest = (self._rest + block).split(b"\n")
        for raw in lines:
            if match := STEP.match(raw.decode(errors="replace")):
                step, total = match[1] or match[4], match[2] or match[5]
                event = Progress(name=self._name, done=int(step), total=int(total), unit="steps")
                self._reporter.emit(event)
                text = f"{step}/{total} {match[3] or match[6]}"
                self._reporter.emit(Note(text=text, level="detail"))
