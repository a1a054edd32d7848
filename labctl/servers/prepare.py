"""Turn a machine that answers SSH into a lab server, and find out what it can do.

A server that lacks nothing costs one round trip, the probe. Otherwise the playbook runs, in a
separate Ansible process, and leaves its content hash as a stamp on the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from labctl.commands import ansible
from labctl.commands.probe import (
    SCRIPT,
    MissingRequirement,
    list_admin_commands,
    list_missing,
    parse,
)
from labctl.errors import ConnectError, DiskFullError, LabError, PolicyError
from labctl.errors.subject import Subject
from labctl.events import Note, Progress, Reporter, SilentReporter, Step
from labctl.model import GpuNeed, Need, Server, ServerFacts, Value
from labctl.shell import command
from labctl.text import bytes_text
from labctl.transports import Transport

PROBE_TIMEOUT_S = 90.0
LOG_NAME = "prepare.log"
STEP = "prepare"

# A card sold as 24 GB shows 22.5 GiB: drivers and ECC use the rest.
_SOLD_SIZE_SLACK = 0.07


def probe(transport: Transport) -> ServerFacts:
    """Collect the server's ServerFacts in one round trip. LabError if it cannot run a script."""
    result = transport.run(
        command("sh", "-s"), stdin=SCRIPT.encode(), timeout_s=PROBE_TIMEOUT_S, check=False
    )
    noise = result.noise + "\n" if result.noise.strip() else ""
    return parse(noise + result.stdout, result.stderr)


def playbook_hash(playbooks_dir: Path) -> str:
    """Return the content hash of all files that decide what the playbook does to a server."""
    files = {
        path.relative_to(playbooks_dir).as_posix(): path.read_bytes()
        for path in playbooks_dir.rglob("*.yml")
    }
    return ansible.compute_stamp(files)


def prepare(
    transport: Transport,
    server: Server,
    facts: ServerFacts | None,
    *,
    playbooks_dir: Path,
    ssh_config: Path,
    reporter: Reporter,
    boto3: bool = False,
    name: str = "",
) -> ServerFacts:
    """Install on the server what labctl needs, and return its ServerFacts afterwards.

    `facts` is the result of a `probe` just before, None to probe here. Returns at once if nothing
    is missing, or if this same playbook has already run and can do no more (a GPU without NVIDIA's
    repository, a daemon that something else starts), which is reported as a Note. Otherwise runs
    the playbook, which needs root or sudo without a password; its log is next to `ssh_config`.
    Raises PolicyError with the administrator's commands if the account lacks these rights,
    LabError with the failed task, ConnectError.
    `boto3` is for a server that saves its results by itself; one that cannot is reported, and
    stays usable. Errors call the server `name`, or its alias.
    """
    name = name or server.alias
    facts = facts or probe(transport)
    plain_stamp = playbook_hash(playbooks_dir)
    boto3_stamp = f"{plain_stamp} boto3"
    stamp = boto3_stamp if boto3 else plain_stamp
    lacking = list_missing(facts, boto3=boto3)
    if not _should_run_playbook(lacking, done_before=facts.stamp in (stamp, boto3_stamp)):
        _report_missing(lacking, reporter)
        return facts
    if not (facts.sudo or facts.uid == 0):
        if all(lack.optional for lack in lacking):
            _report_missing(lacking, reporter)
            return facts
        raise _make_needs_admin_error(name, server, facts, lacking, playbooks_dir)
    host = ansible.Host(
        alias=server.alias,
        ssh_config=ssh_config,
        user=server.endpoint.user,
        stamp=stamp,
        boto3=boto3,
    )
    run_playbook(host, playbooks_dir, reporter, server_name=name)
    # A login from before the playbook keeps the groups that the account had then.
    transport.close()
    after = probe(transport)
    still_lacking = list_missing(after, boto3=boto3)
    if any(_can_playbook_fix(lack) for lack in still_lacking):
        raise _make_incomplete_error(name, still_lacking, ssh_config)
    _report_missing(still_lacking, reporter)
    return after


def _can_playbook_fix(lack: MissingRequirement) -> bool:
    """Whether the playbook fixes it on every server and for every account."""
    return not lack.optional and lack.name != "docker daemon"


def _should_run_playbook(lacking: list[MissingRequirement], *, done_before: bool) -> bool:
    return any(_can_playbook_fix(lack) for lack in lacking) if done_before else bool(lacking)


def _report_missing(lacking: list[MissingRequirement], reporter: Reporter) -> None:
    for lack in lacking:
        reporter.emit(Note(text=f"{lack.words}. To fix it: {lack.command}", level="warning"))


