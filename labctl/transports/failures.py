"""Errors of connections, each with its own message and next step."""

from __future__ import annotations

import re
import shlex

from labctl.commands.ssh import parse_hops
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
    UnknownHostKeyError,
    UnreachableError,
)
from labctl.model import Endpoint


def endpoint_text(endpoint: Endpoint) -> str:
    """Return user@host for messages, with the port if it is not 22."""
    port = "" if endpoint.port == 22 else f":{endpoint.port}"
    return f"{endpoint.user}@{endpoint.host}{port}"


def make_dns_error(endpoint: Endpoint, why: str) -> DnsError:
    return DnsError(
        f"the name {endpoint.host} does not resolve",
        why=why.rpartition(f"{endpoint.host}: ")[2],  # ssh repeats that it does not resolve
        hint=lambda subject: (
            f"{subject.up}   # after you checked the name and this machine's network (a VPN?)"
        ),
    )


def make_refused_error(endpoint: Endpoint, why: str) -> ConnectionRefusedByServerError:
    return ConnectionRefusedByServerError(
        f"{endpoint.host} refuses connections to port {endpoint.port}",
        why=why or "the machine is up, but nothing listens there",
        hint=lambda subject: (
            f"{subject.up}   # finds a restarted server; otherwise check the port and its sshd\n"
            f"{subject.refresh}   # says whether the server was stopped, and why"
        ),
    )


def make_unreachable_error(endpoint: Endpoint, why: str) -> UnreachableError:
    return UnreachableError(
        f"{endpoint_text(endpoint)} cannot be reached",
        why=why or "no answer",
        hint=lambda subject: (
            f"{subject.up}   # finds a server that was restarted or has another address"
        ),
    )


def make_turned_away_error(endpoint: Endpoint, why: str) -> TurnedAwayError:
    return TurnedAwayError(
        f"{endpoint_text(endpoint)} closed the connection before sending an SSH banner",
        why=why or "its sshd may be starting, or there are too many simultaneous logins",
        hint=lambda subject: f"{subject.up}   # in a minute",
    )


def make_jump_error(endpoint: Endpoint, why: str) -> ConnectError:
    return ConnectError(
        f"{endpoint_text(endpoint)} cannot be reached through {_describe_hop(endpoint)}",
        why=why,
        hint=_suggest_hop_login(endpoint),
    )


def make_unknown_jump_key_error(endpoint: Endpoint, why: str) -> UnknownHostKeyError:
    return UnknownHostKeyError(
        f"{_describe_hop(endpoint)} has a host key that your ssh does not know",
        why=why,
        hint=f"{_suggest_hop_login(endpoint)}   # once, so that ssh can ask you about the key",
    )


def make_changed_jump_key_error(endpoint: Endpoint) -> HostKeyError:
    return HostKeyError(
        f"{_describe_hop(endpoint)} has another host key than the one that your ssh knows",
        why="it was reinstalled, or another machine answers at its address",
        hint="ask its administrator, then look at what your ssh says:\n"
        f"{_suggest_hop_login(endpoint)}",
    )


def _describe_hop(endpoint: Endpoint) -> str:
    return f"the jump host {endpoint.jump}" if endpoint.jump else "its proxy command"


def _suggest_hop_login(endpoint: Endpoint) -> str:
    """Return the plain ssh command that shows why the last jump host cannot be used."""
    if not endpoint.jump:
        return shlex.join(_list_login_words(endpoint))
    earlier, _, last = endpoint.jump.rpartition(",")
    (hop,) = parse_hops(last)
    words = ["ssh", *(["-J", earlier] if earlier else [])]
    words += ["-p", str(hop.port)] if hop.port else []
    return shlex.join([*words, f"{hop.user}@{hop.host}" if hop.user else hop.host])


def _list_login_words(endpoint: Endpoint) -> list[str]:
    """Return the words of the plain ssh command that shows where the connection ends."""
    port = ["-p", str(endpoint.port)] if endpoint.port != 22 else []
    return ["ssh", "-v", *port, f"{endpoint.user}@{endpoint.host}"]


def make_authentication_error(endpoint: Endpoint, why: str) -> AuthenticationError:
    key = f"the key {endpoint.identity}" if endpoint.identity else "any of your keys"
    return AuthenticationError(
        f"{endpoint_text(endpoint)} does not accept {key}",
        endpoint=endpoint,
        why=why,
        hint=copy_key_command(endpoint, endpoint.identity),
    )


def copy_key_command(endpoint: Endpoint, key: str) -> str:
    """Return the command that sets up a key with a password; ssh-copy-id finds a key for ""."""
    words = ["ssh-copy-id"]
    words += ["-i", key] if key else []
    words += ["-p", str(endpoint.port)] if endpoint.port != 22 else []
    words += ["-o", f"ProxyJump={endpoint.jump}"] if endpoint.jump else []
    return shlex.join([*words, f"{endpoint.user}@{endpoint.host}"])


