"""The lab's key pair at AWS, which stores only the public half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.providers.aws import tags
from labctl.providers.aws.errors import get_code, translate_errors

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors


def key_name(lab_id: str) -> str:
    return f"labctl-{lab_id}"


def ensure_key(ec2: EC2Client, public_key: str, lab_tags: dict[str, str]) -> str:
    """Create or replace the lab's key pair so that it has this key; return its name."""
    name = key_name(lab_tags[tags.LAB_ID])
    with translate_errors():
        try:
            _import(ec2, name, public_key, lab_tags)
        except boto_errors.ClientError as error:
            if get_code(error) != "InvalidKeyPair.Duplicate":
                raise
            if not _is_same(ec2, name, public_key):
                ec2.delete_key_pair(KeyName=name)
                _import(ec2, name, public_key, lab_tags)
    return name


def _import(ec2: EC2Client, name: str, public_key: str, lab_tags: dict[str, str]) -> None:
    ec2.import_key_pair(
        KeyName=name,
        PublicKeyMaterial=public_key.encode(),
        TagSpecifications=[{"ResourceType": "key-pair", "Tags": tags.as_pairs(lab_tags)}],
    )


def _is_same(ec2: EC2Client, name: str, public_key: str) -> bool:
    pairs = ec2.describe_key_pairs(
        Filters=[{"Name": "key-name", "Values": [name]}], IncludePublicKey=True
    )["KeyPairs"]
    return any(pair.get("PublicKey", "").split()[:2] == public_key.split()[:2] for pair in pairs)
