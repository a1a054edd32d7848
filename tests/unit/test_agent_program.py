"""A verb in another process of the agent: its reply, its failure, or that it ended without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labctl.agent.program import call_program
from labctl.agent.reply import MARK, Failure
from labctl.wire.runs import STATUS, StatusRequest

REQUEST = StatusRequest("digits", "1")


def words(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_the_request_is_one_line_and_the_verb_the_last_word() -> None:
    error = '{"error": {"kind": "usage", "what": sys.argv[1], "why": sys.stdin.read()}}'
    program = f"import sys, json; print({MARK!r} + json.dumps({error}))"
    with pytest.raises(Failure) as caught:
        call_program(words(program), STATUS, REQUEST)
    assert caught.value.report.what == STATUS.name
    assert caught.value.report.why.endswith("}\n")
    assert caught.value.report.why.count("\n") == 1


def test_an_end_without_a_reply_says_what_was_printed() -> None:
    with pytest.raises(Failure, match="ended without a reply") as caught:
        call_program(words("import sys; sys.exit('no such thing')"), STATUS, REQUEST)
    assert caught.value.report.why == "no such thing"


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        call_program(words("import time; time.sleep(60)"), STATUS, REQUEST, 0.5)
