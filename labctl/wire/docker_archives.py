"""Archives of images through pipes: from `docker save`, and to `docker load`, perhaps over ssh.

A reader never mistakes the first part of an archive for all of it, and `docker load` never gets the
end of an incomplete archive.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Callable, ContextManager, Iterator, Sequence

# characters at the end of a command's error output
OUTPUT_CHARACTERS = 300


class DockerCommandError(Exception):
    """A `docker save` or `docker load` failed; `output` is the end of its error output."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(output or f"exit code {code}")
        self.code = code
        self.output = output


class SavedArchive:
    """The archive that a `docker save` writes. If the command fails, `read` raises at its end."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    def read(self, size: int) -> bytes:
        assert self._process.stdout
        block = self._process.stdout.read(size)
        if not block:
            _require_success(self._process.wait(), self._errors)
        return block


@contextmanager
def open_saved(words: Sequence[str]) -> Iterator[SavedArchive]:
    """Run a `docker save`, and yield its output; end the command if it is not read to its end."""
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
    ) as process:
        try:
            yield SavedArchive(process, errors)
        finally:
            process.kill()


def feed_load(
    words: Sequence[str],
    write: Callable[[IO[bytes]], object],
    guard: Callable[[Callable[[], None]], ContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Run a `docker load`, whose archive `write` writes to the file that it is given.

    DockerCommandError if the command fails. If `write` raises, the command is killed. All of this
    happens in a context that `guard` returns for a function that ends the command early.
    """
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
    ) as process:
        assert process.stdin
        try:
            with guard(process.terminate):
                # A command that no longer reads has failed; its exit code says so.
                with suppress(BrokenPipeError):
                    write(process.stdin)
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait()
        except BaseException:
            process.kill()
            with suppress(OSError):
                process.stdin.close()
            raise
        _require_success(process.returncode, errors)


def _require_success(code: int, errors: IO[bytes]) -> None:
    if code:
        errors.seek(0)
        output = errors.read().decode(errors="replace").strip()[-OUTPUT_CHARACTERS:]
        raise DockerCommandError(code, output)
