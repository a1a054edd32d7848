"""Grading in two containers: the student's code without labels, then the grader without that code.

A request without a grading command has one container: the student's code, and staff's program that
grades it there (an autograder in Gradescope's form, public tests).

    ~/labctl/<lab>/grading/<name>/      pushed files: submissions, inputs, labels, the grader
    ~/labctl/<lab>/grading/.jobs/<job>  the result of a submission, until it is cleared

The containers run as the account "nobody", so mounted files are made readable for all accounts,
below a directory that only this account may enter.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from ...wire.boot_id import read_boot_token
from ...wire.codec import MessageError, from_json, to_json
from ...wire.sandbox import (
    ClearGradingReply,
    GradedJobRecord,
    GradeReply,
    GradeRequest,
    GradingCheckReply,
)
from ...wire.verbs import LabRequest
from ..host import engine
from ..host.engine_objects import Image, Mount, NewContainer
from ..host.imds import Imds
from ..host.paths import CHUNK, drop_tree, lab_dir, read_json, require_name, write_json, write_text
from ..reply import Failure
from ..runs.containers import build_mount
from . import sandbox

LABEL = "labctl.courses.grading"
LARGEST_PREDICTIONS = 64 * 1024 * 1024
LARGEST_RESULTS = 1024 * 1024
# Of what a probe returns, which the tests read into memory.
LARGEST_OUTPUTS = 4 * 1024 * 1024
PREDICTIONS, RESULTS = "predictions", "results.json"
SCRIPTS = ("accuracy.py", "images.py", "probe.py", "tests.py", "autograder.sh")
AUTOGRADER = "/autograder"
# Credentials that must not be in the home where students' code runs.
KEYS = (
    ".aws/credentials", ".aws/sso/cache", ".config/gcloud", ".azure", ".kube/config", ".netrc",
    ".git-credentials", ".config/labctl/secrets", ".local/share/labctl/keys", ".docker/config.json",
    ".config/huggingface/token", ".cache/huggingface/token",
)  # fmt: skip
VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS")
ROLES = "meta-data/iam/security-credentials/"
UNKNOWN_ROLE = "which its metadata service does not tell now"
# Statuses with which the service says that a process has no role.
NO_ROLE = (400, 403, 404)


def check(request: LabRequest) -> GradingCheckReply:
    """Describe the credentials on this machine, which students' code could read."""
    credentials = [f"~/{name}" for name in KEYS if _has_content(Path.home() / name)]
    credentials += [f"the variable {name}" for name in VARIABLES if os.environ.get(name)]
    credentials += _private_keys(Path.home() / ".ssh")
    role = _get_role(Imds())
    credentials += [f"the machine's own role, {role}"] if role else []
    return GradingCheckReply(read_boot_token(), tuple(credentials))


def _has_content(path: Path) -> bool:
    if path.name == "config.json":
        auths = read_json(path).get("auths")
        return bool(auths) or bool(read_json(path).get("credsStore"))
    try:
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
    except OSError:
        return False


def _private_keys(folder: Path) -> list[str]:
    keys = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            with path.open("rb") as file:
                private = b"PRIVATE KEY-----" in file.read(64)
        except OSError:
            continue
        if private:
            keys.append(f"~/.ssh/{path.name}")
    return keys


def _get_role(imds: Imds) -> str:
    """Return the role that a cloud machine grants to any process on it; "" without one.

    UNKNOWN_ROLE if the metadata service has issued a token and does not say.
    """
    is_known = False
    # Some clouds have only version 1 of the service, which issues no tokens.
    for get in (imds.get, imds.get_without_token):
        try:
            response = get(ROLES)
        except OSError:
            continue
        if response.status == 200:
            return response.body.split("\n")[0]
        is_known = is_known or response.status in NO_ROLE
    return UNKNOWN_ROLE if imds.has_token and not is_known else ""


