"""What the metadata service says to each machine."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from labctl.rehearsal.backend import Backend
from labctl.rehearsal.fleet import Record
from labctl.rehearsal.imds import Look, document

CREDENTIALS_S = 6 * 3600


def metadata_of(record: Record, backend: Backend) -> Look:
    """The paths below /latest/ for one machine, read anew each time."""

    def look(path: str) -> str | None:
        known = _plain(record, backend)
        known.update(_spot(record))
        for role, arn in _roles(record, backend).items():
            info = document({"Code": "Success", "InstanceProfileArn": arn})
            known["meta-data/iam/info"] = _always(info)
            known["meta-data/iam/security-credentials"] = _always(role)
            known[f"meta-data/iam/security-credentials/{role}"] = _credentials
        found = known.get(path)
        if found is not None:
            return found()
        below = {name[len(path) + 1 :] for name in known if name.startswith(f"{path}/")}
        listed = {name.split("/")[0] + ("/" if "/" in name else "") for name in below}
        return "\n".join(sorted(listed)) or None

    return look


def _plain(record: Record, backend: Backend) -> dict[str, Callable[[], str]]:
    with backend.held():
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
        "dynamic/instance-identity/document": _always(document(identity)),
        "user-data": _always(record.user_data),
    }


def _spot(record: Record) -> dict[str, Callable[[], str]]:
    """Notices: they are there once they were given."""
    known: dict[str, Callable[[], str]] = {}
    if (at := record.notice_at) is not None:
        action = document({"action": "terminate", "time": stamp(at)})
        known["meta-data/spot/instance-action"] = _always(action)
        known["meta-data/spot/termination-time"] = _always(stamp(at))
    if (at := record.rebalance_at) is not None:
        notice = document({"noticeTime": stamp(at)})
        known["meta-data/events/recommendations/rebalance"] = _always(notice)
    return known


def _roles(record: Record, backend: Backend) -> dict[str, str]:
    """The role of its instance profile, with the profile's ARN."""
    with backend.held():
        associations = backend.ec2(record.region).iam_instance_profile_associations
        found = associations.get(record.id)
        profile = found.iam_instance_profile if found is not None else None
        return {role.name: profile.arn for role in profile.roles} if profile is not None else {}


def _credentials() -> str:
    now = datetime.now(UTC)
    return document(
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


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _always(text: str) -> Callable[[], str]:
    return lambda: text
