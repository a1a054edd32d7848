"""lab.yaml's `server.runpod`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration, parse_size
from labctl.model import Value

_DATA_CENTER = re.compile(r"[A-Z]{2,3}(-[A-Z]{2,4})?-[0-9]{1,2}")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}")
_VOLUME = re.compile(r"[A-Za-z0-9_-]{1,64}")
GB = 10**9
LEAST_DISK_GB, LEAST_VOLUME_GB, MOST_GB = 5, 10, 4096


def _match(pattern: re.Pattern[str], what: str) -> Parsed:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quote(text)} is not {what}")
        return text

    return Parsed(parse)


def _parse_data_centers(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if not _DATA_CENTER.fullmatch(name):
            raise ValueError(f"{quote(name)} is not a data center: write EU-RO-1")
    return names


def _parse_gb(least: int) -> Parsed:
    def parse(text: str) -> int:
        size_gb = math.ceil(parse_size(text) / GB)
        if not least <= size_gb <= MOST_GB:
            raise ValueError(f"{quote(text)} is not a size from {least}GB to {MOST_GB}GB")
        return size_gb

    return Parsed(parse)


DataCenter = Annotated[str, _match(_DATA_CENTER, "a data center: write EU-RO-1")]


class RunPodSettings(Value, frozen=True):
    """lab.yaml's `server.runpod`.

    `cloud`: "secure" has RunPod's own data centers, "community" other people's machines, "any"
    both. `data_centers`: where to take pods from; by default everywhere. A string may name several,
    with commas. `image` is the pod's image: Debian or Ubuntu with the programs that runs need.
    `disk` is the size of the container's own disk, which is empty again after a stop; `volume` that
    of the disk with the home directory. `network_volume` is the id of a network volume to use
    instead of the latter.
    `settle`: how long RunPod may not list what was just created.
    """

    cloud: Literal["secure", "community", "any"] = "secure"
    data_centers: (
        Annotated[tuple[str, ...], Parsed(_parse_data_centers)] | tuple[DataCenter, ...]
    ) = ()
    image: Annotated[str, _match(_IMAGE, "an image: write runpod/pytorch:TAG")] = (
        "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
    )
    disk_gb: Annotated[int, _parse_gb(LEAST_DISK_GB)] = msgspec.field(default=20, name="disk")
    volume_gb: Annotated[int, _parse_gb(LEAST_VOLUME_GB)] = msgspec.field(default=50, name="volume")
    network_volume: Annotated[str, _match(_VOLUME, "the id of a network volume")] = ""
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=30, name="settle")
