"""lab.yaml's `server.gcp`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration
from labctl.config.schema import Size
from labctl.model import Value
from labctl.providers.caller_network import (
    CHECK_ADDRESS,
    parse_address_source,
    parse_network,
    parse_rehearsal_url,
)

_PROJECT = re.compile(r"([a-z0-9.-]{1,63}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_REGION = re.compile(r"[a-z]{2,12}(-[a-z]{2,12})?-[a-z]{3,12}[0-9]{1,2}")
_NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_IMAGE = re.compile(rf"{_PROJECT.pattern}/(family/)?{_NAME}")
_NETWORK = re.compile(rf"({_PROJECT.pattern}/)?{_NAME}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


def _match(pattern: re.Pattern[str], what: str) -> Parsed:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quote(text)} is not {what}")
        return text

    return Parsed(parse)


def parse_gcp_region(text: str) -> str:
    if not _REGION.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a region of Google Cloud: write us-central1")
    return text


def _parse_regions(text: str) -> tuple[str, ...]:
    return tuple(parse_gcp_region(part.strip()) for part in text.split(","))


def _parse_networks(text: str) -> tuple[str, ...]:
    return tuple(parse_network(part) for part in text.split(","))


GcpRegion = Annotated[str, Parsed(parse_gcp_region)]
Cidr = Annotated[str, Parsed(parse_network)]
Source = Annotated[str, Parsed(parse_address_source)]
RehearsalUrl = Annotated[str, Parsed(parse_rehearsal_url)]


class GcpSettings(Value, frozen=True):
    """lab.yaml's `server.gcp`.

    `project`: the project that pays; by default that of gcloud's own configuration or environment.

    `regions`: the regions to search for offers; by default gcloud's own, else us-central1. A string
    may name several, with commas. Servers and leftovers are found in every region.

    `image`: PROJECT/family/FAMILY or PROJECT/IMAGE; by default Canonical's Ubuntu with NVIDIA's
    driver, or plain Ubuntu. It needs cloud-init. `user` is the login account of the image.

    `ssh_from`: the networks that may reach SSH; by default only the caller's own address, which
    the URL `address_from` returns as text. `disk` is the boot disk's size.

    `network`: replaces the network `default`; `subnet` is needed only if the network does not
    create its subnets automatically. `settle`: how long Google may not list what was just created.

    `prices_from`: replaces the address of gpuhunt's price catalogs. `endpoint_url`: replaces
    Google's, for a rehearsal.
    """

    project: Annotated[str, _match(_PROJECT, "the id of a project")] = ""
    regions: Annotated[tuple[str, ...], Parsed(_parse_regions)] | tuple[GcpRegion, ...] = ()
    image: Annotated[str, _match(_IMAGE, "an image: write PROJECT/family/FAMILY")] = ""
    user: Annotated[str, _match(_USER, "a user name")] = "ubuntu"
    ssh_from: Annotated[tuple[str, ...], Parsed(_parse_networks)] | tuple[Cidr, ...] = ()
    address_from: Source = CHECK_ADDRESS
    disk_bytes: Size = msgspec.field(default=100 * 10**9, name="disk")
    network: Annotated[str, _match(_NETWORK, "a network: write NAME or PROJECT/NAME")] = "default"
    subnet: Annotated[str, _match(_NETWORK, "a subnet: write NAME or PROJECT/NAME")] = ""
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=30, name="settle")
    prices_from: Source = ""
    endpoint_url: RehearsalUrl = ""
