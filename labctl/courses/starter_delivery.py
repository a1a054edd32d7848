"""Bring a course's starters to the student's machine: each assignment gets a lab of its own.

The lab is a directory below the student's course lab, with the same server, its own lab.yaml and
the assignment's file. The keeper's messages are validated like any untrusted input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from labctl.config import Paths, list_trust_questions, load_lab, trust
from labctl.config.identity import replace_file, write_private
from labctl.config.reader import LAB_FILE
from labctl.courses.invitation import JoinInvitation
from labctl.courses.starters import RESERVED, has_image
from labctl.errors import LabError, PolicyError
from labctl.errors.replies import describe_error
from labctl.model import NAME_PATTERN, Value
from labctl.providers.course import CourseProviderSettings
from labctl.servers.provider_traits import read_provider_traits
from labctl.submissions import ASSIGNMENT_FILE
from labctl.sync.starter import (
    Starter,
    StarterFile,
    StarterRecord,
    decode_starter,
    hash_document,
    is_sha256,
    read_record,
    write_record,
)
from labctl.sync.starter_update import FileChange, update_files
from labctl.wire.runs import SLURM

MOST_STARTERS = 100
MOST_ASSIGNMENTS, MOST_TEXT = 100, 64 * 1024
IGNORE_FILE = ".labignore"
# The lines of a student's lab.yaml that `labctl join` writes, for any student and keeper. The image
# of a starter's own lab.yaml follows an empty line, and is not part of them.
_GENERATED = re.compile(
    rb"\A(?:# Written by `labctl join`[^\n]*\n)?lab: [^\n]*\nserver:\n  provider: course\n"
    rb"(?:  executor: slurm\n)?"
    rb"  course:\n(?: {4}[^\n]*\n)+(?:image: \"[^\n]*\"\n(?=\n|\Z))?"
)
# Returns the document of an assignment's starter with this sha256.
Download = Callable[[str, str], bytes]


class DeliveredStarter(Value, frozen=True):
    """What an update did with one assignment's lab. `directory` is the lab's path.

    `state`: "new", "updated", "current" (nothing to do) or "failed", with the `problem` and the
    `next` command. `changes` has a FileChange for each file that the update was about. With
    `has_generated_lab_file`, `labctl join` wrote the lab.yaml among them, not the course.
    """

    assignment: str
    directory: Path
    state: str
    changes: tuple[FileChange, ...] = ()
    problem: str = ""
    next: str = ""
    has_generated_lab_file: bool = False


class CourseLab(Value, frozen=True):
    """What the labs of a student's assignments have in common.

    `section` is the `server:` section of their lab.yaml, with `seat_line`; `image` is the course's
    image or "".
    """

    course: str
    student: str
    directory: Path
    section: str
    seat_line: str
    image: str = ""


def deliver_starters(
    lab: CourseLab,
    starters: Mapping[str, str],
    assignments: Mapping[str, str],
    download: Download,
    paths: Paths,
) -> tuple[DeliveredStarter, ...]:
    """Bring every starter (name -> sha256) to the version of the course.

    A starter that fails does not stop the others. `assignments` has the text of each assignment's
    file.
    """
    names = sorted(
        name
        for name, sha256 in starters.items()
        if NAME_PATTERN.fullmatch(name) and name not in RESERVED and is_sha256(sha256)
    )[:MOST_STARTERS]
    delivered = []
    for name in names:
        try:
            result = _deliver(lab, name, starters[name], download, paths)
            if name in assignments:
                write_private(result.directory / ASSIGNMENT_FILE, assignments[name].encode())
        except LabError as error:
            result = _make_failure(lab, name, describe_error(error), error.hint)
        except OSError as error:
            place = error.filename2 or error.filename or lab.directory / name
            result = _make_failure(lab, name, f"{place} cannot be written: {error.strerror}", "")
        delivered.append(result)
    return tuple(delivered)


def _make_failure(lab: CourseLab, name: str, problem: str, next_command: str) -> DeliveredStarter:
    return DeliveredStarter(
        assignment=name,
        directory=lab.directory / name,
        state="failed",
        problem=problem,
        next=next_command,
    )


def _deliver(
    lab: CourseLab, name: str, sha256: str, download: Download, paths: Paths
) -> DeliveredStarter:
    root = lab.directory / name
    _require_plain_directory(root)
    record = read_record(root)
    if record is not None and _is_current(record, sha256, lab, name):
        return DeliveredStarter(assignment=name, directory=root, state="current")
    data = download(name, sha256)
    if hash_document(data) != sha256:
        raise PolicyError(
            f"the starter of {name} is not what the keeper announced",
            why="its hash differs; nothing was written",
            hint="labctl join",
        )
    published = decode_starter(data)
    starter = _add_lab_file(lab, name, published)
    root.mkdir(parents=True, exist_ok=True)
    _ignore_in_course_lab(lab.directory, name)
    base = record.starter if record else None
    changes = update_files(root, base, starter)
    write_record(root, _make_record(sha256, base, starter, changes))
    _trust_own_lab_file(root, starter, paths)
    state = "updated" if record else "new"
    return DeliveredStarter(
        assignment=name,
        directory=root,
        state=state,
        changes=changes,
        has_generated_lab_file=LAB_FILE not in published.by_path(),
    )


def _make_record(
    sha256: str, base: Starter | None, starter: Starter, changes: tuple[FileChange, ...]
) -> StarterRecord:
    """Return the record of what the lab has received.

    A blocked file was not received. Without a hash, the next update tries it again.
    """
    blocked = {change.path for change in changes if change.action == "blocked"}
    if not blocked:
        return StarterRecord(sha256=sha256, starter=starter)
    earlier = base.files if base else ()
    files = [file for file in starter.files if file.path not in blocked]
    files += [file for file in earlier if file.path in blocked]
    return StarterRecord(sha256="", starter=msgspec.structs.replace(starter, files=tuple(files)))


def _require_plain_directory(root: Path) -> None:
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise PolicyError(
            f"{root} is not a directory",
            why="the assignment's files belong there, and labctl follows no link",
            hint=f"mv {root} {root}.mine && labctl join",
        )


def _add_lab_file(lab: CourseLab, name: str, starter: Starter) -> Starter:
    """Return the starter with the student's name and server in its lab.yaml."""
    files = starter.by_path()
    own = files.pop(LAB_FILE, None)
    text = _compose_head(lab, name)
    if own is None or not has_image(starter):
        text += _compose_image(lab)
    if own is not None:
        text += b"\n" + own.content
    composed = StarterFile(path=LAB_FILE, content=text)
    return msgspec.structs.replace(starter, files=(composed, *files.values()))


