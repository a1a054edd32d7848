"""A receiver's machine: a real sshd on a port of its own, students let in by `labctl receive`; and
a wire to it that can be cut."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sshd_container import greets, wait_for

from labctl.servers.host_keys import ensure_key_pair
from labctl.submissions.receive import admit, expel, write_assignment
from labctl.submissions.receiver import Receiver

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {home}/.ssh/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
SetEnv HOME={home}
"""
COMMAND_S = 300.0


@dataclass
class Machine:
    """The receiver's. `wire` is the port that students are told, in front of sshd's own."""

    folder: Path
    port: int
    host_key: str
    wire: Wire

    @property
    def drop(self) -> Path:
        return self.folder / "drop"

    @property
    def keys(self) -> Path:
        return self.folder / "home" / ".ssh" / "authorized_keys"

    @property
    def receiver(self) -> Receiver:
        return Receiver(self.drop)

    def admit(self, student: str, public: str) -> None:
        admit(self.receiver, student, public, self.keys)

    def expel(self, student: str) -> None:
        assert expel(student, self.keys)

    def assignment(self, **given: str) -> str:
        """The text of hw3's file, which the receiver has too."""
        at = f"ssh://{getpass.getuser()}@127.0.0.1:{self.wire.port}"
        about = {"course": "ml", "due": "2099-01-01 12:00 UTC", "host_key": self.host_key}
        return write_assignment(self.receiver, "hw3", at, {**about, **given})


class Wire:
    """Bytes from students to sshd and back. `passed` counts those that went in.

    `cut_after` breaks the next connection off once so many have; `hold_after` lets it stand still
    there (`held` says so) until `let_go`.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.passed = 0
        self.cut_after: int | None = None
        self.cuts = 0
        self.hold_after: int | None = None
        self.held, self.let_go = threading.Event(), threading.Event()
        self.ends: list[socket.socket] = []
        self.ways: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in (self.listener, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                student, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self.target))
            self.ends += [student, there]
            for way in ((student, there, True), (there, student, False)):
                self.ways.append(threading.Thread(target=self._carry, args=way, daemon=True))
                self.ways[-1].start()

    def settled(self) -> bool:
        """Whether no connection is left, and so nothing on its way."""
        return not any(way.is_alive() for way in self.ways)

    def _carry(self, source: socket.socket, sink: socket.socket, inward: bool) -> None:
        gone = 0
        with suppress(OSError):
            while block := source.recv(65536):
                sink.sendall(block)
                if inward:
                    gone += len(block)
                    self.passed += len(block)
                    if self.hold_after is not None and gone > self.hold_after:
                        self.hold_after = None
                        self.held.set()
                        self.let_go.wait(COMMAND_S)
                    if self.cut_after is not None and gone > self.cut_after:
                        self.cut_after = None
                        self.cuts += 1
                        break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def receiving_machine(folder: Path) -> Iterator[Machine]:
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    host_key = ensure_key_pair(folder / "host")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "sshd_config"
    config.write_text(CONFIG.format(port=port, folder=folder, home=home))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "sshd.log").open("wb") as log:
        sshd = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log, stdout=log
        )
    wire = Wire(port)
    try:
        wait_for(lambda: greets(port))
        made = Machine(folder, port, " ".join(host_key.split()[:2]), wire)
        made.receiver.init()
        yield made
    finally:
        wire.close()
        sshd.terminate()
        sshd.wait(120)
