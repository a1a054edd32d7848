"""Create a pod exactly once, although a creation at RunPod is not idempotent.

An attempt's token is in the pod's environment, and in its first name.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from labctl.errors import CapacityError, DeniedError
from labctl.model import CreateServerRequest, Offer
from labctl.providers.http.creation import AttemptMachines
from labctl.providers.runpod.api import (
    RUNPOD,
    WORKSPACE,
    CloudTier,
    CreatePod,
    GpuChoice,
    Mounts,
    NetworkMount,
    PersistentMount,
    Pod,
)
from labctl.providers.runpod.cloud import RunPodCloud
from labctl.providers.runpod.first_boot import COMMAND
from labctl.providers.runpod.settings import RunPodSettings
from labctl.providers.runpod.tags import (
    FIRST_BOOT,
    RECORD,
    get_age_key,
    is_live,
    make_first_name,
    make_record,
    read_record,
)

SSH_PORT = "22/tcp"


def create_once(
    cloud: RunPodCloud,
    settings: RunPodSettings,
    owner: str,
    offer: Offer,
    request: CreateServerRequest,
) -> Pod:
    """Return the pod of this attempt, after creating it unless it exists."""

    def prepare() -> Callable[[], Pod]:
        body = build_body(settings, owner, offer, request)
        return lambda: _create(cloud, body, offer)

    return PodAttempts(cloud).create_once(request.token, settings.settle_s, prepare)


class PodAttempts(AttemptMachines[Pod]):
    cloud = RUNPOD
    noun = "pod"

    def __init__(self, pods: RunPodCloud) -> None:
        self._pods = pods

    def list_attempts(self, token: str) -> list[Pod]:
        pods = [(pod, read_record(pod)) for pod in self._pods.list_pods()]
        return [pod for pod, record in pods if record and record.token == token and is_live(pod)]

    def get_id(self, machine: Pod) -> str:
        return machine.id

    def get_age_key(self, machine: Pod) -> tuple[int, str]:
        return get_age_key(machine)

    def end(self, machine: Pod) -> None:
        self._pods.delete_pod(machine.id)


def build_body(
    settings: RunPodSettings, owner: str, offer: Offer, request: CreateServerRequest
) -> CreatePod:
    script = base64.b64encode(request.first_boot.encode()).decode()
    tier: CloudTier = "COMMUNITY" if offer.region == "community" else "SECURE"
    return CreatePod(
        name=make_first_name(request),
        image=settings.image,
        gpu=GpuChoice(id=offer.type, count=offer.gpu_count),
        args=COMMAND,
        cloud=tier,
        disk=settings.disk_gb,
        env={RECORD: make_record(offer, request, owner), FIRST_BOOT: script},
        mounts=_choose_mounts(settings),
        ports=(SSH_PORT,),
        data_center_ids=(offer.zone,) if offer.zone else (),
    )


def _choose_mounts(settings: RunPodSettings) -> Mounts:
    if volume := settings.network_volume:
        return Mounts(network=(NetworkMount(volume_id=volume, path=WORKSPACE),))
    return Mounts(persistent=PersistentMount(size=settings.volume_gb, path=WORKSPACE))


def _create(cloud: RunPodCloud, body: CreatePod, offer: Offer) -> Pod:
    where = f"{offer.type} in {offer.zone or offer.region}"
    try:
        return cloud.create_pod(body)
    except CapacityError as error:
        raise CapacityError(
            f"RunPod did not place {where}: {error.why}", why=error.why, hint=error.hint
        ) from error
    except DeniedError as error:
        # The account may not use this pool of machines, or the key may not create pods at all.
        cloud.check_write_permission()
        what = f"this RunPod account has no access to {where}"
        raise CapacityError(what, why=error.why, hint=error.hint) from error
