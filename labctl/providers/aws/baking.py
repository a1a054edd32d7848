"""Machine images created from servers. Image and snapshot have our tags, and cost per month."""

from __future__ import annotations

import math

import msgspec

from labctl.errors import NotFoundError, UsageError
from labctl.model import GIB
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import translate_errors
from labctl.providers.aws.instances import require_instance
from labctl.providers.aws.leftovers import SNAPSHOT_USD_PER_GB_MONTH
from labctl.providers.aws.settings import AwsSettings


def bake(clients: Clients, server_id: str, name: str, extra_tags: dict[str, str]) -> str:
    """Start to create an image; return `<image id>.<region>`.

    AWS restarts the machine, so that its disk is consistent.
    """
    instance = require_instance(clients, server_id)
    region = server_id.rpartition(".")[2]
    image_tags = tags.as_pairs({tags.OURS: "1", "Name": f"labctl-{name}", **extra_tags})
    with translate_errors():
        created = clients.get_ec2(region).create_image(
            InstanceId=instance["InstanceId"],
            Name=name,
            Description="made by labctl",
            TagSpecifications=[
                {"ResourceType": "image", "Tags": image_tags},
                {"ResourceType": "snapshot", "Tags": image_tags},
            ],
        )
    return f"{created['ImageId']}.{region}"


def get_image_state(clients: Clients, image_id: str) -> str:
    """Return the state of an image: "pending", "ready", or why it cannot be used."""
    native_id, _, region = image_id.rpartition(".")
    with translate_errors():
        images = clients.get_ec2(region).describe_images(
            Filters=[{"Name": "image-id", "Values": [native_id]}], Owners=["self"]
        )["Images"]
    if not images:
        return "pending"  # not shown yet
    state = str(images[0]["State"])
    if state in ("available", "pending"):
        return "ready" if state == "available" else state
    reason = images[0].get("StateReason", {}).get("Message", "")
    return " ".join(filter(None, [state, reason]))


def estimate_usd_per_month(settings: AwsSettings) -> float:
    """Return the price of the snapshot of a full disk; AWS bills only blocks that are in use."""
    return round(math.ceil(settings.disk_bytes / GIB) * SNAPSHOT_USD_PER_GB_MONTH, 2)


def with_image(settings: AwsSettings, image_id: str) -> AwsSettings:
    """Return settings that boot this image, restricted to the image's region."""
    native_id, _, region = image_id.rpartition(".")
    if not native_id:
        raise NotFoundError(f"{image_id!a} is not an AWS image", hint="labctl course bake")
    if settings.regions and region not in settings.regions:
        raise UsageError(
            f"the course's image is in {region}, and server.aws.regions has other regions",
            why="an image boots only in its own region",
            hint="labctl course bake",
        )
    return msgspec.structs.replace(settings, ami=native_id, regions=(region,))
