"""Rules about how the run ended, and about known messages of PyTorch, CUDA and Linux in its log."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from labctl.insight.explain.evidence import (
    LOG,
    Answer,
    Evidence,
    Finding,
    RunData,
    Unknown,
    from_log,
    from_record,
    from_telemetry,
)
from labctl.insight.explain.gpu_loss import has_lost_gpu
from labctl.insight.explain.losses import IN_LOG
from labctl.insight.explain.memory import find_out_of_memory
from labctl.insight.explain.missing_program import find_missing_program
from labctl.insight.explain.samples import median_of
from labctl.insight.explain.sources import (
    CUDA_NOTES,
    DATA_LOADER,
    LAB_FILE,
    LABCTL,
    LABCTL_IMAGES,
    TUNING,
    Reference,
)
from labctl.insight.explain.wording import repeat_command
from labctl.model import Run
from labctl.text import duration_text
from labctl.wire.runs import GPU_LEASE

# A run that is idle and makes no progress for this long is stuck. A rule of thumb.
STUCK_S = 300.0
# a shell's exit code for a file that it found and cannot execute
CANNOT_EXECUTE_CODE = 126


class KnownMessage(NamedTuple):
    """A message, what it means, and what to do. `{0}` stands for the first group of the match."""

    rule: str
    pattern: re.Pattern[str]
    what: str
    why: str
    next: str
    source: Reference
    level: str = "problem"


def _known_message(
    rule: str,
    pattern: str,
    what: str,
    why: str,
    next_: str,
    source: Reference,
    level: str = "problem",
) -> KnownMessage:
    return KnownMessage(rule, re.compile(pattern), what, why, next_, source, level)


KNOWN_MESSAGES = (
    _known_message(
        "module-missing",
        r"(?:ModuleNotFoundError|python[\d.]*): No module named '?([\w.]*\w)",
        "{image} has no Python module {0}",
        "a run has only what its image or environment installs, not what is on your machine",
        "correct its name, or add it to {packages}, then:\n{again}",
        LABCTL,
    ),
    _known_message(
        "install-failed",
        r"(?m:^ERROR: No matching distribution found for (\S+))",
        "pip did not install {0}",
        "its name or version does not exist, none fits the image's Python, or the package index "
        "was not reachable. A script goes on after a failed command, unless it begins with set -e",
        "correct its name or version, and add it to {packages}",
        LABCTL_IMAGES,
    ),
    _known_message(
        "card-unknown-to-pytorch",
        r"no kernel image is available for execution",
        "this PyTorch was not built for this GPU",
        "the GPU is newer or older than those that PyTorch was compiled for",
        "use another base image in the Dockerfile or lab.yaml, with a newer PyTorch (an older one "
        "for an old GPU)",
        CUDA_NOTES,
    ),
    _known_message(
        "driver-too-old",
        r"(driver version is insufficient|NVIDIA driver on your system is too old)",
        "the server's NVIDIA driver is too old for this image",
        "an image contains its own CUDA, but uses the server's driver",
        "use an image with an older CUDA, or another server:\nlabctl down && labctl up",
        CUDA_NOTES,
    ),
    _known_message(
        "device-side-assert",
        r"device-side assert triggered",
        "a CUDA kernel refused its input",
        "nearly always a label or index out of range, such as a class number equal to the number "
        "of classes. Kernels run asynchronously, so the traceback names the wrong line",
        "labctl run -- env CUDA_LAUNCH_BLOCKING=1 {command}   # gives the right traceback",
        CUDA_NOTES,
    ),
    _known_message(
        "worker-killed",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal: Killed|exited unexp)",
        "a DataLoader worker was killed",
        "usually memory ran out: every worker has its own copy of the data that it uses",
        "use fewer workers, or raise `memory` under `limits` in lab.yaml",
        DATA_LOADER,
    ),
    _known_message(
        "out-of-memory-host",
        r"(?m:^(?:[\w.]+\.)?_?(?:Array)?MemoryError\b)"
        r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "the program asked for more main memory than it can have",
        "its tensors, arrays or lists do not fit into the server's memory; this is not the GPU's",
        "load the data in parts, use a smaller batch, or a server with more memory:\nlabctl offers",
        LABCTL,
    ),
    _known_message(
        "too-many-files",
        r"Too many open files",
        "too many files are open",
        "each tensor that a DataLoader worker passes on is an open file",
        "torch.multiprocessing.set_sharing_strategy('file_system'); and close files after use",
        DATA_LOADER,
    ),
    _known_message(
        "disk-full",
        r"No space left on device",
        "a disk was full",
        "either the server's disk, or /dev/shm, which is in memory",
        "labctl run -- df -h /dev/shm\nlabctl ssh -- df -h",
        LAB_FILE,
    ),
    _known_message(
        "data-read-only",
        r"Read-only file system: '?(/lab/data[^'\s]*)?",
        "it tried to write to a read-only directory",
        "/lab/data is read-only, so that no run can damage another run's data",
        "write below $LABCTL_RUN_DIR (kept with the run) or $LABCTL_CACHE_DIR",
        LAB_FILE,
    ),
    _known_message(
        "file-missing",
        r"python[\d.]*: can't open file '(?:/lab/code/)?([^']+)'",
        "the program {0} does not exist",
        "a command starts in the directory of lab.yaml, whatever directory it was typed in",
        "correct the path of {0} in the command",
        LAB_FILE,
    ),
    _known_message(
        "file-missing",
        r"FileNotFoundError: .*?'([^']+)'",
        "the file {0} does not exist",
        "in the container, code is in /lab/code and data in /lab/data/NAME; paths of your own "
        "machine do not exist there",
        "add it under data: in lab.yaml and read it from $LABCTL_DATA_DIR; to list the data: "
        "labctl run -- ls /lab/data",
        LAB_FILE,
    ),
    _known_message(
        "shapes",
        r"((?:mat1 and mat2 shapes|size mismatch|shape .* is invalid for input)[^\n]{0,120})",
        "tensor shapes do not match",
        "the output size of one layer is not the input size of the next",
        "print the shapes before that line, or run the model on this machine:\n"
        "labctl estimate FILE.py:FUNCTION",
        TUNING,
    ),
    _known_message(
        "two-devices",
        r"Expected all tensors to be on the same device",
        "some tensors are on the GPU and some are not",
        "an operation needs all its inputs on one device",
        "call model.to(device), and .to(device) on every batch and every tensor that you create",
        CUDA_NOTES,
    ),
    _known_message(
        "scheduler-before-optimizer",
        r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
        "the scheduler steps before the optimizer",
        "this skips the first value of the learning rate",
        "call optimizer.step() first, then scheduler.step()",
        TUNING,
        "advice",
    ),
)
LAST_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?:: ?(.*))?$")


def find_known_messages(material: RunData) -> Iterator[Answer]:
    """Find known messages in the log."""
    for message in KNOWN_MESSAGES:
        matches = list(message.pattern.finditer(material.log))
        if not matches:
            continue
        match = matches[-1]
        groups = [group or "" for group in match.groups()] or [""]
        start = material.log.rfind("\n", 0, match.start()) + 1
        line = material.log[start:].split("\n", 1)[0].strip()
        yield Finding(
            rule=message.rule,
            level="advice" if message.level == "advice" else "problem",
            what=message.what.format(*groups, image=material.image_name),
            why=message.why,
            evidence=(from_log(line[:240]),),
            next=message.next.format(
                *groups,
                command=shlex.join(material.run.command),
                again=repeat_command(material),
                packages=material.package_list,
            ),
            source=message.source,
        )


def explain_end(material: RunData) -> Iterator[Answer]:
    """Explain the end from the run's record, if no known message does."""
    run = material.run
    if run.state == "lost":
        yield _explain_loss(run)
        return
    if run.state == "exited" and run.exit_code not in (0, None) and not _is_explained(material):
        yield _explain_failure(material, run.exit_code or 0)


