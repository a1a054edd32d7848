"""A real sshd of this account on this machine, whose one key leads to a store's gateway."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from labctl.agent.mirror import authorized_keys, ssh_gateway
from labctl.agent.mirror.ssh_store import MirrorSshStore
from labctl.wire.mirrors import StoreConfigRecord

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


def ensure_key_pair(path: Path) -> str:
    """The public half."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text().strip()


class StoreSshd:
    def __init__(self, folder: Path, port: int, gateway: Path) -> None:
        self.folder = folder
        self.directory = folder / "labs" / "digits-1"
        self.config = StoreConfigRecord(host="127.0.0.1", port=port, user=getpass.getuser())
        public = ensure_key_pair(folder / "store-key")
        host = ensure_key_pair(folder / "host")
        (folder / "hosts").write_text(f"labctl-store {host}\n")
        line = authorized_keys.build_key_line(str(gateway), str(self.directory), "digits-1", public)
        (folder / "authorized_keys").write_text(line + "\n")

    def open_store(self) -> MirrorSshStore:
        return MirrorSshStore(
            self.config, self.folder / "store-key", self.folder / "hosts", lambda: None
        )

    def call(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """ssh with the server's key, and these words as its command."""
        store = self.open_store()
        line = [*store.words, "--", "labctl-store", *words]
        return subprocess.run(line, input=stdin, capture_output=True, timeout=120)

    def rsync(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        import shlex

        line = ["rsync", "-e", shlex.join(self.open_store().words), *words]
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)


@contextmanager
def store_sshd(folder: Path, gateway: Path | None = None) -> Iterator[StoreSshd]:
    port = find_free_port()
    found = StoreSshd(folder, port, gateway or Path(ssh_gateway.__file__))
    with run_sshd(folder, port):
        yield found


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def run_sshd(folder: Path, port: int, more: str = "") -> Iterator[None]:
    """An sshd for the keys that `folder` has; `more` are lines of its configuration."""
    (folder / "sshd_config").write_text(CONFIG.format(port=port, folder=folder) + more)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    words: list[Any] = [SSHD, "-D", "-e", "-f", folder / "sshd_config"]
    with (folder / "sshd.log").open("wb") as log:
        sshd = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not greets(port):
            assert sshd.poll() is None, (folder / "sshd.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        sshd.terminate()
        sshd.wait(120)


def greets(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
        return link.recv(4) == b"SSH-"
    return False


def find_lacks() -> str:
    """Why there can be no such sshd here; "" where there can."""
    lacking = [name for name in ("ssh", "ssh-keygen", SSHD) if not shutil.which(name)]
    spaces = [] if " " not in sys.executable else ["a Python without spaces in its path"]
    return ", ".join([*lacking, *spaces])
