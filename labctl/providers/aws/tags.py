"""The tags of servers and resources, which record everything about them: written and read here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict

import msgspec

from labctl.model import CreateServerRequest, Endpoint, Offer, Server, ServerState
from labctl.providers.aws.fit import PROVIDER

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import (
        FilterTypeDef,
        InstanceTypeDef,
        ReservationResponseTypeDef,
        ReservationTypeDef,
        TagTypeDef,
    )

    class Tagged(TypedDict):
        """Any resource with tags, as AWS describes it."""

        Tags: NotRequired[list[TagTypeDef]]

    class OwnedInstance(InstanceTypeDef):
        """An instance with the account that owns it, which AWS returns in its reservation."""

        OwnerId: str


OURS = "labctl"
LAB = "labctl:lab"
LAB_ID = "labctl:lab-id"
OWNER = "labctl:owner"
TOKEN = "labctl:token"
PRICE = "labctl:price"
SPOT = "labctl:spot"
ON_DEMAND = "labctl:on-demand"
HARDWARE = "labctl:hardware"
HOST_KEY = "labctl:host-key"
NEXT_HOST_KEY = "labctl:host-key-next"
TTL_S = "labctl:ttl-s"
DEADLINE = "labctl:deadline"
EXPIRES = "labctl:expires"

SSH_PORT = 22
_SERVER_ID = re.compile(r"(i-[0-9a-f]{8,17})\.([a-z0-9-]{3,30})")
_STATES: dict[str, ServerState] = {
    "pending": "starting",
    "running": "running",
    "stopping": "stopped",
    "stopped": "stopped",
    "shutting-down": "ending",
    "terminated": "terminated",
}


def make_filters(*more: FilterTypeDef) -> list[FilterTypeDef]:
    """Return the filters for resources with labctl's tag, and these further filters."""
    return [{"Name": f"tag:{OURS}", "Values": ["1"]}, *more]


def as_pairs(tags: Mapping[str, str]) -> list[TagTypeDef]:
    """Return tags in AWS's format."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def parse_tags(described: Tagged) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags") or ()}


def is_same_attempt(first: Tagged, second: Tagged) -> bool:
    """Whether the same request created both resources, such as a server and its disk."""
    token = parse_tags(first).get(TOKEN)
    return bool(token) and token == parse_tags(second).get(TOKEN)


def make_lab_tags(lab: str, lab_id: str, owner: str) -> dict[str, str]:
    """Return the tags of every resource of a lab."""
    return {OURS: "1", LAB: lab, LAB_ID: lab_id, OWNER: owner, "Name": f"labctl-{lab}"}


def make_server_tags(offer: Offer, request: CreateServerRequest, owner: str) -> dict[str, str]:
    """Return the tags of a server: all that is needed to rebuild its record from them alone."""
    hardware = (
        f"cpus={offer.cpus} memory={offer.memory_bytes} arch={offer.arch}"
        f" gpus={offer.gpu_count} gpu_memory={offer.gpu_memory_bytes} gpu={offer.gpu_name}"
    )
    ttl_s = request.need.ttl_s
    return {
        **({} if ttl_s is None else {TTL_S: str(ttl_s)}),
        **request.tags,
        **make_lab_tags(request.lab, request.lab_id, owner),
        TOKEN: request.token,
        PRICE: repr(offer.price_usd_per_hour),
        SPOT: "1" if offer.spot else "0",
        ON_DEMAND: ""
        if offer.on_demand_usd_per_hour is None
        else repr(offer.on_demand_usd_per_hour),
        HARDWARE: hardware,
        HOST_KEY: request.host_key,
    }


def parse_offer(instance: InstanceTypeDef, region: str) -> Offer:
    tags = parse_tags(instance)
    # The GPU's name comes last, since it may contain spaces.
    words, _, gpu_name = tags.get(HARDWARE, "").partition(" gpu=")
    values = dict(word.split("=", 1) for word in words.split() if "=" in word)
    return Offer(
        provider=PROVIDER,
        type=instance["InstanceType"],
        region=region,
        zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        cpus=int(_parse_number(values.get("cpus", ""))),
        memory_bytes=int(_parse_number(values.get("memory", ""))),
        arch=values.get("arch", ""),
        gpu_name=gpu_name,
        gpu_count=int(_parse_number(values.get("gpus", ""))),
        gpu_memory_bytes=int(_parse_number(values.get("gpu_memory", ""))),
        price_usd_per_hour=_parse_number(tags.get(PRICE, "")),
        spot=tags.get(SPOT) == "1" or instance.get("InstanceLifecycle") == "spot",
        on_demand_usd_per_hour=_parse_number(tags.get(ON_DEMAND, "")) or None,
    )


def with_owner(
    instance: InstanceTypeDef, reservation: ReservationTypeDef | ReservationResponseTypeDef
) -> OwnedInstance:
    """Add the account that owns an instance, which AWS returns in its reservation."""
    return {**instance, "OwnerId": reservation.get("OwnerId", "")}


def parse_server(instance: OwnedInstance, region: str, user: str) -> Server:
    """Turn a described instance into a Server, without its key file, which the caller adds."""
    tags = parse_tags(instance)
    host = instance.get("PublicIpAddress") or ""
    state = _STATES.get(instance["State"]["Name"], "starting")
    lab = tags.get(LAB, "")
    return Server(
        id=f"{instance['InstanceId']}.{region}",
        provider=PROVIDER,
        lab=lab,
        lab_id=tags.get(LAB_ID, ""),
        alias=lab or instance["InstanceId"],
        endpoint=Endpoint(
            host=host,
            port=SSH_PORT,
            user=user,
            host_key=tags.get(HOST_KEY, ""),
            next_host_key=tags.get(NEXT_HOST_KEY, ""),
        ),
        offer=parse_offer(instance, region),
        created_at=_created_at(instance),
        state="starting" if state == "running" and not host else state,
        deadline_at=_parse_number(tags.get(DEADLINE, "")) or None,
        account=instance["OwnerId"],
    )


def with_identity(server: Server, identity: str) -> Server:
    endpoint = msgspec.structs.replace(server.endpoint, identity=identity)
    return msgspec.structs.replace(server, endpoint=endpoint)


def split_id(server_id: str) -> tuple[str, str] | None:
    """Split a server id into (instance id, region); None if it is not a valid one."""
    match = _SERVER_ID.fullmatch(server_id)
    return (match[1], match[2]) if match else None


def _created_at(instance: InstanceTypeDef) -> float:
    """Return the first launch: LaunchTime is that of the last start; attachments keep theirs."""
    times = [instance.get("LaunchTime")]
    times += [
        interface.get("Attachment", {}).get("AttachTime")
        for interface in instance.get("NetworkInterfaces", ())
    ]
    return min((time.timestamp() for time in times if time), default=0.0)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