def _explain_loss(run: Run) -> Finding:
    what = "the run ended with its server"
    hint = "labctl run --recover   # resumes on a new server from the last checkpoint"
    if run.stopped_by == GPU_LEASE:
        what = "the run's time with the shared GPU ended"
        hint = f"labctl run --recover --id {run.id}   # resumes when a GPU is free"
    elif run.stopped_by:
        hint = "set a longer ttl: or a larger budget: in lab.yaml, or:\nlabctl extend 1h"
    return Finding(
        rule="lost",
        level="problem",
        what=what,
        why=run.summary or "the server ended while the run was active",
        evidence=(from_record(run.summary or "lost"),),
        next=hint,
        source=LABCTL,
    )


def _explain_failure(material: RunData, code: int) -> Finding:
    run = material.run
    last = _find_last_error(material.log)
    if last:
        return Finding(
            rule="exception",
            level="problem",
            what=f"it failed with an error: {last[:160]}",
            why="the code did not catch this exception; the traceback above it shows the line",
            evidence=(from_record(run.summary), from_log(last[:240])),
            next=f"labctl logs {run.id} -n 40",
            source=LABCTL,
        )
    if code == 137:
        return Finding(
            rule="killed",
            level="problem",
            what="it was killed (SIGKILL)",
            why="a user killed it, or the server ran out of memory and the kernel did",
            evidence=(from_record(run.summary),),
            next="labctl ssh -- dmesg   # shows whether memory ran out on the server",
            source=LAB_FILE,
        )
    if code == CANNOT_EXECUTE_CODE and run.command:
        return _explain_unexecutable(material)
    return Finding(
        rule="failed",
        level="problem",
        what=f"it failed with exit code {code}",
        why="Check the end of the log.",
        evidence=(from_record(run.summary or f"exit code {code}"), *_last_line(material)),
        next=f"labctl logs {run.id} -n 40",
        source=LABCTL,
    )


