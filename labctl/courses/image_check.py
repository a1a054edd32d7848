"""A check that the course's image can be pulled: tried on a real server."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.plan_changes import IMAGE_CAUTION, IMAGE_NEXT
from labctl.courses.servers import CourseOperator
from labctl.courses.starters import find_published, has_image
from labctl.courses.status import build_seat_context
from labctl.errors import ConnectError, LabError
from labctl.errors.replies import describe_error
from labctl.model import Check, Server
from labctl.runs import images
from labctl.servers import machine_images
from labctl.servers.context import LabContext

NAME = "image"
# Unreachable servers to try before giving up.
TRIED = 3


def check_reference(staff: CourseOperator) -> Check | None:
    """Judge the image by its reference alone; None if a server has to try it."""
    lab = staff.folder.config.lab
    image = lab.image
    if image.is_built:
        detail = "each server builds it, so the first run of a class has to wait"
        fix = "push it to a registry and name it in course.yaml"
        if machine_images.can_make_images(staff.course(plain=True).provider):
            fix += ", then:\nlabctl course bake"
        return Check(name=NAME, ok=False, detail=detail, next=fix)
    if not lab.has_own_image:
        if not lab.uses_containers:
            detail = "none in course.yaml: runs use the programs of their machine"
            return Check(name=NAME, ok=True, detail=detail)
        if have_own_images(staff.folder):
            detail = "none in course.yaml; each assignment brings its own"
            return Check(name=NAME, ok=True, detail=detail)
        detail = f"none in course.yaml: {IMAGE_CAUTION}"
        return Check(name=NAME, ok=True, warning=True, detail=detail, next=IMAGE_NEXT)
    if "@sha256:" not in image.reference and image.reference.endswith(":latest"):
        detail = f"{image.reference} may change at any time"
        return Check(name=NAME, ok=False, detail=detail, next="pin a version in course.yaml")
    return None


def have_own_images(folder: CourseFolder) -> bool:
    """Whether the published files of every assignment name or build an image."""
    published = [find_published(folder, name) for name in folder.config.assignments]
    return bool(published) and all(one is not None and has_image(one) for one in published)


def check_image(staff: CourseOperator, up: Sequence[tuple[Seat, Server]]) -> Check:
    """Pull or load the image on one of the running servers; "not checked" without one."""
    if (judged := check_reference(staff)) is not None:
        return judged
    for seat, server in up[:TRIED]:
        try:
            return load_image(build_seat_context(staff, seat), server, seat.name)
        except ConnectError:
            continue
    why = "no server can be reached" if up else "no server is up"
    return Check(
        name=NAME,
        ok=True,
        skipped=True,
        detail=f"{staff.folder.config.lab.image.reference}: not checked, {why}",
        next="labctl course check --boot   # or repeat this once a server is up",
    )


def load_image(context: LabContext, server: Server, where: str) -> Check:
    """Pull or load the image on this server; ConnectError if it cannot be reached."""
    reference = context.config.image.reference
    try:
        remote = context.open_agent(server)
        if images.has_image(remote, reference):
            return Check(name=NAME, ok=True, detail=f"{reference} is on {where} already")
        images.ensure_image(context, server, remote, reference)
    except ConnectError:
        raise
    except LabError as error:
        error.subject = context.subject
        message = describe_error(error)
        return Check(
            name=NAME,
            ok=False,
            detail=f"{reference} cannot be loaded onto {where}: {message}",
            next=error.hint or "name another image in course.yaml",
        )
    return Check(name=NAME, ok=True, detail=f"{reference} was loaded onto {where}")
