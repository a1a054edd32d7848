"""`labctl orphans --provider auto` while one cloud cannot be asked."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "RUNPOD_API_KEY",
    "VAST_API_KEY",
)


@pytest.fixture
def closed_port() -> Any:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]  # nothing listens there


def test_the_list_says_that_it_is_incomplete(
    labctl: Any, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{closed_port}")
    monkeypatch.setenv("LAMBDA_API_KEY", "secret_labctl_test_0123")
    monkeypatch.setenv("LAMBDA_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    said = labctl("orphans", "--provider", "auto")
    assert (said.code, said.out) == (75, "")
    assert "lambda: " in said.err
    assert "labctl orphans --provider lambda" in said.err
    assert "The list is incomplete: 2 providers could not be asked." in said.err
    reply = json.loads(labctl("orphans", "--provider", "auto", "--json").out)
    assert sorted(reply["orphans"]["failures"]) == ["lambda", "local"]
    assert (reply["billing"], reply["orphans"]["servers"]) == (False, [])
