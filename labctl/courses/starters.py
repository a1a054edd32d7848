"""The starters of a course's assignments: built from course.yaml, published, read by students.

Students get the published version, which changes only with `labctl course push`, so that nobody
gets files that are being edited.
"""

from __future__ import annotations

import base64
import io
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import msgspec

from labctl.config import CourseConfig, Paths, load_lab
from labctl.config.document import Node, make_problem_at, make_problems_error, parse
from labctl.config.identity import replace_file, write_private
from labctl.config.locations import parse_git_address
from labctl.config.reader import LAB_FILE
from labctl.courses import image_files
from labctl.courses.git_templates import is_fetched
from labctl.courses.handed_out import STARTERS, record_handed_out
from labctl.courses.material import NAME as HANDOUTS
from labctl.courses.private_paths import find_overlap, list_grading_paths
from labctl.courses.records.folder import PRIVATE, CourseFolder
from labctl.courses.records.roster import ROSTER_FILE
from labctl.courses.templates import read_directory, read_template
from labctl.errors import ConfigError, NotFoundError, Problem
from labctl.model import NAME_PATTERN, Value
from labctl.servers.provider_traits import read_provider_traits
from labctl.submissions.leaks import LeakSearch, describe_leaks
from labctl.sync.ignore import NEVER_AT_TOP
from labctl.sync.starter import (
    TESTS,
    Starter,
    StarterFile,
    decode_starter,
    encode_starter,
    find_files_problem,
    hash_document,
    is_sha256,
)
from labctl.wire.keeper import STARTER_PART_BYTES, FetchStarterReply, FetchStarterRequest

# Directories of a student's course lab that an assignment's directory must not be.
RESERVED = frozenset({"assignments", TESTS, *NEVER_AT_TOP})
# `labctl join` writes these keys of a student's lab.yaml.
OWN_KEYS = ("lab", "server")


class StarterSummary(Value, frozen=True):
    """A starter: where its files come from, how many, and how many of them are public tests.

    `published` is "" if it was not published, "current", or "older" if students have another one.
    `has_image` is whether its lab names or builds an image of its own.
    """

    assignment: str
    source: str
    files: int
    size_bytes: int
    tests: int
    published: str = ""
    has_image: bool = False


class PublishedStarter(Value, frozen=True):
    """A starter that students can get now. `changed` is whether it is new."""

    assignment: str
    files: int
    changed: bool


def build_starters(
    config: CourseConfig,
    paths: Paths,
    *,
    offline: bool = False,
    without: Collection[str] = (),
) -> tuple[Starter, ...]:
    """Build the starter of every assignment, but those in `without`, that hands out files.

    ConfigError lists everything that cannot be handed out, by the lines of course.yaml. `offline`
    leaves out templates that would have to be fetched.
    """
    top = parse(config.path.read_bytes(), "", [])
    problems: list[Problem] = []
    starters = []
    course_image: tuple[StarterFile, ...] | None = None
    for name, rules in config.assignments.items():
        if name in without or not rules.hands_out_files:
            continue
        if offline and _needs_network(config, rules.template):
            continue
        before = len(problems)
        files = _read_part(config, name, "template", paths, problems, top)
        tests = _read_part(config, name, "tests.public", paths, problems, top)
        if len(problems) > before:
            continue
        starter = Starter(
            assignment=name,
            source=rules.template or rules.tests.public,
            files=(*files, *tests),
            tests=tuple(file.path for file in tests),
        )
        if image_files.is_handed_over(config) and not has_image(starter):
            if course_image is None:
                course_image = _read_course_image(config, problems, top)
            starter = image_files.add_image(config, starter, course_image)
        if problem := _find_problem(starter):
            key = "template" if rules.template else "tests.public"
            problems.append(make_problem_at(top, f"assignments.{name}.{key}", problem))
        starters.append(starter)
    if problems:
        hint = "labctl course plan   # after you fix these lines"
        raise make_problems_error(str(config.path), problems, hint=hint)
    return tuple(starters)