def grade(request: GradeRequest) -> GradeReply:
    """Run one submission and grade its predictions, unless this job was done before."""
    image = engine.inspect_image(request.image)
    if image is None:
        return GradeReply(missing=request.image)
    top = _make_grading_directory(request.lab, request.lab_id)
    job = top / ".jobs" / require_name(request.job)
    job.mkdir(parents=True, exist_ok=True)
    with (job / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = _read_record(job / "reply.json")
        if record is None:
            record = _grade_submission(request, top, job, image)
            if record.grade is None or record.grade.outcome == "ok":
                write_json(job / "reply.json", to_json(record), mode=0o600)
        return GradeReply(*record)


def _read_record(path: Path) -> GradedJobRecord | None:
    """Read the result of a job; None if it was not stored, or is damaged."""
    try:
        return from_json(GradedJobRecord, read_json(path))
    except MessageError:
        return None


def clear(request: LabRequest) -> ClearGradingReply:
    """Remove everything of this lab's grading: labels, submissions, containers."""
    top = _make_grading_directory(request.lab, request.lab_id)
    for name in sandbox.list_labeled_containers(f"{LABEL}={request.lab_id}"):
        engine.remove_container(name)
    drop_tree(top)
    lab = lab_dir(request.lab, request.lab_id)
    for path in (lab / ".labctl").glob(".*-grading-*"):
        drop_tree(path) if path.is_dir() else path.unlink()
    return ClearGradingReply(not top.exists())


def _make_grading_directory(lab: str, lab_id: str) -> Path:
    top = lab_dir(lab, lab_id) / "grading"
    top.mkdir(mode=0o700, exist_ok=True)
    top.chmod(0o700)
    return top


def _grade_submission(request: GradeRequest, top: Path, job: Path, image: Image) -> GradedJobRecord:
    student = _run_student_code(request, top, image)
    if student.program.outcome != "ok":
        return GradedJobRecord(student.program)
    if not request.grade:
        return GradedJobRecord(student.program, None, student.output.decode("utf-8", "replace"))
    predictions = job / PREDICTIONS
    try:
        _write_file(predictions, student.output)
        grading = _run_grader(request, top, predictions, image)
    finally:
        if predictions.exists():
            predictions.unlink()
    has_results = grading.program.outcome == "ok"
    results = grading.output.decode("utf-8", "replace") if has_results else None
    return GradedJobRecord(student.program, grading.program, results)


def _run_student_code(request: GradeRequest, top: Path, image: Image) -> sandbox.SandboxResult:
    """Run the student's container: their code and model, the inputs, and files for it of staff's.

    Without a grading command its output is the results.
    """
    submission = _find_pushed(top, request.submission)
    mounts = [_mount_readable(submission / part, f"/lab/{part}") for part in ("code", "model")]
    for part, name in (("inputs", request.inputs), ("staff", request.staff_files)):
        if name:
            mounts.append(_mount_readable(_find_pushed(top, name), f"/lab/{part}"))
    mounts.append(_mount_readable(_install_scripts(top), "/lab/labctl"))
    env = {
        "LABCTL_INPUTS": "/lab/inputs",
        "LABCTL_MODEL": "/lab/model",
        "LABCTL_PREDICTIONS": f"{sandbox.OUT}/{PREDICTIONS}",
        "LABCTL_PROBE": "/lab/staff/probe.py",
        "LABCTL_TIMEOUT_S": str(request.timeout_s),
    }
    if request.grade:
        container = _container(request, image, request.predict, PREDICTIONS, mounts, env)
        largest_bytes = LARGEST_OUTPUTS if request.staff_files else LARGEST_PREDICTIONS
        return _run(request, "predict", container, largest_bytes)
    env.update(_build_result_env(request), LABCTL_TESTS="/lab/staff", LABCTL_VISIBILITY="visible")
    container = _container(request, image, request.predict, RESULTS, mounts, env)
    return _run(request, "predict", _add_autograder_directory(container, request), LARGEST_RESULTS)


def _add_autograder_directory(container: NewContainer, request: GradeRequest) -> NewContainer:
    """Add an empty /autograder in memory, from which programs can be run."""
    host = container.HostConfig
    options = f"rw,exec,nosuid,nodev,size={request.limits.disk_bytes},mode=1777"
    tmpfs = {**(host.Tmpfs or {}), AUTOGRADER: options}
    return container._replace(HostConfig=host._replace(Tmpfs=tmpfs))


def _build_result_env(request: GradeRequest) -> dict[str, str]:
    return {
        "LABCTL_RESULTS": f"{sandbox.OUT}/{RESULTS}",
        "LABCTL_POINTS": str(request.points),
    }


def _run_grader(
    request: GradeRequest, top: Path, predictions: Path, image: Image
) -> sandbox.SandboxResult:
    """Run the staff's container: the labels, the grader, and the student's predictions only."""
    mounts = [build_mount(predictions, "/lab/predictions", read_only=True)]
    mounts.append(_mount_readable(_find_pushed(top, request.grader), "/lab/code"))
    for part, name in (("inputs", request.inputs), ("labels", request.labels)):
        if name:
            mounts.append(_mount_readable(_find_pushed(top, name), f"/lab/{part}"))
    mounts.append(_mount_readable(_install_scripts(top), "/lab/labctl"))
    env = {
        "LABCTL_INPUTS": "/lab/inputs",
        "LABCTL_LABELS": "/lab/labels",
        "LABCTL_PREDICTIONS": "/lab/predictions",
        "LABCTL_TESTS": "/lab/code",
        "LABCTL_VISIBILITY": "hidden",
        **_build_result_env(request),
    }
    container = _container(request, image, request.grade, RESULTS, mounts, env)
    return _run(request, "grade", container, LARGEST_RESULTS)


def _container(
    request: GradeRequest,
    image: Image,
    command: tuple[str, ...],
    output: str,
    mounts: list[Mount],
    env: dict[str, str],
) -> NewContainer:
    labels = {LABEL: request.lab_id, "labctl.lab-id": request.lab_id}
    return sandbox.build_sandbox_container(
        image, command, output, mounts, env, labels, request.limits
    )


def _run(
    request: GradeRequest, part: str, container: NewContainer, most_bytes: int
) -> sandbox.SandboxResult:
    name = f"labctl-{part}-{require_name(request.job)}"
    return sandbox.run_sandboxed(name, container, request.timeout_s, most_bytes)


def _find_pushed(top: Path, name: str) -> Path:
    path = top / require_name(name)
    if not path.is_dir():
        raise Failure(
            "missing", f"{name} is not on the grading server", hint="run the command again"
        )
    return path


def _mount_readable(path: Path, target: str) -> Mount:
    """Return a mount that "nobody" can read; a missing path becomes an empty directory."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)
    for folder, names, files in os.walk(str(path)):
        for name in names:
            _add_mode(Path(folder, name), 0o755)
        for name in files:
            _add_mode(Path(folder, name), 0o644)
    return build_mount(path, target, read_only=True)


def _add_mode(path: Path, mode: int) -> None:
    status = path.lstat()
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & mode != mode:
        path.chmod(status.st_mode | mode)


def _install_scripts(top: Path) -> Path:
    """Write labctl's own programs as files that the containers can read."""
    folder = top / ".labctl"
    folder.mkdir(exist_ok=True)
    for name in SCRIPTS:
        text = Path(__file__).with_name(f"grading_{name}").read_text(encoding="utf-8")
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    return folder


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        for offset in range(0, len(content), CHUNK):
            file.write(content[offset : offset + CHUNK])
    path.chmod(0o644)
