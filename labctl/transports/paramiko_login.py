"""Logging in with paramiko: the socket (direct, proxied or through jump hosts), keys, watchdog.

An unknown host key is never accepted: `log_in` compares with the endpoint's pinned key alone.
"""

from __future__ import annotations

import logging
import os
import pwd
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from labctl.commands import ssh
from labctl.errors import ConnectError, LabError
from labctl.model import Endpoint
from labctl.retry import while_turned_away
from labctl.transports import failures

STEP_TIMEOUT_S = 8.0
PING_EVERY_S = 2.0
SILENT_FOR_S = 7.0
_HUNG_UP = (EOFError, ConnectionResetError)
_KEX = ("curve25519-sha256@libssh.org", "mlkem768x25519-sha256", "ecdh-sha2-nistp256")
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
# Else Python itself prints paramiko's tracebacks, of errors that are raised anyway.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class Watchdog:
    """Closes a connection whose other side has stopped answering.

    paramiko's own keep-alive asks for no answer, so it never notices. Two threads, since a ping
    into a dead link blocks once the socket's buffer is full.
    """

    def __init__(self, transport: paramiko.Transport, wire: socket.socket | None) -> None:
        self._transport = transport
        self._wire = wire
        self._heard = time.monotonic()
        self._stopped = threading.Event()
        for loop in (self._ping, self._watch):
            threading.Thread(target=loop, name="labctl-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _ping(self) -> None:
        while not self._stopped.wait(PING_EVERY_S) and self._transport.is_active():
            try:
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, OSError, EOFError):
                return
            self._heard = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5) and self._transport.is_active():
            if time.monotonic() - self._heard > SILENT_FOR_S:
                if self._wire is not None:
                    self._wire.close()  # frees a thread that is blocked in writing
                self._transport.close()
                return


@dataclass(frozen=True)
class Login:
    """A connection that is logged in, with what it goes through."""

    transport: paramiko.Transport
    watchdog: Watchdog
    way: Login | None

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        self.watchdog.stop()
        self.transport.close()
        if self.way is not None:
            self.way.close()


@dataclass(frozen=True)
class _Wire:
    """Something that bytes go through to a server: a socket or a jump host's channel."""

    end: socket.socket | paramiko.Channel
    way: Login | None = None

    def close(self) -> None:
        self.end.close()
        if self.way is not None:
            self.way.close()


def log_in(endpoint: Endpoint, known_hosts: Path | None = None) -> Login:
    """Connect, compare the host key, authenticate. `known_hosts` is where jump hosts' keys are.

    Raises the ConnectError family, HostKeyError and AuthenticationError.
    """
    if not endpoint.host_key:
        raise failures.no_key(endpoint)
    kinds = _key_algorithms(endpoint.host_key)
    wire, transport = while_turned_away()(_greet, endpoint, known_hosts, kinds)
    try:
        remote = transport.get_remote_server_key()
        presented = f"{remote.get_name()} {remote.get_base64()}"
        pinned = (endpoint.host_key, endpoint.next_host_key)
        if presented.split() not in [key.split()[:2] for key in pinned if key]:
            raise failures.wrong_key(endpoint, "")
        _authenticate(transport, endpoint)
    except BaseException:
        transport.close()
        wire.close()
        raise
    bare = wire.end if isinstance(wire.end, socket.socket) else None
    return Login(transport, Watchdog(transport, bare), wire.way)


def fetch_host_key(endpoint: Endpoint, known_hosts: Path | None = None) -> str:
    """The key ("ssh-ed25519 AAAA...") that the server presents, asked without logging in.

    It proves nothing by itself: a person has to confirm it. Raises the ConnectError family.
    """
    wire, transport = while_turned_away()(_greet, endpoint, known_hosts, ())
    try:
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"
    finally:
        transport.close()
        wire.close()


def _key_algorithms(host_key: str) -> tuple[str, ...]:
    kind = host_key.split()[0]
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _greet(
    endpoint: Endpoint, known_hosts: Path | None, key_algorithms: tuple[str, ...]
) -> tuple[_Wire, paramiko.Transport]:
    """Agree on keys with the server; who it is must still be compared."""
    wire = _open_wire(endpoint, known_hosts)
    try:
        transport = paramiko.Transport(wire.end)
        transport.banner_timeout = STEP_TIMEOUT_S
        transport.auth_timeout = STEP_TIMEOUT_S
        options = transport.get_security_options()
        options.kex = [*_KEX, *(name for name in options.kex if name not in _KEX)]
        options.ciphers = [*_CIPHERS, *(name for name in options.ciphers if name not in _CIPHERS)]
        if key_algorithms:
            options.key_types = key_algorithms
        transport.start_client(timeout=STEP_TIMEOUT_S)
        if not transport.initial_kex_done:  # that timeout passes in silence
            raise TimeoutError(f"no greeting within {STEP_TIMEOUT_S:g} s")
    except IncompatiblePeer as error:
        wire.close()
        if key_algorithms and "host key" in str(error):
            raise failures.wrong_key(endpoint, "it has no key of the kind we knew") from error
        raise failures.unreachable(endpoint, str(error)) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        wire.close()
        if isinstance(error, _HUNG_UP) or isinstance(error.__context__, _HUNG_UP):
            raise failures.turned_away(endpoint, "") from error
        raise failures.unreachable(endpoint, _said(error)) from error
    return wire, transport


