"""A machine image made of a server. It and its snapshot bear our tags, and cost by the month."""

from __future__ import annotations

import msgspec

from labctl.errors import NotFoundError, UsageError
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import told
from labctl.providers.aws.instances import present
from labctl.providers.aws.settings import AwsSettings


def bake(clients: Clients, server_id: str, name: str, bears: dict[str, str]) -> str:
    """`<image id>.<region>`. AWS restarts the machine, so that its disk is whole."""
    instance = present(clients, server_id)
    region = server_id.rpartition(".")[2]
    mine = tags.pairs({tags.OURS: "1", "Name": f"labctl-{name}", **bears})
    with told():
        made = clients.ec2(region).create_image(
            InstanceId=instance["InstanceId"],
            Name=name,
            Description="made by labctl",
            TagSpecifications=[
                {"ResourceType": kind, "Tags": mine} for kind in ("image", "snapshot")
            ],
        )
    return f"{made['ImageId']}.{region}"


def baked(clients: Clients, image_id: str) -> str:
    native, _, region = image_id.rpartition(".")
    with told():
        found = clients.ec2(region).describe_images(
            Filters=[{"Name": "image-id", "Values": [native]}], Owners=["self"]
        )["Images"]
    if not found:
        return "pending"  # not shown yet
    state = str(found[0]["State"])
    if state in ("available", "pending"):
        return "ready" if state == "available" else state
    reason = found[0].get("StateReason", {}).get("Message", "")
    return " ".join(filter(None, [state, reason]))


def booting(settings: AwsSettings, image_id: str) -> AwsSettings:
    """An image is of one region: servers are looked for there alone."""
    native, _, region = image_id.rpartition(".")
    if not native:
        raise NotFoundError(f"{image_id!a} is no image of AWS", hint="labctl course bake")
    if settings.regions and region not in settings.regions:
        raise UsageError(
            f"the course's image is in {region}, and server.aws.regions has other regions",
            why="an image boots in its own region alone",
            hint="labctl course bake",
        )
    return msgspec.structs.replace(settings, ami=native, regions=(region,))
