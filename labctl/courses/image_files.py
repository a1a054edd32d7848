"""The course's image that servers build, in the labs that students get: its files and its section.

A reference reaches these labs through the keeper. A build needs the files that it is made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from labctl.config import CourseConfig, ImageConfig
from labctl.config.packages import read_packages
from labctl.config.reader import LAB_FILE
from labctl.courses.templates import read_directory
from labctl.sync.starter import MOST_BYTES, Starter, StarterFile

DOCKERFILE = "Dockerfile"


def is_handed_over(config: CourseConfig) -> bool:
    """Whether labs of assignments get the files of an image that servers build.

    Not those of a Dockerfile in the course's folder itself: it could copy the roster.
    """
    image = config.lab.image
    return config.lab.uses_containers and image.is_built and image.build != "."


def find_image_key(config: CourseConfig) -> str:
    """Return the key of course.yaml that names what the image is built from."""
    image = config.lab.image
    return next(f"image.{key}" for key in ("build", "requirements", "conda") if getattr(image, key))


def read_image_files(config: CourseConfig) -> tuple[StarterFile, ...]:
    """Read what the image is built from, by path; ValueError if it cannot be handed out."""
    image, root = config.lab.image, config.root
    if image.build:
        files = read_directory(root, image.build)
        if not any(file.path == DOCKERFILE for file in files):
            raise ValueError(f"{image.build} has no {DOCKERFILE}")
        return tuple(
            msgspec.structs.replace(file, path=f"{image.build}/{file.path}") for file in files
        )
    packages = read_packages(root, image.environment_file, image.extras)
    if packages.problems:
        raise ValueError(packages.problems[0].message)
    # Without the list that labctl generates for a project: the lab generates its own.
    names = [name for name in packages.files if (root / name).is_file()]
    return tuple(
        StarterFile(path=name, content=_read_bounded(config, name)) for name in sorted(names)
    )


def add_image(config: CourseConfig, starter: Starter, files: tuple[StarterFile, ...]) -> Starter:
    """Return the starter with the course's image; files of its own stay as they are."""
    own = starter.by_path()
    section = "".join(f"{line}\n" for line in _compose_section(config.lab.image))
    lab = own.get(LAB_FILE)
    before = lab.content.rstrip(b"\n") + b"\n\n" if lab else b""
    added = {file.path: file for file in files} | own
    added[LAB_FILE] = StarterFile(path=LAB_FILE, content=before + section.encode())
    return msgspec.structs.replace(
        starter, files=tuple(sorted(added.values(), key=lambda file: file.path))
    )


def _compose_section(image: ImageConfig) -> Iterator[str]:
    """Yield the lines of `image:` in lab.yaml."""
    yield "# The image of the course. The server builds it at the first run."
    yield "image:"
    for key in ("build", "requirements", "conda", "python", "registry"):
        if value := getattr(image, key):
            yield f"  {key}: {json.dumps(value)}"
    if image.extras:
        yield f"  extras: {json.dumps(image.extras)}"
    if image.args:
        yield f"  args: {json.dumps(image.args)}"


def _read_bounded(config: CourseConfig, name: str) -> bytes:
    with (config.root / name).open("rb") as file:
        return file.read(MOST_BYTES + 1)
