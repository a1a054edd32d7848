"""The command line of rsync, and the parsers of its output. No I/O.

rsync writes only to a private staging directory, so it may write `--inplace`: a partial file there
is the start of the next try, however the last one ended. A file gets its time (`--times`) only
after its checksum was right, which shows that it is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from labctl.model import Value

# Seconds without data after which either side gives up. ssh notices a dead link earlier.
SILENCE_S = 60
PARTIAL_CODES = (23, 24)  # some files could not be read, or are gone
FILE_ERROR_CODE = 11  # a disk is full, or broken
SSH_FAILED_CODE = 255
# An incompatible rsync, no rsync, or a login shell that prints something.
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
_COMPLETE = "complete: "
_COMPLETE_FILE = re.compile(rf"{_COMPLETE}\d+ (.+)")
_ESCAPED = re.compile(r"\\#([0-7]{3})")
_PROGRESS = re.compile(r"^\s*([\d,]+)\s+\d+%")
_LITERAL = re.compile(r"^Literal data: ([\d,]+) bytes", re.MULTILINE)


class RsyncProgram(Value, frozen=True):
    """The abilities of one side's rsync: its options and compression methods."""

    flags: frozenset[str] = frozenset()
    compressions: frozenset[str] = frozenset()

    @property
    def is_usable(self) -> bool:
        """Whether it has all options that labctl needs."""
        return self.flags >= _NEEDED

    def can_name(self, path: str) -> bool:
        """Whether it can send `path` to the other side without a shell interpreting it."""
        return bool(self.flags & _SECLUDED or _PLAIN_PATH.fullmatch(path))


class Transfer(Value, frozen=True):
    """One run of rsync: copies the files named on its standard input from `source` to `target`.

    Both are directories; the one on the other side is "HOST:PATH". `basis` is a directory on the
    target's side with similar files, so that only differences are sent; "" without one. With
    `names_files`, rsync prints each file that is complete (`parse_complete_file`).
    """

    shell_words: tuple[str, ...]
    source: str
    target: str
    basis: str = ""
    compression: str = ""
    names_files: bool = False


def parse_program(text: str) -> RsyncProgram:
    """Parse the output of `rsync --help` (or `--version`, which lists no options)."""
    compressions = _COMPRESSIONS.search(text)
    return RsyncProgram(
        flags=frozenset(_FLAG.findall(text)),
        compressions=frozenset(compressions[1].split() if compressions else ()),
    )


def transfer_argv(program: RsyncProgram, transfer: Transfer) -> list[str]:
    """Build the command line of a transfer, for a `program` that is usable."""
    argv = ["rsync", "--files-from=-", "--from0", "--no-implied-dirs", "--no-links"]
    argv += ["--times", "--chmod=D755,F644"]  # the umask of the target applies too
    # The caller has compared the files: all named files are sent, whatever their time and size.
    argv += ["--ignore-times", "--inplace", f"--timeout={SILENCE_S}", "--stats"]
    if program.flags & _SECLUDED:
        argv += ["-s"]
    if "--info" in program.flags:
        argv += ["--info=progress2"]
    if transfer.names_files and "--out-format" in program.flags:
        argv += [f"--out-format={_COMPLETE}%b %n"]  # with %b it is printed after the transfer
    if transfer.compression:
        argv += [f"--compress-choice={transfer.compression}"]
    if transfer.basis:
        argv += [f"--compare-dest={transfer.basis}"]
    return [*argv, "-e", shell_text(transfer.shell_words), "--", transfer.source, transfer.target]


def shell_text(words: Iterable[str]) -> str:
    """Quote `words` for rsync's `-e`, which reads a doubled quote within quotes as one."""
    return " ".join(
        word if _PLAIN_PATH.fullmatch(word) else "'" + word.replace("'", "''") + "'"
        for word in words
    )


def name_list(paths: Iterable[str]) -> bytes:
    """Build the input of `--files-from=-`. `./` keeps names with # or ; from being comments."""
    return b"".join(b"./" + path.encode() + b"\0" for path in paths)


def parse_progress(line: str) -> int | None:
    """Parse the bytes of copied files from a line of `--info=progress2`; None for other lines."""
    match = _PROGRESS.match(line)
    return _parse_number(match[1]) if match else None


def parse_complete_file(line: str) -> str | None:
    """Parse the path of a file that has just been completed; None for other lines.

    rsync prints bytes outside printable ASCII as octal numbers.
    """
    match = _COMPLETE_FILE.fullmatch(line)
    if match is None:
        return None
    raw = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), match[1])
    return os.fsdecode(raw.encode("latin-1"))


def parse_sent_bytes(output: str) -> int:
    """Parse the bytes that went over the network from the output of `--stats`."""
    match = _LITERAL.search(output)
    return _parse_number(match[1]) if match else 0


def _parse_number(text: str) -> int:
    return int(text.replace(",", ""))
