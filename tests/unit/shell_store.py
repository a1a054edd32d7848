"""A store on an "SSH server" that is a home directory and a shell of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from labctl.agent.mirror import authorized_keys, ssh_gateway
from labctl.model import Endpoint
from labctl.shell import Command
from labctl.stores import StoreContext
from labctl.stores.ssh import SshLabStore


class Shell:
    """Enough of a Transport for a store."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def stream(
        self,
        line: Command | str,
        *,
        stdin: bytes | Callable[[], Iterator[bytes]] = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        timeout_s: float | None = None,
    ) -> int:
        done = subprocess.run(
            ["sh", "-c", str(line)],
            input=stdin if isinstance(stdin, bytes) else b"".join(stdin()),
            capture_output=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
            check=False,
        )
        on_stdout(done.stdout)
        on_stderr(done.stderr)
        return done.returncode


def shell_store(folder: Path, prefix: str) -> SshLabStore:
    home = folder / "account"
    home.mkdir(exist_ok=True)
    around = StoreContext(
        connect=lambda endpoint: Shell(home),
        settle_host_key=lambda endpoint: msgspec.structs.replace(endpoint, host_key="ssh-x AAAA"),
        resolve_alias=lambda host: Endpoint(host=host),
        gateway=Path(ssh_gateway.__file__).read_bytes(),
        keys=Path(authorized_keys.__file__).read_bytes(),
    )
    return SshLabStore("ssh://me@store/~/labs", prefix, around)
