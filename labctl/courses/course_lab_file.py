"""The lab.yaml of a student's course lab: `labctl join` writes it and keeps up the course's image.

A file that the student has edited is never changed.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from labctl.config import Paths, list_trust_questions, load_lab, trust
from labctl.config.identity import replace_file
from labctl.config.reader import LAB_FILE
from labctl.courses.starter_delivery import CourseLab
from labctl.model import Value
from labctl.servers.provider_traits import read_provider_traits

# What labctl writes into a lab.yaml for the course's image, which may be none.
IMAGE_LINE = re.compile(r'(?:image: "[^\n]*"\n)?')


class LabFileUpdate(Value, frozen=True):
    """What was done with lab.yaml. `section` is what the student has to add; "" if nothing.

    `image_change` is "updated" if the file names the course's new image now, and "differs" if the
    student's file names another image, which stays.
    """

    section: str = ""
    image_change: Literal["", "updated", "differs"] = ""


def update_lab_file(lab: CourseLab, paths: Paths, *, is_current: bool = True) -> LabFileUpdate:
    """Write lab.yaml if it is missing, and the course's new image if only labctl wrote the file.

    Without `is_current` the image of `lab` is not known, and an existing file stays as it is.
    """
    file = lab.directory / LAB_FILE
    if not file.exists():
        lab.directory.mkdir(parents=True, exist_ok=True)
        replace_file(file, _compose(lab).encode(), mode=0o644)
        return LabFileUpdate()
    text = file.read_text()
    if lab.seat_line.strip() not in text:
        return LabFileUpdate(section=lab.section)
    if not is_current or text == _compose(lab):
        return LabFileUpdate()
    start = _compose_start(lab)
    if text.startswith(start) and IMAGE_LINE.fullmatch(text.removeprefix(start)):
        replace_file(file, _compose(lab).encode(), mode=0o644)
        _trust_again(lab, paths)
        return LabFileUpdate(image_change="updated")
    config = load_lab(lab.directory, find_provider=read_provider_traits)
    differs = lab.image and config.image.reference != lab.image
    return LabFileUpdate(image_change="differs" if differs else "")


def _compose(lab: CourseLab) -> str:
    return _compose_start(lab) + (f"image: {json.dumps(lab.image)}\n" if lab.image else "")


def _compose_start(lab: CourseLab) -> str:
    name = f"{lab.course}-{lab.student}"[:39].rstrip("-")
    head = f"# Written by `labctl join`: servers come from the keeper of {lab.course}.\n"
    return f"{head}lab: {name}\n{lab.section}"


def _trust_again(lab: CourseLab, paths: Paths) -> None:
    """Approve the file that labctl has just written, if it requests only the course's server."""
    config = load_lab(lab.directory, find_provider=read_provider_traits)
    if len(list_trust_questions(config)) == 1:
        trust(paths, config)
