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
# Shortest known value to search for: shorter ones occur by chance.
SHORTEST = 8
MOST_NAMED = 20
FILES = {
    ".env": "a file of secrets", ".netrc": "passwords", ".pypirc": "passwords",
    ".git-credentials": "passwords", "id_rsa": "a private key", "id_ed25519": "a private key",
    "id_ecdsa": "a private key", "kaggle.json": "a Kaggle token", "credentials": "credentials",
}  # fmt: skip
SHAPES = {
    "private_key": (rb"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----", "a private key"),
    "aws_id": (rb"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b", "an AWS access key"),
    "aws_secret": (
        rb"(?i:aws_secret_access_key)[\"' ]{0,3}[=:][\"' ]{0,3}[A-Za-z0-9/+]{40}\b",
        "an AWS secret key",
    ),
    "github": (rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{60,}", "a GitHub token"),
    "gitlab": (rb"\bglpat-[A-Za-z0-9_-]{20,}", "a GitLab token"),
    "huggingface": (rb"\bhf_[A-Za-z0-9]{30,}\b", "a Hugging Face token"),
    "wandb": (rb"(?i:wandb_api_key|wandb\.login\()[^\n]{0,24}\b[0-9a-f]{40}\b", "a W&B key"),
    "openai": (rb"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}", "an API key"),
    "slack": (rb"\bxox[abprs]-[A-Za-z0-9-]{10,}", "a Slack token"),
    "google": (rb"\bAIza[A-Za-z0-9_-]{35}\b", "a Google API key"),
    "jwt": (rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}", "a JWT"),
    "password_in_url": (rb"\b[a-z][a-z0-9+]{1,12}://[^\s/@:\"']{1,64}:[^\s/@\"'{}$<]{6,}@[\w.-]+",
                        "a password in an address"),
}  # fmt: skip
# Every match contains one of these texts, in any case. The patterns are slow, so they are tried
# only where such a text occurs.
MARKS = (
    b"private key", b"akia", b"asia", b"aws_secret_access_key", b"ghp_", b"gho_", b"ghu_", b"ghs_",
    b"ghr_", b"github_pat_", b"glpat-", b"hf_", b"wandb", b"sk-", b"xoxa-", b"xoxb-", b"xoxr-",
    b"xoxs-", b"xoxp-", b"aiza", b".eyj", b"://",
)  # fmt: skip


class SecretFinding(Value, frozen=True):
    """Something that looks like a secret: its file, its line (0 means the file's name) and kind."""

    path: str
    line: int
    kind: str


class LeakSearch:
    """Searches for known formats of secrets, and for the values of `known` (name -> value)."""

    def __init__(self, known: Mapping[str, Secret] | None = None) -> None:
        self._kinds = {name: kind for name, (_, kind) in SHAPES.items()}
        self._marks = list(MARKS)
        parts = [b"(?P<%s>%s)" % (name.encode(), shape) for name, (shape, _) in SHAPES.items()]
        for number, (name, value) in enumerate(sorted((known or {}).items())):
            if len(value.reveal()) >= SHORTEST:
                text = value.reveal().encode()
                parts.insert(0, b"(?P<own%d>%s)" % (number, re.escape(text)))
                self._kinds[f"own{number}"] = f"the value of your secret {name}"
                self._marks.append(text.lower())
        self._pattern = re.compile(b"|".join(parts))

    def find_leaks(self, path: str, file: BinaryIO) -> list[SecretFinding]:
        """Return the findings in one file, its name included; at most MOST_NAMED."""
        name = PurePosixPath(path).name
        found: dict[SecretFinding, None] = {}
        if name in FILES:
            found[SecretFinding(path=path, line=0, kind=FILES[name])] = None
        file.seek(0)
        lines, overlap = 1, b""
        while block := file.read(BLOCK_BYTES):
            text = overlap + block
            for match in self._find_matches(text):
                line = lines + text.count(b"\n", 0, match.start())
                found[
                    SecretFinding(path=path, line=line, kind=self._kinds[match.lastgroup or ""])
                ] = None
            overlap = text[-OVERLAP_BYTES:]
            lines += text.count(b"\n", 0, len(text) - len(overlap))
        return list(found)[:MOST_NAMED]

    def _find_matches(self, text: bytes) -> Iterator[re.Match[bytes]]:
        lower = text.lower()
        if any(mark in lower for mark in self._marks):
            yield from self._pattern.finditer(text)


def describe_leaks(leaks: Iterable[SecretFinding]) -> str:
    """Return the findings as text, one line for each."""
    return "\n".join(
        f"{leak.path}{f', line {leak.line}' if leak.line else ''}: {leak.kind}" for leak in leaks
    )
