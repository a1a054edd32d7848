"""A line that a student's program sends: for their own part only, and with known fields only."""

from __future__ import annotations

import json

import pytest

from labctl.courses.requests import VERBS as KEEPER_VERBS
from labctl.errors import PolicyError, UsageError
from labctl.submissions.service import VERBS as RECEIVER_VERBS
from labctl.submissions.student_requests import parse_student_request
from labctl.wire.keeper import ExtendSeatServerRequest
from labctl.wire.receiver import ListReceiptsRequest

HOSTILE = [
    b"",
    b"\xff",
    b"[]",
    b"null",
    b'"do"',
    b'{"do": []}',
    b'{"do": {"a": 1}}',
    b'{"do": "drop"}',
    b'{"do": null}',
    b'{"student": "ada"}',
    b"[" * 100_000,
    b'{"do": "servers", "more": 1}',
    b'{"do": "extend", "id": "x"}',
    b'{"do": "extend", "id": "x", "seconds": "60"}',
    b'{"do": "receipts", "assignment": 1}',
]


@pytest.mark.parametrize("line", HOSTILE)
def test_what_is_no_request_is_refused(line: bytes) -> None:
    for verbs in (KEEPER_VERBS, RECEIVER_VERBS):
        with pytest.raises(UsageError):
            parse_student_request(line, verbs, "ada")


@pytest.mark.parametrize("other", ["bob", "", None, 5, ["ada"], "ada\0", "Ada"])
def test_a_request_in_anothers_name_is_refused(other: object) -> None:
    line = json.dumps({"do": "receipts", "assignment": "hw3", "student": other}).encode()
    with pytest.raises(PolicyError, match="belongs to ada"):
        parse_student_request(line, RECEIVER_VERBS, "ada")


def test_a_request_may_name_the_student_that_the_key_belongs_to() -> None:
    line = b'{"do": "receipts", "assignment": "hw3", "student": "ada"}'
    request = parse_student_request(line, RECEIVER_VERBS, "ada")
    assert request == ("receipts", ListReceiptsRequest("hw3"))
    line = b'{"do": "extend", "id": "x", "seconds": 60}'
    assert parse_student_request(line, KEEPER_VERBS, "ada") == (
        "extend",
        ExtendSeatServerRequest("x", 60),
    )
