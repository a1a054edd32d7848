"""What labctl says to rsync, and what rsync says back. No I/O.

rsync writes to a private staging directory only, so it may write `--inplace`: what was cut off
there is the beginning of the next try, whichever way the last one ended. A file gets its time
(`--times`) when its checksum was right, and not before: that is how it is known to be whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from labctl.model import Value

# Seconds of silence after which either side gives up. A dead link is noticed earlier, by ssh.
SILENCE_S = 60
PARTIAL_CODES = (23, 24)  # some files could not be read, or are gone
FILE_ERROR_CODE = 11  # a disk is full, or broken
SSH_FAILED_CODE = 255
# Another rsync than expected, none at all, or a login shell that prints something.
UNUSABLE_CODES = (1, 2, 4, 126, 127)

_NEEDED = frozenset(
    {
        "--files-from",
        "--from0",
        "--times",
        "--chmod",
        "--ignore-times",
        "--inplace",
        "--compare-dest",
        "--timeout",
        "--stats",
    }
)
_SECLUDED = frozenset({"--protect-args", "--secluded-args"})
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_COMPRESSIONS = re.compile(r"^Compress list:\n\s+(.+)$", re.MULTILINE)
_PROGRESS = re.compile(r"^\s*([\d,]+)\s+\d+%")
_LITERAL = re.compile(r"^Literal data: ([\d,]+) bytes", re.MULTILINE)


class RsyncProgram(Value, frozen=True):
    """What one side's rsync can do: its options, and how it can compress."""

    flags: frozenset[str] = frozenset()
    compressions: frozenset[str] = frozenset()

    @property
    def is_usable(self) -> bool:
        """Whether it has the options without which labctl does not use it."""
        return self.flags >= _NEEDED

    def can_name(self, path: str) -> bool:
        """Whether it can hand `path` to the other side without a shell reading it."""
        return bool(self.flags & _SECLUDED or _PLAIN_PATH.fullmatch(path))


class Transfer(Value, frozen=True):
    """One rsync: the files named on its standard input go from `source` to `target`.

    Both are directories; that of the other side is "HOST:PATH". `basis` is a directory beside
    the target whose files are like those that come, "" without one.
    """

    shell_words: tuple[str, ...]
    source: str
    target: str
    basis: str = ""
    compression: str = ""


def parse_program(text: str) -> RsyncProgram:
    """What `rsync --help` (or `--version`, which names no options) says."""
    compressions = _COMPRESSIONS.search(text)
    return RsyncProgram(
        flags=frozenset(_FLAG.findall(text)),
        compressions=frozenset(compressions[1].split() if compressions else ()),
    )


def transfer_argv(program: RsyncProgram, transfer: Transfer) -> list[str]:
    """The command line of a transfer, for a `program` that is usable."""
    argv = ["rsync", "--files-from=-", "--from0", "--no-implied-dirs", "--no-links"]
    argv += ["--times", "--chmod=D755,F644"]  # less what the umask there takes away
    # The caller has compared: what is named is sent, whatever its time and size.
    argv += ["--ignore-times", "--inplace", f"--timeout={SILENCE_S}", "--stats"]
    if program.flags & _SECLUDED:
        argv += ["-s"]
    if "--info" in program.flags:
        argv += ["--info=progress2"]
    if transfer.compression:
        argv += [f"--compress-choice={transfer.compression}"]
    if transfer.basis:
        argv += [f"--compare-dest={transfer.basis}"]
    return [*argv, "-e", shell_text(transfer.shell_words), "--", transfer.source, transfer.target]


def shell_text(words: Iterable[str]) -> str:
    """`words` as rsync's `-e` reads them: a quote within quotes is doubled."""
    return " ".join(
        word if _PLAIN_PATH.fullmatch(word) else "'" + word.replace("'", "''") + "'"
        for word in words
    )


def name_list(paths: Iterable[str]) -> bytes:
    """What `--files-from=-` reads. rsync would skip a name that begins with # or ; as a comment."""
    return b"".join(b"./" + path.encode() + b"\0" for path in paths)


def parse_progress(line: str) -> int | None:
    """The bytes of files that are done, from a line of `--info=progress2`."""
    found = _PROGRESS.match(line)
    return _number(found[1]) if found else None


def parse_sent_bytes(output: str) -> int:
    """The bytes of files that had to travel, from what `--stats` prints."""
    found = _LITERAL.search(output)
    return _number(found[1]) if found else 0


def _number(text: str) -> int:
    return int(text.replace(",", ""))
