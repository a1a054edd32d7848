"""The content of each machine's metadata service."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from labctl.rehearsal.backend import Backend
from labctl.rehearsal.fleet import InstanceRecord
from labctl.rehearsal.imds import Look, format_document

CREDENTIALS_S = 6 * 3600


def build_metadata(record: InstanceRecord, backend: Backend) -> Look:
    """Return a lookup of the paths below /latest/ for a machine, current at each call."""

    def find_entry(path: str) -> str | None:
        entries = _list_facts(record, backend)
        entries.update(_list_notices(record))
        for role, arn in _list_roles(record, backend).items():
            info = format_document({"Code": "Success", "InstanceProfileArn": arn})
            entries["meta-data/iam/info"] = _always(info)
            entries["meta-data/iam/security-credentials"] = _always(role)
            entries[f"meta-data/iam/security-credentials/{role}"] = _credentials
        entry = entries.get(path)
        if entry is not None:
            return entry()
        names = {name[len(path) + 1 :] for name in entries if name.startswith(f"{path}/")}
        children = {name.split("/")[0] + ("/" if "/" in name else "") for name in names}
        return "\n".join(sorted(children)) or None

    return find_entry


def _list_facts(record: InstanceRecord, backend: Backend) -> dict[str, Callable[[], str]]:
    with backend.lock():
        instance = backend.instance(record.region, record.id)
        facts: dict[str, Any] = {
            "ami-id": instance.image_id,
            "instance-id": record.id,
            "instance-life-cycle": instance.lifecycle or "on-demand",
            "instance-type": instance.instance_type,
            "local-hostname": instance.private_dns_name,
            "local-ipv4": instance.private_ip_address,
            "public-ipv4": record.address,
            "placement/availability-zone": instance.availability_zone,
            "placement/region": record.region,
            "services/domain": "amazonaws.com",
            "services/partition": "aws",
        }
        architecture = instance.architecture
        launched = instance.launch_time
    identity = {
        "accountId": backend.account,
        "architecture": architecture,
        "availabilityZone": facts["placement/availability-zone"],
        "imageId": facts["ami-id"],
        "instanceId": record.id,
        "instanceType": facts["instance-type"],
        "pendingTime": launched.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "privateIp": facts["local-ipv4"],
        "region": record.region,
        "version": "2017-09-30",
    }
    return {
        **{f"meta-data/{name}": _always(str(value)) for name, value in facts.items()},
        "dynamic/instance-identity/document": _always(format_document(identity)),
        "user-data": _always(record.user_data),
    }


def _list_notices(record: InstanceRecord) -> dict[str, Callable[[], str]]:
    """Return the paths of notices that have been given."""
    entries: dict[str, Callable[[], str]] = {}
    if (at := record.notice_at) is not None:
        action = format_document({"action": "terminate", "time": format_timestamp(at)})
        entries["meta-data/spot/instance-action"] = _always(action)
        entries["meta-data/spot/termination-time"] = _always(format_timestamp(at))
    if (at := record.rebalance_at) is not None:
        notice = format_document({"noticeTime": format_timestamp(at)})
        entries["meta-data/events/recommendations/rebalance"] = _always(notice)
    return entries


def _list_roles(record: InstanceRecord, backend: Backend) -> dict[str, str]:
    """Return the role of its instance profile, with the profile's ARN."""
    with backend.lock():
        associations = backend.ec2(record.region).iam_instance_profile_associations
        association = associations.get(record.id)
        profile = association.iam_instance_profile if association is not None else None
        return {role.name: profile.arn for role in profile.roles} if profile is not None else {}


def _credentials() -> str:
    now = datetime.now(UTC)
    return format_document(
        {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "LastUpdated": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "Expiration": (now + timedelta(seconds=CREDENTIALS_S)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "AccessKeyId": f"ASIA{secrets.token_hex(8).upper()}",
            "SecretAccessKey": secrets.token_urlsafe(30),
            "Token": secrets.token_urlsafe(60),
        }
    )


def format_timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _always(text: str) -> Callable[[], str]:
    return lambda: text
