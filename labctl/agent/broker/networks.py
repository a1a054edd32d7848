"""Networks of accounts, the fence round them, and services on Unix sockets of their own.

Each account's containers have a bridge of their own. From the machine itself only root reaches
these, so that a service is had through its socket alone, which lies in the account's directory.
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
from typing import Any

from ..host import engine
from ..host.paths import read_text
from ..reply import Failure
from .http import CHUNK, Refusal
from .rules import OWNER, Account

BRIDGE = "lc"
# Where clouds hand out credentials: no account's.
METADATA = "169.254.169.254"
PLACE = Path("/run/labctl/accounts")
CLONE_NEWNET = 0x40000000
PEER = struct.Struct("3i")
ANSWER_S = 10.0
# Connections to all services of one account together.
MOST_CARRIED = 128
PAUSE_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def peer(link: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of who connected, as the kernel says."""
    said = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    pid, uid, gid = PEER.unpack(said)
    return pid, uid, gid


def fence() -> None:
    """Only root on this machine reaches the bridges; containers reach neither it nor metadata.

    Failure where the rules cannot be set: then no account may have a container.
    """
    shell = ["-m", "owner", "!", "--uid-owner", "0", "-j", "REJECT"]
    rules = [
        ("filter", "OUTPUT", ["-o", f"{BRIDGE}+", *shell]),
        ("filter", "OUTPUT", ["-o", "docker0", *shell]),
        ("filter", "OUTPUT", ["-d", METADATA, *shell]),
        ("filter", "INPUT", ["-i", f"{BRIDGE}+", "-j", "REJECT"]),
        # Not in FORWARD: for each new network Docker puts a rule before all others there.
        ("mangle", "PREROUTING", ["-i", f"{BRIDGE}+", "-d", METADATA, "-j", "DROP"]),
    ]
    for table, chain, words in rules:
        if _iptables(table, "-C", chain, *words).returncode != 0:
            done = _iptables(table, "-I", chain, *words)
            if done.returncode != 0:
                raise SystemExit(f"the fence cannot be set: {done.stderr.strip()}")


def _iptables(table: str, action: str, chain: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = ["iptables", "--wait", "-t", table, action, chain, *words]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def network(account: Account) -> str:
    """The account's own network, made where there is none."""
    name = f"labctl-u{account.uid}"
    body = {
        "Name": name,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "Options": {"com.docker.network.bridge.name": f"{BRIDGE}{account.uid}"},
        "Labels": {OWNER: str(account.uid)},
    }
    try:
        engine.ask("GET", f"/networks/{name}")
    except engine.Refused as absent:
        if absent.status != 404:
            raise
        try:
            engine.ask("POST", "/networks/create", body)
        except engine.Refused as refused:
            if refused.status != 409:
                raise Refusal(500, f"no network for {account.name}: {refused.message}") from None
    return name


def socket_of(account: Account, container: str) -> Path:
    """Where a service of the account's is reached. Short: a socket's path may have 107 bytes."""
    digest = hashlib.sha256(container.encode()).hexdigest()[:16]
    return PLACE / str(account.uid) / f"{digest}.sock"


class Relay:
    """One service's socket, and the way from there into its container."""

    def __init__(
        self,
        owner: int,
        place: Path,
        container: str,
        port: int,
        slots: threading.BoundedSemaphore,
    ) -> None:
        """OSError where the account keeps its own directory from having the socket."""
        self._slots = slots
        self._closed = False
        self.owner = owner
        self.container = container
        self.port = port
        self.place = place
        PLACE.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder = place.parent
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            os.chown(folder, owner, -1, follow_symlinks=False)
        self._listener = socket.socket(socket.AF_UNIX)
        # Made where only root may write, and moved: nothing of the account's own is followed.
        staging = PLACE / f".{os.urandom(8).hex()}"
        try:
            self._listener.bind(str(staging))
            staging.chmod(0o666)
            self._listener.listen(64)
            staging.replace(place)
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
            self.place.unlink()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE_S)  # closed, or there are too many open files at this moment
                continue
            if not self._slots.acquire(blocking=False):
                link.close()
                continue
            try:
                threading.Thread(target=self._met, args=(link,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._slots.release()
                link.close()

    def _met(self, link: socket.socket) -> None:
        try:
            with link:
                self._carry(link)
        finally:
            self._slots.release()

    def _carry(self, link: socket.socket) -> None:
        if peer(link)[1] not in (0, self.owner):
            return
        try:
            far = connected(self.container, self.port)
        except (OSError, Failure):
            return
        with far:
            back = threading.Thread(target=_carried, args=(far, link), daemon=True)
            back.start()
            _carried(link, far)
            back.join()


def _carried(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while True:
            block = source.recv(CHUNK)
            if not block:
                break
            target.sendall(block)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def connected(container: str, port: int) -> socket.socket:
    """A connection to the loopback inside a container that runs. OSError where nobody listens.

    Called in a thread that may be left in the wrong namespace, should coming back fail.
    """
    seen = engine.inspect([container])
    state: dict[str, Any] = next(iter(seen.values()), {}).get("State") or {}
    pid = int(state.get("Pid") or 0)
    if not pid:
        raise ConnectionRefusedError("the container does not run")
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _inside(own, theirs, container, pid, port)
        finally:
            os.close(theirs)
    finally:
        os.close(own)


def _inside(own: int, theirs: int, container: str, pid: int, port: int) -> socket.socket:
    # A pid that was used again must not lead to the machine's own loopback.
    same = os.fstat(own).st_ino == os.fstat(theirs).st_ino
    if same or container not in read_text(Path(f"/proc/{pid}/cgroup")):
        raise ConnectionRefusedError("the container has ended")
    _enter(theirs)
    try:
        far = socket.socket()
    finally:
        _enter(own)
    try:
        # The socket stays where it was made.
        far.settimeout(ANSWER_S)
        far.connect(("127.0.0.1", port))
        far.settimeout(None)
    except OSError:
        far.close()
        raise
    return far


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "the network of the container cannot be entered")