def _read_part(
    config: CourseConfig,
    name: str,
    key: str,
    paths: Paths,
    problems: list[Problem],
    top: Node | None,
) -> tuple[StarterFile, ...]:
    """Read the template or the public tests of an assignment; () with a problem if it cannot."""
    rules = config.assignments[name]
    place = rules.template if key == "template" else rules.tests.public
    if not place:
        return ()
    try:
        _require_not_private(config, place)
        if key == "template":
            return read_template(
                place,
                config.root,
                paths.data_dir / "templates",
                _cache_directory(config),
                image=config.image_reference,
                has_gpus=not config.lab.server.on_this_machine,
            )
        files = read_directory(config.root, place)
        if not any(is_test_module(file.path) for file in files):
            raise ValueError(f"{place} has no file test_*.py, which pytest would run")
        return tuple(msgspec.structs.replace(file, path=f"{TESTS}/{file.path}") for file in files)
    except ValueError as error:
        problems.append(make_problem_at(top, f"assignments.{name}.{key}", str(error)))
        return ()


def _read_course_image(
    config: CourseConfig, problems: list[Problem], top: Node | None
) -> tuple[StarterFile, ...]:
    """Read what the course's image is built from; () with a problem if it cannot be handed out."""
    try:
        files = image_files.read_image_files(config)
        for file in files:
            _require_not_private(config, file.path)
    except ValueError as error:
        problems.append(make_problem_at(top, image_files.find_image_key(config), str(error)))
        return ()
    return files


def _cache_directory(config: CourseConfig) -> Path:
    return config.root / PRIVATE / "templates"


def _needs_network(config: CourseConfig, template: str) -> bool:
    git = parse_git_address(template)
    return git is not None and not is_fetched(*git, _cache_directory(config))


def is_test_module(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(".py") and name.startswith("test_")


def _require_not_private(config: CourseConfig, place: str) -> None:
    """Raise ValueError if `place` has, or is in, something that students must not get."""
    private = [config.path.name, PRIVATE, "imported", ROSTER_FILE, *list_grading_paths(config)]
    if name := find_overlap(config.root, place, private):
        raise ValueError(f"{place} has, or is in, {name}, which students must not get")


def _find_problem(starter: Starter) -> str:
    """Return why this starter cannot be handed out; "" if it can."""
    if starter.assignment in RESERVED:
        return f"{starter.assignment} is the name of a directory in a student's lab"
    if problem := find_files_problem(starter.files):
        return problem
    search = LeakSearch()
    leaks = [
        leak for file in starter.files
        for leak in search.find_leaks(file.path, io.BytesIO(file.content))
    ]  # fmt: skip
    if leaks:
        return f"it has secrets: {describe_leaks(leaks[:3])}; list such files in its .labignore"
    lab = starter.by_path().get(LAB_FILE)
    return _find_lab_problem(lab.content) if lab else ""


def _find_lab_problem(data: bytes) -> str:
    """Return why a student's lab.yaml must not have this text; "" if it may."""
    problems: list[Problem] = []
    top = parse(data, "", problems)
    if problems:
        return f"{LAB_FILE}, line {problems[0].line}: {problems[0].message}"
    keys = top.value if top is not None and isinstance(top.value, dict) else {}
    for key in OWN_KEYS:
        if key in keys:
            message = f"remove `{key}`, which labctl join writes for each student"
            return f"{LAB_FILE}, line {keys[key].line}: {message}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / LAB_FILE).write_bytes(data + b"\nlab: x\n")
        try:
            load_lab(Path(folder), environ={"HOME": folder}, find_provider=read_provider_traits)
        except ConfigError as error:
            if not error.problems:
                return f"{LAB_FILE}: {error.why}"
            first = error.problems[0]
            return f"{LAB_FILE}, line {first.line}: {first.message}"
    return ""


def has_image(starter: Starter) -> bool:
    """Whether a starter's lab.yaml names an image, or its Dockerfile builds one."""
    files = starter.by_path()
    if "Dockerfile" in files:
        return True
    lab = files.get(LAB_FILE)
    top = parse(lab.content, "", []) if lab else None
    keys = top.value if top is not None and isinstance(top.value, dict) else {}
    return "image" in keys


def summarize_starters(
    folder: CourseFolder, paths: Paths, *, offline: bool = False
) -> tuple[StarterSummary, ...]:
    """Build every starter and describe it, for the plan. ConfigError as in `build_starters`."""
    published = list_published(folder)
    summaries = []
    for starter in build_starters(folder.config, paths, offline=offline):
        earlier = published.get(starter.assignment, "")
        is_current = earlier == hash_document(encode_starter(starter))
        summaries.append(
            StarterSummary(
                assignment=starter.assignment,
                source=starter.source,
                files=len(starter.files),
                size_bytes=sum(len(file.content) for file in starter.files),
                tests=sum(is_test_module(path) for path in starter.tests),
                published="current" if is_current else "older" if earlier else "",
                has_image=has_image(starter),
            )
        )
    return tuple(summaries)


def publish_starters(
    folder: CourseFolder, paths: Paths, *, only_new: bool = False
) -> list[PublishedStarter]:
    """Publish the starters of course.yaml, and withdraw those that it no longer has.

    ConfigError as in `build_starters`; nothing is published then. `only_new` leaves everything that
    was published as it is. Each is also written into the handouts, for labs on servers.
    """
    earlier = list_published(folder)
    starters = build_starters(folder.config, paths, without=earlier.keys() if only_new else ())
    published = []
    for starter in starters:
        data = encode_starter(starter)
        sha256 = hash_document(data)
        changed = earlier.get(starter.assignment) != sha256
        if changed:
            _write_handouts(folder, starter, earlier.get(starter.assignment, ""))
            record_handed_out(folder, starter)
            write_private(_published_file(folder, starter.assignment, sha256), data)
        _remove_others(folder, starter.assignment, sha256)
        published.append(
            PublishedStarter(
                assignment=starter.assignment, files=len(starter.files), changed=changed
            )
        )
    for name in () if only_new else earlier:
        rules = folder.config.assignments.get(name)
        if rules is None or not rules.hands_out_files:
            _remove_others(folder, name, "")
    return published


def _remove_others(folder: CourseFolder, assignment: str, sha256: str) -> None:
    """Remove the published versions of an assignment's starter, except this one."""
    for file in (folder.private / STARTERS / assignment).glob("[!.]*.json"):
        if file.stem != sha256:
            file.unlink()


def _write_handouts(folder: CourseFolder, starter: Starter, earlier: str) -> None:
    """Write the starter's files below handouts/; those of the version `earlier` are removed."""
    directory = folder.path / HANDOUTS / starter.assignment
    if earlier:
        data = _published_file(folder, starter.assignment, earlier).read_bytes()
        for path in decode_starter(data).by_path().keys() - starter.by_path().keys():
            (directory / path).unlink(missing_ok=True)
    for file in starter.files:
        target = directory / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, file.content, mode=0o755 if file.executable else 0o644)


