"""Drafts of submissions without a server: a worker that packs a bundle of its own."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from labctl.courses.publish import publish_assignments
from labctl.courses.submission_worker import (
    BUNDLE,
    PreparedFile,
    PreparedSubmission,
    PublicTestSummary,
    SubmissionOrder,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed
from submission_bed import packed, sha256

EVIL = "<script>alert(1)</script>"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43


@dataclass
class Worker:
    """Prepares a small bundle; what is in it has no meaning here."""

    orders: list[SubmissionOrder] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    problem: PreparedSubmission | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def run(self, order: SubmissionOrder) -> PreparedSubmission:
        self.orders.append(order)
        assert self.gate.wait(60)
        if self.problem is not None:
            return self.problem
        fields = {"course": "ml-2026", "assignment": order.assignment, "student": order.student}
        content = packed(**fields)
        (Path(order.directory) / BUNDLE).write_bytes(content)
        return PreparedSubmission(
            run=order.run,
            sha256=sha256(content),
            bundle_bytes=len(content),
            file_count=2,
            files=(
                PreparedFile(path="model/a.bin", size=4),
                PreparedFile(path=f"code/{EVIL}", size=1),
            ),
            notes=(f"skipped {EVIL}: it is a link",),
            tests=PublicTestSummary(text=f"1 of 2 public tests fail: {EVIL}"),
            stale=("the evaluation is older than the checkpoint",),
        )


def publish(bed: Bed) -> None:
    """Give the course a keeper, to which its assignments are submitted, and publish them."""
    with (bed.folder.path / "course.yaml").open("a") as file:
        file.write("keeper: {host: keeper.example.edu, user: labctl}\n")
    bed.folder.refresh()
    publish_assignments(bed.folder, HOST_KEY)
