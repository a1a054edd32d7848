"""A machine image for the course: with its Docker image and data, without anybody's keys.

One server is created as for a seat, filled, cleaned, baked and ended. If labctl is killed on the
way, `course down --end-of-term` and the next `course bake` find the server that is left.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import msgspec

from labctl.config.identity import write_private
from labctl.courses.context import BAKED, BakedImage, build_own_context, find_baked_image
from labctl.courses.material import SHARED, collect_material, push_material
from labctl.courses.seat_reporter import label_events
from labctl.courses.servers import CourseOperator, require_price_consent
from labctl.errors import ProviderError
from labctl.events import Note, Step
from labctl.lifecycle import up
from labctl.model import Resource, Server
from labctl.runs import images
from labctl.servers import adoption, attempts, end_server, machine_images
from labctl.servers.context import LabContext
from labctl.shell import command

DAY_S = 86_400
# Lifetime of an image if course.yaml names no term.
LONGEST_DAYS = 180
# In order of removal: a snapshot can be removed only after its image.
KINDS = ("image", "snapshot")
CLEAN_SCRIPT = """set -e
home=$1 lab=$2 data=$3
mkdir -p "$data"
if [ -d "$home/labctl/$lab/data" ]; then
  cp -R "$home/labctl/$lab/data/." "$data/" && chown -R root:root "$data" && chmod -R a+rX "$data"
fi
# From here on nothing else ends this server, should labctl die before it does.
shutdown -P +120 >/dev/null 2>&1
systemctl disable --now labctl-watchdog.service >/dev/null 2>&1 || true
rm -f /etc/systemd/system/labctl-watchdog.service
for place in /var/lib/labctl/watchdog /var/tmp/labctl-watchdog-*; do
  pid=$(cat "$place/lock" 2>/dev/null || true)
  rm -rf "$place"
  [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
done
# A server that boots from this has a first boot, and a deadline, of its own.
pkill -f '/var/lib/labctl/[t]tl.sh' || true
# Not by its whole name, which pkill would find in this very script.
rm -f /var/lib/labctl/ttl*
rm -rf "$home/labctl" "$home/.ssh/authorized_keys" /root/.ssh/authorized_keys
rm -f "$home/.bash_history" /root/.bash_history "$home/.docker/config.json"
rm -f /etc/ssh/ssh_host_* /etc/ssh/labctl_next_key*
if command -v cloud-init >/dev/null; then cloud-init clean --logs; fi
[ ! -e /etc/machine-id ] || : > /etc/machine-id
sync
"""


def bake(staff: CourseOperator) -> BakedImage:
    """Bake the course's image and return it once servers can boot from it.

    The previous image is removed once the new one is ready; until then, seats boot from it.
    PolicyError if the provider cannot make images.
    """
    course = staff.course(plain=True, uses_baked_image=False)
    machine_images.require_images(course.provider)
    context = build_own_context(staff.folder, course, "bake")
    server = _create_filled_server(staff, context)
    staff.reporter.emit(Step(name="baking"))
    name = f"{staff.folder.config.name}-{_stamp()}"
    try:
        _clean(context, server)
        image_id = machine_images.make_image(course.provider, server, name, _tags(staff, name))
    finally:
        # Half cleaned, nobody can log in to it, and no watchdog ends it.
        end_server.end(context, [server])
    staff.reporter.emit(Step(name="baking", done=True, detail=image_id))
    resources = _list_images(staff, course)
    image = BakedImage(
        provider=course.provider.name,
        image_id=image_id,
        at=time.time(),
        image=context.config.image.reference,
        data=tuple(name for name in context.config.data if name not in context.config.server_data),
        usd_per_month=sum(
            resource.price_usd_per_month for resource in resources if resource.lab == name
        ),
    )
    write_private(staff.folder.private / BAKED, msgspec.json.encode(image) + b"\n")
    _remove(course, [resource for resource in resources if resource.lab != name])
    return image


def _stamp() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}"


def drop_images(staff: CourseOperator) -> list[Resource]:
    """Remove the course's images and snapshots; servers boot the provider's own image again."""
    image = find_baked_image(staff.folder)
    (staff.folder.private / BAKED).unlink(missing_ok=True)
    course = staff.course(everywhere=True, plain=True)
    resources = _list_images(staff, course)
    if image is not None and not resources:
        text = f"image {image.image_id} no longer exists at {course.provider.name}"
        staff.reporter.emit(Note(text=text))
    _remove(course, resources)
    return resources


def _create_filled_server(staff: CourseOperator, context: LabContext) -> Server:
    """Create a server with the course's Docker image and data on it."""
    with context.state.lock(context.lab_id, "course bake"):
        server = adoption.adopt(context)
        if server is None:
            need = require_price_consent(context, [context]) or context.config.server.need
            server = attempts.create_server(
                label_events(context, context.config.name, agreed=True), need
            )
        server = up.make_ready(context, server)
        reference = context.config.image.reference
        if reference:
            images.ensure_image(context, server, context.open_agent(server), reference)
        push_material(context, server, collect_material(staff.folder, staff.reporter))
    return server


def _clean(context: LabContext, server: Server) -> None:
    """Remove everything that sixty other servers must not inherit, keys above all."""
    transport = context.connections.reopen(server)
    home = transport.run('printf %s "$HOME"', timeout_s=30.0).stdout.strip()
    line = command("sudo", "-n", "sh", "-c", CLEAN_SCRIPT, "sh", home, context.config.name, SHARED)
    result = transport.run(line.render(), timeout_s=1800.0, check=False)
    if result.code != 0:
        raise ProviderError(
            "the server could not be cleaned, so no image was made",
            why=result.stderr.strip()[-500:],
            hint="labctl course bake   # again",
        )
    context.connections.close(server)


def _tags(staff: CourseOperator, name: str) -> dict[str, str]:
    """Return tags that mark the image as the course's, with the day on which it expires."""
    term = staff.folder.config.term
    days = LONGEST_DAYS
    if term is not None:
        days = max(1, (term.last - datetime.now(UTC).date() + timedelta(days=1)).days)
    return {
        "labctl:lab": name,
        "labctl:lab-id": staff.folder.id,
        "labctl:expires": str(int(time.time()) + days * DAY_S),
    }


def _list_images(staff: CourseOperator, course: LabContext) -> list[Resource]:
    resources = course.provider.leftovers()
    return [
        resource
        for resource in resources
        if resource.lab_id == staff.folder.id and resource.kind in KINDS
    ]


def _remove(course: LabContext, resources: list[Resource]) -> None:
    end_server.remove_resources(
        course, sorted(resources, key=lambda resource: KINDS.index(resource.kind))
    )
