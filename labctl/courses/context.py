"""What a course's flows stand on: one ground for the course, one for each seat beside it.

They share one provider, its connections and its caches, so that thirty servers cost hardly more
calls than one. A provider is told pseudonyms and the course's id, never a name.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from labctl.config import LabConfig, Paths
from labctl.courses.records.folder import MOST_NAME, PRIVATE, CourseFolder, Seat
from labctl.courses.records.ledger import Entry
from labctl.courses.records.spending import Spent, allowance_usd, spending
from labctl.events import Reporter
from labctl.model import Need, Server, Value
from labctl.providers import Bake, provider_class
from labctl.servers.context import Ground
from labctl.servers.cost import server_costs
from labctl.state import State

BAKED = "baked.json"
# Below it each seat has a directory of its own, as a lab has one: results come home there.
SEATS = Path(PRIVATE) / "seats"
# Seconds for the keeper to notice that a server's runs were stopped, and to bring results home.
SAVER_S = 240.0


def course_ground(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    reporter: Reporter,
    *,
    everywhere: bool = False,
    plain: bool = False,
) -> Ground:
    """The course's own ground: its provider is asked about all seats at once. It has no server.

    `everywhere` asks in every region. With `shared:` its servers are accounts on shared ones,
    but for `plain`, which has those that carry them.
    """
    own = msgspec.structs.replace(_booting(folder), root=folder.path / SEATS)
    course = Ground(
        own,
        folder.id,
        paths,
        state,
        reporter,
        everywhere=everywhere,
        group=folder.id,
        owner=f"{folder.config.name}-{folder.id[:6]}",
        place=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8],
        saver_s=SAVER_S if folder.config.keeper is not None else 0.0,
    )
    if plain or folder.config.shared is None:
        return course
    from labctl.courses.shared_servers import through

    return through(folder, course)


def seat_grounds(
    folder: CourseFolder,
    paths: Paths,
    state: State,
    reporter: Reporter,
    seats: Sequence[Seat] | None = None,
    *,
    course: Ground | None = None,
    listed: Iterable[Server] = (),
) -> list[Ground]:
    """One ground for each of these seats (of all), in their order.

    A seat's budget is what the ledger leaves of it now, and its longest life what was granted to
    its present server on top. `listed` is what the provider has just shown: it is priced from its
    own tags where the ledger does not know it. `course` is a ground of `course_ground` to share.
    """
    wanted = folder.seats() if seats is None else list(seats)
    first = course or course_ground(folder, paths, state, reporter)
    shares = _Shares(folder, state, list(listed))
    grounds = []
    for seat in wanted:
        config = seat_config(folder, seat, shares.need(seat))
        config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        grounds.append(first.beside(config, seat.lab_id))
    return grounds


def seat_config(folder: CourseFolder, seat: Seat, need: Need) -> LabConfig:
    """The course's lab as this seat has it. `root` is the seat's directory in the folder."""
    lab = _booting(folder)
    return msgspec.structs.replace(
        lab,
        name=seat.lab,
        root=folder.path / SEATS / seat.name,
        server=msgspec.structs.replace(lab.server, need=need),
    )


class Baked(Value, frozen=True):
    """The course's machine image. `image` is the Docker image inside, `data` the data sets."""

    provider: str
    image_id: str
    at: float
    image: str = ""
    data: tuple[str, ...] = ()
    usd_per_month: float = 0.0


def baked(folder: CourseFolder) -> Baked | None:
    """What seats of this course boot from, where it was baked for the provider that they have."""
    try:
        found = msgspec.json.decode((folder.private / BAKED).read_bytes(), type=Baked)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return found if found.provider == folder.config.lab.server.provider else None


def _booting(folder: CourseFolder) -> LabConfig:
    """The course's lab, with the image that was baked for it."""
    lab, found = folder.config.lab, baked(folder)
    if found is None:
        return lab
    kind = provider_class(found.provider)
    if not issubclass(kind, Bake):
        return lab
    settings = lab.server.provider_settings.get(found.provider)
    image = kind.booting(kind.settings_type() if settings is None else settings, found.image_id)
    both = {**lab.server.provider_settings, found.provider: image}
    server = msgspec.structs.replace(lab.server, provider_settings=both)
    return msgspec.structs.replace(lab, server=server)


class _Shares:
    """What the ledger leaves each seat, read once for all of them."""

    def __init__(self, folder: CourseFolder, state: State, listed: Sequence[Server]) -> None:
        self._need = folder.config.lab.server.need
        self._entries = folder.ledger.entries()
        now = time.time()
        self._spent = spending(self._entries, now)
        self._spent |= spending(self._entries, now, folder.living(listed)) if listed else {}
        self._here: dict[str, float] = {}
        for one in server_costs(state, None, now):
            self._here[one.lab_id] = self._here.get(one.lab_id, 0.0) + (one.cost_usd or 0.0)

    def need(self, seat: Seat) -> Need:
        """Flows subtract from the budget what this machine's record knows of the seat: it is
        added here, so that what they come to is what the ledger leaves."""
        own = [one for one in self._entries if one.seat == seat.name]
        budget = allowance_usd(own, seat.name, self._need.budget_usd)
        if budget is not None:
            left = max(0.0, budget - self._spent.get(seat.name, Spent()).usd)
            budget = left + self._here.get(seat.lab_id, 0.0)
        longest = self._need.max_ttl_s
        if longest is not None:
            longest += granted_s(own)
        return msgspec.structs.replace(self._need, budget_usd=budget, max_ttl_s=longest)


def granted_s(entries: Iterable[Entry]) -> int:
    """Seconds that staff gave to a seat's present server, from the seat's own lines.

    What students took for themselves, inside the ceiling, bears their name and does not move it.
    """
    total = 0
    for one in entries:
        if one.kind == "up":
            total = 0
        elif one.kind == "extend" and not one.student:
            total += int(one.detail.get("seconds", 0))
    return total


def own_seat(folder: CourseFolder, purpose: str) -> Seat:
    """A seat that nobody has: for a server of the course's own, such as one that is measured."""
    digest = hashlib.sha256(f"{folder.id}:{purpose}".encode()).hexdigest()
    room = MOST_NAME - len(purpose) - 1
    lab = f"{folder.config.name[:room].rstrip('-')}-{purpose}"
    return Seat(name=f".{purpose}", lab=lab, lab_id=digest[:12], students=())


# What the course itself has servers for, and not for long.
OWN = ("check", "bake", "grading")


def own_ground(folder: CourseFolder, course: Ground, purpose: str) -> Ground:
    """The ground of a server of the course's own: no budget but its own hour, the course's TTL."""
    seat = own_seat(folder, purpose)
    need = msgspec.structs.replace(folder.config.lab.server.need, budget_usd=None)
    config = seat_config(folder, seat, need)
    config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return course.beside(config, seat.lab_id, has_results=False)
