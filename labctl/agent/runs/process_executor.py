"""The executor `process`: each attempt is a session of processes, for servers without Docker.

An attempt has a directory of its own outside of the run's, which the program does not see: what
was created (attempt.json), the script that sets its environment (enter.sh), the mark that it was
started (started/) and its first process (process.json), which is the leader of the session. With
`-it`, start.sh starts it in the user's terminal.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...wire.boot_id import read_boot_token
from ...wire.codec import to_json
from ...wire.runs import PROCESS, ProcessAttemptRecord, ProcessRecord, RunSpec
from ...wire.verbs import CONFIG_FILE
from ..host.background import build_scope_words
from ..host.paths import drop_tree, read_record, require_name, write_json, write_text
from ..host.server_data import resolve_all
from ..host.sessions import is_alive, kill_session, list_session
from ..reply import Failure
from . import secrets_tmpfs
from .attempt_directories import (
    drop_unstarted,
    find_attempt_directory,
    list_attempt_directories,
)
from .enter_script import ENTER, build_enter_script
from .environments import use_environment
from .executor import Environment, LiveAttempt, NewAttempt, ProgramState

# Of an attempt with a terminal: the script by which the terminal starts it.
START = "start.sh"
STARTED = "started"
# seconds that a new session may take to record its first process; systemd-run itself gives up
# after 25
STARTS_WITHIN_S = 30.0
POLL_S = 0.02


class ProcessExecutor:
    """See `Executor`. What an attempt runs in is an Environment."""

    noun = "process"
    runs_here = True

    def find_image(self, spec: RunSpec) -> Environment | None:
        return use_environment(spec.image, spec.lab_id)

    def create(self, attempt: NewAttempt) -> bool:
        require_supported(attempt.spec)
        directory = find_attempt_directory(attempt.name)
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            return False
        spec = attempt.spec
        record = ProcessAttemptRecord(
            spec.id, spec.lab_id, str(attempt.directory), read_boot_token()
        )
        drop_unstarted(attempt, STARTED)
        link_server_data(attempt.root, spec.data)
        write_text(directory / ENTER, build_process_enter_script(directory, attempt), 0o700)
        if spec.tty:
            write_text(directory / START, build_start_script(directory, attempt), 0o700)
        write_json(directory / "attempt.json", to_json(record))
        return True

    def start(self, attempt: NewAttempt) -> None:
        directory = find_attempt_directory(attempt.name)
        words = [*build_scope_words(), "sh", str(directory / ENTER), *attempt.spec.command]
        log = str(attempt.directory / "logs" / "run.log")
        spawn_session(words, log)
        deadline_s = time.monotonic() + STARTS_WITHIN_S
        while not (directory / "process.json").exists():
            if time.monotonic() > deadline_s:
                self.remove(attempt.name)
                what = f"run {attempt.spec.id} did not start within {STARTS_WITHIN_S:.0f} s"
                raise Failure("server", what, "", "labctl doctor")
            time.sleep(POLL_S)

    def stop(self, name: str, grace_s: int) -> None:
        process = read_process(name)
        if process is None:
            return
        self.send_signal(name, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while list_session(process):
            if time.monotonic() > deadline_s:
                kill_session(process)
                return
            time.sleep(POLL_S)

    def send_signal(self, name: str, number: int) -> None:
        """Send it to the entry script, which passes it on; SIGKILL to the whole session."""
        process = read_process(name)
        if process and number == signal.SIGKILL:
            kill_session(process)
        elif process and is_alive(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def inspect(self, names: Sequence[str]) -> dict[str, ProgramState]:
        programs = (_inspect(name) for name in names)
        return {program.name: program for program in programs if program}

    def list_live(self, lab_id: str = "") -> list[LiveAttempt]:
        live = []
        for directory in list_attempt_directories():
            record = _read_attempt(directory.name)
            program = _inspect(directory.name)
            if record and program and program.status == "running":
                attempt = LiveAttempt(
                    PROCESS, directory.name, record.run, record.lab_id, Path(record.directory)
                )
                live += [attempt] if lab_id in ("", record.lab_id) else []
        return live

    def remove(self, name: str) -> None:
        process = read_process(name)
        if process:
            kill_session(process)
        drop_tree(find_attempt_directory(name))

    def build_exec_words(self, name: str, command: Sequence[str]) -> list[str]:
        enter = str(find_attempt_directory(name) / ENTER)
        return ["env", "LABCTL_ENTER=1", "sh", enter, *command]

    def build_wait_words(self, name: str) -> list[str]:
        process = read_process(name)
        if process is None or not is_alive(process):
            return ["true"]
        return ["tail", "--sleep-interval=0.1", f"--pid={process.pid}", "-f", "/dev/null"]

    def read_console(self, name: str) -> str:
        """Return nothing: what the session prints before its log is open goes to the log too."""
        return ""


def require_supported(spec: RunSpec) -> None:
    """Failure for what only a container can do."""
    lacking = [
        text
        for text, is_wanted in (
            ("limits.memory", spec.memory_bytes > 0),
            ("limits.cpus", spec.cpus > 0),
        )
        if is_wanted
    ]
    if lacking:
        what = f"run {spec.id} cannot have {' and '.join(lacking)} on this server"
        why = "runs are plain processes here, without a container"
        raise Failure(
            "policy", what, why, ("remove that, or `executor: process`, from ", CONFIG_FILE)
        )


def link_server_data(root: Path, data: dict[str, str]) -> None:
    """Put a link to each data set of the server beside the pushed ones, where the run looks."""
    (root / "data").mkdir(exist_ok=True)
    for name, directory in resolve_all(data).items():
        link = root / "data" / require_name(name)
        if link.is_symlink():
            link.unlink()
        elif link.is_dir():
            link.rmdir()  # the empty directory on which a container mounts it
        link.symlink_to(directory)


def build_process_enter_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that runs a command in the environment of an attempt."""
    spec = attempt.spec
    own = {"LABCTL_SECRETS_DIR": str(secrets_tmpfs.secrets_directory(spec.id))}
    if spec.gpus != "all":
        own["CUDA_VISIBLE_DEVICES"] = spec.gpus
    return build_enter_script(attempt_directory, attempt, own)