def _make_needs_admin_error(
    name: str,
    server: Server,
    facts: ServerFacts,
    lacking: list[MissingRequirement],
    playbooks_dir: Path,
) -> LabError:
    required = [lack for lack in lacking if not lack.optional]
    lines = [f"- {lack.words}" for lack in required]
    lines.append(f"the account {facts.user} may not use sudo without a password.")
    lines.append(f"An administrator of {server.endpoint.host} must run there:")
    lines += [f"    {line}" for line in list_admin_commands(required)]
    playbook = playbooks_dir / "server.yml"
    return PolicyError(
        f"{name} is not ready for labctl, and {facts.user} may not change it",
        why="\n".join(lines),
        hint="send these lines to the administrator; or, if you know the sudo password: "
        f"labctl inventory > hosts && ansible-playbook -i hosts {playbook} -K",
    )


def _make_incomplete_error(
    name: str, lacking: list[MissingRequirement], ssh_config: Path
) -> LabError:
    return LabError(
        f"{name} is still incomplete after its preparation",
        why="\n".join(lack.words for lack in lacking),
        hint=f"less {ssh_config.parent / LOG_NAME}",
    )


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
        return msgspec.json.decode(line, type=TaskEvent)
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
                self._reporter.emit(Step(name=event.task, done=True, detail=event.status))
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
) -> None:
    """Run a playbook against one host; LabError names the task that failed.

    Errors call the server `server_name`, or its alias.
    """
    log_path = host.ssh_config.parent / LOG_NAME
    progress = _PlaybookProgress(reporter)
    reporter.emit(Step(name=STEP, detail=host.alias))
    with _ansible_home() as home, _private_log(log_path) as log:
        inventory = home / "hosts"
        inventory.write_text(ansible.build_inventory([host]))
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
        server_name = server_name or host.alias
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


def select_gpus(need: Need, facts: ServerFacts, reporter: Reporter | None = None) -> str:
    """Return the value of `--gpus` for this need on this server: "" (none) or "all".

    PolicyError if the lab requires a GPU that the server cannot provide. `auto` without a GPU
    returns "" and emits a Note, since training on the CPU is slow.
    """
    gpu = need.gpu
    reporter = reporter or SilentReporter()
    if gpu.kind == "none":
        return ""
    fitting = [g for g in facts.gpus if _is_enough(gpu, g.name, g.memory_bytes)]
    usable = len(fitting) >= max(1, gpu.count)
    if usable and facts.nvidia_runtime:
        return "all"
    if gpu.is_required:
        raise _make_no_gpu_error(gpu, facts, usable)
    if not facts.gpus:
        reporter.emit(Note(text="No GPU on this server; using the CPU."))
    elif not facts.nvidia_runtime:
        gpus = _describe_gpus(facts)
        text = f"{gpus}, but containers cannot use it ({_NO_RUNTIME}); using the CPU."
        reporter.emit(Note(text=text, level="warning"))
    else:
        text = f"{_describe_gpus(facts)}, not {_describe_need(gpu)}; using the CPU."
        reporter.emit(Note(text=text))
    return ""


_NO_RUNTIME = "the NVIDIA Container Toolkit is not installed there"


def _make_no_gpu_error(gpu: GpuNeed, facts: ServerFacts, usable: bool) -> LabError:
    what, why = f"this lab needs {_describe_need(gpu)}", _describe_gpus(facts)
    fix = ""
    if usable:
        what += ", and containers on the server cannot use one"
        why += f", but {_NO_RUNTIME}"
        fix = "; ".join(lack.command for lack in list_missing(facts) if lack.optional)
    else:
        what += ", which this server does not have" if facts.gpus else ", and the server has none"
    return PolicyError(what, why=why, hint=fix or _change_gpu)


def _change_gpu(subject: Subject) -> str:
    file = subject.config_file
    return f"change `gpu:` under `server:` in {file} (auto uses a GPU if the server has one)"


def _is_enough(gpu: GpuNeed, name: str, memory_bytes: int) -> bool:
    if memory_bytes < gpu.min_memory_bytes * (1 - _SOLD_SIZE_SLACK):
        return False
    return gpu.kind in ("auto", "any") or is_gpu_model(gpu.kind, name)


def is_gpu_model(kind: str, name: str) -> bool:
    """Whether nvidia-smi's `name` ("NVIDIA A100-SXM4-80GB") is a `kind` ("A100", "a100-80gb").

    Only whole words match, so that A10 is not an A100; words may be written together (RTX4090).
    """
    words = _words(name)
    if set(_words(kind)) <= set(words):
        return True
    sought = "".join(_words(kind))
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return sought in runs


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def _describe_need(gpu: GpuNeed) -> str:
    kind = "a GPU" if gpu.kind in ("auto", "any") else f"a GPU of kind {gpu.kind}"
    if gpu.count > 1:
        kind = f"{gpu.count} GPUs" + ("" if gpu.kind in ("auto", "any") else f" of kind {gpu.kind}")
    size = f" with at least {bytes_text(gpu.min_memory_bytes)}" if gpu.min_memory_bytes else ""
    return kind + size


def _describe_gpus(facts: ServerFacts) -> str:
    if not facts.gpus:
        return "the server has no GPU"
    gpus = (f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in facts.gpus)
    return "the server has " + ", ".join(gpus)