def make_wrong_host_key_error(endpoint: Endpoint, why: str) -> HostKeyError:
    return HostKeyError(
        f"the host key of {endpoint_text(endpoint)} is not the one that was pinned",
        why=why or "the server was reinstalled, or another machine answers at its address",
        hint=lambda subject: (
            "ask the administrator; if it was changed on purpose:\n"
            f"{subject.down} --discard\n{subject.up}"
        ),
    )


def make_unpinned_host_key_error(endpoint: Endpoint) -> HostKeyError:
    return HostKeyError(
        f"no host key is pinned for {endpoint_text(endpoint)}",
        why="labctl only connects to a server whose host key is pinned",
        hint=lambda subject: subject.up,
    )


def make_link_lost_error(endpoint: Endpoint, why: str) -> LinkLostError:
    return LinkLostError(
        f"the connection to {endpoint_text(endpoint)} was lost",
        why=why or "it was closed before the command's exit code arrived",
        hint=lambda subject: subject.status,
    )


def make_timeout_error(endpoint: Endpoint) -> BusyError:
    return BusyError(
        f"{endpoint_text(endpoint)} did not finish a command in time",
        why="labctl stopped waiting; the command may still be running there",
        hint=lambda subject: subject.status,
    )


def make_silent_sftp_error(endpoint: Endpoint, silence_s: float) -> BusyError:
    return BusyError(
        f"{endpoint_text(endpoint)} did not answer an SFTP request within {silence_s:.0f} s",
        why="its sshd answers, but the SFTP server that sshd starts does not",
        hint=lambda subject: subject.status,
    )


def make_command_error(endpoint: Endpoint, line: str, code: int, stderr: str) -> CommandError:
    shown = line if len(line) <= 200 else line[:200] + "..."
    return CommandError(
        f"a command on {endpoint.host} failed with exit code {code}: {shown}",
        code=code,
        stderr=stderr,
    )


_CHANGED_KEY = r"REMOTE HOST IDENTIFICATION HAS CHANGED"
_UNKNOWN_KEY = r"No \S+ host key is known for|authenticity of host"
_REFUSED_KEY = r"Host key verification failed"
# (kind of error, regular expression) for the messages of OpenSSH, which exits with 255 for every
# error of its own; the first match decides.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("key", f"{_CHANGED_KEY}|{_REFUSED_KEY}"),
    ("no key", _UNKNOWN_KEY),
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
# Behind a hop, only the hop's program opens a connection ("connect to host"). What ssh prints when
# that program ends depends on whether ssh reads or writes then.
_HOP_ENDED = (
    r"connect to host|kex_exchange_identification|Connection (closed|reset) by|UNKNOWN port"
    r"|Broken pipe"
)


def parse_ssh_error(endpoint: Endpoint, stderr: str) -> LabError:
    """Turn what OpenSSH printed, before a command was started, into an error."""
    text = stderr.replace("\r", "").strip()
    why = _find_decisive_line(text)
    kinds = [kind for kind, pattern in _PATTERNS if re.search(pattern, text)]
    kind = "no key" if "no key" in kinds else (kinds or ["connect"])[0]
    is_behind_hop = endpoint.jump or endpoint.proxy_command
    if is_behind_hop and kind != "away" and re.search(_HOP_ENDED, text):
        return parse_hop_error(endpoint, stderr)
    match kind:
        case "no key":
            return (
                make_wrong_host_key_error(endpoint, why)
                if endpoint.host_key
                else make_unpinned_host_key_error(endpoint)
            )
        case "key":
            return make_wrong_host_key_error(endpoint, "")
        case "dns":
            return make_dns_error(endpoint, why)
        case "refused":
            return make_refused_error(endpoint, why)
        case "auth":
            return make_authentication_error(endpoint, why)
        case "away":
            return make_turned_away_error(endpoint, why)
    return make_unreachable_error(endpoint, why)


def parse_hop_error(endpoint: Endpoint, stderr: str) -> LabError:
    """Turn what the ssh of a jump host, or another proxy command, printed into an error."""
    text = stderr.replace("\r", "").strip()
    if re.search(_CHANGED_KEY, text):
        return make_changed_jump_key_error(endpoint)
    if unknown := re.search(rf".*(?:{_UNKNOWN_KEY}).*", text):
        return make_unknown_jump_key_error(endpoint, unknown[0])
    if re.search(_REFUSED_KEY, text):
        return make_unknown_jump_key_error(endpoint, _find_decisive_line(text))
    return make_jump_error(endpoint, _find_decisive_line(text))


def _find_decisive_line(text: str) -> str:
    """Find the line that decides the kind of the error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("@")]
    for _, pattern in _PATTERNS:
        for line in lines:
            if re.search(pattern, line):
                return line.removeprefix("ssh: ")
    return lines[-1] if lines else ""
