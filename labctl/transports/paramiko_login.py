"""Log in with paramiko: the socket (direct, proxied or through jump hosts), keys, keep-alive.

An unknown host key is never accepted: `log_in` compares only with the endpoint's pinned keys.
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
# Otherwise Python prints paramiko's tracebacks of errors that are raised anyway.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class Watchdog:
    """Closes a connection whose other side has stopped answering.

    paramiko's own keep-alive requests no reply, so it never notices. Two threads, since a ping
    into a dead link blocks once the socket's buffer is full.
    """

    def __init__(self, transport: paramiko.Transport, wire: socket.socket | None) -> None:
        self._transport = transport
        self._wire = wire
        self._last_reply = time.monotonic()
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
            self._last_reply = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5) and self._transport.is_active():
            if time.monotonic() - self._last_reply > SILENT_FOR_S:
                if self._wire is not None:
                    self._wire.close()  # frees a thread that is blocked in writing
                self._transport.close()
                return


@dataclass(frozen=True)
class Login:
    """A connection that is logged in; `way` is the login on its jump host, if any."""

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
    """The byte stream to a server: a socket or a jump host's channel."""

    end: socket.socket | paramiko.Channel
    way: Login | None = None

    def close(self) -> None:
        self.end.close()
        if self.way is not None:
            self.way.close()


def log_in(endpoint: Endpoint, known_hosts: Path | None = None) -> Login:
    """Connect, compare the host key, authenticate. `known_hosts` has the keys of jump hosts.

    Raises the ConnectError family, HostKeyError and AuthenticationError.
    """
    if not endpoint.host_key:
        raise failures.no_key(endpoint)
    kinds = _key_algorithms(endpoint.host_key)
    wire, transport = while_turned_away()(_start_transport, endpoint, known_hosts, kinds)
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
    """Fetch the key ("ssh-ed25519 AAAA...") that the server presents, without logging in.

    The key proves nothing by itself: the user must confirm it. Raises the ConnectError family.
    """
    wire, transport = while_turned_away()(_start_transport, endpoint, known_hosts, ())
    try:
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"
    finally:
        transport.close()
        wire.close()


def _key_algorithms(host_key: str) -> tuple[str, ...]:
    kind = host_key.split()[0]
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _start_transport(
    endpoint: Endpoint, known_hosts: Path | None, key_algorithms: tuple[str, ...]
) -> tuple[_Wire, paramiko.Transport]:
    """Connect and exchange keys with the server. The caller must still compare its host key."""
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
        if not transport.initial_kex_done:  # start_client does not raise after its timeout
            raise TimeoutError(f"no SSH banner within {STEP_TIMEOUT_S:g} s")
    except IncompatiblePeer as error:
        wire.close()
        if key_algorithms and "host key" in str(error):
            raise failures.wrong_key(endpoint, "it has no key of the pinned type") from error
        raise failures.unreachable(endpoint, str(error)) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        wire.close()
        if isinstance(error, _HUNG_UP) or isinstance(error.__context__, _HUNG_UP):
            raise failures.turned_away(endpoint, "") from error
        raise failures.unreachable(endpoint, _describe_error(error)) from error
    return wire, transport


def _describe_error(error: BaseException) -> str:
    return str(error) or "the server closed the connection"


def _open_wire(endpoint: Endpoint, known_hosts: Path | None) -> _Wire:
    ssh.check_host(endpoint.host)
    if endpoint.jump:
        return _open_jump(endpoint, known_hosts)
    if endpoint.proxy_command:
        return _Wire(_open_proxy(endpoint))
    try:
        wire = socket.create_connection((endpoint.host, endpoint.port), timeout=STEP_TIMEOUT_S)
    except socket.gaierror as error:
        raise failures.dns(endpoint, str(error)) from error
    except ConnectionRefusedError as error:
        raise failures.refused(endpoint, "") from error
    except OSError as error:
        raise failures.unreachable(endpoint, _describe_error(error)) from error
    # Before the handshake: with Nagle's algorithm one command takes 48 ms instead of 3.5.
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Wire(wire)


def _open_proxy(endpoint: Endpoint) -> socket.socket:
    """Start the proxy command; return a socket to its standard input and output."""
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


def _open_jump(endpoint: Endpoint, known_hosts: Path | None) -> _Wire:
    *earlier, last = endpoint.jump.split(",")
    (hop,) = ssh.parse_hops(last)
    port = hop.port or 22
    jump_host = Endpoint(
        host=hop.host,
        port=port,
        user=hop.user or pwd.getpwuid(os.getuid()).pw_name,
        identity=endpoint.identity,
        jump=",".join(earlier),
        host_key=_find_known_key(ssh.known_hosts_name(hop.host, port), known_hosts),
    )
    if not jump_host.host_key:
        raise failures.on_the_way(endpoint, f"known_hosts has no key of {hop.host}", key=True)
    try:
        way = log_in(jump_host, known_hosts)
    except ConnectError as error:
        raise failures.on_the_way(endpoint, f"{error.what}: {error.why}", key=False) from error
    try:
        channel = way.transport.open_channel(
            "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=STEP_TIMEOUT_S
        )
    except (paramiko.SSHException, OSError, EOFError) as error:
        way.close()
        raise failures.on_the_way(endpoint, _describe_error(error), key=False) from error
    return _Wire(channel, way)


def _find_known_key(name: str, known_hosts: Path | None) -> str:
    """Find the key of `name` in a known_hosts file, hashed names included; "" without one."""
    if known_hosts is None or not known_hosts.is_file():
        return ""
    keys = paramiko.HostKeys(str(known_hosts)).lookup(name)
    for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"):
        if keys is not None and kind in keys:
            return f"{kind} {keys[kind].get_base64()}"
    return ""


def _authenticate(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    refusal = "no private key was found"
    for key in _list_keys(endpoint):
        try:
            transport.auth_publickey(endpoint.user, key)
        except paramiko.AuthenticationException as error:
            refusal = _describe_error(error)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise failures.unreachable(endpoint, _describe_error(error)) from error
        else:
            return
    raise failures.not_accepted(endpoint, refusal)


def _list_keys(endpoint: Endpoint) -> Iterator[paramiko.PKey]:
    """Yield the endpoint's key, or the agent's keys if that one has a passphrase.

    Without a named key: the agent's keys, then those of ~/.ssh without a passphrase.
    """
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
            f"the key {path} cannot be read", why=_describe_error(error), hint=f"ls -l {path}"
        ) from error
