"""How a pod records whose it is: two environment variables, which are set at its creation, and its
name, the only part that can be changed without a restart.

| where | form |
|---|---|
| `LABCTL_POD` | a `PodRecord` as JSON, without nested objects: RunPod replaces `{{ ... }}` |
| `LABCTL_FIRST_BOOT` | the first-boot script in base64 |
| name at creation | `labctl-LAB-TOKEN`, with the first letters of the lab's name |
| name with the key that replaces the first | `labctl-LAB.n.KEY`, then `labctl-LAB.k.KEY` |
| network volumes | names that begin with `labctl-` |

A KEY is the 32 bytes of an ed25519 public key in URL-safe base64. RunPod documents no limit for
names; these have at most 60 letters, which others have used.
"""

from __future__ import annotations

import re
import time
from datetime import datetime

import msgspec

from labctl.decoding import decode_json
from labctl.model import CreateServerRequest, Endpoint, Offer, Server, ServerState, Value
from labctl.providers.ed25519_code import LETTERS, decode_host_key, encode_host_key
from labctl.providers.runpod.api import Pod

PROVIDER = "runpod"
PREFIX = "labctl-"
RECORD, FIRST_BOOT = "LABCTL_POD", "LABCTL_FIRST_BOOT"
USER = "root"
_PINNED_NAME = re.compile(rf"labctl-.{{1,7}}\.([nk])\.({LETTERS})")
_STATES: dict[str, ServerState] = {
    "PROVISIONING": "starting",
    "STARTING": "starting",
    "RUNNING": "running",
    "EXITED": "stopped",
    # It can be started again, or terminated.
    "ERROR": "stopped",
    "TERMINATED": "terminated",
}


class PodRecord(Value, frozen=True):
    """What is known about a pod from its creation. `tags` are "name=value".

    `created_ms` (Unix) sorts the pods of one attempt. A key is in 43 letters.
    """

    lab: str
    lab_id: str
    token: str
    created_ms: int
    owner: str = ""
    host_key: str = ""
    price_usd_per_hour: float = 0.0
    arch: str = ""
    gpu_name: str = ""
    gpu_memory_bytes: int = 0
    ttl_s: int | None = None
    tags: tuple[str, ...] = ()


def make_record(offer: Offer, request: CreateServerRequest, owner: str) -> str:
    """Return the value of LABCTL_POD for a new pod."""
    record = PodRecord(
        lab=request.lab,
        lab_id=request.lab_id,
        token=request.token,
        created_ms=round(time.time() * 1000),
        owner=owner,
        host_key=encode_host_key(request.host_key) if request.host_key else "",
        price_usd_per_hour=offer.price_usd_per_hour,
        arch=offer.arch,
        gpu_name=offer.gpu_name,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        ttl_s=request.need.ttl_s,
        tags=tuple(f"{key}={value}" for key, value in request.tags.items()),
    )
    return msgspec.json.encode(record).decode()


def read_record(pod: Pod) -> PodRecord | None:
    """Return what labctl recorded in a pod; None if labctl did not create it."""
    try:
        return decode_json(pod.env.get(RECORD, ""), PodRecord)
    except msgspec.MsgspecError:
        return None


def make_first_name(request: CreateServerRequest) -> str:
    return f"{PREFIX}{request.lab[:15]}-{request.token}"


def make_pinned_name(lab: str, host_key: str, next_host_key: str) -> str:
    """Return the name that records the keys which are trusted beside the record's."""
    if not next_host_key:
        return f"{PREFIX}{lab[:7]}.k.{encode_host_key(host_key)}"
    return f"{PREFIX}{lab[:7]}.n.{encode_host_key(next_host_key)}"


def get_age_key(pod: Pod) -> tuple[int, str]:
    """Return what sorts the pods of one attempt, the oldest first."""
    record = read_record(pod)
    return (record.created_ms if record else 0, pod.id)


def is_live(pod: Pod) -> bool:
    return pod.status != "TERMINATED"


def parse_server(pod: Pod, record: PodRecord, account: str) -> Server:
    """Turn a pod into a Server, without its key file, which the caller adds."""
    state = _STATES.get(pod.status, "starting")
    address = pod.ssh.direct
    return Server(
        id=pod.id,
        provider=PROVIDER,
        lab=record.lab,
        lab_id=record.lab_id,
        alias=record.lab or pod.id,
        endpoint=_parse_endpoint(pod, record),
        offer=_parse_offer(pod, record),
        created_at=_parse_time(pod.created_at),
        state="starting" if state == "running" and address is None else state,
        account=account,
    )


def _parse_endpoint(pod: Pod, record: PodRecord) -> Endpoint:
    host_key, next_host_key = decode_host_key(record.host_key), ""
    if match := _PINNED_NAME.fullmatch(pod.name):
        key = decode_host_key(match[2])
        host_key, next_host_key = (host_key, key) if match[1] == "n" else (key, "")
    address = pod.ssh.direct
    return Endpoint(
        host=address.host if address else "",
        # A stopped pod has no port, and gets another one at its next start.
        port=address.port if address else 0,
        user=USER,
        host_key=host_key,
        next_host_key=next_host_key,
    )


def _parse_offer(pod: Pod, record: PodRecord) -> Offer:
    return Offer(
        provider=PROVIDER,
        type=pod.gpu.id,
        region=pod.cloud.lower(),
        zone=pod.data_center_id or "",
        arch=record.arch,
        gpu_name=record.gpu_name,
        gpu_count=pod.gpu.count,
        gpu_memory_bytes=record.gpu_memory_bytes,
        # What RunPod bills, or the price that was confirmed while it bills nothing.
        price_usd_per_hour=pod.cost or record.price_usd_per_hour,
    )


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
