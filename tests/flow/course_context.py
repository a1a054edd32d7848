"""A course on the in-memory provider of lab_world; each server is a directory of its own here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab_world import Cloud, DiskCloud, Machine, Recorded, Wires

from labctl.config import Paths, find_paths
from labctl.courses import context as contexts
from labctl.courses import servers
from labctl.courses.context import build_course_context
from labctl.courses.records.folder import CourseFolder, Seat, make_private
from labctl.courses.servers import CourseOperator
from labctl.errors import CapacityError
from labctl.model import CreateServerRequest, Endpoint, Offer, Server
from labctl.providers import QuotaRoom
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State
from labctl.transports import Transport


class ClassCloud(Cloud):
    """Many servers; `full` are labs that get none; quotas and images are known."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.price = 0.5
        self.full: set[str] = set()
        self.most: int | None = 1000
        self.listings = 0
        self.requests: list[CreateServerRequest] = []

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        if request.lab in self.full:
            raise CapacityError("no machine is left")
        with self.guard:
            self.requests.append(request)
        return super().create(offer, request)

    def servers(self) -> list[Server]:
        self.listings += 1
        return super().servers()

    def compute_room(self, offer: Offer) -> QuotaRoom:
        return QuotaRoom(
            most=self.most, quota="machines", units="machines", limit=self.most, next="ask"
        )


class StoppableCloud(ClassCloud, DiskCloud):
    """One that can stop servers, whose disks stay."""


class ClassWires(Wires):
    """Every server is a directory below `home`, and none looks at another's ssh files."""

    def __init__(self, places: Paths, home: Path, machines: dict[str, Machine]) -> None:
        super().__init__(places, Machine(home))
        self._home = home
        self._machines = machines
        self._guard = threading.Lock()

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        return self.machine_of(server_id).transport()

    def machine_of(self, server_id: str) -> Machine:
        with self._guard:
            if server_id not in self._machines:
                there = self._home / server_id
                there.mkdir(parents=True, exist_ok=True)
                self._machines[server_id] = Machine(there)
            return self._machines[server_id]


@dataclass
class Class:
    """A course's folder and its cloud. `staff()` is as a new process would have it."""

    root: Path
    cloud: ClassCloud
    folder: CourseFolder
    machines: dict[str, Machine] = field(default_factory=dict)
    reporter: Recorded = field(default_factory=Recorded)

    @property
    def places(self) -> Paths:
        return find_paths({"HOME": str(self.root / "home")})

    @property
    def state(self) -> State:
        return State(self.places.database)

    def staff(self) -> CourseOperator:
        folder = CourseFolder(self.folder.path)
        return CourseOperator(folder, self.places, self.state, self.reporter, by="ta")

    def seat(self, name: str) -> Seat:
        return self.folder.find_seat(name)

    def server(self, name: str) -> Server:
        lab_id = self.seat(name).lab_id
        (found,) = [one for one in self.cloud.machines.values() if one.lab_id == lab_id]
        return found

    def machine(self, name: str) -> Machine:
        return self.machines[self.server(name).id]


def roster(names: Sequence[str], team: str = "", section: str = "") -> str:
    return "".join(f"{name},{name.title()},,{team},{section},yes\n" for name in names)


def a_class(root: Path, monkeypatch: pytest.MonkeyPatch, rows: str, more: str = "") -> Class:
    """A course of these people, on a cloud that nothing else uses."""
    course = root / "ml"
    course.mkdir()
    (root / "home").mkdir()
    (course / "course.yaml").write_text(
        "course: ml\nserver: {provider: local}\nimage: {build: .}\n"
        "per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}\n" + more
    )
    (course / "roster.csv").write_text("id,name,email,team,section,active\n" + rows)
    make_private(course)
    key = ensure_key_pair(root / "host").rpartition(" ")[0]
    made = Class(root, ClassCloud(key), CourseFolder(course))

    def context(*words: Any, **named: Any) -> LabContext:
        found = build_course_context(*words, **named)
        found.__dict__["provider"] = made.cloud
        wires = ClassWires(made.places, root / "machines", made.machines)
        found.__dict__["connections"] = wires
        return found

    for module in (servers, contexts):
        monkeypatch.setattr(module, "build_course_context", context)
    return made
