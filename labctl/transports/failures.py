"""The ways in which a server cannot be reached, each with its own words and next step."""

from __future__ import annotations

import re

from labctl.errors import (
    AuthenticationError,
    BusyError,
    CommandError,
    ConnectError,
    ConnectionRefusedByServerError,
    DnsError,
    HostKeyError,
    LabError,
    LinkLostError,
    TurnedAwayError,
)
from labctl.model import Endpoint


def place(endpoint: Endpoint) -> str:
    """How messages name a server: user@host, with the port where it is not 22."""
    port = "" if endpoint.port == 22 else f":{endpoint.port}"
    return f"{endpoint.user}@{endpoint.host}{port}"


def dns(endpoint: Endpoint, why: str) -> DnsError:
    return DnsError(
        f"the name {endpoint.host} does not resolve",
        why=why,
        hint="check the name and this machine's network (a VPN?), then try again",
    )


def refused(endpoint: Endpoint, why: str) -> ConnectionRefusedByServerError:
    return ConnectionRefusedByServerError(
        f"{endpoint.host} refuses connections to port {endpoint.port}",
        why=why or "the machine is up, but nothing listens there",
        hint="labctl up   # finds a server that has restarted; else check the port and its sshd",
    )


def unreachable(endpoint: Endpoint, why: str) -> ConnectError:
    return ConnectError(
        f"{place(endpoint)} cannot be reached",
        why=why or "no answer",
        hint="labctl doctor",
    )


def turned_away(endpoint: Endpoint, why: str) -> TurnedAwayError:
    return TurnedAwayError(
        f"{place(endpoint)} closed the connection before it greeted",
        why=why or "its sshd may be starting, or too many log in at once",
        hint="try again in a minute",
    )


def on_the_way(endpoint: Endpoint, why: str, *, key: bool) -> LabError:
    """What failed is the jump host or proxy command, not the server."""
    way = f"the jump host {endpoint.jump}" if endpoint.jump else "its proxy command"
    hint = f"ssh {endpoint.jump.rpartition(',')[2]}" if endpoint.jump else "labctl doctor"
    if key:
        return HostKeyError(f"{way} has a host key that your ssh does not know", why=why, hint=hint)
    return ConnectError(f"{place(endpoint)} cannot be reached through {way}", why=why, hint=hint)


def not_accepted(endpoint: Endpoint, why: str) -> AuthenticationError:
    key = f"the key {endpoint.identity}" if endpoint.identity else "any of your keys"
    return AuthenticationError(
        f"{place(endpoint)} does not accept {key}",
        why=why,
        hint=(
            f"ssh-copy-id -i {endpoint.identity} -p {endpoint.port} {endpoint.user}@{endpoint.host}"
            if endpoint.identity
            else "ssh-add -l shows the keys that your agent offers"
        ),
    )


def wrong_key(endpoint: Endpoint, why: str) -> HostKeyError:
    return HostKeyError(
        f"{place(endpoint)} is not the server that labctl knows: its host key is another one",
        why=why or "it was reinstalled, or another machine answers at its address",
        hint="ask whoever runs it; if the change is meant, `labctl down` and then `labctl up`",
    )


def no_key(endpoint: Endpoint) -> HostKeyError:
    return HostKeyError(
        f"no host key is pinned for {place(endpoint)}",
        why="labctl never connects to a server whose key it does not know",
        hint="labctl up",
    )


def lost(endpoint: Endpoint, why: str) -> LinkLostError:
    return LinkLostError(
        f"the connection to {place(endpoint)} was lost",
        why=why or "it ended before the command's exit code arrived",
        hint="labctl status",
    )


def too_slow(endpoint: Endpoint) -> BusyError:
    return BusyError(
        f"{place(endpoint)} did not finish a command in time",
        why="it was given up; it may still be running there",
        hint="labctl status",
    )


def failed(endpoint: Endpoint, line: str, code: int, stderr: str) -> CommandError:
    shown = line if len(line) <= 200 else line[:200] + "..."
    return CommandError(
        f"a command on {endpoint.host} failed with exit code {code}: {shown}",
        code=code,
        stderr=stderr,
    )


_SIGNS: tuple[tuple[str, str], ...] = (
    ("key", r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed"),
    ("no key", r"No \S+ host key is known for|authenticity of host"),
    ("dns", r"Could not resolve hostname|Name or service not known|nodename nor servname"),
    ("refused", r"Connection refused"),
    ("auth", r"Permission denied|Too many authentication failures|no mutual signature"),
    (
        "connect",
        r"timed out|No route to host|unreachable|banner exchange|stdio forwarding failed"
        r"|Unable to negotiate|Bad configuration|Host is down|Operation not permitted",
    ),
    ("away", r"kex_exchange_identification|Connection (closed|reset) by"),
)


def of_ssh(endpoint: Endpoint, said: str) -> LabError:
    """The error that OpenSSH's last words `said` amount to, before a command was started."""
    text = said.replace("\r", "").strip()
    why = _telling_line(text)
    kinds = [kind for kind, pattern in _SIGNS if re.search(pattern, text)]
    kind = "no key" if "no key" in kinds else (kinds or ["connect"])[0]
    if (endpoint.jump or endpoint.proxy_command) and "away" in kinds and kind != "away":
        return on_the_way(endpoint, why, key=kind in ("key", "no key"))
    match kind:
        case "no key":
            return wrong_key(endpoint, why) if endpoint.host_key else no_key(endpoint)
        case "key":
            return wrong_key(endpoint, "")
        case "dns":
            return dns(endpoint, why)
        case "refused":
            return refused(endpoint, why)
        case "auth":
            return not_accepted(endpoint, why)
        case "away":
            return turned_away(endpoint, why)
    return unreachable(endpoint, why)


def _telling_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("@")]
    for _, pattern in _SIGNS:
        for line in lines:
            if re.search(pattern, line):
                return line.removeprefix("ssh: ")
    return lines[-1] if lines else ""
