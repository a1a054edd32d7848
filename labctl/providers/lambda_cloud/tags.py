"""How an instance records whose it is: its tags, which are written at launch and never change, and
its name, which is the only part that can be changed later.

| where | form |
|---|---|
| tags | `labctl` = 1, the constants below, and those of the request |
| name at launch | `labctl-LAB` |
| name with the key that replaces the first | `labctl-LAB.next.KEY`, then `labctl-LAB.key.KEY` |
| SSH keys | `labctl-LABID-LAB` |
| file systems | names that begin with `labctl-` |

A KEY is the 32 bytes of an ed25519 public key in URL-safe base64. It leaves 8 letters of the lab's
name in the 64 that a name may have.
"""

from __future__ import annotations

import re
import time

from msgspec.structs import replace

from labctl.model import GIB, CreateServerRequest, Endpoint, Offer, Server, ServerState
from labctl.providers.ed25519_code import LETTERS, decode_host_key, encode_host_key
from labctl.providers.lambda_cloud.api import LambdaInstance, LambdaTag, LambdaType

PROVIDER = "lambda"
PREFIX = "labctl-"
OURS = "labctl"
LAB, LAB_ID, OWNER, TOKEN = "labctl-lab", "labctl-lab-id", "labctl-owner", "labctl-token"
# CREATED_MS is in Unix milliseconds: Lambda shows no time of creation.
CREATED_MS, HOST_KEY, TTL_S = "labctl-created", "labctl-host-key", "labctl-ttl-s"
SSH_PORT = 22
LONGEST_NAME = 64
_KEY_NAME = re.compile(r"labctl-([0-9a-f]{12})-([a-z0-9][a-z0-9-]{0,38})")
_PINNED_NAME = re.compile(rf"labctl-.{{1,8}}\.(next|key)\.({LETTERS})")
_GPU = re.compile(r"(?:Tesla |Quadro )?(.+?) ?\(([0-9]+) GB.*\)")
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9_.-]")
_STATES: dict[str, ServerState] = {
    "booting": "starting",
    "active": "running",
    # The machine runs, and may answer; it costs money either way.
    "unhealthy": "running",
    "terminating": "ending",
    "terminated": "terminated",
    "preempted": "terminated",
}


def parse_offer(kind: LambdaType, region: str, priced_at: float = 0.0) -> Offer:
    """Turn an instance type into an Offer; `region` is "" if none has capacity."""
    gpu = _GPU.fullmatch(kind.gpu_description) if kind.specs.gpus else None
    return Offer(
        provider=PROVIDER,
        type=kind.name,
        region=region,
        zone=region,
        cpus=kind.specs.vcpus,
        memory_bytes=kind.specs.memory_gib * GIB,
        # The Grace CPU of a GH200 is Arm.
        arch="arm64" if "gh200" in kind.name else "x86_64",
        gpu_name=(gpu[1] if gpu else kind.gpu_description) if kind.specs.gpus else "",
        gpu_count=kind.specs.gpus,
        gpu_memory_bytes=int(gpu[2]) * GIB if gpu else 0,
        price_usd_per_hour=kind.price_cents_per_hour / 100,
        priced_at=priced_at,
    )


def make_tags(request: CreateServerRequest, owner: str) -> tuple[LambdaTag, ...]:
    """Return the tags of a new instance."""
    ttl_s = request.need.ttl_s
    tags = {
        **{_clean(key): _clean(value) for key, value in request.tags.items()},
        OURS: "1",
        LAB: request.lab,
        LAB_ID: request.lab_id,
        OWNER: _clean(owner),
        TOKEN: request.token,
        CREATED_MS: str(round(time.time() * 1000)),
        **({HOST_KEY: encode_host_key(request.host_key)} if request.host_key else {}),
        **({} if ttl_s is None else {TTL_S: str(ttl_s)}),
    }
    return tuple(LambdaTag(key=key, value=value) for key, value in tags.items())


def make_name(lab: str, host_key: str = "", next_host_key: str = "") -> str:
    """Return an instance's name; with keys, those that are trusted beside the tag's."""
    if not host_key:
        return f"{PREFIX}{lab}"[:LONGEST_NAME]
    kind = "next" if next_host_key else "key"
    return f"{PREFIX}{lab[:8]}.{kind}.{encode_host_key(next_host_key or host_key)}"


def make_key_name(lab: str, lab_id: str) -> str:
    """Return the name of a lab's SSH key."""
    return f"{PREFIX}{lab_id}-{lab}"


def split_key_name(name: str) -> tuple[str, str] | None:
    """Split a key's name into (lab, lab id); None if labctl did not make the key."""
    match = _KEY_NAME.fullmatch(name)
    return (match[2], match[1]) if match else None


def get_tags(instance: LambdaInstance) -> dict[str, str]:
    return {tag.key: tag.value for tag in instance.tags}


def is_ours(instance: LambdaInstance) -> bool:
    return get_tags(instance).get(OURS) == "1"


def get_age_key(instance: LambdaInstance) -> tuple[int, str]:
    """Return what sorts the instances of one attempt, the oldest first."""
    text = get_tags(instance).get(CREATED_MS, "")
    return (int(text) if text.isdigit() else 0, instance.id)


def parse_server(instance: LambdaInstance, user: str, account: str) -> Server:
    """Turn an instance into a Server, without its key file, which the caller adds."""
    tags = get_tags(instance)
    lab = tags.get(LAB, "")
    state = _STATES.get(instance.status, "starting")
    endpoint = Endpoint(
        host=instance.ip, port=SSH_PORT, user=user, host_key=decode_host_key(tags.get(HOST_KEY, ""))
    )
    if match := _PINNED_NAME.fullmatch(instance.name):
        key = decode_host_key(match[2])
        is_next = match[1] == "next"
        endpoint = (
            replace(endpoint, next_host_key=key) if is_next else replace(endpoint, host_key=key)
        )
    return Server(
        id=instance.id,
        provider=PROVIDER,
        lab=lab,
        lab_id=tags.get(LAB_ID, ""),
        alias=lab or instance.id,
        endpoint=endpoint,
        offer=parse_offer(instance.instance_type, instance.region.name),
        created_at=get_age_key(instance)[0] / 1000,
        state="starting" if state == "running" and not instance.ip else state,
        account=account,
    )


def _clean(text: str) -> str:
    """Replace what a tag might not allow: Lambda does not document its alphabet."""
    return _NOT_IN_TAGS.sub("-", text)[:128]
