"""lab.yaml's `server.azure`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration
from labctl.config.schema import Size
from labctl.model import Value
from labctl.providers.azure.hardware import PRICES_URL
from labctl.providers.caller_network import (
    CHECK_ADDRESS,
    parse_address_source,
    parse_network,
    parse_rehearsal_url,
)

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REGION = re.compile(r"[a-z]{3,40}[0-9]?")
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
_IMAGE = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+:(latest|[0-9.]+)")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
DEFAULT_GROUP = "labctl"


def _match(pattern: re.Pattern[str], what: str) -> Parsed:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quote(text)} is not {what}")
        return text

    return Parsed(parse)


def parse_azure_region(text: str) -> str:
    if not _REGION.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a region of Azure: write eastus or westeurope")
    return text


def _parse_regions(text: str) -> tuple[str, ...]:
    return tuple(parse_azure_region(part.strip()) for part in text.split(","))


def _parse_networks(text: str) -> tuple[str, ...]:
    return tuple(parse_network(part) for part in text.split(","))


AzureRegion = Annotated[str, Parsed(parse_azure_region)]
SshNetwork = Annotated[str, Parsed(parse_network)]
HttpsUrl = Annotated[str, Parsed(parse_address_source)]
RehearsalUrl = Annotated[str, Parsed(parse_rehearsal_url)]


class AzureSettings(Value, frozen=True):
    """lab.yaml's `server.azure`.

    `subscription`: the id of the subscription that pays; by default AZURE_SUBSCRIPTION_ID, else the
    one that `az account set` has chosen.

    `regions`: the regions to search for offers. A string may name several, with commas. Servers
    and leftovers are found in every region.

    `resource_group`: everything that labctl creates is in it; it is created if it does not exist.

    `image`: PUBLISHER:OFFER:SKU:VERSION of the marketplace; by default Microsoft's Ubuntu image
    with NVIDIA's driver, or Canonical's plain Ubuntu. It needs cloud-init. `user` is the login
    account.

    `ssh_from`: the networks that may reach SSH; by default only the caller's own address, which
    the URL `address_from` returns as text. `disk` is the size of the operating system's disk.

    `settle`: how long Azure may not list what was just created. `prices_from`: the address of the
    Retail Prices API. `endpoint_url`: replaces Azure Resource Manager's, for a rehearsal.
    """

    subscription: Annotated[str, _match(_UUID, "the id of a subscription")] = ""
    regions: Annotated[tuple[str, ...], Parsed(_parse_regions)] | tuple[AzureRegion, ...] = (
        "eastus",
    )
    resource_group: Annotated[str, _match(_GROUP, "the name of a resource group")] = DEFAULT_GROUP
    image: Annotated[str, _match(_IMAGE, "an image: write PUBLISHER:OFFER:SKU:VERSION")] = ""
    user: Annotated[str, _match(_USER, "a user name")] = "ubuntu"
    ssh_from: Annotated[tuple[str, ...], Parsed(_parse_networks)] | tuple[SshNetwork, ...] = ()
    address_from: HttpsUrl = CHECK_ADDRESS
    disk_bytes: Size = msgspec.field(default=128 * 2**30, name="disk")
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=30, name="settle")
    prices_from: HttpsUrl = PRICES_URL
    endpoint_url: RehearsalUrl = ""
