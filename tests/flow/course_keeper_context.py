"""A course of three, with a team, on the in-memory provider of lab_world."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab_world import Cloud, Wires, World

from labctl.courses import servers
from labctl.courses.context import build_course_context
from labctl.courses.records.folder import CourseFolder, Seat, make_private
from labctl.courses.requests import RequestHandler
from labctl.courses.seat_claims import SeatClaim
from labctl.courses.seat_operations import SeatMoney
from labctl.courses.servers import CourseOperator
from labctl.model import Endpoint, Offer, Server
from labctl.providers import Deadline
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.wire.keeper import SeatEndRecord

ROSTER = """id,name,email,team,section,active
alice,Alice,alice@example.edu,,,yes
bob,Bob,bob@example.edu,owls,,yes
carol,Carol,carol@example.edu,owls,,yes
dave,Dave,dave@example.edu,,,no
"""
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
OFFER = Offer(provider="cloud", type="small", price_usd_per_hour=1.0)


def course_folder(root: Path, more: str = "") -> CourseFolder:
    root.mkdir()
    (root / "course.yaml").write_text(
        "course: ml\nserver: {provider: local}\nimage: {build: .}\n"
        "keeper: {host: keeper.example.edu, user: labctl}\n" + more
    )
    (root / "roster.csv").write_text(ROSTER)
    make_private(root)
    return CourseFolder(root)


@dataclass
class Pretended:
    """Work that only remembers: the request handler's own behavior is what is tested.

    `gate` holds `create_server`.
    """

    folder: CourseFolder
    server: Server | None = None
    error: Exception | None = None
    calls: list[str] = field(default_factory=list)
    keys: list[tuple[str, ...]] = field(default_factory=list)
    refusal: Exception | None = None
    spent_usd: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    making: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def check(self, seat: Seat) -> None:
        if self.refusal is not None:
            raise self.refusal

    def offers(self, seat: Seat) -> list[Offer]:
        return [OFFER]

    def money(self, seat: Seat) -> SeatMoney:
        return SeatMoney(allowance_usd=20.0, spent_usd=self.spent_usd)

    def create_server(self, seat: Seat) -> Server:
        self.calls.append("make")
        self.making.set()
        assert self.gate.wait(120)
        if self.error is not None:
            raise self.error
        if self.server is None:
            endpoint = Endpoint(
                host="192.0.2.7",
                user="student",
                identity="/keeper/key",
                proxy_command="nc -X",
                host_key="ssh-ed25519 AAAA",
            )
            self.server = Server(
                id=f"i-{len(self.calls)}",
                provider="cloud",
                lab=seat.lab,
                lab_id=seat.lab_id,
                alias=seat.lab,
                endpoint=endpoint,
                offer=OFFER,
                created_at=time.time(),
                state="running",
            )
        return self.server

    def authorize_keys(self, seat: Seat, server: Server, claims: tuple[SeatClaim, ...]) -> Server:
        self.keys.append(tuple(sorted(one.student for one in claims)))
        return server

    def explain_stop(self, seat: Seat) -> SeatEndRecord | None:
        return None

    def check_server(self, seat: Seat, server: Server) -> Server | None:
        return self.server

    def save_and_remove_server(self, seat: Seat, server: Server) -> None:
        self.calls.append("end")
        if self.error is not None:
            raise self.error
        self.server = None

    def extend(self, seat: Seat, server: Server, span_s: int, by: str) -> None:
        self.calls.append(f"extend {span_s} {by}")


def asked(
    request_handler: RequestHandler, student: str, do: str, **about: object
) -> dict[str, Any]:
    """The reply to one request, as it goes over the wire."""
    reply = request_handler.answer(student, msgspec.json.encode({"do": do, **about}))
    found: dict[str, Any] = msgspec.json.decode(reply)
    return found


def create(
    request_handler: RequestHandler, student: str, token: str = "aa" * 8, **other: object
) -> dict[str, Any]:
    about = {"lab": f"lab-{student}", "lab_id": "0f1e2d3c4b5a", "token": token, "public_key": KEY}
    return asked(
        request_handler,
        student,
        "create",
        **{**about, "offer": msgspec.to_builtins(OFFER), **other},
    )


class TimedCloud(Cloud):
    """One that ends servers by itself at their time."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.deadlines: dict[str, float] = {}

    missing_deadline_setup = ""

    def set_deadline(self, server_id: str, at: float) -> None:
        self.deadlines[server_id] = at


assert isinstance(TimedCloud(""), Deadline)


@dataclass
class Course:
    """A course whose servers are the world's one machine, at a price."""

    folder: CourseFolder
    world: World

    @property
    def cloud(self) -> Cloud:
        return self.world.cloud

    def staff(self, reporter: object) -> CourseOperator:
        state = State(self.world.places.database)
        return CourseOperator(self.folder, self.world.places, state, reporter, by="keeper")

    def add(self, seat: str, price: float = 1.0, age_s: float = 0.0) -> Server:
        """A server of this seat's that somebody has made; the record knows it as ready."""
        own = self.folder.find_seat(seat)
        offer = msgspec.structs.replace(OFFER, price_usd_per_hour=price)
        made = self.cloud.add(f"srv-{seat}", own.lab, own.lab_id, offer)
        self.cloud.change(made.id, created_at=time.time() - age_s)
        server = self.cloud.machines[made.id]
        state = State(self.world.places.database)
        state.save_server(server)
        state.record("ready", lab_id=own.lab_id, server_id=server.id)
        return server


def patched_course(
    world: World, root: Path, monkeypatch: pytest.MonkeyPatch, more: str = ""
) -> Course:
    """`more` are further lines of course.yaml."""

    def context(*words: object, **named: object) -> LabContext:
        made: Callable[..., LabContext] = build_course_context
        found = made(*words, **named)
        found.__dict__["provider"] = world.cloud
        found.__dict__["connections"] = Wires(world.places, world.machine)
        return found

    monkeypatch.setattr(servers, "build_course_context", context)
    monkeypatch.setattr("labctl.courses.context.build_course_context", context)
    return Course(course_folder(root, more), world)
