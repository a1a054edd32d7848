"""lab.yaml's `server.aws`."""

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
)

_REGION = re.compile(r"[a-z]{2}(-[a-z]{3,10}){1,3}-[0-9]{1,2}")
_AMI = re.compile(r"ami-[0-9a-f]{8,17}|/[A-Za-z0-9_./-]{1,300}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_SUBNET = re.compile(r"subnet-[0-9a-f]{8,17}")
_PROFILE = re.compile(r"[A-Za-z0-9+=,.@_-]{1,128}")
_INSTANCE_PROFILE = re.compile(
    r"[A-Za-z0-9+=,.@_-]{1,128}|arn:aws[a-z-]*:iam::[0-9]{12}:instance-profile/[\x21-\x7e]{1,512}"
)
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\x21-\x7e]{1,512}")


def _match(pattern: re.Pattern[str], what: str) -> Parsed:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{quote(text)} is not {what}")
        return text

    return Parsed(parse)


def parse_region(text: str) -> str:
    if not _REGION.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a region: write us-east-1")
    return text


def _parse_regions(text: str) -> tuple[str, ...]:
    return tuple(parse_region(part.strip()) for part in text.split(","))


def _parse_networks(text: str) -> tuple[str, ...]:
    return tuple(parse_network(part) for part in text.split(","))


Region = Annotated[str, Parsed(parse_region)]
Network = Annotated[str, Parsed(parse_network)]


class AwsSettings(Value, frozen=True):
    """lab.yaml's `server.aws`.

    `regions`: the regions to search for offers and servers; by default the one of AWS's own
    configuration or environment, else us-east-1. A string may name several, with commas.

    `ami`: an image id (ami-...) or the name of a public SSM parameter (/aws/service/...); by
    default the newest that fits the need: AWS's Deep Learning Base GPU image, or plain Ubuntu.
    `user` is the login account of the image.

    `ssh_from`: the networks that may reach SSH; by default only the caller's own address, which
    the URL `address_from` returns as text. `disk` is the root volume's size.

    `subnet`: replaces the default VPC's subnet. `instance_profile` (name or ARN): the permissions
    of the server itself. `scheduler_role` (ARN): lets EventBridge Scheduler end the server at its
    TTL. `profile`: a profile of AWS's own configuration. `settle`: how long AWS may not list what
    was just created; a server that is not listed for longer does not exist.
    """

    regions: Annotated[tuple[str, ...], Parsed(_parse_regions)] | tuple[Region, ...] = ()
    ami: Annotated[str, _match(_AMI, "an image: write ami-... or /aws/service/...")] = ""
    user: Annotated[str, _match(_USER, "a user name")] = "ubuntu"
    ssh_from: Annotated[tuple[str, ...], Parsed(_parse_networks)] | tuple[Network, ...] = ()
    address_from: Annotated[str, Parsed(parse_address_source)] = CHECK_ADDRESS
    disk_bytes: Size = msgspec.field(default=100 * 10**9, name="disk")
    subnet: Annotated[str, _match(_SUBNET, "a subnet: write subnet-...")] = ""
    instance_profile: Annotated[str, _match(_INSTANCE_PROFILE, "an instance profile")] = ""
    scheduler_role: Annotated[str, _match(_ROLE, "a role: write arn:aws:iam::...:role/...")] = ""
    profile: Annotated[str, _match(_PROFILE, "a profile of AWS's configuration")] = ""
    settle_s: Annotated[int, Parsed(parse_duration)] = msgspec.field(default=60, name="settle")
