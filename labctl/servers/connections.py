"""Connections to servers: the ssh_config files that describe them, and the transports.

    <ssh_dir>/config                      one Include of all servers; the user's config includes it
    <ssh_dir>/<server id>/config          the server, under its alias and its id
    <ssh_dir>/<server id>/known_hosts     its pinned key, under its id: addresses are reused
    <ssh_dir>/endpoints/<hash>/           the same for a way to a machine that is no server (yet)

Which transport is used is decided here and nowhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.commands import ssh
from labctl.errors import AuthenticationError, BusyError, LabError, NotFoundError, UsageError
from labctl.events import Reporter
from labctl.model import Endpoint, Server
from labctl.retry import retry_on
from labctl.servers.host_keys import confirm, known_key, replace_file
from labctl.transports import Transport

if TYPE_CHECKING:
    from labctl.transports.forced_command import Lines

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_MOST_INCLUDES = 16


class Connections:
    """All ways to servers that this user has. `user_ssh_config` None leaves the user's alone."""

    def __init__(self, ssh_dir: Path, user_ssh_config: Path | None) -> None:
        self._dir = ssh_dir
        self._user_config = user_ssh_config
        self._declared: dict[str, set[str]] = {}
        self._looking = threading.Lock()

    def write(self, server: Server) -> Path:
        """Describe `server` to ssh and return its config's path; repeated, it changes nothing.

        UsageError where its alias is taken (`alias_free`).
        """
        if not self.alias_free(server.alias, server.id):
            raise UsageError(
                f"ssh already knows a host called {server.alias}",
                why=f"{self._user_config} or another lab's server bears that name",
                hint="give the lab another name: `lab:` in lab.yaml",
            )
        path = self._describe(self._server_dir(server.id), server.id, server.alias, server.endpoint)
        with self._locked():
            line = ssh.include_line(str(self._dir), "*/config")
            _write_if_changed(self._dir / "config", line + "\n")
            self._include_in_user_config()
        return path

    def forget(self, server_id: str) -> None:
        """Remove what `write` wrote for this server; an absent one is fine."""
        shutil.rmtree(self._server_dir(server_id), ignore_errors=True)

    def forget_others(self, on_record: Callable[[], Iterable[str]]) -> None:
        """Remove what is written of any server but these: a killed process may have left some.

        They are asked for after the look at what is written: a server is put on record before
        anything is written of it, so one that comes at this moment is among them.
        """
        written = {config.parent.name for config in self._dir.glob("*/config")}
        for name in written - {*on_record(), "endpoints"}:
            self.forget(name)

    def config_path(self, server_id: str) -> Path:
        """Where `write` puts the server's config."""
        return self._server_dir(server_id) / "config"

    def open(self, server: Server) -> Transport:
        """A transport to `server`; nothing is connected before its first command."""
        return self._transport(self.write(server), server.id, server.endpoint)

    def reopen(self, server: Server) -> Transport:
        """Like `open`, by the server's id alone: many at once need not all look at each other.

        Whether its alias is still free is looked at where it was never written.
        """
        config = self.config_path(server.id)
        if not config.exists():
            config = self.write(server)
        else:
            self._describe(config.parent, server.id, server.alias, server.endpoint)
        return self._transport(config, server.id, server.endpoint)

    def connect(self, endpoint: Endpoint) -> Transport:
        """A transport to a machine that is no server of ours (yet)."""
        return self._transport(*self.described(endpoint), endpoint)

    def described(self, endpoint: Endpoint) -> tuple[Path, str]:
        """The ssh_config that leads to a machine that is no server of ours, and its name in it."""
        folder, name = self._endpoint_dir(endpoint)
        return self._describe(folder, name, name, endpoint), name

    def talk(self, endpoint: Endpoint, request: str) -> Lines:
        """A talk in lines with whatever answers `request` there; nothing is connected yet."""
        from labctl.transports.forced_command import Lines

        config, name = self.described(endpoint)
        return Lines(ssh.command_argv(str(config), name, request), endpoint)

    def close(self, server: Server) -> None:
        """End labctl's master connection to `server`."""
        config = self.config_path(server.id)
        if config.exists():
            self._transport(config, server.id, server.endpoint).close()

    def wait_for_ssh(self, server: Server, deadline_s: float) -> Transport:
        """A transport on which a login has worked, within `deadline_s` seconds from now.

        A wrong host key is raised at once; everything else that a booting machine may do
        (refuse, not answer, not know the key yet) only when the time is over.
        """
        end = time.monotonic() + deadline_s
        transport = self.open(server)

        def log_in() -> None:
            transport.run("true", timeout_s=max(1.0, end - time.monotonic()))

        policy = retry_on(
            (BusyError, AuthenticationError),
            pause_s=FIRST_PAUSE_S,
            longest_pause_s=LONGEST_PAUSE_S,
            deadline_s=deadline_s,
        )
        try:
            policy(log_in)
        except (BusyError, AuthenticationError) as error:
            raise type(error)(
                f"no login on {server.alias} within {deadline_s:g} s: {error.what}",
                why=error.why,
                hint=error.hint,
            ) from error
        return transport

    def alias_free(self, alias: str, server_id: str = "") -> bool:
        """Whether neither the user's config nor another server of ours bears this name."""
        taken: set[str] = set()
        if self._user_config is not None:
            taken |= _declared_hosts(self._user_config, skip=self._dir)
        others = (hosts for name, hosts in self._own_hosts().items() if name != server_id)
        return ssh.check_id(alias) not in taken and not any(alias in hosts for hosts in others)

    def _own_hosts(self) -> dict[str, set[str]]:
        """What each server's config declares, by its directory; one is read once, for a class of
        three hundred would otherwise read ninety thousand."""
        with self._looking:
            there = {path.name for path in self._dir.iterdir()} if self._dir.is_dir() else set()
            for name in there - set(self._declared):
                config = self._dir / name / "config"
                if config.is_file():
                    self._declared[name] = _declared_hosts(config, skip=self._dir / "config")
            self._declared = {name: self._declared[name] for name in there & set(self._declared)}
            return self._declared

    def resolve_alias(self, alias: str) -> Endpoint:
        """What the user's own config says of `alias`: address, user, key, way and known host key.

        `identity` is "" where the config names none: then ssh's defaults and agent count.
        """
        said = self._effective(alias)
        defaults = set(self._effective(alias, config="/dev/null").get("identityfile", []))
        identity = next(
            (
                str(path)
                for name in said.get("identityfile", [])
                if name not in defaults and (path := Path(name).expanduser()).is_file()
            ),
            "",
        )
        host, port = said["hostname"][0], int(said["port"][0])
        name = said.get("hostkeyalias", [ssh.known_hosts_name(host, port)])[0]
        files = said.get("userknownhostsfile", [""])[0].split()
        return Endpoint(
            host=ssh.check_host(host),
            port=port,
            user=ssh.check_user(said["user"][0]),
            identity=identity,
            jump=_unless_none(said.get("proxyjump", [""])[0]),
            proxy_command=_unless_none(said.get("proxycommand", [""])[0]),
            host_key=known_key(name, tuple(Path(file).expanduser() for file in files)),
        )

    def settle_host_key(self, endpoint: Endpoint, reporter: Reporter) -> Endpoint:
        """`endpoint` with a host key to pin: the user's known one, or one confirmed just once.

        PolicyError where the person does not confirm the fingerprint.
        """
        if endpoint.host_key:
            return endpoint
        folder, _ = self._endpoint_dir(endpoint)
        confirmed = folder / "confirmed_key"
        key = confirmed.read_text().strip() if confirmed.exists() else ""
        key = key or self._known_to_user(endpoint)
        if not key:
            from labctl.transports.fabric_login import fetch_host_key

            key = fetch_host_key(self._direct(endpoint))
            confirm(endpoint, key, reporter)
            _make_private(folder)
            replace_file(confirmed, (key + "\n").encode())
        return msgspec.structs.replace(endpoint, host_key=key)

    def _transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        if shutil.which("ssh"):
            from labctl.transports.openssh import OpenSshTransport

            return OpenSshTransport(config, server_id, endpoint)
        from labctl.transports.fabric import FabricTransport

        return FabricTransport(endpoint, known_hosts=self._user_known_hosts())

    def _describe(self, folder: Path, server_id: str, alias: str, endpoint: Endpoint) -> Path:
        from labctl.transports.ssh_client import runtime_dir

        known_hosts = folder / "known_hosts"
        text = ssh.server_config(
            server_id,
            alias,
            endpoint,
            known_hosts=str(known_hosts),
            runtime_dir=str(runtime_dir()),
            user_config=self._jump_config(),
        )
        name = ssh.host_key_alias(server_id)
        keys = [key for key in (endpoint.host_key, endpoint.next_host_key) if key]
        pinned = "".join(ssh.known_hosts_line(name, key) for key in keys)
        _make_private(self._dir)
        _make_private(folder)
        _write_if_changed(known_hosts, pinned)
        _write_if_changed(folder / "config", text)
        with self._looking:
            self._declared.pop(folder.name, None)
        return folder / "config"

    def _server_dir(self, server_id: str) -> Path:
        if ssh.check_id(server_id) in ("config", "endpoints"):
            raise UsageError(f"a server cannot be called {server_id}")
        return self._dir / server_id

    def _endpoint_dir(self, endpoint: Endpoint) -> tuple[Path, str]:
        import hashlib  # a server's own way needs none

        way = (endpoint.host, endpoint.port, endpoint.user, endpoint.jump, endpoint.proxy_command)
        name = "endpoint-" + hashlib.sha256(repr(way).encode()).hexdigest()[:16]
        return self._dir / "endpoints" / name, name

    def _include_in_user_config(self) -> None:
        """One line at the top, once; every byte of the user's stays as it is."""
        if self._user_config is None:
            return
        line = ssh.include_line(str(self._dir), "config").encode()
        path = self._user_config.resolve()  # dotfiles are often symbolic links
        old = path.read_bytes() if path.exists() else b""
        if line in (each.strip() for each in old.splitlines()):
            return
        if not path.parent.exists():
            _make_private(path.parent)
        mode = path.stat().st_mode & 0o777 if old else 0o600
        replace_file(path, line + b"\n" + old, mode=mode)

    def _jump_config(self) -> str:
        """The file that describes hops; "" for ssh's default, which brings the system's along."""
        path = self._user_config
        if path is None or not path.exists() or path == Path("~/.ssh/config").expanduser():
            return ""
        return str(path)

    def _effective(self, alias: str, config: str = "") -> dict[str, list[str]]:
        config = config or self._jump_config()
        argv = ["ssh", *(("-F", config) if config else ()), "-G", "--", ssh.check_host(alias)]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except FileNotFoundError:
            raise NotFoundError(
                f"{alias} cannot be looked up: there is no ssh on this machine",
                hint="sudo apt install openssh-client",
            ) from None
        if done.returncode:
            raise LabError(
                f"ssh cannot read its config for {alias}",
                why=done.stderr.decode(errors="replace").strip(),
                hint=f"ssh -G {alias}",
            )
        found: dict[str, list[str]] = {}
        for line in done.stdout.decode(errors="replace").splitlines():
            key, _, value = line.partition(" ")
            found.setdefault(key, []).append(value)
        return found

    def _user_known_hosts(self) -> Path | None:
        return self._user_config.parent / "known_hosts" if self._user_config else None

    def _known_to_user(self, endpoint: Endpoint) -> str:
        path = self._user_known_hosts()
        name = ssh.known_hosts_name(endpoint.host, endpoint.port)
        return known_key(name, (path,)) if path else ""

    def _direct(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` whose jump hosts the user's ssh goes through, where there is one."""
        if not endpoint.jump or not shutil.which("ssh"):
            return endpoint
        command = ssh.jump_command(endpoint.jump, user_config=self._jump_config())
        return msgspec.structs.replace(endpoint, jump="", proxy_command=command)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        _make_private(self._dir)
        descriptor = os.open(self._dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def answers(endpoint: Endpoint, within_s: float) -> bool:
    """Whether anything takes a connection at that address; True where a proxy leads there."""
    if endpoint.jump or endpoint.proxy_command:
        return True
    try:
        with socket.create_connection((endpoint.host, endpoint.port), within_s):
            return True
    except OSError:
        return False


def _unless_none(value: str) -> str:
    return "" if value == "none" else value


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        replace_file(path, text.encode())


def _declared_hosts(config: Path, *, skip: Path, depth: int = 0) -> set[str]:
    """The exact Host names in a config and in what it includes, but for what lies at `skip`."""
    if depth > _MOST_INCLUDES or not config.is_file() or config.is_relative_to(skip):
        return set()
    hosts, includes = ssh.parse_host_patterns(config.read_text(errors="replace"))
    found = set(hosts)
    for include in includes:
        pattern = Path(include).expanduser()
        absolute = pattern if pattern.is_absolute() else config.parent / pattern
        root = Path(absolute.anchor)
        for path in root.glob(str(absolute.relative_to(root))):
            found |= _declared_hosts(path, skip=skip, depth=depth + 1)
    return found
