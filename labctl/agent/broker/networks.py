"""The firewall around the networks of accounts, and Unix sockets of their services.

Each account's containers have a bridge of their own. On the machine itself only root can reach the
bridges, so a service is available only through its socket in the account's directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from ...wire.watchdog import IMDS_HOST
from ..host import engine
from ..host.paths import read_text
from ..reply import Failure
from .http import CHUNK
from .rules import BrokerAccount

BRIDGE = "lc"
PLACE = Path("/run/labctl/accounts")
CLONE_NEWNET = 0x40000000
PEER = struct.Struct("3i")
ANSWER_S = 10.0
# connections to all services of one account together
MOST_CARRIED = 128
PAUSE_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def read_peer(link: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the client, as the kernel reports it."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    pid, uid, gid = PEER.unpack(credentials)
    return pid, uid, gid


def install_firewall() -> None:
    """Set the firewall rules.

    Only root on this machine reaches the bridges; containers reach neither the machine nor
    metadata. SystemExit if a rule cannot be set: then no account may have a container.
    """
    shell = ["-m", "owner", "!", "--uid-owner", "0", "-j", "REJECT"]
    rules = [
        ("filter", "OUTPUT", ["-o", f"{BRIDGE}+", *shell]),
        ("filter", "OUTPUT", ["-o", "docker0", *shell]),
        ("filter", "OUTPUT", ["-d", IMDS_HOST, *shell]),
        ("filter", "INPUT", ["-i", f"{BRIDGE}+", "-j", "REJECT"]),
        # Not in FORWARD, where Docker inserts a rule before all others for each new network.
        ("mangle", "PREROUTING", ["-i", f"{BRIDGE}+", "-d", IMDS_HOST, "-j", "DROP"]),
    ]
    for table, chain, words in rules:
        if _iptables(table, "-C", chain, *words).returncode != 0:
            done = _iptables(table, "-I", chain, *words)
            if done.returncode != 0:
                raise SystemExit(f"a firewall rule cannot be set: {done.stderr.strip()}")


def _iptables(table: str, action: str, chain: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = ["iptables", "--wait", "-t", table, action, chain, *words]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def find_socket_path(account: BrokerAccount, container: str) -> Path:
    """Return the socket of an account's service. Short: a socket's path is limited to 107 bytes."""
    digest = hashlib.sha256(container.encode()).hexdigest()[:16]
    return PLACE / str(account.uid) / f"{digest}.sock"


class ServiceRelay:
    """A service's socket, and the connections from there into its container."""

    def __init__(
        self,
        owner: int,
        socket_path: Path,
        container: str,
        port: int,
        slots: threading.BoundedSemaphore,
    ) -> None:
        """Create the socket. OSError if the account's own directory prevents it."""
        self._slots = slots
        self._closed = False
        self.owner = owner
        self.container = container
        self.port = port
        self.socket_path = socket_path
        PLACE.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder = socket_path.parent
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            os.chown(folder, owner, -1, follow_symlinks=False)
        self._listener = socket.socket(socket.AF_UNIX)
        # Created where only root may write, then moved, so that no link of the account is followed.
        staging = PLACE / f".{os.urandom(8).hex()}"
        try:
            self._listener.bind(str(staging))
            staging.chmod(0o666)
            self._listener.listen(64)
            staging.replace(socket_path)
        except OSError:
            self._listener.close()
            with suppress(OSError):
                staging.unlink()
            raise
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(OSError):
            self.socket_path.unlink()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE_S)  # closed, or too many files are open at this moment
                continue
            if not self._slots.acquire(blocking=False):
                link.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._slots.release()
                link.close()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                self._carry(link)
        finally:
            self._slots.release()

    def _carry(self, link: socket.socket) -> None:
        if read_peer(link)[1] not in (0, self.owner):
            return
        try:
            container_side = connect_to_container(self.container, self.port)
        except (OSError, Failure):
            return
        with container_side:
            reply_thread = threading.Thread(target=_copy, args=(container_side, link), daemon=True)
            reply_thread.start()
            _copy(link, container_side)
            reply_thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while True:
            block = source.recv(CHUNK)
            if not block:
                break
            target.sendall(block)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def connect_to_container(container: str, port: int) -> socket.socket:
    """Connect to the loopback inside a running container. OSError if nothing listens.

    Call it in a thread of its own, which is left in the wrong namespace if the way back fails.
    """
    inspected = engine.inspect_container(container)
    pid = inspected.State.Pid if inspected else 0
    if not pid:
        raise ConnectionRefusedError("the container is not running")
    own_namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        container_namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _connect_inside(own_namespace, container_namespace, container, pid, port)
        finally:
            os.close(container_namespace)
    finally:
        os.close(own_namespace)


def _connect_inside(
    own_namespace: int, container_namespace: int, container: str, pid: int, port: int
) -> socket.socket:
    # A reused pid must not lead to the machine's own loopback.
    is_same = os.fstat(own_namespace).st_ino == os.fstat(container_namespace).st_ino
    if is_same or container not in read_text(Path(f"/proc/{pid}/cgroup")):
        raise ConnectionRefusedError("the container has ended")
    _enter(container_namespace)
    try:
        link = socket.socket()
    finally:
        _enter(own_namespace)
    try:
        # The socket stays in the namespace in which it was created.
        link.settimeout(ANSWER_S)
        link.connect(("127.0.0.1", port))
        link.settimeout(None)
    except OSError:
        link.close()
        raise
    return link


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network of the container")
