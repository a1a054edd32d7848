"""Logs in with fabric. Only the endpoint's pinned host keys are accepted."""

from __future__ import annotations

import logging
import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fabric
import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from labctl.commands import ssh
from labctl.errors import ConnectError, LabError
from labctl.model import Endpoint
from labctl.retry import retry_rejected_logins
from labctl.transports import failures
from labctl.transports.keepalive import KeepAlive
from labctl.transports.proxy_command import ProxySocket, can_start

STEP_TIMEOUT_S = 8.0
# How long sent bytes may stay unacknowledged before the kernel gives up the connection.
TCP_USER_TIMEOUT_MS = 7000
_HUNG_UP = (EOFError, ConnectionResetError)
_KEX = ("curve25519-sha256@libssh.org", "mlkem768x25519-sha256", "ecdh-sha2-nistp256")
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
# Without a handler, Python prints paramiko's tracebacks of errors that are raised anyway.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Login:
    """An authenticated connection, and the login to the jump host that it goes through."""

    connection: fabric.Connection
    keepalive: KeepAlive
    jump: Login | None

    @property
    def transport(self) -> paramiko.Transport:
        transport: paramiko.Transport = self.connection.transport
        return transport

    @property
    def is_alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        self.keepalive.stop()
        self.connection.close()
        if self.jump is not None:
            self.jump.close()


class LoginStrategy(Protocol):
    """Authenticates on a connection whose host key is verified; paramiko calls it."""

    def authenticate(self, transport: paramiko.Transport) -> None: ...


@dataclass(frozen=True)
class _Keys:
    """The keys to log in with: one private key, those of the user's agent, those in ~/.ssh.

    `strategy` replaces all of them.
    """

    private: paramiko.PKey | None = None
    use_agent: bool = False
    use_home: bool = False
    strategy: LoginStrategy | None = None


