"""The rule for a container that lost access to its GPU during the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    from_log,
    from_record,
)
from labctl.insight.explain.sources import GPU_LOSS

IN_LOG = re.compile(r"^.*Failed to initialize NVML: Unknown Error.*$", re.MULTILINE)


def has_lost_gpu(material: RunData) -> bool:
    """Whether the server detected the loss, or the log has NVML's message."""
    return material.run.gpu_lost_at is not None or IN_LOG.search(material.log) is not None


def check_gpu_loss(material: RunData) -> Iterator[Answer]:
    """Report that the container lost its GPU; the GPU itself may be fine."""
    if not has_lost_gpu(material):
        return
    run = material.run
    ending = "" if run.has_ended else f"labctl cancel {run.id} && "
    yield Finding(
        rule="gpu-lost",
        level="problem",
        what="its container lost access to its GPU",
        why="usually after systemd was reloaded on the server, for example by a package update. "
        "Programs that have the GPU open continue; the next program that opens it fails. This "
        "container does not get the GPU back, but a new one has it",
        evidence=tuple(_list_evidence(material)),
        next=f"{ending}labctl run   # in a new container\n"
        "labctl ssh -- nvidia-smi -L   # if the GPU is missing there too",
        source=GPU_LOSS,
    )


def _list_evidence(material: RunData) -> Iterator[Evidence]:
    if material.run.gpu_lost_at is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(material.run.gpu_lost_at))
        yield from_record(f"opening the GPU inside the container has failed since {at}")
    if match := IN_LOG.search(material.log):
        yield from_log(match[0].strip()[:240])


RULES = (check_gpu_loss,)
