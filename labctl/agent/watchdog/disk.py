"""Keeping a server's disk after its end: the server itself asks EC2 for it.

This runs as a process of its own, in a Python that has boto3, with the server's own credentials
(an instance profile).
"""

from __future__ import annotations

from typing import Any, Callable

from ...wire.watchdog import KeepDiskReply, KeepDiskRequest
from ..host.imds import Imds
from ..reply import Failure

METADATA_TIMEOUT_S = 5.0


def keep_disk(request: KeepDiskRequest) -> KeepDiskReply:
    """Have EC2 keep this server's disks when it ends, tagged with the time of their expiry."""
    imds = Imds(request.imds, METADATA_TIMEOUT_S)
    instance = _read_metadata(imds, "instance-id")
    client = _client("ec2", _read_metadata(imds, "placement/region"), request.endpoint)
    probe = request.probe
    try:
        described = client.describe_instances(InstanceIds=[instance])
        disks = described["Reservations"][0]["Instances"][0]["BlockDeviceMappings"]
        volumes = [disk["Ebs"]["VolumeId"] for disk in disks]
        mappings = [
            {"DeviceName": disk["DeviceName"], "Ebs": {"DeleteOnTermination": False}}
            for disk in disks
        ]
        tags = [{"Key": "labctl:expires", "Value": str(int(request.expires))}]
        _call_or_probe(
            client.create_tags, probe, Resources=volumes, Tags=tags
        )  # tagged first: a disk without an expiry would never be removed
        _call_or_probe(
            client.modify_instance_attribute,
            probe,
            InstanceId=instance,
            BlockDeviceMappings=mappings,
        )
    except _errors() as error:
        raise Failure(
            "denied", "EC2 does not allow the server to keep its disk", str(error)[:500]
        ) from None
    return KeepDiskReply(tuple(volumes))


def _call_or_probe(call: Callable[..., Any], probe: bool, **arguments: Any) -> None:
    """Make the call; for a probe, EC2 rejects it with a code that says that it would succeed."""
    from botocore.exceptions import ClientError

    if not probe:
        call(**arguments)
        return
    try:
        call(**arguments, DryRun=True)
    except ClientError as error:
        if error.response["Error"]["Code"] != "DryRunOperation":
            raise


def _read_metadata(imds: Imds, name: str) -> str:
    try:
        response = imds.get(f"meta-data/{name}")
    except OSError as error:
        message = "the machine's metadata service does not answer"
        raise Failure("denied", message, str(error)) from None
    if response.status != 200:
        message = f"the machine's metadata service does not give its {name}"
        raise Failure("denied", message, f"HTTP {response.status}")
    return response.body


def _client(name: str, region: str, endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})
    arguments = {"region_name": region} if region else {}
    if endpoint:
        arguments["endpoint_url"] = endpoint
    return boto3.client(name, config=config, **arguments)


def _errors() -> tuple[type[BaseException], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, Boto3Error, OSError)
