"""The server that submissions are graded on: claimed or made, looked at, filled, emptied, ended.

Strangers' code runs there. So it is never this machine, never a `local` server (which is no
boundary), and never one where credentials lie. It is told hashes, no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import LabConfig
from labctl.courses.context import own_seat
from labctl.courses.records.folder import PRIVATE
from labctl.courses.servers import Staff
from labctl.errors import ConfigError, ConnectError, LabError, PolicyError
from labctl.events import Decision, Event, Note, Progress, Reporter, Step
from labctl.lifecycle import up
from labctl.model import FileEntry, Server
from labctl.runs import images
from labctl.servers import adoption, end_server
from labctl.servers.agent import Remote
from labctl.servers.context import Ground
from labctl.sync.push import push
from labctl.sync.scan import scan_code, scan_data
from labctl.wire.boot_id import boot_token

# Without a `ttl` of its own, so that a server that nobody ends does not live on.
LONGEST_S = 12 * 3600
# So long a server that cannot be reached is waited for before the batch is broken off.
AGAIN_S = 120.0
PURPOSE = "grading"
NO_BOUNDARY = ("local",)
NO_ASSIGNMENT = ("course",)


class _Sending:
    """A Reporter for what staff has asked for: its size was their own rule."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def emit(self, event: Event) -> None:
        if not isinstance(event, Progress):
            self._reporter.emit(event)

    def ask(self, decision: Decision) -> bool:
        return not decision.typed or self._reporter.ask(decision)


