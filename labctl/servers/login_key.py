"""The user's own key that a machine should accept: the one that ssh offers, or a new one."""

from __future__ import annotations

import shlex
from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.servers.host_keys import ensure_key_pair

with lazy_imports(__name__):
    import paramiko

    from labctl.transports import fabric_login

# ssh offers these without being told to. The first is also the name of a new key.
DEFAULT_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")


class LoginKey(Value, frozen=True):
    """A key pair. `path` is the private key, "" if only the user's agent has it.

    `public_line` is "" for a key that does not exist yet.
    """

    path: str
    public_line: str = ""

    @property
    def name(self) -> str:
        """The key's name in messages."""
        return self.path or "of your SSH agent"

    @property
    def create_command(self) -> str:
        """The command that creates the key."""
        return shlex.join(["ssh-keygen", "-t", "ed25519", "-f", self.path])

    def create_if_new(self) -> str:
        """Return the public line; create the key pair first if it does not exist."""
        return self.public_line or ensure_key_pair(Path(self.path))


def choose_login_key(identity: str, ssh_dir: Path) -> LoginKey:
    """Choose the key to set up: `identity`, else a default one, the agent's first, or a new one.

    LabError if the key has a passphrase and the agent does not have it: ssh could not use it.
    """
    agent = _list_agent_keys()
    paths = [Path(identity)] if identity else [ssh_dir / name for name in DEFAULT_NAMES]
    existing = [path for path in paths if path.is_file()]
    for path in existing:
        if line := _read_public_line(path, agent):
            return LoginKey(path=str(path), public_line=line)
    if agent and not identity:
        return LoginKey(path="", public_line=agent[0])
    if existing:
        raise LabError(
            f"your SSH agent does not have the key {existing[0]}",
            why="the key has a passphrase, so only the agent can log in with it",
            hint=shlex.join(["ssh-add", str(existing[0])]),
        )
    if identity:
        raise NotFoundError(
            f"the key {identity} does not exist",
            why="lab.yaml or your ssh_config names it as the machine's identity",
            hint=LoginKey(path=identity).create_command,
        )
    return LoginKey(path=str(paths[0]))


def _list_agent_keys() -> list[str]:
    """Return the public keys that the user's SSH agent offers, "type base64" each."""
    agent = paramiko.Agent()
    try:
        return [f"{key.get_name()} {key.get_base64()}" for key in agent.get_keys()]
    finally:
        agent.close()


def _read_public_line(path: Path, agent: list[str]) -> str:
    """Return the public line of a key that ssh can use; "" if it needs a passphrase."""
    public = path.with_name(path.name + ".pub")
    noted = public.read_text(errors="replace").strip() if public.is_file() else ""
    try:
        private = fabric_login.load_key(path)
    except (OSError, ValueError, paramiko.SSHException):
        return ""  # of a kind that only OpenSSH reads, or damaged
    if private is None:
        return noted if _key_of(noted) in agent else ""
    line = f"{private.get_name()} {private.get_base64()}"
    return noted if _key_of(noted) == line else line


def _key_of(line: str) -> str:
    """Return a public line without its comment."""
    return " ".join(line.split()[:2])
