"""Whether the course's image gets onto a server: tried on one, never told from its name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.courses.records.folder import Seat
from labctl.courses.servers import Staff, of_course
from labctl.courses.status import ground_of
from labctl.errors import ConnectError, LabError
from labctl.model import Check, Server
from labctl.runs import images
from labctl.servers.context import Ground

NAME = "image"
# So many servers are tried that cannot be reached.
TRIED = 3


def judge_name(staff: Staff) -> Check | None:
    """What is wrong with the image whatever a server does; None where nothing is."""
    image = staff.folder.config.lab.image
    if image.build:
        said = "each server builds it: a class waits for its first run"
        mend = "push it to a registry and name it in course.yaml, then labctl course bake"
        return Check(name=NAME, ok=False, detail=said, next=mend)
    if not image.reference:
        return Check(name=NAME, ok=True, detail="labctl's own default")
    if "@sha256:" not in image.reference and image.reference.endswith(":latest"):
        said = f"{image.reference} may be another one tomorrow"
        return Check(name=NAME, ok=False, detail=said, next="name a version in course.yaml")
    return None


def check_image(staff: Staff, up: Sequence[tuple[Seat, Server]]) -> Check:
    """Pull or load the image on one of the servers that are up; "not checked" without one."""
    if (judged := judge_name(staff)) is not None:
        return judged
    for seat, server in up[:TRIED]:
        try:
            found = load_image(ground_of(staff, seat), server, seat.name)
            return msgspec.structs.replace(found, next=of_course(found.next, seat))
        except ConnectError:
            continue
    why = "no server can be reached to try it on" if up else "there is no server to try it on"
    return Check(
        name=NAME,
        ok=True,
        skipped=True,
        detail=f"{staff.folder.config.lab.image.reference}: not checked, {why}",
        next="labctl course check --boot   # or again once a server is up",
    )


def load_image(ground: Ground, server: Server, where: str) -> Check:
    """Have the image on this server; ConnectError where it cannot be reached."""
    wanted = ground.config.image.reference
    try:
        remote = ground.remote(server)
        if remote.call("image", {"references": [wanted]})["ids"][wanted]:
            return Check(name=NAME, ok=True, detail=f"{wanted} is on {where} already")
        images.ensure(ground, server, remote, wanted)
    except ConnectError:
        raise
    except LabError as error:
        said = ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))
        return Check(
            name=NAME,
            ok=False,
            detail=f"{wanted} cannot be loaded onto {where}: {said}",
            next=error.hint or "name another image in course.yaml",
        )
    return Check(name=NAME, ok=True, detail=f"{wanted} was loaded onto {where}")
