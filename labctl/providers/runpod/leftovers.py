"""What bills at RunPod besides compute: the disks of pods, and network volumes named for labctl."""

from __future__ import annotations

from labctl.errors import BusyError
from labctl.model import Resource
from labctl.providers.runpod.api import NetworkVolume, Pod
from labctl.providers.runpod.cloud import RunPodCloud
from labctl.providers.runpod.tags import PREFIX, PROVIDER, PodRecord, is_live, read_record

DISK, VOLUME = "disk", "network volume"
DISK_OF = "disk-of-"
# docs.runpod.io, Storage options: USD per GB and month. The API shows no prices of disks.
# While a pod runs, its volume bills half of this, and its container's disk as much.
STOPPED_USD = 0.20
VOLUME_USD, LARGE_VOLUME_USD, LARGE_GB = 0.07, 0.05, 1000


def list_leftovers(cloud: RunPodCloud) -> list[Resource]:
    """List the disks of labctl's pods, as parts of them, and the network volumes."""
    records = [(pod, read_record(pod)) for pod in cloud.list_pods()]
    disks = [_make_disk(pod, record) for pod, record in records if record and is_live(pod)]
    volumes = [volume for volume in cloud.list_volumes() if volume.name.startswith(PREFIX)]
    account = cloud.get_account_id() if volumes else ""
    return [*disks, *(_make_volume(volume, account) for volume in volumes)]


def _make_disk(pod: Pod, record: PodRecord) -> Resource:
    volume_gb = pod.mounts.persistent.size if pod.mounts.persistent else 0
    return Resource(
        provider=PROVIDER,
        kind=DISK,
        id=f"{DISK_OF}{pod.id}",
        price_usd_per_month=round(volume_gb * STOPPED_USD, 2),
        note=f"{volume_gb} GB, at the documented rate while the pod is stopped",
        lab=record.lab,
        lab_id=record.lab_id,
        region=pod.data_center_id or "",
        server_id=pod.id,
    )


def _make_volume(volume: NetworkVolume, account: str) -> Resource:
    rate = VOLUME_USD if volume.size < LARGE_GB else LARGE_VOLUME_USD
    return Resource(
        provider=PROVIDER,
        kind=VOLUME,
        id=volume.id,
        price_usd_per_month=round(volume.size * rate, 2),
        note=f"{volume.name}, {volume.size} GB, at the documented rate",
        region=volume.data_center,
        account=account,
    )


def remove_leftover(cloud: RunPodCloud, resource: Resource) -> None:
    """Remove a network volume; a pod's disk ends with the pod alone."""
    if resource.kind == VOLUME:
        cloud.delete_volume(resource.id)
        return
    pod = cloud.find_pod(resource.id.removeprefix(DISK_OF))
    if pod is not None and is_live(pod):
        raise BusyError(
            f"the pod {pod.id} still has this disk",
            why="the disk ends with its pod",
            hint=lambda subject: subject.down,
        )
