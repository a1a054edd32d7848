"""The network volumes of a rehearsed RunPod."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from labctl.rehearsal.core.operations import AnyOperation, ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.runpod import replies

if TYPE_CHECKING:
    from labctl.rehearsal.runpod.simulation import RunPodRehearsal

PATH = "/v2/network-volumes"


class VolumeHandlers:
    """Volumes by id."""

    def __init__(self, cloud: RunPodRehearsal) -> None:
        self._cloud = cloud
        self.volumes: dict[str, replies.VolumeReply] = {}

    def list_operations(self) -> tuple[AnyOperation, ...]:
        body = replies.CreateVolumeBody
        return (
            Operation("listNetworkVolumes", "GET", PATH, self._list, NoBody),
            Operation("createNetworkVolume", "POST", PATH, self._create, body, status=201),
            Operation(
                "deleteNetworkVolume", "DELETE", f"{PATH}/<id>", self._delete, NoBody, status=204
            ),
        )

    def _list(self, call: ApiCall[NoBody]) -> replies.VolumesReply:
        return replies.VolumesReply(network_volumes=tuple(self.volumes.values()))

    def _create(self, call: ApiCall[replies.CreateVolumeBody]) -> replies.VolumeReply:
        body = call.body
        if body.data_center not in self._cloud.scenario.regions:
            raise ApiError(400, "Bad Request", "no such data center")
        volume = replies.VolumeReply(
            id=secrets.token_hex(5),
            name=body.name,
            size=body.size,
            data_center=body.data_center,
            type=body.type,
        )
        self.volumes[volume.id] = volume
        return volume

    def _delete(self, call: ApiCall[NoBody]) -> None:
        if self.volumes.pop(call.path["id"], None) is None:
            raise ApiError(404, "Not Found", "network volume not found")
