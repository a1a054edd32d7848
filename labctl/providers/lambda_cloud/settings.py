"""lab.yaml's `server.lambda`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration
from labctl.model import Value

_REGION = re.compile(r"[a-z]{2,12}(-[a-z]{2,12}){1,2}-[0-9]{1,2}")
_FAMILY = re.compile(r"[A-Za-z0-9._-]{1,100}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


def _match(pattern: re.Pattern[str], what: str) -> Parsed:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quote(text)} is not {what}")
        return text

    return Parsed(parse)


def _parse_regions(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if not _REGION.fullmatch(name):
            raise ValueError(f"{quote(name)} is not a region: write us-east-1")
    return names


Region = Annotated[str, _match(_REGION, "a region: write us-east-1")]


class LambdaSettings(Value, frozen=True):
    """lab.yaml's `server.lambda`.

    `regions`: the regions to take servers from; by default every one. A string may name several,
    with commas. `image_family`: the family of the machine image; by default Lambda's own. `user` is
    the login account of the image. `settle`: how long Lambda may not list what was just created.
    """

    regions: Annotated[tuple[str, ...], Parsed(_parse_regions)] | tuple[Region, ...] = ()
    image_family: Annotated[str, _match(_FAMILY, "an image family: write lambda-stack-22-04")] = ""
    user: Annotated[str, _match(_USER, "a user name")] = "ubuntu"
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=60, name="settle")
