"""Commands of the demonstration that go on while others run, or that ask questions."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from market_clouds import LABCTL

WAIT_S = 600.0
# seconds without a question or an end, after which an asking command counts as stuck
QUESTION_S = 600.0
# A pattern of what the command asks, and the answer to it.
Answer = tuple[str, Callable[[re.Match[str]], str]]


class Follower:
    """A `labctl` that goes on while other things happen; it shows what it prints.

    While it is held, its lines wait, so that they do not mix with those of other commands.
    """

    def __init__(self, *words: str, cwd: Path) -> None:
        print(f"\n$ labctl {shlex.join(words)} &", flush=True)
        self.output = ""
        self._shown = 0
        self._lock = threading.RLock()
        self._process = subprocess.Popen(
            [LABCTL, *words],
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._is_held = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._lock:
                self.output += line
                if not self._is_held:
                    self._show()

    def _show(self) -> None:
        text = self.output[self._shown :]
        if sys.stdout.isatty():
            # The command writes to a pipe, where it does not know how wide the screen is.
            width = shutil.get_terminal_size().columns
            lines = [
                textwrap.wrap(line, width, subsequent_indent="  ") for line in text.split("\n")
            ]
            text = "\n".join("\n".join(parts) for parts in lines)
        print(text, end="", flush=True)
        self._shown = len(self.output)

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            self._is_held = True
        yield
        with self._lock:
            self._is_held = False
            if len(self.output) > self._shown:
                print(flush=True)
            self._show()

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.output))

    def wait_for(self, pattern: str, times: int = 1, timeout_s: float = WAIT_S) -> None:
        """Wait until the output matches so often; end the story if the command ends before."""
        until_s = time.monotonic() + timeout_s
        while self.count(pattern) < times:
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the run's output has no {pattern!r}")
            time.sleep(0.2)

    def end(self, timeout_s: float) -> int:
        """Wait for its end; return its exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join()
        return code

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def answer_questions(*words: str, cwd: Path, answers: Sequence[Answer]) -> str:
    """Run a command in a terminal of its own, answer its questions in this order, and show it.

    SystemExit if it asks nothing of that, or fails.
    """
    print(f"\n$ labctl {shlex.join(words)}", flush=True)
    outside, inside = pty.openpty()
    size = shutil.get_terminal_size()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    with subprocess.Popen(
        [LABCTL, *words], cwd=cwd, stdin=inside, stdout=inside, stderr=inside
    ) as process:
        os.close(inside)
        output, open_answers, since = "", list(answers), 0
        for part in _read_parts(outside):
            output += part
            print(part, end="", flush=True)
            if open_answers and (match := re.search(open_answers[0][0], output[since:])):
                since = len(output)
                os.write(outside, f"{open_answers.pop(0)[1](match)}\n".encode())
        os.close(outside)
    if open_answers or process.returncode != 0:
        raise SystemExit(f"labctl {shlex.join(words)} exited with code {process.returncode}")
    return output


def _read_parts(descriptor: int) -> Iterator[str]:
    """Yield what a terminal shows until its program has ended."""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # on Linux, the end of a terminal is an error
            return
        if not part:
            return
        yield part.decode(errors="replace")