def _explain_unexecutable(material: RunData) -> Finding:
    program = material.run.command[0]
    command = f"labctl run -- {shlex.join(['python', *material.run.command])}"
    return Finding(
        rule="failed",
        level="problem",
        what=f"{program} cannot be executed",
        why="the file has no permission to be executed, or is not a program",
        evidence=(from_record(material.run.summary), *_last_line(material)),
        next=command
        if program.endswith(".py")
        else f"chmod +x {shlex.quote(program)}, then:\n{repeat_command(material)}",
        source=LABCTL,
    )


def _is_explained(material: RunData) -> bool:
    """Whether another rule explains why the run ended."""
    last = material.log.rstrip().rpartition("\n")[2]
    is_known = any(message.pattern.search(material.log) for message in KNOWN_MESSAGES)
    is_known = is_known or has_lost_gpu(material) or bool(find_missing_program(material))
    return is_known or find_out_of_memory(material) is not None or IN_LOG.search(last) is not None


def _find_last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if LAST_ERROR.match(line)), "")


def _last_line(material: RunData) -> tuple[Evidence, ...]:
    lines = [line for line in material.log.splitlines() if line.strip()]
    return (from_log(lines[-1].strip()[:240]),) if lines else ()


def detect_stuck(material: RunData) -> Iterator[Answer]:
    """Detect a run that is active but makes no progress."""
    run = material.run
    if run.has_ended or run.state != "running":
        return
    times = [time for item in material.scalars.series for time in item.times]
    last = max([*times, run.started_at or 0.0])
    recent = material.samples[-6:]
    if not last or not recent:
        return
    quiet_s = recent[-1].at - last
    if quiet_s < STUCK_S:
        return
    busy = median_of(item.cpu_cores for item in recent)
    use = median_of(gpu.use_percent for item in recent for gpu in item.gpus)
    if (busy is not None and busy > 0.2) or (use is not None and use > 5):
        return
    cores = "not measured" if busy is None else f"{busy:.2f}"
    yield Finding(
        rule="stands-still",
        level="problem",
        what=f"no progress for {duration_text(quiet_s)}",
        why="it probably waits for a lock, a download, or another process",
        evidence=(
            from_telemetry(f"cores busy: {cores}; GPU: {use or 0:.0f}%"),
            _progress_evidence(quiet_s),
        ),
        next=f"labctl logs {run.id} -n 40\n"
        f"labctl attach {run.id}   # looks inside\n"
        f"labctl cancel {run.id}   # stops it",
        source=LABCTL,
    )


def _progress_evidence(quiet_s: float) -> Evidence:
    text = f"no new point in any curve for {duration_text(quiet_s)}"
    return Evidence(text=text, source="TensorBoard")


def check_log(material: RunData) -> Iterator[Answer]:
    """Report a missing or empty log."""
    if material.log.strip():
        return
    run = material.run
    why, command = f"{LOG} is not on this machine", f"labctl logs {run.id}"
    if material.has_log:
        why = f"{LOG} is empty: the run has printed nothing so far"
        command += " -f   # shows it as soon as it does"
        if run.has_ended:
            why = f"{LOG} is empty: the run printed nothing"
            command = f"labctl pull {run.id} --all   # downloads everything that it wrote to files"
    yield Unknown(rule="log", what="what it printed", why=why, next=command)


RULES = (find_known_messages, explain_end, detect_stuck, check_log)
