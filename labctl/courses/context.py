"""The contexts that a course's flows work on: one for the course, one for each seat.

They share one provider, its connections and its caches, so that thirty servers need hardly more
calls than one. A provider sees pseudonyms and the course's id, never a name.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from labctl.config import LabConfig, Paths
from labctl.courses.records.folder import FORMER, MOST_NAME, PRIVATE, CourseFolder, Seat
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.spending import SeatSpending, allowance_usd, compute_spending
from labctl.decoding import decode_json
from labctl.errors.subject import COURSE, Subject
from labctl.events import Reporter
from labctl.lazy import lazy_imports
from labctl.model import Need, Server, Value
from labctl.servers import machine_images
from labctl.servers.context import LabContext
from labctl.servers.cost import list_server_costs
from labctl.state import State

with lazy_imports(__name__):
    from labctl.courses import shared_seats

BAKED = "baked.json"
# Each seat has a directory below it, as a lab has one: results are downloaded there.
SEATS = Path(PRIVATE) / "seats"
# Seconds for the keeper to notice that a server's runs were stopped, and to save their results.
SAVER_S = 240.0


def build_course_context(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    reporter: Reporter,
    *,
    everywhere: bool = False,
    plain: bool = False,
    uses_baked_image: bool = True,
) -> LabContext:
    """Build the course's own context, for requests about all seats at once. It has no server.

    `everywhere` searches every region. With `shared:` in course.yaml its servers are accounts on
    shared servers; with `plain` they are the shared servers themselves. They boot from the baked
    image, if there is one, unless `uses_baked_image` is False.
    """
    lab = _with_baked_image(folder) if uses_baked_image else folder.config.lab
    config = msgspec.structs.replace(lab, root=folder.path / SEATS)
    course = LabContext(
        config,
        folder.id,
        paths,
        state,
        reporter,
        everywhere=everywhere,
        group=folder.id,
        owner=f"{folder.config.name}-{folder.id[:6]}",
        place=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8],
        saver_s=SAVER_S if folder.config.keeper is not None else 0.0,
        in_process=True,
        subject=COURSE,
    )
    if plain or folder.config.shared is None:
        return course
    return shared_seats.build_shared_context(folder, course)


def build_seat_contexts(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    reporter: Reporter,
    seats: Sequence[Seat] | None = None,
    *,
    course: LabContext | None = None,
    listed: Iterable[Server] = (),
) -> list[LabContext]:
    """Build a context for each of these seats, by default all, in their order.

    A seat's budget is what the ledger leaves of it now; its maximum lifetime includes what was
    granted to its present server. `listed` is what the provider has just listed: a server that the
    ledger does not know is priced from its own tags. `course` is a `build_course_context` to share.
    """
    chosen = folder.list_seats() if seats is None else list(seats)
    shared = course or build_course_context(folder, paths, state, reporter)
    budgets = _SeatBudgets(folder, state, list(listed))
    lab = _with_baked_image(folder)
    contexts = []
    for seat in chosen:
        config = build_seat_config(folder, lab, seat, budgets.need(seat))
        config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        contexts.append(shared.make_sibling(config, seat.lab_id, subject=make_subject(seat)))
    return contexts


def make_subject(seat: Seat) -> Subject:
    """Return what staff's commands select a seat by.

    The bare name of a student who is in a team by now would select the team.
    """
    return Subject("seat", seat.name if seat.students else FORMER + seat.name)


def build_seat_config(folder: CourseFolder, lab: LabConfig, seat: Seat, need: Need) -> LabConfig:
    """Return the course's lab as configured for a seat, rooted in the seat's own directory."""
    return msgspec.structs.replace(
        lab,
        name=seat.lab,
        root=folder.path / SEATS / seat.name,
        server=msgspec.structs.replace(lab.server, need=need),
    )


class BakedImage(Value, frozen=True):
    """The course's machine image. `image` is the Docker image inside, `data` the data sets."""

    provider: str
    image_id: str
    at: float
    image: str = ""
    data: tuple[str, ...] = ()
    usd_per_month: float = 0.0