def _said(error: BaseException) -> str:
    return str(error) or "the server closed the connection"


def _open_wire(endpoint: Endpoint, known_hosts: Path | None) -> _Wire:
    ssh.check_host(endpoint.host)
    if endpoint.jump:
        return _through_jump(endpoint, known_hosts)
    if endpoint.proxy_command:
        return _Wire(_through_command(endpoint))
    try:
        wire = socket.create_connection((endpoint.host, endpoint.port), timeout=STEP_TIMEOUT_S)
    except socket.gaierror as error:
        raise failures.dns(endpoint, str(error)) from error
    except ConnectionRefusedError as error:
        raise failures.refused(endpoint, "") from error
    except OSError as error:
        raise failures.unreachable(endpoint, _said(error)) from error
    # Before the handshake: with Nagle's algorithm one command takes 48 ms instead of 3.5.
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Wire(wire)


def _through_command(endpoint: Endpoint) -> socket.socket:
    """A socket whose other end is the proxy command's standard input and output."""
    words = {"%h": endpoint.host, "%p": str(endpoint.port), "%r": endpoint.user, "%%": "%"}
    parts = endpoint.proxy_command.split("%%")
    for token in ("%h", "%p", "%r"):
        parts = [part.replace(token, words[token]) for part in parts]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["sh", "-c", "exec " + "%".join(parts)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
        )
    threading.Thread(target=process.wait, name="labctl-proxy", daemon=True).start()
    return ours


def _through_jump(endpoint: Endpoint, known_hosts: Path | None) -> _Wire:
    *earlier, last = endpoint.jump.split(",")
    (hop,) = ssh.parse_hops(last)
    port = hop.port or 22
    near = Endpoint(
        host=hop.host,
        port=port,
        user=hop.user or pwd.getpwuid(os.getuid()).pw_name,
        identity=endpoint.identity,
        jump=",".join(earlier),
        host_key=_known(ssh.known_hosts_name(hop.host, port), known_hosts),
    )
    if not near.host_key:
        raise failures.on_the_way(endpoint, f"no host key of {hop.host} is known", key=True)
    try:
        way = log_in(near, known_hosts)
    except ConnectError as error:
        raise failures.on_the_way(endpoint, f"{error.what}: {error.why}", key=False) from error
    try:
        channel = way.transport.open_channel(
            "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=STEP_TIMEOUT_S
        )
    except (paramiko.SSHException, OSError, EOFError) as error:
        way.close()
        raise failures.on_the_way(endpoint, _said(error), key=False) from error
    return _Wire(channel, way)


def _known(name: str, known_hosts: Path | None) -> str:
    """The key that a known_hosts file holds for `name`; hashed names are found too."""
    if known_hosts is None or not known_hosts.is_file():
        return ""
    found = paramiko.HostKeys(str(known_hosts)).lookup(name)
    for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"):
        if found is not None and kind in found:
            return f"{kind} {found[kind].get_base64()}"
    return ""


def _authenticate(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    refusal = "there is no key to try"
    for key in _keys(endpoint):
        try:
            transport.auth_publickey(endpoint.user, key)
        except paramiko.AuthenticationException as error:
            refusal = _said(error)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise failures.unreachable(endpoint, _said(error)) from error
        else:
            return
    raise failures.not_accepted(endpoint, refusal)


def _keys(endpoint: Endpoint) -> Iterator[paramiko.PKey]:
    """The named key alone; without one (or where it has a passphrase) the agent's, then ~/.ssh."""
    if endpoint.identity:
        try:
            yield _read_key(Path(endpoint.identity))
            return
        except paramiko.PasswordRequiredException:
            yield from paramiko.Agent().get_keys()
            return
    yield from paramiko.Agent().get_keys()
    for name in _DEFAULT_KEYS:
        path = Path("~/.ssh").expanduser() / name
        if path.is_file():
            try:
                yield _read_key(path)
            except paramiko.PasswordRequiredException:
                continue


def _read_key(path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(path)
    except paramiko.PasswordRequiredException:
        raise
    except (OSError, ValueError, paramiko.SSHException) as error:
        raise LabError(
            f"the key {path} cannot be read", why=_said(error), hint=f"ls -l {path}"
        ) from error
