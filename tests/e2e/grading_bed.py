"""A course whose grading server is the session's server, and hand-ins to it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab_servers import ROOT

from labctl.config import Paths
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.servers import CourseOperator
from labctl.events import Event, Question, SilentReporter
from labctl.state import State
from labctl.submissions import bundle, manifest
from labctl.submissions.bundle import BundleSource
from labctl.submissions.manifest import BundleFile, BundleManifest, CodeCommit
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver


class Agrees(SilentReporter):
    """Compares the host key, as it were, and says yes."""

    def emit(self, event: Event) -> None:
        pass

    def confirm(self, decision: Question) -> bool:
        return True


def packed(student: str, files: Mapping[str, bytes], assignment: str) -> bytes:
    def sha256(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    sources = [
        BundleSource(
            file=BundleFile(path=path, size=len(content), sha256=sha256(content)), content=content
        )
        for path, content in files.items()
    ]
    made = BundleManifest(
        kind=manifest.KIND,
        version=1,
        assignment=assignment,
        course="ml",
        student=student,
        lab="digits",
        run="r1",
        checkpoint="step-1",
        record={"id": "r1", "state": "exited", "exit_code": 0, "server_id": "local-1"},
        code=CodeCommit(),
        files=tuple(one.file for one in sources),
    )
    out = io.BytesIO()
    bundle.write_bundle(made, sources, out)
    return out.getvalue()


def evaluation(accuracy: float) -> bytes:
    right = round(accuracy * 100)
    body = {
        "checkpoint": "step-1",
        "classes": ["odd", "even"],
        "confusion": [[right, 100 - right], [0, 0]],
        "accuracy": accuracy,
        "items": 100,
    }
    return json.dumps(body).encode()


def hand_in(
    receiver: Receiver, student: str, files: Mapping[str, bytes], assignment: str = "hw3"
) -> None:
    data = packed(student, files, assignment)
    about = (assignment, student, hashlib.sha256(data).hexdigest(), len(data))
    assert receiver.begin(*about) == 0
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def make_receiver(folder: Path, assignments: Sequence[str]) -> Receiver:
    """Publish these assignments in the course's folder, where everybody can hand in."""
    make_private(folder)
    receiver = Receiver(folder / ".course" / "drop")
    receiver.init()
    for name in assignments:
        given = {"course": "ml", "due": "2030-01-01 00:00 UTC", "late": "any", "penalty": "10"}
        address = "ssh://drop@course.example"
        write_assignment(receiver, name, address, {**given, "host_key": "ssh-ed25519 AAAA"})
    return receiver


def make_operator(home: Path, folder: Path) -> CourseOperator:
    state_dir = home / "state"
    paths = Paths(
        home=home,
        state_dir=state_dir,
        config_dir=home / "config",
        keys_dir=home / "keys",
        ssh_dir=state_dir / "ssh",
        log_dir=state_dir / "logs",
        data_dir=ROOT,
        cache_dir=home / "cache",
        user_ssh_config=home / "ssh_config",
    )
    state = State(paths.database)
    return CourseOperator(CourseFolder(folder), paths, state, Agrees(), by="staff")
