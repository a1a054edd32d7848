"""The course provider under the contract: a keeper behind a real sshd, whose course has the static
machines. Nothing is prepared there: the contract is about what the provider tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from case import Case
from msgspec.structs import replace

from labctl.courses.seat_operations import SeatOperations
from labctl.model import Server
from labctl.providers import ProviderContext
from labctl.providers.course import CourseProvider, CourseProviderSettings
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from course_bed import CourseBed, course_bed, keeping
from sshd_container import Sshd

STUDENT = "alice"


@dataclass
class CourseCase(Case):
    """The flow logs in with the lab's own key, whose public half went with the request."""

    def log_in(self, server: Server) -> None:
        identity = str(self.directory / "id_ed25519")
        super().log_in(replace(server, endpoint=replace(server.endpoint, identity=identity)))


@pytest.fixture(scope="session")
def course_keeper(
    static_machines: list[Sshd], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CourseBed, Path]]:
    """A keeper with one course, and the key of a student who has joined."""
    hosts = [
        {"host": "127.0.0.1", "port": box.port, "user": "student", "identity": str(box.key)}
        for box in static_machines
    ]
    section = {"provider": "static", "static": {"hosts": hosts}}
    folder = tmp_path_factory.mktemp("course")
    with course_bed(folder, msgspec.json.encode(section).decode()) as bed:
        known = bed.folder / "keeper-home" / ".ssh"
        known.mkdir(parents=True)
        lines = [f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in static_machines]
        (known / "known_hosts").write_text("".join(lines))
        key = folder / "student-key"
        bed.keys.admit(STUDENT, ensure_key_pair(key))
        with keeping(bed, SeatOperations(bed.staff(), login_only=True)):
            yield bed, key


@pytest.fixture
def course_case(course_keeper: tuple[CourseBed, Path], tmp_path: Path) -> Iterator[Case]:
    bed, key = course_keeper
    connections = Connections(tmp_path / "ssh", None)

    def unexpected(*_: Any) -> Any:
        raise AssertionError("the course provider asks its keeper and nobody else")

    around = ProviderContext(
        data_dir=tmp_path,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        talk=connections.open_line_channel,
        student_key=str(key),
    )
    keeper = bed.course.config.keeper
    assert keeper is not None
    settings = CourseProviderSettings(
        keeper=f"ssh://{keeper.user}@{keeper.host}:{keeper.port}",
        host_key=bed.machine.host_key,
        student=STUDENT,
        seat=bed.course.find_seat_of(STUDENT).lab_id,
    )
    provider = CourseProvider(settings, around)
    case = CourseCase(provider, tmp_path, shares_machine=True)
    try:
        yield case
    finally:
        case.clean_up()
        provider.close()
