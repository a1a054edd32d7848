"""What the watchdog does with boto3: results to the store, and a disk that outlives its server.

Run as processes of their own, by whichever Python on the server has boto3, with the server's own
credentials (an instance profile). Nothing else of the program needs boto3.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Callable

from .place import sha256_of
from .reply import Failure

IMDS = "http://169.254.169.254"
PYTHONS = ("/opt/labctl/venv/bin/python3", sys.executable, "python3")


def python_with_boto3() -> str:
    """A Python here that can import boto3; "" where none can."""
    for python in PYTHONS:
        if shutil.which(python):
            words = [python, "-c", "import boto3"]
            if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0:
                return python
    return ""


def mirror(request: dict[str, Any]) -> dict[str, Any]:
    """Send "files" ([path, key, size, sha256] each) below "store" (s3://bucket/prefix).

    Replies "sent" (indices of files that arrived whole: size and hash as promised), "failed"
    ([index, reason]) and the "bytes_s" that were reached. "probe" writes, reads and removes one
    small object instead.
    """
    bucket, prefix = _split(request["store"])
    client = _client("s3", request)
    if request.get("probe"):
        _probe(client, bucket, prefix)
        return {}
    began, size = time.monotonic(), 0
    sent, failed = [], []
    for index, (path, key, length, sha256) in enumerate(request["files"]):
        try:
            _send(client, bucket, f"{prefix}{key}", Path(path), length, sha256)
        except _errors() as error:
            failed.append([index, str(error)[:300]])
            continue
        sent.append(index)
        size += length
    rate = size / max(time.monotonic() - began, 0.001)
    return {"sent": sent, "failed": failed, "bytes_s": rate}


def _send(client: Any, bucket: str, key: str, path: Path, size: int, sha256: str) -> None:
    """Upload one file unless it is there already, and have the store confirm its size and hash.

    S3 checks the bytes themselves against the checksum that goes with them.
    """
    if _confirmed(client, bucket, key, size, sha256):
        return
    extra = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
    client.upload_file(str(path), bucket, key, ExtraArgs=extra)
    if sha256_of(path) != sha256:
        raise OSError(f"{path} changed while it was sent")
    if not _confirmed(client, bucket, key, size, sha256):
        raise OSError(f"the store does not show {key} as it was sent")


def _confirmed(client: Any, bucket: str, key: str, size: int, sha256: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        head = client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404):
            return False
        raise
    return bool(head["ContentLength"] == size and head["Metadata"].get("sha256") == sha256)


def _probe(client: Any, bucket: str, prefix: str) -> None:
    key = f"{prefix}.labctl-probe"
    try:
        client.put_object(Bucket=bucket, Key=key, Body=b"")
        client.head_object(Bucket=bucket, Key=key)
        client.delete_object(Bucket=bucket, Key=key)
    except _errors() as error:
        raise Failure("store", f"s3://{bucket}/{prefix} cannot be written", str(error)) from None


def _split(store: str) -> tuple[str, str]:
    """("bucket", "prefix/") of s3://bucket/prefix."""
    bucket, _, prefix = store[len("s3://") :].partition("/")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


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
