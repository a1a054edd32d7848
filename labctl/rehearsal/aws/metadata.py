"""The content of each machine's metadata service."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from labctl.model import Value
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.fleet import InstanceRecord
from labctl.rehearsal.aws.imds import MetadataLookup, format_json

CREDENTIALS_S = 6 * 3600


class IdentityDocument(Value, frozen=True, rename="camel"):
    """The document by which an instance identifies itself."""

    account_id: str
    architecture: str
    availability_zone: str
    image_id: str
    instance_id: str
    instance_type: str
    pending_time: str
    private_ip: str
    region: str
    version: str = "2017-09-30"


class ProfileInfo(Value, frozen=True, rename="pascal"):
    """The instance's profile, which is called by its ARN."""

    instance_profile_arn: str
    code: str = "Success"


class SpotAction(Value, frozen=True):
    """The notice of the end of a spot instance. `time` is in UTC, in ISO 8601."""

    time: str
    action: str = "terminate"


class RebalanceNotice(Value, frozen=True, rename="camel"):
    """The recommendation that precedes the notice. `notice_time` is in UTC, in ISO 8601."""

    notice_time: str


class RoleCredentials(Value, frozen=True, rename="pascal"):
    """The credentials of the instance's role."""

    access_key_id: str
    secret_access_key: str
    token: str
    last_updated: str
    expiration: str
    code: str = "Success"
    type: str = "AWS-HMAC"


def build_metadata(record: InstanceRecord, backend: Backend) -> MetadataLookup:
    """Return a lookup of the paths below /latest/ for a machine, current at each call."""

    def find_entry(path: str) -> str | None:
        entries = _list_facts(record, backend)
        entries.update(_list_notices(record))
        for role, arn in _list_roles(record, backend).items():
            info = format_json(ProfileInfo(instance_profile_arn=arn))
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
        facts: dict[str, str] = {
            "ami-id": str(instance.image_id),
            "instance-id": record.id,
            "instance-life-cycle": str(instance.lifecycle or "on-demand"),
            "instance-type": str(instance.instance_type),
            "local-hostname": str(instance.private_dns_name),
            "local-ipv4": str(instance.private_ip_address),
            "public-ipv4": record.address,
            "placement/availability-zone": str(instance.availability_zone),
            "placement/region": record.region,
            "services/domain": "amazonaws.com",
            "services/partition": "aws",
        }
        architecture = str(instance.architecture)
        launched = instance.launch_time
    identity = IdentityDocument(
        account_id=backend.account,
        architecture=architecture,
        availability_zone=facts["placement/availability-zone"],
        image_id=facts["ami-id"],
        instance_id=record.id,
        instance_type=facts["instance-type"],
        pending_time=launched.strftime("%Y-%m-%dT%H:%M:%SZ"),
        private_ip=facts["local-ipv4"],
        region=record.region,
    )
    return {
        **{f"meta-data/{name}": _always(value) for name, value in facts.items()},
        "dynamic/instance-identity/document": _always(format_json(identity)),
        "user-data": _always(record.user_data),
    }


def _list_notices(record: InstanceRecord) -> dict[str, Callable[[], str]]:
    """Return the paths of notices that have been given."""
    entries: dict[str, Callable[[], str]] = {}
    if (at := record.notice_at) is not None:
        action = format_json(SpotAction(time=format_timestamp(at)))
        entries["meta-data/spot/instance-action"] = _always(action)
        entries["meta-data/spot/termination-time"] = _always(format_timestamp(at))
    if (at := record.rebalance_at) is not None:
        notice = format_json(RebalanceNotice(notice_time=format_timestamp(at)))
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
    return format_json(
        RoleCredentials(
            access_key_id=f"ASIA{secrets.token_hex(8).upper()}",
            secret_access_key=secrets.token_urlsafe(30),
            token=secrets.token_urlsafe(60),
            last_updated=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            expiration=(now + timedelta(seconds=CREDENTIALS_S)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
    )


def format_timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _always(text: str) -> Callable[[], str]:
    return lambda: text