def build_start_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that starts an attempt in a terminal, which may be lost before its end."""
    terminal = [sys.executable, "-I", "-S", str(Path(__file__).with_name("terminal.py"))]
    log = str(attempt.directory / "logs" / "run.log")
    program = ["sh", str(attempt_directory / ENTER), *attempt.spec.command]
    words = [*build_scope_words(), *terminal, log, *program]
    return f"#!/bin/sh\nexec {' '.join(map(shlex.quote, words))}\n"


def spawn_session(words: Sequence[str], log: str) -> int:
    """Start a program as the leader of a new session, its output in a log; return its number."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    words = list(words)
    pid = os.posix_spawnp(words[0], words, os.environ, file_actions=actions, setsid=True)
    # This process may outlive it, and must not keep it as a zombie, which others take for alive.
    threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
    return pid


def _inspect(name: str) -> ProgramState | None:
    record = _read_attempt(name)
    if record is None:
        return None
    process = read_process(name)
    if process is None:
        return ProgramState(name, "created")
    if record.boot == read_boot_token() and list_session(process):
        return ProgramState(name, "running")
    return ProgramState(name, "ended", exit_code=None)


def _read_attempt(name: str) -> ProcessAttemptRecord | None:
    return read_record(ProcessAttemptRecord, find_attempt_directory(name) / "attempt.json")


def read_process(name: str) -> ProcessRecord | None:
    """Read the first process of an attempt; None if it has not been started."""
    return read_record(ProcessRecord, find_attempt_directory(name) / "process.json")
