"""Finding secrets in a submission, by their format or because their values are known.

A finding names the file, the line and the kind, and never repeats the secret itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import BinaryIO

from labctl.model import Value
from labctl.shell import Secret

BLOCK_BYTES = 256 * 1024
OVERLAP_BYTES = 8 * 1024
# Bytes in front of a mark that `before` can match: the first part of a JWT has a few hundred.
MOST_BEFORE_BYTES = 1024
# Shortest known value to search for: shorter ones occur by chance.
SHORTEST = 8
MOST_NAMED = 20
FILES = {
    ".env": "a file of secrets", ".netrc": "passwords", ".pypirc": "passwords",
    ".git-credentials": "passwords", "id_rsa": "a private key", "id_ed25519": "a private key",
    "id_ecdsa": "a private key", "kaggle.json": "a Kaggle token", "credentials": "credentials",
}  # fmt: skip


class SecretShape(Value, frozen=True):
    """A format of secrets: one of the texts `marks` between what `before` and `after` match.

    With `ignores_case`, all three match in any case, and `marks` and `after` are in lower case.
    """

    kind: str
    marks: tuple[bytes, ...]
    after: bytes
    before: bytes = rb"\b"
    ignores_case: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression of a whole secret, for texts."""
        marks = b"|".join(map(re.escape, self.marks))
        flags = "(?i:" if self.ignores_case else "(?:"
        return f"{flags}{(self.before + b'(?:' + marks + b')' + self.after).decode()})"


