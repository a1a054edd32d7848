"""The files sent to a grading server: staff's inputs, labels and grader, and the submissions."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from labctl.config.course_schema import AssignmentConfig, GradeConfig
from labctl.courses.graded_parts import PROBE
from labctl.courses.grading.parts import GradedPart, PartKind
from labctl.courses.grading_server import GradingServer, hash_files
from labctl.courses.servers import CourseOperator
from labctl.errors import ConfigError, LabError
from labctl.model import FileEntry, Value
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import Evaluation, read_evaluation
from labctl.sync.scan import hash_file
from labctl.wire.sandbox import SandboxLimits

# What Python and pytest leave behind in directories of tests.
CACHES = frozenset({"__pycache__", ".pytest_cache"})
# Limits of a container if course.yaml sets none.
MEMORY_BYTES, CPUS, PIDS, DISK_BYTES = 4 * 10**9, 1.0, 256, 256 * 1024**2


class GradingMaterial(Value, frozen=True):
    """Staff's files for grading an assignment, by part: each part's files, and its local root."""

    files: dict[str, tuple[FileEntry, ...]]
    roots: dict[str, Path]

    def hash_lines(self) -> list[str]:
        """Return one line per file with its hash, to detect changes."""
        return [
            f"{part} {file.path} {file.sha256}"
            for part, files in self.files.items()
            for file in files
        ]


def remote_name(assignment: str, part: str) -> str:
    """Return the name of a part on the server."""
    return f"{assignment[:28].rstrip('-')}-{part}"


def upload_material(server: GradingServer, assignment: str, material: GradingMaterial) -> None:
    """Upload all parts to the server."""
    for part, files in material.files.items():
        server.upload(remote_name(assignment, part), material.roots[part], files)


def hash_material(
    staff: CourseOperator,
    name: str,
    rules: AssignmentConfig,
    how: GradeConfig,
    parts: Sequence[GradedPart],
) -> GradingMaterial:
    """Hash the inputs, the labels, the grader, and what the other parts need.

    The grader is all other files of assignments/NAME; the reference solution belongs to none.
    """
    folder = staff.folder.path
    own = folder / "assignments" / name
    configured = {"inputs": how.inputs, "labels": how.labels}
    roots = {part: folder / text for part, text in configured.items() if text}
    for part, root in roots.items():
        if not root.is_dir():
            raise ConfigError(
                f"{name} cannot be graded: {root} is not a directory",
                hint=f"put the hidden {part} there, or edit {staff.folder.config.path}",
            )
    files = {
        part: hash_files(staff, f"{part}-{name}", roots[part]) if part in roots else ()
        for part in configured
    }
    files["grader"] = _hash_grader(staff, name, rules, how)
    roots = {part: roots.get(part, own) for part in files}
    # In this order, the hashes that earlier versions stored stay the same.
    for kind in [part.kind for part in parts if part.kind != "grader"]:
        roots[kind] = _find_root(staff, name, rules, how, kind)
        hashed = hash_files(staff, f"{kind}-{name}", roots[kind])
        files[kind] = tuple(one for one in hashed if CACHES.isdisjoint(one.path.split("/")))
    if "hidden" in files:
        roots["probe"] = roots["hidden"]
        files["probe"] = tuple(file for file in files["hidden"] if file.path == PROBE)
    return GradingMaterial(files=files, roots=roots)


def _hash_grader(
    staff: CourseOperator, name: str, rules: AssignmentConfig, how: GradeConfig
) -> tuple[FileEntry, ...]:
    folder = staff.folder.path
    own = folder / "assignments" / name
    others = (how.inputs, how.labels, how.reference, how.autograder, rules.tests.hidden)
    data = [(folder / text).resolve() for text in others if text]
    return tuple(
        file
        for file in (hash_files(staff, f"grader-{name}", own) if own.is_dir() else ())
        if not any((own / file.path).resolve().is_relative_to(d) for d in data)
    )


def _find_root(
    staff: CourseOperator, name: str, rules: AssignmentConfig, how: GradeConfig, kind: PartKind
) -> Path:
    """Return the directory of staff's tests or autograder."""
    places = {"hidden": rules.tests.hidden, "public": rules.tests.public}
    path = staff.folder.path / places.get(kind, how.autograder)
    return path if path.is_dir() else _unpack_autograder(staff, name, path)


def _unpack_autograder(staff: CourseOperator, name: str, path: Path) -> Path:
    """Unpack the zip of an autograder into the course's private directory."""
    target = staff.folder.private / "autograders" / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700, parents=True)
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"the autograder of {name} cannot be unpacked",
            why=f"{path}: {error}",
            hint=f"edit {staff.folder.config.path}: assignments: {name}: grade: autograder",
        ) from None
    return target


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
