"""A person's terminal: a shell in a tmux server of its own, typed to and read from the screen."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROMPT = "$"
QUESTION = re.compile(r"\]:$")
# rows of the screen; what scrolls out stays in tmux's history
ROWS = 40
POLL_S = 0.2


@dataclass(frozen=True)
class Terminal:
    """A running terminal. `tmux` are the words that reach its server."""

    tmux: tuple[str, ...]

    def run(
        self,
        line: str,
        answers: Sequence[str],
        timeout_s: float,
        type_ahead: str = "",
        on_screen: Callable[[list[str]], None] = lambda lines: None,
    ) -> str:
        """Type `line`, answer each question in turn, and return what the screen shows below it.

        Lines that the terminal has wrapped are joined, and have no trailing spaces. `type_ahead` is
        typed at once, before any question. `on_screen` gets the lines about five times a second.
        """
        self._clear()
        self._type(line)
        if type_ahead:
            self._type(type_ahead)
        waiting = list(answers)
        deadline = time.monotonic() + timeout_s
        while not self._has_ended():
            lines = self._read_lines()
            on_screen(lines)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{line!r} still runs:\n" + "\n".join(lines))
            if QUESTION.search(lines[-1]) and waiting:
                self._type(waiting.pop(0))
            time.sleep(POLL_S)
        assert not waiting, f"{line!r} did not ask for {waiting}"
        shown = self._read_lines()[:-1]
        assert shown, f"{line!r} was not typed"
        assert shown[0] == f"{PROMPT} {line}", shown[0]
        return "".join(f"{text}\n" for text in shown[1:])

    def start(self, line: str) -> None:
        """Type a line whose program keeps the screen."""
        self._type(line)

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def wait_for(self, text: str, timeout_s: float = 10) -> list[str]:
        """Return the lines of the screen and its history once one of them has `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in "\n".join(lines := self._read_lines()):
            assert time.monotonic() < deadline, lines
            time.sleep(POLL_S)
        return lines

    def read_rows(self) -> list[str]:
        """Return the rows of the screen and its history as they are, without trailing spaces."""
        text = self._call("capture-pane", "-p", "-J", "-S", "-")
        return [line.rstrip() for line in text.splitlines()]

    def _has_ended(self) -> bool:
        """Whether a prompt is below the typed line, which the screen may not show yet."""
        lines = self._read_lines()
        return len(lines) > 1 and lines[-1] == PROMPT

    def _type(self, line: str) -> None:
        self._call("send-keys", "-l", "--", line)
        self._call("send-keys", "Enter")

    def _clear(self) -> None:
        self._call("send-keys", "-R", "C-l")
        self._call("clear-history")
        self.wait_for_prompt()

    def wait_for_prompt(self) -> None:
        """Wait until the screen shows the prompt and nothing else."""
        deadline = time.monotonic() + 10
        while self._read_lines() != [PROMPT]:
            assert time.monotonic() < deadline, self._read_lines()
            time.sleep(POLL_S)

    def _read_lines(self) -> list[str]:
        """Return the lines of the history and the screen that are not empty; at least one."""
        text = self._call("capture-pane", "-p", "-J", "-S", "-")
        return [line.rstrip() for line in text.splitlines() if line.strip()] or [""]

    def _call(self, *words: str) -> str:
        done = subprocess.run([*self.tmux, *words], check=True, capture_output=True, text=True)
        return done.stdout


@contextmanager
def open_terminal(directory: Path, environ: Mapping[str, str], columns: int) -> Iterator[Terminal]:
    """Open a terminal in `directory` with this environment alone."""
    with tempfile.TemporaryDirectory(prefix="tmux-") as sockets:
        tmux = ("tmux", "-f", "/dev/null", "-S", f"{sockets}/terminal")
        size = ("-x", str(columns), "-y", str(ROWS))
        shell = f"PS1='{PROMPT} ' exec bash --norc --noprofile"
        subprocess.run(
            [*tmux, "new-session", "-d", *size, shell],
            check=True,
            cwd=directory,
            env={"LANG": "C.UTF-8", **environ},
        )
        try:
            terminal = Terminal(tmux)
            # Keys that come before the shell is ready are shown twice.
            terminal.wait_for_prompt()
            yield terminal
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)


@contextmanager
def attach_tmux(socket: Path, columns: int) -> Iterator[Terminal]:
    """Attach a client to a new tmux server at `socket`; yields the terminal that shows it."""
    with open_terminal(socket.parent, {"PATH": "/usr/bin:/bin"}, columns) as terminal:
        inner = ("tmux", "-f", "/dev/null", "-S", str(socket))
        terminal.start(f"exec {' '.join(inner)} new-session 'sleep 600'")
        try:
            terminal.wait_for("[0] 0:")
            yield terminal
        finally:
            subprocess.run([*inner, "kill-server"], check=False)
