"""The files sent to a grading server: staff's inputs, labels and grader, and the submissions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.config.course_schema import GradeConfig
from labctl.courses.grading_server import GradingServer, hash_files
from labctl.courses.servers import CourseOperator
from labctl.errors import ConfigError, LabError
from labctl.model import FileEntry, Value
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import Evaluation, read_evaluation
from labctl.sync.scan import hash_file
from labctl.wire.sandbox import SandboxLimits

# Limits of a container if course.yaml sets none.
MEMORY_BYTES, CPUS, PIDS, DISK_BYTES = 4 * 10**9, 1.0, 256, 256 * 1024**2


class GradingMaterial(Value, frozen=True):
    """Staff's files for grading an assignment: each part's files, below its local root."""

    inputs: tuple[FileEntry, ...]
    labels: tuple[FileEntry, ...]
    grader: tuple[FileEntry, ...]
    roots: dict[str, str]

    def hash_lines(self) -> list[str]:
        """Return one line per file with its hash, to detect changes."""
        parts = (("inputs", self.inputs), ("labels", self.labels), ("grader", self.grader))
        return [f"{part} {file.path} {file.sha256}" for part, files in parts for file in files]


def remote_name(assignment: str, part: str) -> str:
    """Return the name of a part on the server."""
    return f"{assignment[:30].rstrip('-')}-{part}"


def upload_material(server: GradingServer, assignment: str, parts: GradingMaterial) -> None:
    """Upload all parts to the server."""
    for part, files in (
        ("inputs", parts.inputs),
        ("labels", parts.labels),
        ("grader", parts.grader),
    ):
        server.upload(remote_name(assignment, part), Path(parts.roots[part]), files)


def hash_material(staff: CourseOperator, name: str, how: GradeConfig) -> GradingMaterial:
    """Hash the inputs, the labels and the grader: all other files of assignments/NAME.

    The reference solution belongs to neither.
    """
    folder = staff.folder.path
    configured = {"inputs": how.inputs, "labels": how.labels}
    roots = {part: folder / text for part, text in configured.items() if text}
    for part, root in roots.items():
        if not root.is_dir():
            raise ConfigError(
                f"{name} cannot be graded: {root} is not a directory",
                hint=f"put the hidden {part} there, or edit {staff.folder.config.path}",
            )
    own = folder / "assignments" / name
    files = hash_files(staff, f"grader-{name}", own) if own.is_dir() else ()
    others = [*roots.values(), *([folder / how.reference] if how.reference else [])]
    data = [root.resolve() for root in others]
    grader = tuple(
        file
        for file in files
        if not any((own / file.path).resolve().is_relative_to(d) for d in data)
    )
    return GradingMaterial(
        inputs=hash_files(staff, f"inputs-{name}", roots["inputs"]) if how.inputs else (),
        labels=hash_files(staff, f"labels-{name}", roots["labels"]) if how.labels else (),
        grader=grader,
        roots={part: str(roots.get(part, own)) for part in ("inputs", "labels", "grader")},
    )


def read_own_evaluation(root: Path) -> Evaluation | None:
    """Return the evaluation in a submission, or None if it is missing or damaged."""
    try:
        return read_evaluation(root / EVALUATION)
    except LabError:
        return None


def list_bundle_files(root: Path) -> Iterable[FileEntry]:
    """List the code and the model of an unpacked bundle: all that the container needs."""
    for part in ("code", "model"):
        for path in sorted((root / part).rglob("*")):
            if path.is_file():
                status = path.stat()
                yield FileEntry(
                    path=path.relative_to(root).as_posix(),
                    size=status.st_size,
                    sha256=hash_file(path),
                    mtime_ns=status.st_mtime_ns,
                )


def build_limits(server: GradingServer) -> SandboxLimits:
    """Return course.yaml's grading.limits, with defaults for those that it does not set."""
    limits = server.context.config.limits
    memory = limits.memory_bytes or MEMORY_BYTES
    return SandboxLimits(
        memory_bytes=memory,
        shm_bytes=min(limits.shm_bytes, memory),
        cpus=limits.cpus or CPUS,
        pids=PIDS,
        disk_bytes=DISK_BYTES,
        gpus="all" if server.gpu_setting() else "",
    )
