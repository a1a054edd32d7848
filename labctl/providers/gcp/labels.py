"""Names, labels and the record of servers at Google Cloud: written and read here.

A label's value has at most 63 lower-case letters, digits, `_` and `-`, so labels are only for
searching. The whole record is JSON in the instance's metadata, below the key `labctl`. Firewall
rules have no labels: their names begin with `labctl-`, and their descriptions are records too.

A server's name is `labctl-LAB-TOKEN`, so that a repeated request cannot create a second one. Its
id is `NAME.ZONE`; the id of a disk is `NAME.ZONE`, that of an address `NAME.REGION`, and that of a
firewall rule `NAME.global`.
"""

from __future__ import annotations

import hashlib
import re
import uuid

import msgspec

from labctl.decoding import decode_json
from labctl.model import CreateServerRequest, Endpoint, Offer, Server, ServerState, Value
from labctl.providers.gcp.replies import GceInstance, last_part, parse_timestamp

PROVIDER = "gcp"
OURS = "labctl"
LAB = "labctl-lab"
LAB_ID = "labctl-lab-id"
OWNER = "labctl-owner"
TOKEN = "labctl-token"
EXPIRES = "labctl-expires"
# Selects what bears labctl's label, in every list call.
FILTER = f"labels.{OURS}=1"
# The keys of an instance's metadata. cloud-init reads `user-data`.
RECORD, USER_DATA = "labctl", "user-data"
PREFIX = "labctl-"

SSH_PORT = 22
GLOBAL = "global"
_SERVER_ID = re.compile(r"([a-z][a-z0-9-]{0,62})\.([a-z]{2,12}(?:-[a-z0-9]{1,20}){1,4}|global)")
_LABEL = re.compile(r"[^a-z0-9_-]")
_NAMESPACE = uuid.UUID("6f6b1f0e-52b8-4d35-9bb1-6a6d3d0b2c7e")
_STATES: dict[str, ServerState] = {
    "DEPROVISIONING": "ending",
    "PENDING_STOP": "stopped",
    "RUNNING": "running",
    "STOPPED": "stopped",
    "STOPPING": "stopped",
    "SUSPENDED": "stopped",
    "SUSPENDING": "stopped",
    "TERMINATED": "stopped",
}


class ServerRecord(Value, frozen=True):
    """All that is needed to rebuild a Server from its instance alone.

    `group` is the id of the servers that share firewall rules, such as a course's.
    """

    lab: str
    lab_id: str
    owner: str
    token: str
    offer: Offer
    group: str = ""
    group_name: str = ""
    host_key: str = ""
    next_host_key: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)


class FirewallRecord(Value, frozen=True):
    """The description of a firewall rule."""

    lab: str
    lab_id: str
    owner: str = ""


def make_request_id(*words: str) -> str:
    """Return the UUID of a request, the same for the same words."""
    return str(uuid.uuid5(_NAMESPACE, "\0".join(words)))


def make_server_name(request: CreateServerRequest) -> str:
    return f"{PREFIX}{request.lab}-{request.token}"


def make_server_id(name: str, place: str) -> str:
    return f"{name}.{place}"


def split_id(resource_id: str) -> tuple[str, str] | None:
    """Split an id into (name, zone or region); None if it is not a valid one."""
    match = _SERVER_ID.fullmatch(resource_id)
    return (match[1], match[2]) if match else None


def get_region(zone: str) -> str:
    return zone.rpartition("-")[0]


def make_label_value(text: str) -> str:
    """Return a text as the value of a label; characters that it may not have become `_`."""
    return _LABEL.sub("_", text.lower())[:63]


def make_network_tag(group: str) -> str:
    """Return the network tag of a group's servers, which its firewall rules name."""
    return f"{PREFIX}{_shorten(group, 40)}"


def make_rule_name(group: str, part: str) -> str:
    """Return the name of one of a group's firewall rules."""
    return f"{make_network_tag(group)}-{part}"


def make_owner_part(owner: str) -> str:
    """Return a part of a name that differs for each owner."""
    return hashlib.sha256(owner.encode()).hexdigest()[:10]


def make_labels(request: CreateServerRequest, owner: str) -> dict[str, str]:
    return {
        OURS: "1",
        LAB: make_label_value(request.lab),
        LAB_ID: make_label_value(request.lab_id),
        OWNER: make_label_value(owner),
        TOKEN: make_label_value(request.token),
    }


def make_record(offer: Offer, request: CreateServerRequest, owner: str) -> ServerRecord:
    return ServerRecord(
        lab=request.lab,
        lab_id=request.lab_id,
        owner=owner,
        token=request.token,
        offer=offer,
        group=request.group or request.lab_id,
        group_name=(request.group_name or request.group) if request.group else request.lab,
        host_key=request.host_key,
        tags=request.tags,
    )


def encode_record(record: ServerRecord | FirewallRecord) -> str:
    return msgspec.json.encode(record).decode()


def parse_firewall_record(description: str) -> FirewallRecord | None:
    try:
        return decode_json(description, FirewallRecord)
    except msgspec.DecodeError:
        return None


def parse_record(instance: GceInstance) -> ServerRecord | None:
    """Return the record of an instance; None if it is damaged."""
    texts = [item.value for item in instance.metadata.items if item.key == RECORD]
    try:
        return decode_json(texts[0], ServerRecord) if texts else None
    except msgspec.DecodeError:
        return None


def parse_server(instance: GceInstance, project: str, user: str) -> Server:
    """Turn one of our instances into a Server, without its key file, which the caller adds.

    If its record is damaged, what its labels say is left.
    """
    zone = last_part(instance.zone)
    record = parse_record(instance) or _rebuild_record(instance, zone)
    host = _find_host(instance)
    state = _STATES.get(instance.status, "starting")
    ends_at = parse_timestamp(instance.resource_status.scheduling.termination_timestamp)
    return Server(
        id=make_server_id(instance.name, zone),
        provider=PROVIDER,
        lab=record.lab,
        lab_id=record.lab_id,
        alias=record.lab or instance.name,
        endpoint=Endpoint(
            host=host,
            port=SSH_PORT,
            user=user,
            host_key=record.host_key,
            next_host_key=record.next_host_key,
        ),
        offer=record.offer,
        created_at=parse_timestamp(instance.creation_timestamp),
        state="starting" if state == "running" and not host else state,
        deadline_at=ends_at or None,
        account=project,
    )


def with_identity(server: Server, identity: str) -> Server:
    endpoint = msgspec.structs.replace(server.endpoint, identity=identity)
    return msgspec.structs.replace(server, endpoint=endpoint)


def _rebuild_record(instance: GceInstance, zone: str) -> ServerRecord:
    offer = Offer(
        provider=PROVIDER,
        type=last_part(instance.machine_type),
        region=get_region(zone),
        zone=zone,
        spot=instance.scheduling.provisioning_model == "SPOT",
    )
    labels = instance.labels
    return ServerRecord(
        lab=labels.get(LAB, ""),
        lab_id=labels.get(LAB_ID, ""),
        owner=labels.get(OWNER, ""),
        token=labels.get(TOKEN, ""),
        offer=offer,
    )


def _find_host(instance: GceInstance) -> str:
    addresses = [
        config.nat_ip for nic in instance.network_interfaces for config in nic.access_configs
    ]
    return next(filter(None, addresses), "")


def _shorten(text: str, most: int) -> str:
    """Return a text as a part of a name; a long or an unusual one is replaced by its hash."""
    if len(text) <= most and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:20]
