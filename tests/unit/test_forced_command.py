"""Lines that are exchanged with a forced command."""

from __future__ import annotations

import pytest

from labctl.errors import ConnectionRefusedByServerError
from labctl.model import Endpoint
from labctl.transports.forced_command import LineChannel

# As ssh does: the reason is the C library's text, in the language of the user.
SSH = "case $LC_ALL in C) echo Connection refused;; *) echo Verbindungsaufbau abgelehnt;; esac"


def test_a_refusal_is_recognized_in_every_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    channel = LineChannel(["sh", "-c", f"({SSH}) >&2; exit 255"], Endpoint(host="192.0.2.1"))
    with pytest.raises(ConnectionRefusedByServerError):
        channel.exchange(b"hello\n")
