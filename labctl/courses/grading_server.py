"""The server that grades submissions: adopted or created, checked, filled, cleared, ended.

Students' code runs there. So it is never this machine, never a container on it (which is not a
boundary), and never a machine that holds credentials. It receives hashes, no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from labctl.config import LabConfig
from labctl.courses.context import build_own_seat
from labctl.courses.private_paths import find_overlap, list_hidden_paths
from labctl.courses.records.folder import PRIVATE, CourseFolder
from labctl.courses.servers import CourseOperator
from labctl.errors import ConfigError, ConnectError, LabError, PolicyError
from labctl.errors.subject import COURSE
from labctl.events import ConsentPolicy, Event, Note, PolicyReporter, Progress, Reporter, Step
from labctl.lifecycle import up
from labctl.model import FileEntry, Server, Value
from labctl.runs import images
from labctl.runs.image_sources import hash_local_image
from labctl.servers import adoption, end_server
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.sync.push import push_tree
from labctl.sync.scan import scan_code, scan_data
from labctl.wire.boot_id import read_boot_token
from labctl.wire.sandbox import (
    CHECK_GRADING,
    CLEAR_GRADING,
    GRADE,
    GradedJobRecord,
    GradeRequest,
)
from labctl.wire.verbs import LabRequest

# Lifetime if course.yaml sets no `ttl`, so that a forgotten server ends.
LONGEST_S = 12 * 3600
# Seconds to wait for a server that cannot be reached before the grading is given up.
AGAIN_S = 120.0
PURPOSE = "grading"


def _make_upload_reporter(reporter: Reporter) -> Reporter:
    """Return a Reporter for staff's own uploads: hides progress, agrees to untyped questions."""

    def show(event: Event) -> None:
        if not isinstance(event, Progress):
            reporter.emit(event)

    untyped = ConsentPolicy(price=True, billing=True, other=True)
    return PolicyReporter(show, untyped, ask=reporter)


class GradingImage(Value, frozen=True):
    """The image of a grading: its reference and a hash of its content, "" where unknown."""

    reference: str = ""
    content: str = ""

    def replaces(self, reference: str, content: str) -> bool:
        """Return whether this image is known to differ from the image of an earlier grading."""
        pairs = ((self.reference, reference), (self.content, content))
        return any(now and before and now != before for now, before in pairs)


class GradingServer:
    """The server of one grading."""

    def __init__(self, context: LabContext, server: Server) -> None:
        self.context = context
        self.server = server
        self.image = ""
        self.image_content = ""
        self.ended = False

    @property
    def lab_request(self) -> LabRequest:
        return LabRequest(self.context.config.name, self.context.lab_id)

    def remote(self) -> AgentClient:
        return self.context.open_agent(self.server)

    def check(self) -> None:
        """Raise PolicyError if the server is this machine, or holds credentials."""
        reply = self.remote().call(CHECK_GRADING, self.lab_request)
        own_machine = read_boot_token()
        if len(own_machine) > 1 and reply.machine == own_machine:
            raise PolicyError(
                f"{self.server.alias} is this machine",
                why="submissions are untrusted code, and the labels and your keys are here",
                hint="set another machine in course.yaml: grading.server",
            )
        if reply.credentials:
            raise PolicyError(
                f"{self.server.alias} holds credentials, so submissions must not run on it",
                why="\n".join(reply.credentials),
                hint="remove them there, or set another machine in course.yaml: grading.server",
            )

    def prepare_image(self) -> str:
        """Load, pull or build the image on the server; return its reference.

        If this machine has the image, the server gets the same one. A built image needs no
        comparison: its name is a hash of its content.
        """
        reference = images.image_reference(self.context)
        remote = self.remote()
        if not self.context.config.image.is_built:
            self.image_content = images.ensure_current_image(
                self.context, self.server, remote, reference
            )
        elif not images.has_image(remote, reference):
            root = self.context.config.root
            self._upload("code", root, scan_code(root, self.context.reporter))
            images.ensure_image(self.context, self.server, remote, reference)
        self.image = reference
        return reference

    def upload(self, name: str, root: Path, files: tuple[FileEntry, ...]) -> None:
        """Upload these files to the server, under `name`."""
        self._upload(f"grading/{name}", root, files)

    def grade(self, request: GradeRequest, timeout_s: float) -> GradedJobRecord:
        """Grade one submission and return the result. A broken connection is retried once.

        A repeated request gets the same reply: nothing runs twice.
        """
        try:
            reply = self.remote().call(GRADE, request, timeout_s=timeout_s)
        except ConnectError:
            if self.ended:
                raise
            self.context.connections.wait_for_ssh(self.server, AGAIN_S)
            reply = self.remote().call(GRADE, request, timeout_s=timeout_s)
        if reply.predict is None:
            raise LabError(f"{reply.missing} is no longer on the grading server")
        return GradedJobRecord(reply.predict, reply.grade, reply.results)

    def gpu_setting(self) -> str:
        """Return "all" if the server has GPUs for containers, else ""."""
        facts = self.context.load_facts(self.server)
        return "all" if facts.gpus and facts.nvidia_runtime else ""

    def clear(self) -> None:
        """Remove the labels and the submissions from the server."""
        self.remote().call(CLEAR_GRADING, self.lab_request)

    def _upload(self, target: str, root: Path, files: tuple[FileEntry, ...]) -> None:
        config = self.context.config
        about = (self.remote(), config.name, self.context.lab_id, target)
        push_tree(*about, root, files, _make_upload_reporter(self.context.reporter), force=True)


