"""Names, tags and the record of servers at Azure: written and read here.

A server's name is `labctl-LAB-TOKEN`, which is its id too: a repeated request replaces the same
machine and cannot create a second one. What belongs to it alone has its name with an ending.

Tags of their own are for searching. The whole record is JSON in the tags `labctl-record-1`, `-2`
and so on, since a value has at most 256 characters (learn.microsoft.com/azure/
azure-resource-manager/management/tag-resources). `labctl-timer` has the timer at Azure as
`OPERATION@UNIX_SECONDS`.
"""

from __future__ import annotations

import hashlib
import math
import re

import msgspec

from labctl.decoding import decode_json
from labctl.model import CreateServerRequest, Endpoint, Offer, Server, ServerState, Value
from labctl.providers.azure.replies import VmReply, parse_arm_time

PROVIDER = "azure"
OURS = "labctl"
LAB, LAB_ID, OWNER, TOKEN = "labctl-lab", "labctl-lab-id", "labctl-owner", "labctl-token"
RECORD, TIMER = "labctl-record-", "labctl-timer"
PREFIX = "labctl-"
VALUE_CHARACTERS = 250
DISK_ENDING, IP_ENDING, NIC_ENDING = "-disk", "-ip", "-nic"

SSH_PORT = 22
POWER = "PowerState/"
_SERVER_ID = re.compile(r"labctl-[A-Za-z0-9-]{1,56}")
_SPECIAL = re.compile(r"[^a-z0-9-]")
# A machine whose system is off while Azure keeps its hardware is `stopped` there, and billed as
# before. In labctl a stopped server costs only its disk: that is a deallocated machine.
_STATES: dict[str, ServerState] = {
    "deallocated": "stopped",
    "deallocating": "stopped",
    "running": "running",
    "stopped": "running",
    "stopping": "running",
}


class AzureRecord(Value, frozen=True):
    """All that is needed to rebuild a Server from its machine alone.

    `group` is the id of the servers that share a network, such as a course's.
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


class AzureTimer(Value, frozen=True):
    """A timer that has been set: the id of its operation, and when it ends the server."""

    operation: str
    at: float


def make_server_name(request: CreateServerRequest) -> str:
    lab = _SPECIAL.sub("-", request.lab.lower())[:38].strip("-")
    return f"{PREFIX}{lab}-{request.token}"


def is_server_id(text: str) -> bool:
    return _SERVER_ID.fullmatch(text) is not None


def make_network_name(group: str, region: str, ending: str) -> str:
    """Return the name of what the servers of a group share in one region."""
    known = group if re.fullmatch(r"[a-z0-9-]{1,24}", group) else _hash(group)
    return f"{PREFIX}{known}-{region}-{ending}"


def make_owner_part(owner: str) -> str:
    """Return a part of a name that differs for each owner."""
    return _hash(owner)[:10]


def make_search_tags(lab: str, lab_id: str, owner: str) -> dict[str, str]:
    return {OURS: "1", LAB: lab[:256], LAB_ID: lab_id[:256], OWNER: owner[:256]}


def make_record(offer: Offer, request: CreateServerRequest, owner: str) -> AzureRecord:
    return AzureRecord(
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


def make_tags(record: AzureRecord) -> dict[str, str]:
    """Return all tags of a new server."""
    return {
        **make_search_tags(record.lab, record.lab_id, record.owner),
        TOKEN: record.token,
        **make_record_tags(record),
    }


def make_record_tags(record: AzureRecord, count: int = 0) -> dict[str, str]:
    """Spread the record over `count` tags, so that a changed record replaces all of the former one.

    Without `count`, over one more than it needs: the room is for the keys that are pinned later.
    """
    text = msgspec.json.encode(record).decode()
    least = math.ceil(len(text) / VALUE_CHARACTERS)
    count = max(count, least) if count else least + 1
    ends = [len(text) * number // count for number in range(count + 1)]
    return {
        f"{RECORD}{number}": text[ends[number - 1] : ends[number]] for number in range(1, count + 1)
    }


def count_record_tags(tags: dict[str, str]) -> int:
    """Count the tags that the record is in now."""
    count = 0
    while f"{RECORD}{count + 1}" in tags:
        count += 1
    return count


def parse_record(tags: dict[str, str]) -> AzureRecord | None:
    """Return the record in a server's tags; None if it is damaged."""
    numbers = range(1, count_record_tags(tags) + 1)
    text = "".join(tags[f"{RECORD}{number}"] for number in numbers)
    try:
        return decode_json(text, AzureRecord)
    except msgspec.DecodeError:
        return None


def parse_timer(tags: dict[str, str]) -> AzureTimer | None:
    operation, _, at = tags.get(TIMER, "").rpartition("@")
    return AzureTimer(operation=operation, at=float(at)) if at.isdecimal() else None


def find_power_state(vm: VmReply) -> str:
    """Return Azure's word for the state of a machine, such as running; "" while it has none."""
    codes = (status.code for status in vm.properties.instance_view.statuses)
    return next((code.removeprefix(POWER) for code in codes if code.startswith(POWER)), "")


def parse_server(vm: VmReply, host: str, subscription: str, user: str) -> Server:
    """Turn one of our machines into a Server, without its key file, which the caller adds.

    If its record is damaged, what its tags say is left.
    """
    record = parse_record(vm.tags) or _rebuild_record(vm)
    state = _STATES.get(find_power_state(vm), "starting")
    if vm.properties.provisioning_state == "Deleting":
        state = "ending"
    timer = parse_timer(vm.tags)
    return Server(
        id=vm.name,
        provider=PROVIDER,
        lab=record.lab,
        lab_id=record.lab_id,
        alias=record.lab or vm.name,
        endpoint=Endpoint(
            host=host,
            port=SSH_PORT,
            user=user,
            host_key=record.host_key,
            next_host_key=record.next_host_key,
        ),
        offer=record.offer,
        created_at=parse_arm_time(vm.properties.time_created),
        state="starting" if state == "running" and not host else state,
        deadline_at=timer.at if timer else None,
        account=subscription,
    )


def _rebuild_record(vm: VmReply) -> AzureRecord:
    offer = Offer(
        provider=PROVIDER,
        type=vm.properties.hardware_profile.vm_size,
        region=vm.location,
        spot=vm.properties.priority == "Spot",
    )
    return AzureRecord(
        lab=vm.tags.get(LAB, ""),
        lab_id=vm.tags.get(LAB_ID, ""),
        owner=vm.tags.get(OWNER, ""),
        token=vm.tags.get(TOKEN, ""),
        offer=offer,
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