class GradingServer:
    """One server while it is graded on. `begin` it once there is something to grade."""

    def __init__(self, ground: Ground, server: Server) -> None:
        self.ground = ground
        self.server = server
        self.image = ""
        self.ended = False

    @property
    def about(self) -> dict[str, Any]:
        return {"lab": self.ground.config.name, "lab_id": self.ground.lab_id}

    def remote(self) -> Remote:
        return self.ground.remote(self.server)

    def check(self) -> None:
        """PolicyError where it is this machine, or holds credentials."""
        said = self.remote().call("grade-check", self.about)
        here = boot_token()
        if len(here) > 1 and said["machine"] == here:
            raise PolicyError(
                f"{self.server.alias} is this very machine",
                why="submissions are strangers' code, and the labels and your keys are here",
                hint="name another machine under grading.server in course.yaml",
            )
        if said["credentials"]:
            raise PolicyError(
                f"{self.server.alias} holds credentials, so no submission is run on it",
                why="\n".join(said["credentials"]),
                hint="take them away there, or name another machine under grading.server",
            )

    def ready_image(self) -> str:
        """Have the image there; its reference."""
        wanted = images.reference(self.ground)
        remote = self.remote()
        if not remote.call("image", {"references": [wanted]})["ids"][wanted]:
            if self.ground.config.image.build:
                root = self.ground.config.root
                self._push("code", root, scan_code(root, self.ground.reporter))
            images.ensure(self.ground, self.server, remote, wanted)
        self.image = wanted
        return wanted

    def bring(self, name: str, root: Path, files: tuple[FileEntry, ...]) -> None:
        """Have these files there, under `name`."""
        self._push(f"grading/{name}", root, files)

    def grade(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """What the server's program says of one submission, through a link that broke once.

        The same question again gets the same answer: nothing is run twice for a lost reply.
        """
        whole = {**self.about, "image": self.image, **request}
        try:
            reply = self.remote().call("grade", whole, timeout_s=timeout_s)
        except ConnectError:
            if self.ended:
                raise
            self.ground.connections.wait_for_ssh(self.server, AGAIN_S)
            reply = self.remote().call("grade", whole, timeout_s=timeout_s)
        if "missing" in reply:
            raise LabError(f"{reply['missing']} is on the grading server no more")
        return reply

    def gpus(self) -> str:
        """What a container may have of the server's GPUs: one submission has them at a time."""
        facts = self.ground.facts(self.server)
        return "all" if facts.gpus and facts.nvidia_runtime else ""

    def clear(self) -> None:
        """Nothing of the labels and the submissions stays."""
        self.remote().call("grade-clear", self.about)

    def _push(self, target: str, root: Path, files: tuple[FileEntry, ...]) -> None:
        config = self.ground.config
        about = (self.remote(), config.name, self.ground.lab_id, target)
        push(*about, root, files, _Sending(self.ground.reporter), force=True)


def grading_ground(staff: Staff) -> Ground:
    """The ground of the course's grading server; ConfigError or PolicyError where it has none that
    strangers' code may run on."""
    folder = staff.folder
    if folder.config.grading is None:
        raise ConfigError(
            "course.yaml names no server to grade on",
            why="submissions are strangers' code: they need a machine without credentials",
            hint=f"edit {folder.config.path}: "
            "grading: {server: {provider: static, static: {hosts: [grader.example.edu]}}}",
        )
    lab = folder.config.grading.lab
    provider = lab.server.provider
    if provider in NO_BOUNDARY:
        raise PolicyError(
            f"submissions are not graded on a {provider} server",
            why="its container shares this machine, and can reach it: it is no boundary",
            hint="grading.server in course.yaml: provider: static, or a cloud's",
        )
    if provider in NO_ASSIGNMENT:
        raise ConfigError(
            f"grading.server: provider {provider} is for students",
            hint="name static or a cloud's in course.yaml",
        )
    owner = f"{folder.config.name}-{folder.id[:6]}"
    return Ground(
        _config(staff, lab),
        own_seat(folder, PURPOSE).lab_id,
        staff.paths,
        staff.state,
        staff.reporter,
        owner=owner,
        has_results=False,
    )


def other_grading_ground(staff: Staff) -> Ground | None:
    """The grading server's ground where asking the course's own provider does not show it."""
    config = staff.folder.config
    if config.grading is None or config.grading.lab.server.provider in NO_BOUNDARY:
        return None
    ours, its = config.lab.server, config.grading.lab.server
    name = its.provider
    same = ours.provider_settings.get(name) == its.provider_settings.get(name)
    return None if ours.provider == name and same else grading_ground(staff)


def _config(staff: Staff, lab: LabConfig) -> LabConfig:
    """The grading lab: the course's image where grading names none, no data, no store."""
    folder = staff.folder
    named = any(key == "image" or key.startswith("image.") for key in lab.origins)
    image = lab.image if named else folder.config.lab.image
    root = folder.path / PRIVATE / "grading"
    root.mkdir(mode=0o700, exist_ok=True)
    if image.build:
        root = folder.path / image.build
        if root.resolve() == folder.path.resolve():
            raise ConfigError(
                "the grading image cannot be built from the course's own folder",
                why="the roster and the labels lie there, and would be sent along",
                hint="keep its Dockerfile in a directory of its own: image: {build: image}",
            )
        image = msgspec.structs.replace(image, build=".")
    need = lab.server.need
    if need.ttl_s is None:
        need = msgspec.structs.replace(need, ttl_s=min(LONGEST_S, need.max_ttl_s or LONGEST_S))
    return msgspec.structs.replace(
        lab,
        name=own_seat(folder, PURPOSE).lab,
        root=root,
        server=msgspec.structs.replace(lab.server, need=need),
        image=image,
        data={},
        store="",
        secrets=(),
        services={},
    )


@contextmanager
def grading_server(staff: Staff, *, keep: bool = False) -> Iterator[GradingServer]:
    """A server that was looked at. It is emptied and ended afterwards, whatever happens.

    With `keep` it stays, with all that was brought: the next grading is quicker.
    """
    ground = grading_ground(staff)
    server = up.up(ground)
    made = GradingServer(ground, server)
    try:
        made.check()
        yield made
    finally:
        if not keep:
            _end(made)


def end_forgotten(staff: Staff) -> None:
    """End the grading server that an earlier grading left: kept on purpose, or interrupted."""
    if staff.state.server_of_lab(own_seat(staff.folder, PURPOSE).lab_id) is None:
        return
    ground = grading_ground(staff)
    if (server := adoption.adopt(ground)) is not None:
        _end(GradingServer(ground, server))


def _end(made: GradingServer) -> None:
    ground, made.ended = made.ground, True
    ground.reporter.emit(Step(name="emptying the grading server"))
    try:
        made.clear()
    except LabError as error:
        text = f"labels and submissions may still lie on {made.server.alias}: {error.what}"
        ground.reporter.emit(Note(text=text, level="warning"))
    end_server.remove(ground, made.server)
    ground.reporter.emit(Step(name="emptying the grading server", done=True))


def files_below(staff: Staff, name: str, root: Path) -> tuple[FileEntry, ...]:
    """A directory of staff's, hashed; what was hashed before is not read again."""
    return scan_data(staff.folder.private, name, root, staff.reporter)
