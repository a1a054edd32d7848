"""The image of a service: the lab's own, or one that adds the service's programs to it."""

from __future__ import annotations

import hashlib
import json

from ...wire.services import ServiceRequest
from ..host.docker import run_docker
from ..host.engine import inspect_image
from ..host.engine_objects import Image
from ..host.paths import labctl_home, read_json, write_json
from .known_services import KNOWN


def image_tag(base_image: Image, request: ServiceRequest) -> str:
    args = {k: v for k, v in request.args.items() if k != "BASE"}
    text = json.dumps([base_image.Id, request.dockerfile, args], sort_keys=True)
    return "labctl-services:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def find_service_image(base_image: Image, request: ServiceRequest) -> Image | None:
    """Return the image to start: this one, or the one built on it, None until that is built."""
    preset = KNOWN.get(request.name)
    test = request.test or (preset.test if preset and not request.command else "")
    if not test:
        return base_image
    path = labctl_home() / ".passwd" / f"programs-{base_image.Id.rpartition(':')[2][:24]}.json"
    programs = read_json(path)
    program = request.test or request.name
    if program not in programs:
        words = ["run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", base_image.Id]
        done = run_docker(*words, "-c", f"{test} >/dev/null 2>&1", check=False)
        programs[program] = done.returncode == 0
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, programs)
    return base_image if programs[program] else inspect_image(image_tag(base_image, request))
