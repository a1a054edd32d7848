"""A disk that outlives its server, by EC2's leave, which the server asks for itself.

Run as a process of its own, by whichever Python on the server has boto3, with the server's own
credentials (an instance profile).
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any, Callable

from ..reply import Failure

IMDS = "http://169.254.169.254"


def keep_disk(request: dict[str, Any]) -> dict[str, Any]:
    """Have EC2 keep this server's disks when it ends, tagged with "expires" (Unix seconds).

    Replies the volumes' ids. "probe" asks EC2 whether it would, and changes nothing.
    """
    metadata = _metadata(request.get("imds", IMDS))
    instance = metadata("instance-id")
    client = _client("ec2", {**request, "region": metadata("placement/region")})
    probe = bool(request.get("probe"))
    try:
        found = client.describe_instances(InstanceIds=[instance])
        disks = found["Reservations"][0]["Instances"][0]["BlockDeviceMappings"]
        volumes = [disk["Ebs"]["VolumeId"] for disk in disks]
        wish = [
            {"DeviceName": disk["DeviceName"], "Ebs": {"DeleteOnTermination": False}}
            for disk in disks
        ]
        tags = [{"Key": "labctl:expires", "Value": str(int(request["expires"]))}]
        _would(
            client.create_tags, probe, Resources=volumes, Tags=tags
        )  # first: a disk without an expiry would stay for ever
        _would(
            client.modify_instance_attribute, probe, InstanceId=instance, BlockDeviceMappings=wish
        )
    except _errors() as error:
        raise Failure("denied", "the disk cannot be kept", str(error)[:500]) from None
    return {"volumes": volumes}


def _would(call: Callable[..., Any], probe: bool, **words: Any) -> None:
    """Call it; a probe is refused by EC2 with a code that says it would have been done."""
    from botocore.exceptions import ClientError

    if not probe:
        call(**words)
        return
    try:
        call(**words, DryRun=True)
    except ClientError as error:
        if error.response["Error"]["Code"] != "DryRunOperation":
            raise


def _metadata(address: str) -> Callable[[str], str]:
    """Reads what the machine may know of itself; tokens are required there."""

    def get(path: str, method: str, headers: dict[str, str]) -> str:
        asked = urllib.request.Request(f"{address}{path}", headers=headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=5) as reply:
            return str(reply.read().decode())

    try:
        lasting = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        token = get("/latest/api/token", "PUT", lasting)
    except (urllib.error.URLError, OSError) as error:
        said = "the machine's metadata service does not answer"
        raise Failure("denied", said, str(error)) from None
    known = {"X-aws-ec2-metadata-token": token}
    return lambda what: get(f"/latest/meta-data/{what}", "GET", known)


def _client(name: str, request: dict[str, Any]) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})
    words = {"region_name": request["region"]} if request.get("region") else {}
    if request.get("endpoint"):
        words["endpoint_url"] = request["endpoint"]
    return boto3.client(name, config=config, **words)


def _errors() -> tuple[type[BaseException], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, Boto3Error, OSError)
