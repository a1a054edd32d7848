"""OpenSSH's last words, as several versions and systems say them, and what they amount to."""

from __future__ import annotations

import msgspec
import pytest

from labctl.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionRefusedByServerError,
    DnsError,
    HostKeyError,
    LabError,
    TurnedAwayError,
    UnknownHostKeyError,
    UnreachableError,
)
from labctl.model import Endpoint
from labctl.transports import failures

HERE = Endpoint(host="gpu1", port=2222, user="alice", host_key="ssh-ed25519 AAAA")
JUMPED = msgspec.structs.replace(HERE, jump="bob@bastion")

CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\r
Host key verification failed.\r
"""
WAY_CLOSED = "kex_exchange_identification: Connection closed by remote host\n"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known\r\n", DnsError),
        ("ssh: Could not resolve hostname gpu1: nodename nor servname provided\n", DnsError),
        ("ssh: Could not resolve hostname gpu1: Temporary failure in name resolution", DnsError),
        (
            "ssh: connect to host gpu1 port 2222: Connection refused\n",
            ConnectionRefusedByServerError,
        ),
        ("ssh: connect to host gpu1 port 2222: Connection timed out\n", UnreachableError),
        ("ssh: connect to host gpu1 port 2222: Operation timed out\n", UnreachableError),
        ("ssh: connect to host gpu1 port 2222: No route to host\n", UnreachableError),
        ("ssh: connect to host gpu1 port 2222: Network is unreachable\n", UnreachableError),
        ("Connection timed out during banner exchange\n", UnreachableError),
        ("something never heard of\n", UnreachableError),
        ("", UnreachableError),
        ("alice@gpu1: Permission denied (publickey,password).\n", AuthenticationError),
        ("Received disconnect from 1.2.3.4: Too many authentication failures", AuthenticationError),
        (CHANGED, HostKeyError),
        ("No ED25519 host key is known for i-1 and you have requested strict", HostKeyError),
        (WAY_CLOSED, TurnedAwayError),
        ("kex_exchange_identification: read: Connection reset by peer\n", TurnedAwayError),
    ],
)
def test_each_kind_has_its_error(said: str, kind: type[LabError]) -> None:
    error = failures.parse_ssh_error(HERE, said)
    assert type(error) is kind
    assert "gpu1" in error.what
    assert error.hint
    assert "\r" not in error.why


def test_a_name_that_does_not_resolve_is_said_once() -> None:
    error = failures.parse_ssh_error(HERE, "ssh: Could not resolve hostname gpu1: not known\n")
    assert (error.what, error.why) == ("the name gpu1 does not resolve", "not known")


def test_whoever_was_turned_away_tries_again_to_connect() -> None:
    error = failures.parse_ssh_error(HERE, WAY_CLOSED)
    assert error.hint == "labctl up   # in a minute"


def test_messages_differ_and_quote_what_tells() -> None:
    error = failures.parse_ssh_error(
        HERE, "Warning: noise\nssh: connect to host gpu1: No route to host\n"
    )
    assert error.what == "alice@gpu1:2222 cannot be reached"
    assert error.why == "connect to host gpu1: No route to host"


def test_an_unpinned_key_is_not_a_changed_one() -> None:
    said = "No ED25519 host key is known for i-1 and you have requested strict checking."
    unpinned = failures.parse_ssh_error(msgspec.structs.replace(HERE, host_key=""), said)
    assert "no host key is pinned" in unpinned.what
    assert "not the one that was pinned" in failures.parse_ssh_error(HERE, said).what


@pytest.mark.parametrize(
    ("said", "kind", "word"),
    [
        (
            "No ED25519 host key is known for bastion\n" + WAY_CLOSED,
            UnknownHostKeyError,
            "bastion",
        ),
        (
            "ssh: connect to host bastion: Connection refused\n" + WAY_CLOSED,
            ConnectError,
            "refused",
        ),
        ("bob@bastion: Permission denied (publickey).\n" + WAY_CLOSED, ConnectError, "denied"),
        ("stdio forwarding failed\n" + WAY_CLOSED, ConnectError, "forwarding"),
    ],
)
def test_a_failing_way_is_not_blamed_on_the_server(
    said: str, kind: type[LabError], word: str
) -> None:
    error = failures.parse_ssh_error(JUMPED, said)
    assert type(error) is kind
    assert "jump host bob@bastion" in error.what
    assert word in f"{error.what} {error.why}"
    assert error.hint.partition("   # ")[0] == "ssh bob@bastion"


@pytest.mark.parametrize(
    "end",
    [
        "",
        WAY_CLOSED,
        "Connection closed by UNKNOWN port 65535\n",
        "banner exchange: Connection to UNKNOWN port 65535: Broken pipe\n",
    ],
)
def test_a_jump_host_that_refuses_is_not_the_server(end: str) -> None:
    refused = "ssh: connect to host bastion port 22: Connection refused\n"
    error = failures.parse_ssh_error(JUMPED, refused + end)
    assert "cannot be reached through the jump host bob@bastion" in error.what
    assert error.hint == "ssh bob@bastion"


def test_the_changed_key_of_a_jump_host_is_not_an_unknown_one() -> None:
    said = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n" + WAY_CLOSED
    error = failures.parse_ssh_error(JUMPED, said)
    assert type(error) is HostKeyError
    assert "jump host bob@bastion has another host key" in error.what


@pytest.mark.parametrize(
    ("jump", "command"),
    [
        ("bastion", "ssh bastion"),
        ("bob@bastion:2222", "ssh -p 2222 bob@bastion"),
        ("outer,bob@inner:2222", "ssh -J outer -p 2222 bob@inner"),
    ],
)
def test_the_command_that_shows_why_a_jump_host_fails(jump: str, command: str) -> None:
    error = failures.make_jump_error(msgspec.structs.replace(HERE, jump=jump), "")
    assert error.hint == command
