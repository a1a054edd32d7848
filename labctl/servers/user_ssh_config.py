"""The user's own ssh_config and known_hosts: labctl reads both, and adds one Include line.

`ssh -G` resolves a host's options, so that labctl understands whatever the user's ssh does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from labctl.commands import ssh
from labctl.config import expand_user
from labctl.config.identity import replace_file
from labctl.errors import LabError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.model import Endpoint
from labctl.servers.host_keys import find_known_key

with lazy_imports(__name__):
    import subprocess

_MOST_INCLUDES = 16


class UserSshConfig:
    """The ssh_config at `path`. With None, labctl reads and changes no file of the user.

    `created_mark` is a file of labctl that exists while the config is one that labctl created.
    """

    def __init__(self, path: Path | None, created_mark: Path) -> None:
        self.path = path
        self._created_mark = created_mark

    @property
    def known_hosts(self) -> Path | None:
        return self.path.parent / "known_hosts" if self.path else None

    @property
    def jump_config(self) -> str:
        """The config file for jump hosts; "" for ssh's default, which adds the system's."""
        path = self.path
        if path is None or not path.exists() or path == expand_user("~/.ssh/config"):
            return ""
        return str(path)

    def has_line(self, line: str) -> bool:
        """Whether the config has the line; True without a config, so that nothing is added."""
        return self.path is None or has_line(self.path, line)

    def add_first_line(self, line: str) -> None:
        """Add a line at the top of the config, once; leave all other bytes as they are."""
        if self.path is None or self.has_line(line):
            return
        path = self.path.resolve()  # dotfiles are often symbolic links
        if not path.exists():
            self._created_mark.touch()
        old = path.read_bytes() if path.exists() else b""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if old else 0o600
        replace_file(path, line.encode() + b"\n" + old, mode=mode)

    def remove_line(self, line: str) -> None:
        """Remove a line that `add_first_line` added; leave all other bytes as they are.

        A config that labctl created, and that is empty then, is deleted.
        """
        if self.path is None or not has_line(self.path, line):
            return
        path = self.path.resolve()
        lines = path.read_bytes().splitlines(keepends=True)
        rest = b"".join(each for each in lines if each.strip() != line.encode())
        if rest or not self._created_mark.exists():
            replace_file(path, rest, mode=path.stat().st_mode & 0o777)
        else:
            path.unlink()
        self._created_mark.unlink(missing_ok=True)

    def list_hosts(self, *, skip: Path) -> set[str]:
        """List the exact Host names of the config, except those in files at or below `skip`."""
        return set() if self.path is None else list_hosts(self.path, skip=skip)

    def resolve_alias(self, alias: str) -> Endpoint:
        """Read `alias` from the config: address, user, key, proxy and known host key.

        `identity` is "" if the config names none: ssh's defaults and agent apply then.
        """
        options = self._read_options(alias)
        defaults = set(self._read_options(alias, config="/dev/null").get("identityfile", []))
        identity = next(
            (
                str(path)
                for name in options.get("identityfile", [])
                if name not in defaults and (path := expand_user(name)).is_file()
            ),
            "",
        )
        host, port = options["hostname"][0], int(options["port"][0])
        name = options.get("hostkeyalias", [ssh.known_hosts_name(host, port)])[0]
        files = options.get("userknownhostsfile", [""])[0].split()
        return Endpoint(
            host=ssh.check_host(host),
            port=port,
            user=ssh.check_user(options["user"][0]),
            identity=identity,
            jump=_none_to_empty(options.get("proxyjump", [""])[0]),
            proxy_command=_none_to_empty(options.get("proxycommand", [""])[0]),
            host_key=find_known_key(name, tuple(expand_user(file) for file in files)),
        )

    def find_known_key(self, endpoint: Endpoint) -> str:
        """Return the machine's host key from the user's known_hosts; "" without one."""
        path = self.known_hosts
        name = ssh.known_hosts_name(endpoint.host, endpoint.port)
        return find_known_key(name, (path,)) if path else ""

    def add_jump_command(self, endpoint: Endpoint) -> Endpoint:
        """Add a proxy command of the user's ssh that goes through the jump hosts.

        Without jump hosts, or if ssh is not installed, the endpoint stays as it is.
        """
        if not endpoint.jump or not shutil.which("ssh"):
            return endpoint
        command = ssh.jump_command(endpoint.jump, user_config=self.jump_config)
        return msgspec.structs.replace(endpoint, proxy_command=command)

    def _read_options(self, alias: str, config: str = "") -> dict[str, list[str]]:
        """Return the options that `ssh -G` prints for a host: name -> values, in their order."""
        config = config or self.jump_config
        argv = ["ssh", *(("-F", config) if config else ()), "-G", "--", ssh.check_host(alias)]
        try:
            result = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
        except FileNotFoundError:
            raise NotFoundError(
                f"{alias} cannot be looked up: ssh is not installed on this machine",
                hint="sudo apt install openssh-client",
            ) from None
        if result.returncode:
            raise LabError(
                f"ssh cannot read its config for {alias}",
                why=result.stderr.decode(errors="replace").strip(),
                hint=f"ssh -G {alias}",
            )
        options: dict[str, list[str]] = {}
        for line in result.stdout.decode(errors="replace").splitlines():
            key, _, value = line.partition(" ")
            options.setdefault(key, []).append(value)
        return options


def has_line(path: Path, line: str) -> bool:
    """Whether a file has the line, apart from spaces around it; False if there is no file."""
    old = path.read_bytes() if path.exists() else b""
    return line.encode() in (each.strip() for each in old.splitlines())


def list_hosts(config: Path, *, skip: Path, depth: int = 0) -> set[str]:
    """List the exact Host names in a config and its includes, except files at or below `skip`."""
    if depth > _MOST_INCLUDES or not config.is_file() or config.is_relative_to(skip):
        return set()
    hosts, includes = ssh.parse_host_patterns(config.read_text(errors="replace"))
    names = set(hosts)
    for include in includes:
        pattern = expand_user(include)
        absolute = pattern if pattern.is_absolute() else config.parent / pattern
        root = Path(absolute.anchor)
        for path in root.glob(str(absolute.relative_to(root))):
            names |= list_hosts(path, skip=skip, depth=depth + 1)
    return names


def _none_to_empty(value: str) -> str:
    return "" if value == "none" else value
