"""This program on the server: an archive or a directory that `python3` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from ..wire.codec import encode
from ..wire.verbs import Reply, Request, Verb
from .reply import parse_reply

PROGRAM = Path(__file__).parents[1]


def call_program(
    words: Sequence[str],
    verb: Verb[Request, Reply],
    request: Request,
    timeout_s: float | None = None,
) -> Reply:
    """Run a verb in another process of this program, which `words` start.

    Return its reply or raise its Failure; subprocess.TimeoutExpired after `timeout_s`.
    """
    import subprocess  # imported here to keep `start` fast

    done = subprocess.run(
        [*words, verb.name],
        input=encode(request) + "\n",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return parse_reply(verb, done.stdout, done.stderr)
