"""Run an Ansible playbook against a server, in a process of its own, and report its tasks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from labctl.commands import ansible
from labctl.decoding import decode_json
from labctl.errors import ConnectError, DiskFullError, LabError
from labctl.events import Progress, Reporter, Step
from labctl.model import Value

LOG_NAME = "prepare.log"
STEP = "prepare"


class TaskEvent(Value, frozen=True):
    """One line that `labctl_events` (playbooks/callback_plugins) prints."""

    event: str
    host: str = ""
    task: str = ""
    status: str = ""
    message: str = ""
    total: int = 0
    changed: int = 0


def read_event(line: bytes) -> TaskEvent | None:
    """Parse an event from a line of Ansible's output; None for any other text."""
    try:
        return decode_json(line, TaskEvent)
    except msgspec.DecodeError:
        return None


class _PlaybookProgress:
    """Counts the tasks of a playbook and reports each one; `failed` is the first that failed."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._started = 0
        self._total = 0
        self.failed: TaskEvent | None = None

    def handle(self, event: TaskEvent) -> None:
        match event.event:
            case "play":
                self._total += event.total
            case "task":
                self._started += 1
                self._reporter.emit(Step(name=event.task))
            case "done":
                # Half of the tasks apply to other kinds of machines.
                is_skipped = event.status == "skipped"
                self._reporter.emit(
                    Step(name=event.task, done=True, detail=event.status, brief=is_skipped)
                )
                self._reporter.emit(
                    Progress(
                        name=STEP,
                        done=self._started,
                        total=max(self._total, self._started),
                        unit="steps",
                    )
                )
            case "failed" | "unreachable":
                self.failed = self.failed or event


def run_playbook(
    host: ansible.Host,
    playbooks_dir: Path,
    reporter: Reporter,
    *,
    name: str = "server.yml",
    variables: Value | None = None,
    server_name: str = "",
    others: Sequence[ansible.Host] = (),
) -> None:
    """Run a playbook against a host, and `others`; LabError names the task that failed.

    Errors call the server `server_name`, or its alias.
    """
    log_path = host.ssh_config.parent / LOG_NAME
    progress = _PlaybookProgress(reporter)
    reporter.emit(Step(name=STEP, detail=host.alias))
    with _ansible_home() as home, _private_log(log_path) as log:
        inventory = home / "hosts"
        inventory.write_text(ansible.build_inventory([host, *others]))
        variables_file = home / "variables.json" if variables else None
        if variables_file:
            variables_file.write_bytes(msgspec.json.encode(variables))
        argv = ansible.playbook_argv(
            sys.executable,
            playbooks_dir,
            inventory,
            home=home,
            locale=_utf8_locale(),
            name=name,
            variables=variables_file,
        )
        code = _run(argv, playbooks_dir, log, progress)
    # A failed task may have been rescued: only the exit code says whether the playbook failed.
    if code:
        failed_alias = progress.failed.host if progress.failed and others else host.alias
        server_name = server_name or failed_alias or host.alias
        raise _make_playbook_error(server_name, progress.failed, code, log_path)
    reporter.emit(Step(name=STEP, done=True, detail=host.alias))


def _run(argv: list[str], directory: Path, log: IO[bytes], progress: _PlaybookProgress) -> int:
    with subprocess.Popen(
        argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if event := read_event(line):
                    progress.handle(event)
            return process.wait()
        finally:
            # Reached early if the user interrupts: Ansible ends what it started on the server.
            process.terminate()


@contextlib.contextmanager
def _ansible_home() -> Iterator[Path]:
    """Create a private directory for one run of Ansible, and remove it afterwards.

    It is not in TMPDIR: it holds sockets, whose paths must be short.
    """
    home = Path(tempfile.mkdtemp(prefix="labctl-a-", dir="/tmp"))
    try:
        yield home
    finally:
        _stop_ssh_masters(home)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _private_log(path: Path) -> Iterator[IO[bytes]]:
    """Open a server's log (0600) in the server's directory, which is removed with the server."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    except FileNotFoundError:
        raise LabError(
            f"{path.parent.name} was removed while it was being prepared",
            why="its files on this machine are gone",
            hint=lambda subject: f"{subject.up}   # creates another one",
        ) from None
    with os.fdopen(descriptor, "wb") as log:
        yield log


def _stop_ssh_masters(home: Path) -> None:
    """Stop Ansible's SSH masters now; otherwise they outlive their sockets by seconds."""
    for control in (home / "cp").glob("*"):
        if control.is_socket():
            subprocess.run(ansible.end_master_argv(control), capture_output=True, check=False)


def _utf8_locale() -> str:
    return "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"


def _make_playbook_error(
    server_name: str, failed: TaskEvent | None, code: int, log_path: Path
) -> LabError:
    hint = f"less {log_path}"
    if failed is None:
        return LabError(
            f"Ansible could not prepare {server_name}",
            why=f"it exited with code {code}: {_read_last_lines(log_path)}",
            hint=hint,
        )
    kind = LabError
    if failed.event == "unreachable":
        kind = ConnectError
    elif "No space left on device" in failed.message:  # Ansible reports a failed task in words
        kind = DiskFullError
    return kind(
        f"preparing {server_name} failed at: {failed.task}",
        why=failed.message or "no message",
        hint=hint,
    )


def _read_last_lines(log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(line for line in lines[-5:] if not line.startswith("{")) or "no message"
