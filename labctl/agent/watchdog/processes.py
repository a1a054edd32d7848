"""What the server's processes and terminals tell about somebody being at work.

Costs are kept low, since this is read again and again: one small file per process, and more only of
those that stand out. Processes in containers do not count here: activity.py asks the engine.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..host.paths import age_of

# A person's program outside containers that uses more than this of a core is at work. Editors'
# servers at rest use a tenth of it.
PROGRAM_CORES = 0.2
TRANSFER_BYTES_S = 1024.0
TRANSFERS = ("rsync", "scp", "sftp-server", "tar", "sshd", "sshd-session", "python3", "python")
OUR_PROGRAM = "/.cache/labctl/remote-"
# Verbs of our own program that end by themselves: they are at work as long as they live.
LASTING = ("build", "pull-image", "service-image", "service", "fetch", "start")
TRANSFERRING = ("send", "hashes", "plan", "commit", "manifest", "edits")
LEAST_UID = 1000
TICKS_S = os.sysconf("SC_CLK_TCK")


class Sign(NamedTuple):
    """One sentence, and how many seconds ago it was so (0: now)."""

    said: str
    age_s: float = 0.0


class Process(NamedTuple):
    pid: int
    name: str
    started: int
    cpu_s: float


def terminals(directory: Path = Path("/dev/pts")) -> list[Sign]:
    """When somebody last typed in each terminal: what reads it moves its access time.

    Opening one counts. The kernel keeps these times to 8 s. What we write there moves another time.
    """
    found = []
    for entry in directory.iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError):
                age = age_of(entry.stat().st_atime)
                found.append(Sign(f"somebody typed in terminal pts/{entry.name}", age))
    return found


def tmux_clients(uid: int, as_user: list[str]) -> list[Sign]:
    """When somebody last typed in each attached tmux client of this account."""
    found = []
    words = ["list-clients", "-F", "#{client_activity} #{session_name}"]
    for socket in Path(f"/tmp/tmux-{uid}").glob("*"):
        line = [*as_user, "tmux", "-S", str(socket), *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=5, check=False)
        for row in done.stdout.splitlines():
            at, _, session = row.partition(" ")
            age = age_of(float(at))
            found.append(Sign(f"somebody typed in the tmux session {session}", age))
    return found


class Processes:
    """Compares each look at the processes with the one before."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.cpu_s: dict[tuple[int, int], float] = {}
        self.moved: dict[tuple[int, int], int] = {}

    def look(self) -> list[Sign]:
        """Transfers that move, and people's programs that compute, since the last look."""
        now = time.monotonic()
        span = now - self.at_s
        first = not self.at_s
        before_cpu, self.cpu_s, self.at_s = self.cpu_s, {}, now
        before_moved, self.moved = self.moved, {}
        found = []
        for process in _processes():
            key = (process.pid, process.started)
            self.cpu_s[key] = process.cpu_s
            if process.name in TRANSFERS:
                sign = self._transfer(process, key, before_moved, span, first)
                if sign:
                    found.append(sign)
                    continue
            cores = (process.cpu_s - before_cpu.get(key, 0.0)) / span
            if not first and cores > PROGRAM_CORES and _of_a_person(process.pid):
                said = f"{process.name} (process {process.pid}) used {cores:.0%} of a core"
                found.append(Sign(said))
        return found

    def _transfer(
        self,
        process: Process,
        key: tuple[int, int],
        before: dict[tuple[int, int], int],
        span: float,
        first: bool,
    ) -> Sign | None:
        name = transfer_name(process.name, _words(process.pid))
        if not name:
            return None
        if name.startswith("labctl "):
            verb = name.split()[1]
            if verb in LASTING:
                return Sign(f"{name} is at work")
            if verb not in TRANSFERRING:
                return None
        try:
            moved = _moved(process.pid)
        except PermissionError:
            return Sign(f"how much {name} moves cannot be read, which counts as a transfer")
        except (FileNotFoundError, ProcessLookupError):
            return None
        self.moved[key] = moved
        rate = (moved - before.get(key, 0)) / span
        if first or rate < TRANSFER_BYTES_S:
            return None
        return Sign(f"{name} moves {rate / 1024:.0f} KiB a second")


def transfer_name(name: str, words: list[str]) -> str:
    """What a process transfers with, "" where it does not: ("sshd", its words) -> "sftp"."""
    if name.startswith("sshd"):
        return "sftp" if words and words[0].rstrip().endswith("@internal-sftp") else ""
    if name.startswith("python"):
        ours = [verb for word, verb in zip(words, words[1:]) if OUR_PROGRAM in word]
        return f"labctl {ours[0]}" if ours else ""
    return name


def _processes() -> list[Process]:
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123 (half the cost)
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        rest = text[text.rindex(")") + 2 :].split()
        cpu_s = (int(rest[11]) + int(rest[12])) / TICKS_S
        found.append(Process(int(entry.name), name, int(rest[19]), cpu_s))
    return found


def _of_a_person(pid: int) -> bool:
    """Whether it runs as an ordinary account and in no container."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    rows = dict(row.partition(":")[::2] for row in text.splitlines())
    uid = int(rows.get("Uid", "0").split()[0])
    return uid >= LEAST_UID and len(rows.get("NSpid", "1").split()) == 1


def _words(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0")


def _moved(pid: int) -> int:
    """Bytes that a process has read and written so far, sockets and pipes included."""
    rows = Path(f"/proc/{pid}/io").read_text().split()
    return int(rows[1]) + int(rows[3])