SHAPES = (
    SecretShape(
        kind="a private key",
        marks=(b"-----BEGIN ",),
        before=b"",
        after=rb"(?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----",
    ),
    SecretShape(kind="an AWS access key", marks=(b"AKIA", b"ASIA"), after=rb"[A-Z2-7]{16}\b"),
    SecretShape(
        kind="an AWS secret key",
        marks=(b"aws_secret_access_key",),
        before=b"",
        after=rb"[\"' ]{0,3}[=:][\"' ]{0,3}[a-z0-9/+]{40}\b",
        ignores_case=True,
    ),
    SecretShape(
        kind="a GitHub token",
        marks=(b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
        after=rb"[A-Za-z0-9]{36,}\b",
    ),
    SecretShape(kind="a GitHub token", marks=(b"github_pat_",), after=rb"\w{60,}"),
    SecretShape(kind="a GitLab token", marks=(b"glpat-",), after=rb"[A-Za-z0-9_-]{20,}"),
    SecretShape(kind="a Hugging Face token", marks=(b"hf_",), after=rb"[A-Za-z0-9]{30,}\b"),
    SecretShape(
        kind="a W&B key",
        marks=(b"wandb_api_key", b"wandb.login("),
        before=b"",
        after=rb"[^\n]{0,24}\b[0-9a-f]{40}\b",
        ignores_case=True,
    ),
    SecretShape(kind="an API key", marks=(b"sk-",), after=rb"(?:proj-|ant-)?[A-Za-z0-9_-]{32,}"),
    SecretShape(
        kind="a Slack token",
        marks=(b"xoxa-", b"xoxb-", b"xoxp-", b"xoxr-", b"xoxs-"),
        after=rb"[A-Za-z0-9-]{10,}",
    ),
    SecretShape(kind="a Google API key", marks=(b"AIza",), after=rb"[A-Za-z0-9_-]{35}\b"),
    SecretShape(
        kind="a JWT",
        marks=(b".eyJ",),
        before=rb"\beyJ[A-Za-z0-9_-]{10,}",
        after=rb"[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}",
    ),
    SecretShape(
        kind="a password in an address",
        marks=(b"://",),
        before=rb"\b[a-z][a-z0-9+]{1,12}",
        after=rb"[^\s/@:\"']{1,64}:[^\s/@\"'{}$<]{6,}@[\w.-]+",
    ),
)


class SecretFinding(Value, frozen=True):
    """Something that looks like a secret: its file, its line (0 means the file's name) and kind."""

    path: str
    line: int
    kind: str


class _MarkSearch:
    """Finds the secrets of one shape that have one of its marks, in time linear in the text.

    The expression begins with the mark, because `re` searches for a plain text quickly. What is in
    front of the mark is only compared where the rest was found.
    """

    def __init__(self, shape: SecretShape, mark: bytes) -> None:
        self.kind = shape.kind
        self._mark = mark
        self._ignores_case = shape.ignores_case
        literal = re.escape(mark)
        # No letter before it, which is what \b means before a letter.
        boundary = rb"(?<!\w%s)" % literal if shape.before == rb"\b" else b""
        self._pattern = re.compile(literal + boundary + shape.after)
        is_plain = shape.before in (b"", rb"\b")
        self._before = None if is_plain else re.compile(shape.before + rb"\Z")

    def find_spans(self, text: bytes, lower: bytes) -> Iterator[tuple[int, int]]:
        """Yield where secrets begin and end in a text, whose lower-case form is `lower`."""
        text = lower if self._ignores_case else text
        at = text.find(self._mark)
        while at >= 0 and (match := self._pattern.search(text, at)):
            begin = self._find_begin(text, match.start())
            if begin < 0:
                at = match.start() + 1
            else:
                yield begin, match.end()
                at = match.end()

    def _find_begin(self, text: bytes, at: int) -> int:
        """Return where the secret with the mark at `at` begins; -1 without one."""
        if self._before is None:
            return at
        match = self._before.search(text, max(0, at - MOST_BEFORE_BYTES), at)
        return match.start() if match else -1


class LeakSearch:
    """Searches for known formats of secrets, and for the values of `known` (name -> value)."""

    def __init__(self, known: Mapping[str, Secret] | None = None) -> None:
        own = [
            SecretShape(
                kind=f"the value of your secret {name}",
                marks=(value.reveal().encode(),),
                before=b"",
                after=b"",
            )
            for name, value in sorted((known or {}).items())
            if len(value.reveal()) >= SHORTEST
        ]
        self._searches = [
            _MarkSearch(shape, mark) for shape in (*own, *SHAPES) for mark in shape.marks
        ]

    def find_leaks(self, path: str, file: BinaryIO) -> list[SecretFinding]:
        """Return the findings in one file, its name included; at most MOST_NAMED."""
        name = PurePosixPath(path).name
        found: dict[SecretFinding, None] = {}
        if name in FILES:
            found[SecretFinding(path=path, line=0, kind=FILES[name])] = None
        file.seek(0)
        first_line, overlap = 1, b""
        while len(found) < MOST_NAMED and (block := file.read(BLOCK_BYTES)):
            text = overlap + block
            line, counted = first_line, 0
            for begin, kind in self._find_secrets(text):
                line += text.count(b"\n", counted, begin)
                counted = begin
                found[SecretFinding(path=path, line=line, kind=kind)] = None
            overlap = text[-OVERLAP_BYTES:]
            first_line += text.count(b"\n", 0, len(text) - len(overlap))
        return list(found)[:MOST_NAMED]

    def _find_secrets(self, text: bytes) -> list[tuple[int, str]]:
        """Return where the secrets begin, with their kinds; of two that overlap, the first one."""
        lower = text.lower()
        spans = sorted(
            (begin, order, end)
            for order, search in enumerate(self._searches)
            for begin, end in search.find_spans(text, lower)
        )
        secrets, last_end = [], 0
        for begin, order, end in spans:
            if begin >= last_end:
                secrets.append((begin, self._searches[order].kind))
                last_end = end
        return secrets


def describe_leaks(leaks: Iterable[SecretFinding]) -> str:
    """Return the findings as text, one line for each."""
    return "\n".join(
        f"{leak.path}{f', line {leak.line}' if leak.line else ''}: {leak.kind}" for leak in leaks
    )