class _PinnedKeys(paramiko.MissingHostKeyPolicy):
    """Accepts the endpoint's pinned keys. Without any, it refuses with `presented` set."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._pinned = [
            key.split()[:2] for key in (endpoint.host_key, endpoint.next_host_key) if key
        ]
        self.presented = ""
        self.is_accepted = False

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        self.presented = f"{key.get_name()} {key.get_base64()}"
        self.is_accepted = self.presented.split() in self._pinned
        if not self.is_accepted:
            raise failures.make_wrong_host_key_error(self._endpoint, "")


def log_in(
    endpoint: Endpoint, known_hosts: Path | None = None, strategy: LoginStrategy | None = None
) -> Login:
    """Connect, compare the host key, authenticate. `known_hosts` has the keys of jump hosts.

    `strategy` authenticates, if given, instead of the endpoint's keys. Raises what it raises, the
    ConnectError family, HostKeyError and AuthenticationError.
    """
    if not endpoint.host_key:
        raise failures.make_unpinned_host_key_error(endpoint)
    keys = _Keys(strategy=strategy) if strategy else None
    return retry_rejected_logins(_log_in, endpoint, known_hosts, keys)


def fetch_host_key(endpoint: Endpoint, known_hosts: Path | None = None) -> str:
    """Return the key ("ssh-ed25519 AAAA...") that the server presents, without logging in.

    It proves nothing by itself: a person has to confirm it. Raises the ConnectError family.
    """

    def fetch() -> str:
        jump = _log_in_to_jump_host(endpoint, known_hosts)
        pinned = _PinnedKeys(Endpoint(host=endpoint.host))
        connection = _make_connection(endpoint, jump, pinned, _Keys())
        try:
            _open(connection, endpoint, pinned)
        except LabError:
            if not pinned.presented:
                raise
        finally:
            connection.client.close()
            if jump is not None:
                jump.close()
        return pinned.presented

    return retry_rejected_logins(fetch)


def _log_in(endpoint: Endpoint, known_hosts: Path | None, keys: _Keys | None = None) -> Login:
    jump = _log_in_to_jump_host(endpoint, known_hosts)
    pinned = _PinnedKeys(endpoint)
    connection = _make_connection(endpoint, jump, pinned, keys or _read_keys(endpoint))
    try:
        _open(connection, endpoint, pinned)
    except BaseException:
        connection.client.close()
        if jump is not None:
            jump.close()
        raise
    return Login(connection, KeepAlive(connection.transport), jump)


def _make_connection(
    endpoint: Endpoint, jump: Login | None, pinned: _PinnedKeys, keys: _Keys
) -> fabric.Connection:
    """A connection that is not open yet. It reads no ssh_config: the endpoint says everything."""
    gateway: fabric.Connection | bool = jump.connection if jump is not None else False
    host = ssh.check_host(endpoint.host)
    # A gateway brings a channel of its own.
    own_socket = {} if gateway else {"sock": _open_socket(endpoint)}
    connection = fabric.Connection(
        host=host,
        user=endpoint.user,
        port=endpoint.port,
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
        gateway=gateway,
        connect_timeout=int(STEP_TIMEOUT_S),
        connect_kwargs={
            "banner_timeout": STEP_TIMEOUT_S,
            "auth_timeout": STEP_TIMEOUT_S,
            "channel_timeout": STEP_TIMEOUT_S,
            "transport_factory": _transport_factory(endpoint.host_key),
            "pkey": keys.private,
            "allow_agent": keys.use_agent,
            "look_for_keys": keys.use_home,
            "auth_strategy": keys.strategy,
            **own_socket,
        },
    )
    connection.client.set_missing_host_key_policy(pinned)
    return connection


def _transport_factory(host_key: str) -> Any:
    """Make transports that prefer fast algorithms and ask for the kind of key that is pinned."""
    kind = host_key.split()[0] if host_key else ""
    kinds = ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)

    def make(sock: Any, **named: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **named)
        options = transport.get_security_options()
        options.kex = [*_KEX, *(name for name in options.kex if name not in _KEX)]
        options.ciphers = [*_CIPHERS, *(name for name in options.ciphers if name not in _CIPHERS)]
        if kind:
            options.key_types = kinds
        return transport

    return make


def _open(connection: fabric.Connection, endpoint: Endpoint, pinned: _PinnedKeys) -> None:
    try:
        connection.open()
    except IncompatiblePeer as error:
        # paramiko has one class for all that two sides cannot agree on.
        if endpoint.host_key and "host key" in str(error):
            raise failures.make_wrong_host_key_error(
                endpoint, "it has no key of the kind we knew"
            ) from error
        raise failures.make_unreachable_error(endpoint, str(error)) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        transport = connection.client.get_transport()
        if isinstance(error, _HUNG_UP) or isinstance(error.__context__, _HUNG_UP):
            wire = connection.connect_kwargs.get("sock")
            if isinstance(wire, ProxySocket) and (stderr := wire.read_stderr()):
                raise failures.parse_hop_error(endpoint, stderr) from error
            raise failures.make_turned_away_error(endpoint, "") from error
        if pinned.is_accepted and transport is not None and transport.is_active():
            raise failures.make_authentication_error(endpoint, _reason(error)) from error
        if endpoint.jump and transport is None:
            raise failures.make_jump_error(endpoint, _reason(error)) from error
        raise failures.make_unreachable_error(endpoint, _reason(error)) from error


def _reason(error: BaseException) -> str:
    return str(error) or "the server closed the connection"


def _open_socket(endpoint: Endpoint) -> socket.socket:
    if endpoint.proxy_command:
        return ProxySocket.start(endpoint)
    try:
        wire = socket.create_connection((endpoint.host, endpoint.port), timeout=STEP_TIMEOUT_S)
    except socket.gaierror as error:
        raise failures.make_dns_error(endpoint, str(error)) from error
    except ConnectionRefusedError as error:
        raise failures.make_refused_error(endpoint, "") from error
    except OSError as error:
        raise failures.make_unreachable_error(endpoint, _reason(error)) from error
    # Before the handshake: with Nagle's algorithm one command takes 48 ms instead of 3.5.
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    return wire


def _log_in_to_jump_host(endpoint: Endpoint, known_hosts: Path | None) -> Login | None:
    if not endpoint.jump or endpoint.proxy_command:
        return None
    *earlier, last = endpoint.jump.split(",")
    (hop,) = ssh.parse_hops(last)
    port = hop.port or 22
    jump = Endpoint(
        host=hop.host,
        port=port,
        user=hop.user or pwd.getpwuid(os.getuid()).pw_name,
        identity=endpoint.identity,
        jump=",".join(earlier),
        host_key=_find_known_key(ssh.known_hosts_name(hop.host, port), known_hosts),
    )
    if not jump.host_key:
        why = f"no host key of {hop.host} is known"
        raise failures.make_unknown_jump_key_error(endpoint, why)
    try:
        return log_in(jump, known_hosts)
    except ConnectError as error:
        raise failures.make_jump_error(endpoint, f"{error.what}: {error.why}") from error


def _find_known_key(name: str, known_hosts: Path | None) -> str:
    """The key that a known_hosts file has for `name`; hashed names are found too."""
    if known_hosts is None or not known_hosts.is_file():
        return ""
    keys = paramiko.HostKeys(str(known_hosts)).lookup(name)
    for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"):
        if keys is not None and kind in keys:
            return f"{kind} {keys[kind].get_base64()}"
    return ""


def can_log_in(endpoint: Endpoint) -> bool:
    """Return whether this module knows all that the endpoint's login needs; OpenSSH knows more.

    The key must be a file that this process can read without a question: OpenSSH also uses agents,
    security tokens and passphrases. A proxy command must have no other tokens than %h, %p and %r.
    """
    if not can_start(endpoint.proxy_command):
        return False
    try:
        return bool(endpoint.identity) and load_key(Path(endpoint.identity)) is not None
    except (OSError, ValueError, paramiko.SSHException):
        return False


def _read_keys(endpoint: Endpoint) -> _Keys:
    """The named key alone; without one the agent's keys, then those in ~/.ssh.

    Of a key with a passphrase, only the agent can have the private half.
    """
    if not endpoint.identity:
        return _Keys(use_agent=True, use_home=True)
    path = Path(endpoint.identity)
    try:
        key = load_key(path)
    except (OSError, ValueError, paramiko.SSHException) as error:
        raise LabError(
            f"the key {path} cannot be read", why=_reason(error), hint=f"ls -l {path}"
        ) from error
    return _Keys(use_agent=True) if key is None else _Keys(private=key)


def load_key(path: Path) -> paramiko.PKey | None:
    """Load a private key; None if it has a passphrase."""
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):
        return None  # TypeError is what the cryptography package raises
