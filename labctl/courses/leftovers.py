"""What is left of a course at its providers: whose it is, and whether it bills."""

from __future__ import annotations

import dataclasses

import msgspec

from labctl.courses import metering
from labctl.courses.context import OWN, own_seat
from labctl.courses.grading_server import other_grading_ground
from labctl.courses.servers import Staff
from labctl.errors import LabError
from labctl.events import Step
from labctl.model import Resource, Server, Value
from labctl.providers import Keep
from labctl.servers import disks, leftovers
from labctl.servers.context import Ground
from labctl.state.disks import is_expired


def labs_of(staff: Staff) -> set[str]:
    """Ids of the labs that are the course itself or a seat of it, of those too that nobody has now.

    To be asked for once: it reads the ledger.
    """
    folder = staff.folder
    seats = [*folder.seats(active_only=False, former=True), *folder.past_seats()]
    return {folder.id, *own_labs(staff), *(seat.lab_id for seat in seats)}


def remove_expired_disks(staff: Staff) -> list[Resource]:
    """Remove the kept disks whose time is over; returns those that stay. A baked image is the
    course's own."""
    course = staff.course(plain=True)
    if not isinstance(course.provider, Keep):
        return []
    labs = labs_of(staff) - {staff.folder.id}
    shown = [one for one in course.provider.leftovers() if one.lab_id in labs]
    disks.remove_expired(course, shown)
    return [one for one in shown if one.expires_at and not is_expired(one)]


def own_labs(staff: Staff) -> set[str]:
    """What the course has servers for besides seats, those that carry accounts too."""
    found = {own_seat(staff.folder, purpose).lab_id for purpose in OWN}
    if staff.folder.config.shared is not None:
        from labctl.courses.seat_accounts import MOST_HOSTS
        from labctl.courses.shared_servers import Hosts

        hosts = Hosts(staff.folder, staff.course(plain=True))
        found |= {hosts.lab_id(number) for number in range(MOST_HOSTS + 1)}
    return found


class Left(Value, frozen=True):
    """What a provider shows of the course when all was done. Empty: nothing there bills.

    `former`: course.yaml names another one by now, so that nothing was ended at this one. `seats`
    says whose the things are, by lab id.
    """

    provider: str
    servers: tuple[Server, ...] = ()
    resources: tuple[Resource, ...] = ()
    error: str = ""
    former: bool = False
    seats: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def bills(self) -> bool:
        """Whether something goes on costing money there, or nobody can tell."""
        paid = any(one.price_usd_per_month > 0 for one in self.resources)
        return bool(self.error or self.servers or paid)


def every_ground(staff: Staff, *, everywhere: bool) -> list[Ground]:
    """A ground for each provider that course.yaml names: the seats', and grading's."""
    found = [staff.course(everywhere=everywhere, plain=True)]
    grading = other_grading_ground(staff)
    if grading is not None:
        found.append(dataclasses.replace(grading, everywhere=everywhere))
    return found


def asked(staff: Staff) -> list[Left]:
    """What every provider of the course shows of it now, in every region, free caches aside.

    Those too that course.yaml named before, where seats' servers cost something or have not ended.
    """
    found = [_left(staff, ground) for ground in every_ground(staff, everywhere=True)]
    course = staff.course(everywhere=True, plain=True)
    former = {
        one.provider
        for one in metering.known(staff.folder.ledger.entries()).values()
        if one.provider not in ("", course.provider.name) and (one.price or not one.ended)
    }
    for name in sorted(former - {one.provider for one in found}):
        server = msgspec.structs.replace(course.config.server, provider=name)
        config = msgspec.structs.replace(course.config, server=server)
        found.append(_left(staff, dataclasses.replace(course, config=config), former=True))
    return found


def _left(staff: Staff, ground: Ground, *, former: bool = False) -> Left:
    name = ground.config.server.provider
    step = Step(name=f"asking {name} what is left")
    staff.reporter.emit(step)
    try:
        ours = labs_of(staff)
        known = metering.open_servers(staff.folder.ledger.entries(), ground)
        metering.require_same_account(ground, known, ours)
        servers = [
            one
            for one in ground.provider.servers()
            if one.state != "terminated" and one.lab_id in ours
        ]
        resources = [
            one
            for one in ground.provider.leftovers()
            if one.kind != leftovers.CACHE and one.lab_id in ours
        ]
    except LabError as error:
        said = " ".join(filter(None, [error.what, error.why]))
        return Left(provider=name, error=said, former=former)
    staff.reporter.emit(msgspec.structs.replace(step, done=True))
    labs = {one.lab_id for one in servers} | {one.lab_id for one in resources}
    seats = staff.folder.seats(active_only=False, former=True)
    return Left(
        provider=name,
        servers=tuple(servers),
        resources=tuple(resources),
        former=former,
        seats={one.lab_id: one.name for one in seats if one.lab_id in labs},
    )
