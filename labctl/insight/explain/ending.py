"""How the run ended, and what it said on its way: known messages of PyTorch, CUDA and Linux."""

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
    Material,
    Unknown,
    measured,
    printed,
    recorded,
)
from labctl.insight.explain.gpu_loss import has_lost_gpu
from labctl.insight.explain.losses import IN_LOG
from labctl.insight.explain.memory import ran_out
from labctl.insight.explain.samples import middle
from labctl.insight.explain.sources import CUDA_NOTES, DATA_LOADER, LAB_FILE, LABCTL, TUNING, Source
from labctl.insight.explain.wording import minutes

# So long without progress, and idle, is standing still. A rule of thumb.
STILL_S = 300.0


class Saying(NamedTuple):
    """A message, what it means, and what to do. `{0}` stands for the first group of the match."""

    rule: str
    pattern: re.Pattern[str]
    what: str
    why: str
    next: str
    source: Source
    level: str = "problem"


def _saying(
    rule: str, pattern: str, what: str, why: str, next_: str, source: Source, level: str = "problem"
) -> Saying:
    return Saying(rule, re.compile(pattern), what, why, next_, source, level)


SAYINGS = (
    _saying(
        "module-missing",
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "the image has no Python module {0}",
        "the container holds what its Dockerfile installed, not what your own machine has",
        "add it to requirements.txt (which the Dockerfile installs), then: labctl run",
        LABCTL,
    ),
    _saying(
        "card-unknown-to-pytorch",
        r"no kernel image is available for execution",
        "this PyTorch was not built for this GPU",
        "the card is newer or older than those that it was compiled for",
        "another base image in the Dockerfile or lab.yaml, with a newer PyTorch (for an old card "
        "an older one)",
        CUDA_NOTES,
    ),
    _saying(
        "driver-too-old",
        r"(driver version is insufficient|NVIDIA driver on your system is too old)",
        "the server's NVIDIA driver is too old for this image",
        "an image brings its CUDA along, the driver belongs to the server",
        "an image with an older CUDA; or another server: labctl down && labctl up",
        CUDA_NOTES,
    ),
    _saying(
        "device-side-assert",
        r"device-side assert triggered",
        "a kernel refused what it was given",
        "nearly always a label or index out of range: a class number as large as the number of "
        "classes. Kernels run later than they are called, so the line in the traceback is not it",
        "labctl run -- env CUDA_LAUNCH_BLOCKING=1 {command}   # the traceback is right then",
        CUDA_NOTES,
    ),
    _saying(
        "worker-killed",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal: Killed|exited unexp)",
        "a DataLoader worker was killed",
        "mostly for want of memory: every worker has its own copy of what it touches",
        "fewer workers, or limits: {{memory: ...}} in lab.yaml",
        DATA_LOADER,
    ),
    _saying(
        "too-many-files",
        r"Too many open files",
        "too many files are open",
        "each tensor that a DataLoader worker hands over is an open file",
        "torch.multiprocessing.set_sharing_strategy('file_system'); and close what you open",
        DATA_LOADER,
    ),
    _saying(
        "disk-full",
        r"No space left on device",
        "a disk was full",
        "the server's, or /dev/shm, which is memory",
        "labctl ssh -- df -h   # and: labctl exec -- df -h /dev/shm",
        LAB_FILE,
    ),
    _saying(
        "data-read-only",
        r"Read-only file system: '?(/lab/data[^'\s]*)?",
        "it tried to write where it may not",
        "/lab/data is read-only, so that no run spoils another's data",
        "write below $LABCTL_RUN_DIR (kept with the run) or $LABCTL_CACHE_DIR",
        LAB_FILE,
    ),
    _saying(
        "file-missing",
        r"FileNotFoundError: .*?'([^']+)'",
        "it did not find {0}",
        "in the container code is at /lab/code, data at /lab/data/NAME; paths of your own machine "
        "mean nothing there",
        "name it under data: in lab.yaml and read it from $LABCTL_DATA_DIR; labctl exec -- ls "
        "/lab/data",
        LAB_FILE,
    ),
    _saying(
        "shapes",
        r"((?:mat1 and mat2 shapes|size mismatch|shape .* is invalid for input)[^\n]{0,120})",
        "shapes do not fit together",
        "one layer hands on another size than the next one expects",
        "print the shapes before that line; labctl estimate train.py:build_model runs the model "
        "here",
        TUNING,
    ),
    _saying(
        "two-devices",
        r"Expected all tensors to be on the same device",
        "some tensors are on the GPU and some are not",
        "an operation needs all of its inputs in one place",
        "model.to(device), and .to(device) for every batch and every tensor made on the way",
        CUDA_NOTES,
    ),
    _saying(
        "scheduler-before-optimizer",
        r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
        "the schedule steps before the optimizer",
        "the first value of the learning rate is skipped",
        "optimizer.step() first, then scheduler.step()",
        TUNING,
        "advice",
    ),
)
LAST_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): ?(.*)$")


