"""Connections to servers: the ssh_config files that describe them, and the transports.

    <ssh_dir>/config                      one Include of all servers; the user's config includes it
    <ssh_dir>/<server id>/config          the server, under its alias and its id
    <ssh_dir>/<server id>/known_hosts     its pinned key, under its id: addresses are reused
    <ssh_dir>/endpoints/<hash>/           the same for a machine that is not (yet) our server

Only this module decides which transport is used.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from labctl.commands import ssh
from labctl.config.identity import replace_file
from labctl.errors import (
    AuthenticationError,
    BusyError,
    ConnectError,
    HostKeyError,
    UsageError,
)
from labctl.events import Reporter
from labctl.lazy import lazy_imports
from labctl.model import Endpoint, Server
from labctl.retry import retry_on
from labctl.servers.host_keys import confirm_host_key
from labctl.servers.user_ssh_config import UserSshConfig, has_line, list_hosts
from labctl.state.locks import hold_lock
from labctl.transports import Transport
from labctl.transports.ssh_client import runtime_dir

with lazy_imports(__name__):
    import hashlib
    import socket

    from labctl.transports import fabric, fabric_login, forced_command, openssh

# seconds to wait for another process that writes the ssh_config
LOCK_WAIT_S = 60.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# With 2, a server that is ready would on average wait for another third of its boot.
PAUSE_GROWTH = 1.25


class Connections:
    """This user's connections to servers. `user_ssh_config` None leaves the user's config alone.

    With `in_process`, commands run over connections inside this process, which are shared and kept:
    for programs that live long or reach many servers. rsync uses the user's OpenSSH in any case.
    `report_login` is entered with a machine's name while OpenSSH logs in to it.
    """

    def __init__(
        self,
        ssh_dir: Path,
        user_ssh_config: Path | None,
        *,
        in_process: bool = False,
        report_login: Callable[[str], AbstractContextManager[None]] = lambda host: nullcontext(),
    ) -> None:
        self._dir = ssh_dir
        self.user_config = UserSshConfig(user_ssh_config, ssh_dir / "user-config-created")
        self._in_process = in_process
        self._report_login = report_login
        self._pool: dict[str, tuple[Endpoint, Transport]] = {}
        self._pool_lock = threading.Lock()
        self._machines: set[Endpoint] = set()
        self._declared: dict[str, set[str]] = {}
        self._declared_lock = threading.Lock()

    def write(self, server: Server) -> Path:
        """Write the ssh_config of `server` and return its path. Safe to repeat.

        UsageError if the alias is taken (`is_alias_free`).
        """
        if not self.is_alias_free(server.alias, server.id):
            raise UsageError(
                f"ssh already knows a host called {server.alias}",
                why=f"{self.user_config.path} or another lab's server uses that name",
                hint=lambda subject: f"give the lab another name: `lab:` in {subject.config_file}",
            )
        path = self._describe(self._server_dir(server.id), server.id, server.alias, server.endpoint)
        line = ssh.include_line(str(self._dir), "*/config")
        included = self._dir / "config"
        if has_line(included, line) and self.user_config.has_line(self._include):
            return path  # as nearly always: a lock on the path of every command takes 10 ms
        with self._lock():
            _write_if_changed(included, line + "\n")
            self.user_config.add_first_line(self._include)
        return path

    def _lock(self) -> AbstractContextManager[None]:
        what = "writing ssh_config"
        return hold_lock(self._dir / ".lock", what, wait_s=LOCK_WAIT_S, is_command=False)

    def forget(self, server_id: str) -> None:
        """Remove what `write` wrote for this server; with the last one, the user's Include too."""
        shutil.rmtree(self._server_dir(server_id), ignore_errors=True)
        if not self._dir.is_dir() or self._has_servers():
            return
        with self._lock():
            self.user_config.remove_line(self._include)
            # Another process may have written a server's config and seen the line before.
            if self._has_servers():
                self.user_config.add_first_line(self._include)

    @property
    def _include(self) -> str:
        """The line of the user's config that includes all servers."""
        return ssh.include_line(str(self._dir), "config")

    def _has_servers(self) -> bool:
        return any(config.parent.name != "endpoints" for config in self._dir.glob("*/config"))

    def forget_unrecorded(self, list_recorded_ids: Callable[[], Iterable[str]]) -> None:
        """Remove the files of all servers except those on record: a killed process may leave some.

        `list_recorded_ids` is called after the files are listed. A server is put on record before
        its files are written, so one that is added at this moment is among them.
        """
        written = {config.parent.name for config in self._dir.glob("*/config")}
        for name in written - {*list_recorded_ids(), "endpoints"}:
            self.forget(name)

    def config_path(self, server_id: str) -> Path:
        """Return the path that `write` uses for the server's config."""
        return self._server_dir(server_id) / "config"

    def open(self, server: Server) -> Transport:
        """Return a transport to `server`. It connects at its first command."""
        return self._make_transport(self.write(server), server.id, server.endpoint)

    def reopen(self, server: Server) -> Transport:
        """Like `open`, but check the alias only if the server's config was never written.

        With many servers at once, each check would read the configs of all the others.
        """
        config = self.config_path(server.id)
        if not config.exists():
            config = self.write(server)
        else:
            self._describe(config.parent, server.id, server.alias, server.endpoint)
        return self._make_transport(config, server.id, server.endpoint)

    def connect(self, endpoint: Endpoint) -> Transport:
        """Return a transport to a machine that is not (yet) one of our servers."""
        self._machines.add(endpoint)
        return self._make_transport(*self.describe_endpoint(endpoint), endpoint)

    def retire_machines(self) -> None:
        """Let the connections end that `connect` has opened, with what other processes run there.

        They would last for minutes more, on machines that the lab has left.
        """
        if shutil.which("ssh"):
            for endpoint in self._machines:
                config, name = self.describe_endpoint(endpoint)
                self._make_openssh(config, name, endpoint).retire()

    def describe_endpoint(self, endpoint: Endpoint) -> tuple[Path, str]:
        """Write the ssh_config of a machine that is not one of our servers: (path, its name)."""
        folder, name = self._endpoint_dir(endpoint)
        return self._describe(folder, name, name, endpoint), name

    def open_line_channel(self, endpoint: Endpoint, request: str) -> forced_command.LineChannel:
        """Return a line-by-line channel to the program that answers `request` there.

        It connects when it is used.
        """
        config, name = self.describe_endpoint(endpoint)
        return forced_command.LineChannel(ssh.command_argv(str(config), name, request), endpoint)

    def close(self, server: Server) -> None:
        """Close labctl's connections to `server`: this process's own, and the user's ssh's."""
        with self._pool_lock:
            _, shared = self._pool.pop(server.id, (None, None))
        config = self.config_path(server.id)
        if shared is not None:
            shared.close()
        elif config.exists() and shutil.which("ssh"):
            self._make_openssh(config, server.id, server.endpoint).close()

    def wait_for_ssh(
        self,
        server: Server,
        deadline_s: float,
        name: str = "",
        before_retry: Callable[[BaseException], None] | None = None,
        *,
        waits_for_host_key: bool = False,
    ) -> Transport:
        """Wait up to `deadline_s` seconds for a login that works, and return its transport.

        Errors call the server `name`, or its alias. `before_retry` is called with the error of each
        login that is tried again, and may raise to stop.

        A wrong host key is raised at once, or with `waits_for_host_key` only after the deadline, as
        is everything else that a booting machine may do (refuse, not answer, not know the key yet).
        """
        end = time.monotonic() + deadline_s
        transport = self.open(server)

        def log_in() -> None:
            transport.run("true", timeout_s=max(1.0, end - time.monotonic()))

        passing = (BusyError, AuthenticationError)
        policy = retry_on(
            (*passing, HostKeyError) if waits_for_host_key else passing,
            pause_s=FIRST_PAUSE_S,
            longest_pause_s=LONGEST_PAUSE_S,
            growth=PAUSE_GROWTH,
            deadline_s=deadline_s,
            before_pause=before_retry,
        )
        try:
            policy(log_in)
        except (BusyError, AuthenticationError) as error:
            look = f"ssh -v {server.alias}   # shows where the connection ends"
            raise type(error)(
                f"could not log in to {name or server.alias} within {deadline_s:g} s: {error.what}",
                why=error.why,
                # `labctl up`, the next step of other commands, is often what waited here.
                hint=look if isinstance(error, ConnectError) else error.next_step,
            ) from error
        return transport

    def is_alias_free(self, alias: str, server_id: str = "") -> bool:
        """Whether neither the user's config nor another server of ours uses this name."""
        user_hosts = self.user_config.list_hosts(skip=self._dir)
        others = (hosts for name, hosts in self._list_own_hosts().items() if name != server_id)
        return ssh.check_id(alias) not in user_hosts and not any(alias in hosts for hosts in others)

    def _list_own_hosts(self) -> dict[str, set[str]]:
        """List the Host names of each server's config, by the server's directory.

        Each config is read once: a class of 300 servers would otherwise read 90,000 files. Another
        thread may read more of them while the caller goes through the result.
        """
        with self._declared_lock:
            names = {path.name for path in self._dir.iterdir()} if self._dir.is_dir() else set()
            for name in names - set(self._declared):
                config = self._dir / name / "config"
                if config.is_file():
                    self._declared[name] = list_hosts(config, skip=self._dir / "config")
            self._declared = {name: self._declared[name] for name in names & set(self._declared)}
            return dict(self._declared)

    def settle_host_key(self, endpoint: Endpoint, reporter: Reporter) -> Endpoint:
        """Return `endpoint` with a host key to pin.

        It is the key that the user's known_hosts has, or one that the user confirms once.
        PolicyError if the user does not confirm the fingerprint.
        """
        if endpoint.host_key:
            return endpoint
        folder, _ = self._endpoint_dir(endpoint)
        confirmed = folder / "confirmed_key"
        key = confirmed.read_text().strip() if confirmed.exists() else ""
        key = key or self.user_config.find_known_key(endpoint)
        if not key:
            key = fabric_login.fetch_host_key(self.user_config.add_jump_command(endpoint))
            confirm_host_key(endpoint, key, reporter)
            _make_private(folder)
            replace_file(confirmed, (key + "\n").encode())
        return msgspec.structs.replace(endpoint, host_key=key)

    def forget_confirmed_key(self, endpoint: Endpoint) -> None:
        """Forget the host key that the user has confirmed for this machine."""
        folder, _ = self._endpoint_dir(endpoint)
        (folder / "confirmed_key").unlink(missing_ok=True)

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        if shutil.which("ssh") and not self._in_process:
            return self._make_openssh(config, server_id, endpoint)
        with self._pool_lock:
            known, shared = self._pool.get(server_id, (None, None))
            if shared is None or known != endpoint:  # a server may get another address
                shared = self._make_shared(config, server_id, endpoint)
                self._pool[server_id] = endpoint, shared
            return shared

    def _make_openssh(
        self, config: Path, server_id: str, endpoint: Endpoint
    ) -> openssh.OpenSshTransport:
        return openssh.OpenSshTransport(
            config,
            server_id,
            endpoint,
            report_login=partial(self._report_login, endpoint.host),
        )

    def _make_shared(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        """Make the transport that all commands of this process to one server share."""
        openssh = None
        if shutil.which("ssh"):
            openssh = self._make_openssh(config, server_id, endpoint)
            if not fabric_login.can_log_in(endpoint):
                return openssh
        return fabric.FabricTransport(
            self.user_config.add_jump_command(endpoint),
            known_hosts=self.user_config.known_hosts,
            openssh=openssh,
        )

    def _describe(self, folder: Path, server_id: str, alias: str, endpoint: Endpoint) -> Path:
        if not endpoint.host or not endpoint.port:
            # Recorded while it starts, or stopped. Callers treat it like one that does not answer.
            raise ConnectError(
                f"{alias} has no address",
                why="its machine is not running, or is still starting",
                hint=lambda subject: subject.up,
            )
        known_hosts = folder / "known_hosts"
        text = ssh.server_config(
            server_id,
            alias,
            endpoint,
            known_hosts=str(known_hosts),
            runtime_dir=str(runtime_dir()),
            user_config=self.user_config.jump_config,
        )
        name = ssh.host_key_alias(server_id)
        keys = [key for key in (endpoint.host_key, endpoint.next_host_key) if key]
        pinned = "".join(ssh.known_hosts_line(name, key) for key in keys)
        _make_private(self._dir)
        _make_private(folder)
        _write_if_changed(known_hosts, pinned)
        _write_if_changed(folder / "config", text)
        with self._declared_lock:
            self._declared.pop(folder.name, None)
        return folder / "config"

    def _server_dir(self, server_id: str) -> Path:
        if ssh.check_id(server_id) in ("config", "endpoints"):
            raise UsageError(f"a server cannot be called {server_id}")
        return self._dir / server_id

    def _endpoint_dir(self, endpoint: Endpoint) -> tuple[Path, str]:
        key = (endpoint.host, endpoint.port, endpoint.user, endpoint.jump, endpoint.proxy_command)
        name = "endpoint-" + hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return self._dir / "endpoints" / name, name


def is_reachable(endpoint: Endpoint, within_s: float) -> bool:
    """Whether the address accepts a TCP connection within `within_s`; True behind a proxy."""
    if endpoint.jump or endpoint.proxy_command:
        return True
    try:
        with socket.create_connection((endpoint.host, endpoint.port), within_s):
            return True
    except OSError:
        return False


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        replace_file(path, text.encode())