def _compose_head(lab: CourseLab, name: str) -> bytes:
    """Return the student's name and server for an assignment's lab.yaml."""
    # The assignment first: the end is cut, and labs of one course should have different names.
    lab_name = f"{name}-{lab.course}-{lab.student}"[:39].rstrip("-")
    return f"lab: {lab_name}\n{lab.section}".encode()


def _compose_image(lab: CourseLab) -> bytes:
    return f"image: {json.dumps(lab.image)}\n".encode() if lab.image else b""


def strip_generated_lines(lab_file: bytes) -> bytes:
    """Return a student's lab.yaml without what `labctl join` wrote: the starter's own, or b""."""
    own, count = _GENERATED.subn(b"", lab_file)
    return own.removeprefix(b"\n") if count else lab_file


def _is_current(record: StarterRecord, sha256: str, lab: CourseLab, name: str) -> bool:
    """Whether the lab has this version, with today's keeper and image in its lab.yaml."""
    file = record.starter.by_path().get(LAB_FILE)
    if file is None or record.sha256 != sha256:
        return False
    text = file.content
    head = _compose_head(lab, name)
    with_image = head + _compose_image(lab)
    return text.startswith((head + b"\n", with_image + b"\n")) or text == with_image


def _trust_own_lab_file(root: Path, starter: Starter, paths: Paths) -> None:
    """Approve lab.yaml if it is as handed out, and requests only the course's server.

    Joining has agreed to that server. For secrets or files of the student, labctl asks.
    """
    file = root / LAB_FILE
    handed_out = starter.by_path()[LAB_FILE].content
    if not file.is_file() or file.read_bytes() != handed_out:
        return
    config = load_lab(root, find_provider=read_provider_traits)
    if len(list_trust_questions(config)) == 1:
        trust(paths, config)


def _ignore_in_course_lab(directory: Path, name: str) -> None:
    """Keep the assignment's lab out of what the course lab, which contains it, uploads."""
    file, line = directory / IGNORE_FILE, f"/{name}/"
    if file.is_symlink():
        return
    text = file.read_text(errors="surrogateescape") if file.exists() else ""
    if line not in text.splitlines():
        gap = "" if not text or text.endswith("\n") else "\n"
        data = f"{text}{gap}{line}\n".encode(errors="surrogateescape")
        replace_file(file, data, mode=0o644)


def describe_course_lab(
    source: JoinInvitation | CourseProviderSettings, directory: Path, image: str, executor: str
) -> CourseLab:
    return CourseLab(
        course=source.course,
        student=source.student,
        directory=directory,
        section=make_server_section(source, executor),
        seat_line=make_seat_line(source),
        image=image,
    )


def make_server_section(source: JoinInvitation | CourseProviderSettings, executor: str = "") -> str:
    """Return the `server:` section of a lab.yaml whose servers come from the keeper."""
    # The keeper's word for it is not trusted: it goes into a file.
    runs = "  executor: slurm\n" if executor == SLURM else ""
    return (
        "server:\n"
        "  provider: course\n"
        f"{runs}"
        "  course:\n"
        f"    course: {source.course}\n"
        f"    student: {source.student}\n"
        f"    keeper: {source.keeper}\n"
        f'    host_key: "{source.host_key}"\n'
        f"{make_seat_line(source)}\n"
    )


def make_seat_line(source: JoinInvitation | CourseProviderSettings) -> str:
    """Return the line of that section by which labctl recognizes it."""
    return f'    seat: "{source.seat}"'


def write_assignments(target: Path, texts: dict[str, str]) -> tuple[str, ...]:
    """Write each assignment's file; return the names. Names from the keeper must not be paths."""
    names = sorted(
        name
        for name, text in texts.items()
        if NAME_PATTERN.fullmatch(name) and len(text) <= MOST_TEXT
    )[:MOST_ASSIGNMENTS]
    for name in names:
        write_private(target / "assignments" / f"{name}.yaml", texts[name].encode())
    return tuple(names)