def find_baked_image(folder: CourseFolder) -> BakedImage | None:
    """Return the image that seats boot from, or None if none was baked for their provider."""
    try:
        image = decode_json((folder.private / BAKED).read_bytes(), BakedImage)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return image if image.provider == folder.config.lab.server.provider else None


def _with_baked_image(folder: CourseFolder) -> LabConfig:
    """Return the course's lab, set to boot from the baked image if there is one."""
    lab, baked_image = folder.config.lab, find_baked_image(folder)
    if baked_image is None:
        return lab
    return machine_images.use_image(lab, baked_image.provider, baked_image.image_id)


class _SeatBudgets:
    """What the ledger leaves each seat to spend; the ledger is read once for all seats."""

    def __init__(self, folder: CourseFolder, state: State, listed: Sequence[Server]) -> None:
        self._need = folder.config.lab.server.need
        self._entries = folder.ledger.list_entries()
        now = time.time()
        self._spent = compute_spending(self._entries, now)
        self._spent |= (
            compute_spending(self._entries, now, folder.list_running(listed)) if listed else {}
        )
        self._recorded_usd: dict[str, float] = {}
        for cost in list_server_costs(state, None, now):
            lab_usd = self._recorded_usd.get(cost.lab_id, 0.0)
            self._recorded_usd[cost.lab_id] = lab_usd + (cost.cost_usd or 0.0)

    def need(self, seat: Seat) -> Need:
        """Return a seat's need, with the budget and the maximum lifetime that it has left.

        Flows subtract from the budget what this machine has recorded for the seat, so that amount
        is added here: the difference is then what the ledger leaves.
        """
        entries = [entry for entry in self._entries if entry.seat == seat.name]
        budget_usd = allowance_usd(entries, seat.name, self._need.budget_usd)
        if budget_usd is not None:
            left_usd = max(0.0, budget_usd - self._spent.get(seat.name, SeatSpending()).usd)
            budget_usd = left_usd + self._recorded_usd.get(seat.lab_id, 0.0)
        max_ttl_s = self._need.max_ttl_s
        if max_ttl_s is not None:
            max_ttl_s += sum_staff_extensions_s(entries)
        return msgspec.structs.replace(self._need, budget_usd=budget_usd, max_ttl_s=max_ttl_s)


def sum_staff_extensions_s(entries: Iterable[CourseLedgerEntry]) -> int:
    """Return the seconds that staff granted to a seat's present server, from the seat's own lines.

    Extensions by students (lines with their name) stay within the ceiling and do not raise it.
    """
    total = 0
    for entry in entries:
        if entry.kind == "up":
            total = 0
        elif entry.kind == "extend" and not entry.student:
            total += int(entry.detail.get("seconds", 0))
    return total


def build_own_seat(folder: CourseFolder, purpose: str) -> Seat:
    """Return a seat without students, for a server of the course itself, such as for grading."""
    digest = hashlib.sha256(f"{folder.id}:{purpose}".encode()).hexdigest()
    room = MOST_NAME - len(purpose) - 1
    lab = f"{folder.config.name[:room].rstrip('-')}-{purpose}"
    return Seat(name=f".{purpose}", lab=lab, lab_id=digest[:12], students=())


# Purposes of the course's own, short-lived servers.
OWN = ("check", "bake", "grading")


def build_own_context(folder: CourseFolder, course: LabContext, purpose: str) -> LabContext:
    """Build the context of a server of the course itself: no budget, the course's TTL.

    It boots from the image that `course` boots from.
    """
    seat = build_own_seat(folder, purpose)
    need = msgspec.structs.replace(folder.config.lab.server.need, budget_usd=None)
    config = build_seat_config(folder, course.config, seat, need)
    if config.submits_jobs:  # only the students' runs do
        server = msgspec.structs.replace(config.server, executor="docker")
        config = msgspec.structs.replace(config, server=server)
    config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return course.make_sibling(config, seat.lab_id, has_results=False)
