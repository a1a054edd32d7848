"""Command lines as values: quoting happens in one place, and secrets are never printed.

A `Command` is a tuple of words. `render()` quotes every word for a POSIX shell; `Raw` words pass
unquoted (for `&&`, `|`, `>`). A `Secret` masks itself in `str()` and `repr()`; only `reveal()`
returns the value, and a Command refuses to hold one, since any user can read argv.
"""

from __future__ import annotations

import binascii
import shlex

import msgspec


class Secret:
    """A value that must not appear in argv, logs or state. It cannot be encoded as JSON."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        return "********"

    __repr__ = __str__

    def reveal(self) -> str:
        return self._value


class Raw(str):
    """A word that the shell must read as syntax."""

    __slots__ = ()


class Command(msgspec.Struct, frozen=True):
    """One command line. Build it with `command("docker", "run", ...)`."""

    words: tuple[str, ...]

    def render(self) -> str:
        """Return the line for a POSIX shell, with every word quoted unless it is Raw."""
        return " ".join(w if isinstance(w, Raw) else shlex.quote(w) for w in self.words)

    def __str__(self) -> str:
        return self.render()

    def chain(self, other: Command) -> Command:
        """Return `self && other`."""
        return Command((*self.words, Raw("&&"), *other.words))

    def pipe(self, other: Command) -> Command:
        """Return `self | other`."""
        return Command((*self.words, Raw("|"), *other.words))


def command(*words: str | int | float) -> Command:
    """Build a Command of these words; raise TypeError for a Secret."""
    for word in words:
        if isinstance(word, Secret):
            raise TypeError("a Secret cannot be a word of a command line: argv is public")
    return Command(tuple(w if isinstance(w, Raw) else str(w) for w in words))


def portable_line(line: str) -> str:
    """Wrap a POSIX shell line so that any login shell (fish, csh, ...) runs it unchanged.

    The line is sent as base64, which every shell reads as a plain word.
    """
    encoded = binascii.b2a_base64(line.encode(), newline=False).decode()
    return f"exec sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"