def build_grading_context(staff: CourseOperator, *, is_own_code: bool = False) -> LabContext:
    """Build the context of the course's grading server.

    ConfigError or PolicyError if it has none on which students' code may run; staff's own code may
    run on this machine.
    """
    folder = staff.folder
    if folder.config.grading is None:
        raise ConfigError(
            "course.yaml has no grading server",
            why="submissions are untrusted code: they need a machine without credentials",
            hint=f"edit {folder.config.path}: "
            "grading: {server: {provider: static, static: {hosts: [grader.example.edu]}}}",
        )
    lab = folder.config.grading.lab
    if lab.server.on_this_machine and not is_own_code:
        raise PolicyError(
            f"submissions cannot be graded on a {lab.server.provider} server",
            why="its container runs on this machine, and code in it can reach your files",
            hint="grading.server in course.yaml: provider: static, or a cloud",
        )
    owner = f"{folder.config.name}-{folder.id[:6]}"
    return LabContext(
        _build_grading_config(staff, lab),
        build_own_seat(folder, PURPOSE).lab_id,
        staff.paths,
        staff.state,
        staff.reporter,
        owner=owner,
        has_results=False,
        in_process=True,
        subject=COURSE,
    )


def find_grading_image(staff: CourseOperator) -> GradingImage:
    """Return the image that a grading would use now, as far as this machine knows it."""
    if staff.folder.config.grading is None:
        return GradingImage()
    reference = images.find_wanted_image(build_grading_context(staff, is_own_code=True))
    return GradingImage(reference=reference, content=hash_local_image(reference))


def build_other_grading_context(staff: CourseOperator) -> LabContext | None:
    """Return the grading server's context if the course's provider does not list that server."""
    config = staff.folder.config
    if config.grading is None or config.grading.lab.server.on_this_machine:
        return None
    ours, its = config.lab.server, config.grading.lab.server
    name = its.provider
    same = ours.provider_settings.get(name) == its.provider_settings.get(name)
    return None if ours.provider == name and same else build_grading_context(staff)


def _build_grading_config(staff: CourseOperator, lab: LabConfig) -> LabConfig:
    """Return the grading lab: without data or store, with the course's image unless it sets one."""
    folder = staff.folder
    image = lab.image if lab.has_own_image else folder.config.lab.image
    root = folder.path / PRIVATE / "grading"
    root.mkdir(mode=0o700, exist_ok=True)
    if image.is_built:
        root = _find_build_directory(folder, image.build)
        image = msgspec.structs.replace(image, build=".")
    need = lab.server.need
    if need.ttl_s is None:
        need = msgspec.structs.replace(need, ttl_s=min(LONGEST_S, need.max_ttl_s or LONGEST_S))
    return msgspec.structs.replace(
        lab,
        name=build_own_seat(folder, PURPOSE).lab,
        root=root,
        server=msgspec.structs.replace(lab.server, need=need),
        image=image,
        data={},
        store="",
        secrets=(),
        services={},
    )


def _find_build_directory(folder: CourseFolder, build: str) -> Path:
    """Return where the image is built. ConfigError if students' code must not read what is there.

    All files of the directory are sent to the server, and may end up in the image.
    """
    root = folder.path / build
    problem, why = "", ""
    if root.resolve() == folder.path.resolve():
        problem = "the course's own folder"
        why = "the roster and the labels are in it, and would be uploaded too"
    elif name := find_overlap(folder.path, build, list_hidden_paths(folder.config)):
        problem = f"{build}, which contains or is in {name}"
        why = "students' code runs in the image, and could read it there"
    if problem:
        raise ConfigError(
            f"the grading image cannot be built from {problem}",
            why=why,
            hint="put its Dockerfile into a separate directory: image: {build: image}",
        )
    return root


@contextmanager
def open_grading_server(
    staff: CourseOperator, *, keep: bool = False, is_own_code: bool = False
) -> Iterator[GradingServer]:
    """Yield a checked server; clear and end it afterwards, whatever happens.

    With `keep` it stays up with all its files, so that the next grading is faster. `is_own_code` is
    whether nothing of students runs there: then it may be a container on this machine.
    """
    context = build_grading_context(staff, is_own_code=is_own_code)
    server = up.up(context)
    grading = GradingServer(context, server)
    try:
        if not context.config.server.on_this_machine:
            grading.check()
        yield grading
    finally:
        if not keep:
            _clear_and_end(grading)


def end_forgotten(staff: CourseOperator) -> None:
    """End the grading server that an earlier grading left, kept on purpose or interrupted."""
    if staff.state.get_lab_server(build_own_seat(staff.folder, PURPOSE).lab_id) is None:
        return
    context = build_grading_context(staff, is_own_code=True)
    if (server := adoption.adopt(context)) is not None:
        _clear_and_end(GradingServer(context, server))


def _clear_and_end(grading: GradingServer) -> None:
    context, grading.ended = grading.context, True
    context.reporter.emit(Step(name="clearing the grading server"))
    try:
        grading.clear()
    except LabError as error:
        text = f"labels and submissions may still be on {grading.server.alias}: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
    end_server.remove(context, grading.server)
    context.reporter.emit(Step(name="clearing the grading server", done=True))


def hash_files(staff: CourseOperator, name: str, root: Path) -> tuple[FileEntry, ...]:
    """Hash the files of a directory of staff's; unchanged files are not read again."""
    return scan_data(staff.folder.private, name, root, staff.reporter)
