"""What goes to a grading server: staff's inputs, labels and grader, a submission's own files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labctl.config.course_schema import GradeConfig
from labctl.courses.grading_server import GradingServer, files_below
from labctl.courses.servers import Staff
from labctl.errors import ConfigError, LabError
from labctl.model import FileEntry, Value
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import Evaluation, read_evaluation
from labctl.sync.scan import hash_file

# Bounds of a container where course.yaml names none.
MEMORY_BYTES, CPUS, PIDS, DISK_BYTES = 4 * 10**9, 1.0, 256, 256 * 1024**2


class Material(Value, frozen=True):
    """Staff's side of an assignment: the files of each part, below its root here."""

    inputs: tuple[FileEntry, ...]
    labels: tuple[FileEntry, ...]
    grader: tuple[FileEntry, ...]
    roots: dict[str, str]

    def lines(self) -> list[str]:
        """All that it is made of, for a hash."""
        parts = (("inputs", self.inputs), ("labels", self.labels), ("grader", self.grader))
        return [f"{part} {one.path} {one.sha256}" for part, files in parts for one in files]


def name_there(assignment: str, part: str) -> str:
    """What a part is called on the server."""
    return f"{assignment[:30].rstrip('-')}-{part}"


def bring(server: GradingServer, assignment: str, given: Material) -> None:
    """Have all of it on the server."""
    for part, files in (
        ("inputs", given.inputs),
        ("labels", given.labels),
        ("grader", given.grader),
    ):
        server.bring(name_there(assignment, part), Path(given.roots[part]), files)


def material(staff: Staff, name: str, how: GradeConfig) -> Material:
    """Inputs, labels, and all else of assignments/NAME: the grader."""
    folder = staff.folder.path
    given = {"inputs": how.inputs, "labels": how.labels}
    roots = {part: folder / text for part, text in given.items() if text}
    for part, root in roots.items():
        if not root.is_dir():
            raise ConfigError(
                f"{name} cannot be graded: {root} is no directory",
                hint=f"put the hidden {part} there, or edit {staff.folder.config.path}",
            )
    own = folder / "assignments" / name
    files = files_below(staff, f"grader-{name}", own) if own.is_dir() else ()
    data = [root.resolve() for root in roots.values()]
    grader = tuple(
        one for one in files if not any((own / one.path).resolve().is_relative_to(d) for d in data)
    )
    return Material(
        inputs=files_below(staff, f"inputs-{name}", roots["inputs"]) if how.inputs else (),
        labels=files_below(staff, f"labels-{name}", roots["labels"]) if how.labels else (),
        grader=grader,
        roots={part: str(roots.get(part, own)) for part in ("inputs", "labels", "grader")},
    )


def own_word(root: Path) -> Evaluation | None:
    """The evaluation that a submission brought; a damaged one claims nothing."""
    try:
        return read_evaluation(root / EVALUATION)
    except LabError:
        return None


def entries(root: Path) -> Iterable[FileEntry]:
    """The code and the model of an unpacked bundle: all that the container needs."""
    for part in ("code", "model"):
        for path in sorted((root / part).rglob("*")):
            if path.is_file():
                found = path.stat()
                yield FileEntry(
                    path=path.relative_to(root).as_posix(),
                    size=found.st_size,
                    sha256=hash_file(path),
                    mtime_ns=found.st_mtime_ns,
                )


def limits_of(server: GradingServer) -> dict[str, Any]:
    """course.yaml's grading.limits, and bounds for what those leave open."""
    given = server.ground.config.limits
    gpus = server.gpus()
    asked = {"Driver": "", "Count": -1, "Capabilities": [["gpu"]], "Options": {}}
    memory = given.memory_bytes or MEMORY_BYTES
    return {
        "memory_bytes": memory,
        "shm_bytes": min(given.shm_bytes, memory),
        "cpus": given.cpus or CPUS,
        "pids": PIDS,
        "disk_bytes": DISK_BYTES,
        "devices": [asked] if gpus else [],
    }
