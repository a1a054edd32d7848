"""Turn a machine that answers SSH into a lab server, and say what it can do.

A server that lacks nothing costs one round trip, the probe. Else the playbook runs, by Ansible in
a process of its own, and leaves its content hash as a stamp on the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from labctl.commands import ansible
from labctl.commands.probe import SCRIPT, Missing, admin_commands, missing, parse
from labctl.errors import ConnectError, DiskFullError, LabError, PolicyError
from labctl.events import Note, Progress, Reporter, Silent, Step
from labctl.model import GIB, Facts, GpuNeed, Need, Server, Value
from labctl.shell import command
from labctl.transports import Transport

PROBE_TIMEOUT_S = 90.0
LOG_NAME = "prepare.log"
STEP = "prepare"

# A card sold as 24 GB shows 22.5 GiB: drivers and ECC keep the rest for themselves.
_SOLD_SIZE_SLACK = 0.07


def probe(transport: Transport) -> Facts:
    """Everything about the server, in one round trip. LabError where it cannot run a script."""
    result = transport.run(
        command("sh", "-s"), stdin=SCRIPT.encode(), timeout_s=PROBE_TIMEOUT_S, check=False
    )
    noise = result.noise + "\n" if result.noise.strip() else ""
    return parse(noise + result.stdout, result.stderr)


def playbook_hash(playbooks_dir: Path) -> str:
    """The content hash of all that decides what the playbook does to a server."""
    files = {
        path.relative_to(playbooks_dir).as_posix(): path.read_bytes()
        for path in playbooks_dir.rglob("*.yml")
    }
    return ansible.stamp_of(files)


def prepare(
    transport: Transport,
    server: Server,
    facts: Facts | None,
    *,
    playbooks_dir: Path,
    ssh_config: Path,
    reporter: Reporter,
    boto3: bool = False,
) -> Facts:
    """The server's Facts once it has what labctl needs; `facts` is what `probe` just found,
    None to have it found here.

    Returns at once where nothing is missing, or where the playbook of this very content was here
    and could do no more (a GPU without NVIDIA's repository, a daemon that something else starts):
    that is told as a Note. Otherwise runs the playbook, which needs root or sudo without a
    password; the log lies beside `ssh_config`. Raises PolicyError with the administrator's
    commands where there are no such rights, LabError with the failed task, ConnectError.
    With `boto3` the server is to save results by itself; one that cannot is told, and usable.
    """
    facts = facts or probe(transport)
    plain = playbook_hash(playbooks_dir)
    more = f"{plain} boto3"
    stamp = more if boto3 else plain
    lacking = missing(facts, boto3=boto3)
    if not _worth_running(lacking, done_before=facts.stamp in (stamp, more)):
        _tell(lacking, reporter)
        return facts
    if not (facts.sudo or facts.uid == 0):
        if all(lack.optional for lack in lacking):
            _tell(lacking, reporter)
            return facts
        raise _needs_admin(server, facts, lacking, playbooks_dir)
    host = ansible.Host(
        alias=server.alias,
        ssh_config=ssh_config,
        user=server.endpoint.user,
        stamp=stamp,
        boto3=boto3,
    )
    play(host, playbooks_dir, reporter)
    # A login made before keeps the groups that the account had then.
    transport.close()
    after = probe(transport)
    left = missing(after, boto3=boto3)
    if any(_is_ours(lack) for lack in left):
        raise _still_lacking(server, left, ssh_config)
    _tell(left, reporter)
    return after


def _is_ours(lack: Missing) -> bool:
    """Whether the playbook mends it for every account, wherever it runs."""
    return not lack.optional and lack.name != "docker daemon"


def _worth_running(lacking: list[Missing], *, done_before: bool) -> bool:
    return any(_is_ours(lack) for lack in lacking) if done_before else bool(lacking)


def _tell(lacking: list[Missing], reporter: Reporter) -> None:
    for lack in lacking:
        reporter.emit(Note(text=f"{lack.words}. To mend it: {lack.command}", level="warning"))


def _needs_admin(
    server: Server, facts: Facts, lacking: list[Missing], playbooks_dir: Path
) -> LabError:
    required = [lack for lack in lacking if not lack.optional]
    lines = [f"- {lack.words}" for lack in required]
    lines.append(f"the account {facts.user} may not use sudo without a password.")
    lines.append(f"What an administrator of {server.endpoint.host} types there:")
    lines += [f"    {line}" for line in admin_commands(required)]
    playbook = playbooks_dir / "server.yml"
    return PolicyError(
        f"{server.alias} is not ready for labctl, and {facts.user} may not change it",
        why="\n".join(lines),
        hint="send these lines to the administrator; or, if you know the sudo password: "
        f"labctl inventory > hosts && ansible-playbook -i hosts {playbook} -K",
    )


def _still_lacking(server: Server, lacking: list[Missing], ssh_config: Path) -> LabError:
    return LabError(
        f"{server.alias} was prepared, but still lacks something",
        why="\n".join(lack.words for lack in lacking),
        hint=f"less {ssh_config.parent / LOG_NAME}",
    )


class TaskEvent(Value, frozen=True):
    """One line of what `labctl_events` (playbooks/callback_plugins) prints."""

    event: str
    host: str = ""
    task: str = ""
    status: str = ""
    message: str = ""
    total: int = 0
    changed: int = 0


def read_event(line: bytes) -> TaskEvent | None:
    """The event in a line of Ansible's output, None for any other text."""
    try:
        return msgspec.json.decode(line, type=TaskEvent)
    except msgspec.DecodeError:
        return None


class _Told:
    """What Ansible has told so far, handed on to a Reporter as it comes."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._begun = 0
        self._total = 0
        self.failed: TaskEvent | None = None

    def hear(self, event: TaskEvent) -> None:
        match event.event:
            case "play":
                self._total += event.total
            case "task":
                self._begun += 1
                self._reporter.emit(Step(name=event.task))
            case "done":
                self._reporter.emit(Step(name=event.task, done=True, detail=event.status))
                self._reporter.emit(
                    Progress(
                        name=STEP,
                        done=self._begun,
                        total=max(self._total, self._begun),
                        unit="steps",
                    )
                )
            case "failed" | "unreachable":
                self.failed = self.failed or event


def play(
    host: ansible.Host,
    playbooks_dir: Path,
    reporter: Reporter,
    *,
    name: str = "server.yml",
    variables: Mapping[str, Any] | None = None,
) -> None:
    """Run a playbook against one host; LabError names the task that failed."""
    log_path = host.ssh_config.parent / LOG_NAME
    told = _Told(reporter)
    reporter.emit(Step(name=STEP, detail=host.alias))
    with _ansible_home() as home, _private_log(log_path) as log:
        inventory = home / "hosts"
        inventory.write_text(ansible.inventory([host]))
        more = home / "variables.json" if variables else None
        if more:
            more.write_bytes(msgspec.json.encode(variables))
        argv = ansible.playbook(
            sys.executable,
            playbooks_dir,
            inventory,
            home=home,
            locale=_utf8_locale(),
            name=name,
            variables=more,
        )
        code = _run(argv, playbooks_dir, log, told)
    # A task that a rescue stands behind may fail: only the whole tells.
    if code:
        raise _failure(host.alias, told.failed, code, log_path)
    reporter.emit(Step(name=STEP, done=True, detail=host.alias))


def _run(argv: list[str], directory: Path, log: IO[bytes], told: _Told) -> int:
    with subprocess.Popen(
        argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if event := read_event(line):
                    told.hear(event)
            return process.wait()
        finally:
            # Reached early when the person interrupts: Ansible ends what it began on the server.
            process.terminate()


@contextlib.contextmanager
def _ansible_home() -> Iterator[Path]:
    """A private directory with a short name, gone afterwards. Not TMPDIR: sockets lie in it."""
    home = Path(tempfile.mkdtemp(prefix="labctl-a-", dir="/tmp"))
    try:
        yield home
    finally:
        _end_masters(home)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _private_log(path: Path) -> Iterator[IO[bytes]]:
    """A server's log, in the server's directory: whoever ends the server takes that away."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    except FileNotFoundError:
        raise LabError(
            f"{path.parent.name} was ended while it was being prepared",
            why="its files are gone from this machine",
            hint="labctl up   # makes another one",
        ) from None
    with os.fdopen(descriptor, "wb") as log:
        yield log


def _end_masters(home: Path) -> None:
    """End Ansible's SSH masters now; else they outlive their sockets by seconds."""
    for control in (home / "cp").glob("*"):
        if control.is_socket():
            subprocess.run(ansible.end_master(control), capture_output=True, check=False)


def _utf8_locale() -> str:
    return "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"


def _failure(alias: str, failed: TaskEvent | None, code: int, log_path: Path) -> LabError:
    hint = f"less {log_path}"
    if failed is None:
        return LabError(
            f"Ansible could not prepare {alias}",
            why=f"it ended with code {code}: {_last_words(log_path)}",
            hint=hint,
        )
    kind = LabError
    if failed.event == "unreachable":
        kind = ConnectError
    elif "No space left on device" in failed.message:
        kind = DiskFullError
    return kind(
        f"preparing {alias} failed at: {failed.task}",
        why=failed.message or "no message",
        hint=hint,
    )


def _last_words(log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(line for line in lines[-5:] if not line.startswith("{")) or "no message"


def gpu_for(need: Need, facts: Facts, reporter: Reporter | None = None) -> str:
    """What `--gpus` gets for this need on this server: "" (none) or "all".

    PolicyError where a GPU is asked for that the server cannot give; `auto` without one is "" and
    a Note to the reporter, since training on the CPU is slow.
    """
    gpu = need.gpu
    reporter = reporter or Silent()
    if gpu.kind == "none":
        return ""
    fitting = [found for found in facts.gpus if _fits(gpu, found.name, found.memory_bytes)]
    usable = len(fitting) >= max(1, gpu.count)
    if usable and facts.nvidia_runtime:
        return "all"
    if gpu.required:
        raise _no_gpu(gpu, facts, usable)
    if not facts.gpus:
        reporter.emit(Note(text="this server has no GPU: it runs on the CPU"))
    elif not facts.nvidia_runtime:
        text = f"{_have(facts)}, but containers cannot use it ({_NO_RUNTIME}): it runs on the CPU"
        reporter.emit(Note(text=text, level="warning"))
    else:
        reporter.emit(Note(text=f"{_have(facts)}, not {_asked(gpu)}: it runs on the CPU"))
    return ""


_NO_RUNTIME = "the NVIDIA Container Toolkit is not installed there"


def _no_gpu(gpu: GpuNeed, facts: Facts, usable: bool) -> LabError:
    why = f"{_have(facts)}, but {_NO_RUNTIME}" if usable else _have(facts)
    hint = "change `gpu:` under `server:` in lab.yaml (auto takes a GPU if there is one)"
    if usable:
        hint = "; ".join(lack.command for lack in missing(facts) if lack.optional)
    return PolicyError(f"the lab asks for {_asked(gpu)}: not on this server", why=why, hint=hint)


def _fits(gpu: GpuNeed, name: str, memory_bytes: int) -> bool:
    if memory_bytes < gpu.min_memory_bytes * (1 - _SOLD_SIZE_SLACK):
        return False
    return gpu.kind in ("auto", "any") or gpu_named(gpu.kind, name)


def gpu_named(kind: str, name: str) -> bool:
    """Whether nvidia-smi's `name` ("NVIDIA A100-SXM4-80GB") is a `kind` ("A100", "a100-80gb").

    Whole words count, so that A10 is no A100; words may be run together (RTX4090).
    """
    words = _words(name)
    if set(_words(kind)) <= set(words):
        return True
    sought = "".join(_words(kind))
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return sought in runs


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def _asked(gpu: GpuNeed) -> str:
    kind = "a GPU" if gpu.kind in ("auto", "any") else f"a GPU of kind {gpu.kind}"
    if gpu.count > 1:
        kind = f"{gpu.count} GPUs" + ("" if gpu.kind in ("auto", "any") else f" of kind {gpu.kind}")
    size = f" with at least {gpu.min_memory_bytes / GIB:.0f} GiB" if gpu.min_memory_bytes else ""
    return kind + size


def _have(facts: Facts) -> str:
    if not facts.gpus:
        return "the server has no GPU"
    told = (f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in facts.gpus)
    return "the server has " + ", ".join(told)
