"""Signs of work from the server's processes and terminals.

These are read often, so the cost is kept low: one small file per process, and more only of
processes that stand out. Processes in containers do not count here: activity.py asks the engine.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..host.paths import compute_age_s

# cores: a person's program outside containers that uses more is at work. Idle servers of editors
# use a tenth of this.
PROGRAM_CORES = 0.2
TRANSFER_BYTES_S = 1024.0
TRANSFERS = ("rsync", "scp", "sftp-server", "tar", "sshd", "sshd-session", "python3", "python")
OUR_PROGRAM = "/.cache/labctl/remote-"
# Verbs of the agent that end by themselves: they count as work while they live.
LASTING = (
    *("build", "build-environment", "pull-image", "load-image", "service-image", "service"),
    *("fetch", "start"),
)
# `send` is a verb of earlier versions, whose programs may run beside this one.
TRANSFERRING = ("send", "hashes", "plan", "commit", "manifest", "edits")
LEAST_UID = 1000
TICKS_S = os.sysconf("SC_CLK_TCK")


class ActivitySign(NamedTuple):
    """A sentence, and how many seconds ago it was true (0: now). `run` is a running run's id.

    `gpu_percent` is how much of one GPU is used, None for a use that cannot be measured.
    """

    text: str
    age_s: float = 0.0
    run: str = ""
    gpu_percent: float | None = 0.0


class ProcessStat(NamedTuple):
    pid: int
    name: str
    start_ticks: int
    cpu_s: float


def read_typing(uid: int, as_user: list[str]) -> list[ActivitySign]:
    """Return when somebody last typed in each terminal, and in each tmux client of this account."""
    clients, panes = _read_tmux(uid, as_user)
    return _read_terminals(panes) + clients


def _read_terminals(panes: set[str], directory: Path = Path("/dev/pts")) -> list[ActivitySign]:
    """Return when somebody last typed in each terminal but these, by its access time.

    Opening a terminal counts. The kernel keeps these times to 8 s. Our own messages change only the
    modification time. A pane of tmux is left out: tmux opens it, for example at a run's start, and
    the clients of tmux show whether somebody types there.
    """
    signs = []
    for entry in directory.iterdir():
        if entry.name.isdigit() and str(entry) not in panes:
            with suppress(FileNotFoundError):
                age = compute_age_s(entry.stat().st_atime)
                signs.append(ActivitySign(f"somebody typed in terminal pts/{entry.name}", age))
    return signs


def _read_tmux(uid: int, as_user: list[str]) -> tuple[list[ActivitySign], set[str]]:
    """Return when somebody last typed in each attached tmux client, and the panes' terminals."""
    signs = []
    panes = set()
    clients = ["list-clients", "-F", "#{client_activity} #{session_name}"]
    words = [*clients, ";", "list-panes", "-a", "-F", "#{pane_tty}"]
    for socket in Path(f"/tmp/tmux-{uid}").glob("*"):
        command = [*as_user, "tmux", "-S", str(socket), *words]
        with suppress(FileNotFoundError):  # without tmux, nothing of that kind can be running
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
            for row in done.stdout.splitlines():
                if row.startswith("/"):
                    panes.add(row)
                    continue
                at, _, session = row.partition(" ")
                age = compute_age_s(float(at))
                signs.append(ActivitySign(f"somebody typed in the tmux session {session}", age))
    return signs, panes


class ProcessActivity:
    """Readings of all processes, each compared with the previous one."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.cpu_s: dict[tuple[int, int], float] = {}
        self.moved: dict[tuple[int, int], int] = {}

    def read_activity(self) -> list[ActivitySign]:
        """Return active transfers, and people's programs that compute, since the last call."""
        now = time.monotonic()
        span = now - self.at_s
        is_first = not self.at_s
        before_cpu, self.cpu_s, self.at_s = self.cpu_s, {}, now
        before_moved, self.moved = self.moved, {}
        signs = []
        for process in _list_processes():
            key = (process.pid, process.start_ticks)
            self.cpu_s[key] = process.cpu_s
            if process.name in TRANSFERS:
                sign = self._transfer(process, key, before_moved, span, is_first)
                if sign:
                    signs.append(sign)
                    continue
            cores = (process.cpu_s - before_cpu.get(key, 0.0)) / span
            if not is_first and cores > PROGRAM_CORES and _is_persons(process.pid):
                message = f"{process.name} (process {process.pid}) used {cores:.0%} of a core"
                signs.append(ActivitySign(message))
        return signs

    def _transfer(
        self,
        process: ProcessStat,
        key: tuple[int, int],
        previous: dict[tuple[int, int], int],
        span: float,
        is_first: bool,
    ) -> ActivitySign | None:
        name = name_transfer(process.name, _read_words(process.pid))
        if not name:
            return None
        if name.startswith("labctl "):
            verb = name.split()[1]
            if verb in LASTING:
                return ActivitySign(f"{name} is at work")
            if verb not in TRANSFERRING:
                return None
        try:
            moved_bytes = _read_moved_bytes(process.pid)
        except PermissionError:
            return ActivitySign(
                f"the progress of {name} cannot be read, which counts as a transfer"
            )
        except (FileNotFoundError, ProcessLookupError):
            return None
        self.moved[key] = moved_bytes
        rate = (moved_bytes - previous.get(key, 0)) / span
        if is_first or rate < TRANSFER_BYTES_S:
            return None
        return ActivitySign(f"{name} transfers {rate / 1024:.0f} KiB/s")


def name_transfer(name: str, words: list[str]) -> str:
    """Name the transfer of a process, "" if it has none: ("sshd", its words) -> "sftp"."""
    if name.startswith("sshd"):
        return "sftp" if words and words[0].rstrip().endswith("@internal-sftp") else ""
    if name.startswith("python"):
        ours = [verb for word, verb in zip(words, words[1:]) if OUR_PROGRAM in word]
        return f"labctl {ours[0]}" if ours else ""
    return name


def _list_processes() -> list[ProcessStat]:
    processes = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123 (half the cost)
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_S
        processes.append(ProcessStat(int(entry.name), name, int(fields[19]), cpu_s))
    return processes


def _is_persons(pid: int) -> bool:
    """Return whether a process runs as an ordinary account and in no container."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    rows = dict(row.partition(":")[::2] for row in text.splitlines())
    uid = int(rows.get("Uid", "0").split()[0])
    return uid >= LEAST_UID and len(rows.get("NSpid", "1").split()) == 1


def _read_words(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0")


def _read_moved_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written, including sockets and pipes."""
    rows = Path(f"/proc/{pid}/io").read_text().split()
    return int(rows[1]) + int(rows[3])