def find_published(folder: CourseFolder, assignment: str) -> Starter | None:
    """Return the starter of an assignment that students can get now; None without one."""
    sha256 = list_published(folder).get(assignment)
    if sha256 is None:
        return None
    return decode_starter(_published_file(folder, assignment, sha256).read_bytes())


def list_published(folder: CourseFolder) -> dict[str, str]:
    """Return the sha256 of each published starter, by the assignment's name."""
    files = (folder.private / STARTERS).glob("*/[!.]*.json")
    # Of two versions, which an interrupted publication leaves, the newer one counts.
    newest_last = sorted(files, key=lambda file: file.stat().st_mtime_ns)
    return {file.parent.name: file.stem for file in newest_last}


def read_part(folder: CourseFolder, request: FetchStarterRequest) -> FetchStarterReply:
    """Return a part of a published starter; NotFoundError if it has no such version."""
    try:
        if not NAME_PATTERN.fullmatch(request.assignment) or not is_sha256(request.sha256):
            raise FileNotFoundError
        file = _published_file(folder, request.assignment, request.sha256)
        with file.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(min(max(0, request.offset), size_bytes))
            part = stream.read(STARTER_PART_BYTES)
    except FileNotFoundError:
        raise NotFoundError(
            f"the course has no such version of {request.assignment[:60]!a}",
            why="it may have been replaced a moment ago",
            hint="labctl join",
        ) from None
    return FetchStarterReply(base64.b64encode(part).decode(), size_bytes)


def _published_file(folder: CourseFolder, assignment: str, sha256: str) -> Path:
    return folder.private / STARTERS / assignment / f"{sha256}.json"