def sayings(material: Material) -> Iterator[Answer]:
    """Messages that are known."""
    for saying in SAYINGS:
        matches = list(saying.pattern.finditer(material.log))
        if not matches:
            continue
        found = matches[-1]
        groups = [group or "" for group in found.groups()] or [""]
        start = material.log.rfind("\n", 0, found.start()) + 1
        line = material.log[start:].split("\n", 1)[0].strip()
        yield Finding(
            rule=saying.rule,
            level="advice" if saying.level == "advice" else "problem",
            what=saying.what.format(*groups),
            why=saying.why,
            evidence=(printed(line[:240]),),
            next=saying.next.format(*groups, command=shlex.join(material.run.command)),
            source=saying.source,
        )


def outcome(material: Material) -> Iterator[Answer]:
    """What the record says of its end, where no message explained it."""
    run = material.run
    if run.state == "lost":
        yield Finding(
            rule="lost",
            level="problem",
            what="the run ended with its server",
            why=run.told or "the server went away while it ran",
            evidence=(recorded(run.told or "lost"),),
            next="labctl run --recover   # goes on elsewhere from the last checkpoint"
            if run.stopped_by == ""
            else "a longer life or a larger budget: ttl: and budget: in lab.yaml, labctl extend 1h",
            source=LABCTL,
        )
        return
    if run.state != "exited" or run.exit_code in (0, None) or _explained(material):
        return
    code = run.exit_code or 0
    last = _last_error(material.log)
    if last:
        yield Finding(
            rule="exception",
            level="problem",
            what=f"it ended with an error: {last[:160]}",
            why="an exception that nobody caught; the traceback above it names the line",
            evidence=(recorded(run.told), printed(last[:240])),
            next=f"labctl logs {run.id} -n 40",
            source=LABCTL,
        )
    elif code == 137:
        yield Finding(
            rule="killed",
            level="problem",
            what="it was killed (SIGKILL)",
            why="by somebody, or by the kernel for want of memory, of which the container was not "
            "told",
            evidence=(recorded(run.told),),
            next="labctl ssh -- dmesg | tail   # says whether memory ran out on the server",
            source=LAB_FILE,
        )
    else:
        yield Finding(
            rule="failed",
            level="problem",
            what=f"it ended with exit code {code}",
            why="its own last lines say why, if anything does",
            evidence=(recorded(run.told or f"exit code {code}"), *_last_line(material)),
            next=f"labctl logs {run.id} -n 40",
            source=LABCTL,
        )


def _explained(material: Material) -> bool:
    """Whether another rule says why it ended."""
    last = material.log.rstrip().rpartition("\n")[2]
    known = any(saying.pattern.search(material.log) for saying in SAYINGS)
    known = known or has_lost_gpu(material)
    return known or ran_out(material) is not None or IN_LOG.search(last) is not None


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if LAST_ERROR.match(line)), "")


def _last_line(material: Material) -> tuple[Evidence, ...]:
    lines = [line for line in material.log.splitlines() if line.strip()]
    return (printed(lines[-1].strip()[:240]),) if lines else ()


def still(material: Material) -> Iterator[Answer]:
    """It lives, and nothing moves."""
    run = material.run
    if run.ended or run.state != "running":
        return
    times = [time for one in material.scalars.series for time in one.times]
    last = max([*times, run.started_at or 0.0])
    recent = material.samples[-6:]
    if not last or not recent:
        return
    quiet_s = recent[-1].at - last
    if quiet_s < STILL_S:
        return
    busy = middle(one.cpu_cores for one in recent)
    use = middle(gpu.use_percent for one in recent for gpu in one.gpus)
    if (busy is not None and busy > 0.2) or (use is not None and use > 5):
        return
    cores = "not measured" if busy is None else f"{busy:.2f}"
    yield Finding(
        rule="stands-still",
        level="problem",
        what=f"nothing has moved for {minutes(quiet_s)}",
        why="it waits for something that does not come: a lock, a download, another process",
        evidence=(measured(f"cores busy: {cores}; GPU: {use or 0:.0f} %"), _since(quiet_s)),
        next=f"labctl logs {run.id} -n 40   # its last words; labctl attach looks inside, labctl "
        f"cancel {run.id} ends it",
        source=LABCTL,
    )


def _since(quiet_s: float) -> Evidence:
    return Evidence(said=f"no curve has had a new point for {minutes(quiet_s)}", of="TensorBoard")


def nothing(material: Material) -> Iterator[Answer]:
    """A run of which there is no log."""
    if not material.log.strip():
        yield Unknown(
            rule="log",
            what="what it said",
            why=f"{LOG} is empty or not here",
            next=f"labctl logs {material.run.id}",
        )


RULES = (sayings, outcome, still, nothing)
