"""A second machine with a keeper: a real sshd on a port of its own, and a home of its own."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sshd_container import greets, wait_for
from store_lab import agent

from labctl.servers.host_keys import ensure_key_pair

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(not Path(SSHD).exists(), reason="there is no sshd on this machine")
CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/login.pub
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
SetEnv {environ}
"""
# `labctl` whose keeper checks each lab every few seconds instead of four times a minute.
KEEP = """\
from labctl.cli import main
from labctl.keeper import labs
labs.EVERY_S = 3.0
main()"""


@dataclass
class KeeperBox:
    """One such machine. `environ` is what commands there run in, `host` what follows --keeper."""

    folder: Path
    port: int
    key: str
    agent: str
    environ: dict[str, str]
    keeper: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "keep.log"

    @property
    def host(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def home(self) -> Path:
        return Path(self.environ["HOME"])

    def known_to(self, person: dict[str, str]) -> None:
        """A person (their environment) knows its host key, and may log in there."""
        ssh = Path(person["HOME"]) / ".ssh"
        ssh.mkdir(exist_ok=True, mode=0o700)
        with (ssh / "known_hosts").open("a") as known:
            known.write(f"[127.0.0.1]:{self.port} {self.key}\n")
        person["SSH_AUTH_SOCK"] = self.agent

    def labctl(self, *words: str, code: int | None = 0, stdin: bytes = b"") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "labctl", *words],
            env=self.environ,
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            timeout=300,
        )
        said = done.stdout.decode(errors="replace")
        assert code is None or done.returncode == code, said + done.stderr.decode()
        return said

    def listed(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.labctl("keep", "--list", "--json"))
        return found

    def start(self) -> None:
        begun = self.said.count("labctl keep started")
        with self.log.open("ab") as log:
            self.keeper = subprocess.Popen(
                [sys.executable, "-c", KEEP, "keep"],
                env=self.environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: self.said.count("labctl keep started") > begun)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def heard(self, text: str, within_s: float = 300.0) -> None:
        def there() -> bool:
            assert self.keeper is not None
            assert self.keeper.poll() is None, self.said
            return text in self.said

        try:
            wait_for(there, within_s)
        except AssertionError:
            raise AssertionError(f"no {text!r}:\n{self.said}") from None

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = 10.0) -> int:
        """End the keeper; its exit code."""
        assert self.keeper is not None
        self.keeper.send_signal(number)
        code = self.keeper.wait(within_s)
        self.keeper = None
        return code

    def rss_bytes(self) -> int:
        assert self.keeper is not None
        pages = Path(f"/proc/{self.keeper.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def keeper_box(
    folder: Path, environ: Mapping[str, str], *, installed: bool = True
) -> Iterator[KeeperBox]:
    """A machine with sshd on which labctl is installed; what it has started ends with it."""
    home = folder / "home"
    home.mkdir(parents=True)
    ensure_key_pair(folder / "login")
    key = ensure_key_pair(folder / "host").rpartition(" ")[0]
    port = _free_port()
    around = {**environ, "HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    if installed:
        program = home / ".local" / "bin" / "labctl"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m labctl "$@"\n')
        program.chmod(0o755)
    words = " ".join(f'"{name}={value}"' for name, value in around.items())
    config = folder / "sshd_config"
    config.write_text(CONFIG.format(port=port, folder=folder, environ=words))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: greets(port))
        with agent(folder / "login") as socket_path:
            yield from _box(KeeperBox(folder, port, key, socket_path, around))
    finally:
        sshd.terminate()
        sshd.wait()


def _box(box: KeeperBox) -> Iterator[KeeperBox]:
    try:
        yield box
    finally:
        if box.keeper is not None:
            box.keeper.kill()
            box.keeper.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
