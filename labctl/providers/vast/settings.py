"""lab.yaml's `server.vast`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration
from labctl.model import Value

_COUNTRY = re.compile(r"[A-Z]{2}")
_IMAGE = re.compile(r"docker\.io/vastai/kvm:[A-Za-z0-9._-]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,5}(\.[0-9]{1,6})?")
LEAST_DISK_GB, MOST_DISK_GB = 20, 4096
MOST_OVER_PERCENT = 1000


def _parse_countries(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        _parse_country(name)
    return names


def _parse_country(text: str) -> str:
    if not _COUNTRY.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a country: write two letters, such as US")
    return text


def _parse_image(text: str) -> str:
    if not _IMAGE.fullmatch(text):
        raise ValueError(
            f"{quote(text)} is not an image of a VM: write docker.io/vastai/kvm:ubuntu_terminal"
        )
    return text


def _parse_reliability(text: str) -> float:
    if not (_NUMBER.fullmatch(text) and float(text) <= 1):
        raise ValueError(f"{quote(text)} is not a reliability: write a number from 0 to 1")
    return float(text)


def _parse_disk_gb(text: str) -> int:
    if not (text.isdigit() and LEAST_DISK_GB <= int(text[:6]) <= MOST_DISK_GB):
        limits = f"from {LEAST_DISK_GB} to {MOST_DISK_GB}"
        raise ValueError(f"{quote(text)} is not a number of GB {limits}")
    return int(text)


def _parse_percent(text: str) -> float:
    if not (_NUMBER.fullmatch(text) and float(text) <= MOST_OVER_PERCENT):
        raise ValueError(f"{quote(text)} is not a percentage from 0 to {MOST_OVER_PERCENT}")
    return float(text)


Country = Annotated[str, Parsed(_parse_country)]


class VastSettings(Value, frozen=True):
    """lab.yaml's `server.vast`.

    `verified`: only machines that Vast.ai has verified. `reliability`: only machines whose hosts
    have at least this score, from 0 to 1. `datacenter`: only machines in certified data centers.
    `countries`: where to take machines from; by default everywhere. A string may name several, with
    commas. `image` is the image of the virtual machine. `disk_gb` is its disk, which cannot grow.
    `bid_over_minimum` (percent): how much more than the least bid an interruptible server bids.
    `settle`: how long Vast.ai may not list what was just created.
    """

    verified: bool = True
    reliability: Annotated[float, Parsed(_parse_reliability)] = 0.98
    datacenter: bool = False
    countries: Annotated[tuple[str, ...], Parsed(_parse_countries)] | tuple[Country, ...] = ()
    image: Annotated[str, Parsed(_parse_image)] = "docker.io/vastai/kvm:ubuntu_terminal"
    disk_gb: Annotated[int, Parsed(_parse_disk_gb)] = 60
    bid_over_minimum: Annotated[float, Parsed(_parse_percent)] = 10.0
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=30, name="settle")
