"""The calls of RunPod's API that labctl makes."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import CredentialsError, DeniedError
from labctl.providers.http import AbsentError, ApiClient, remember_account
from labctl.providers.http.client import Nothing
from labctl.providers.runpod.api import (
    CREATION,
    RUNPOD,
    CloudTier,
    CreatePod,
    GpuType,
    GpuTypes,
    GraphQuery,
    GraphReply,
    Myself,
    NetworkVolume,
    NetworkVolumes,
    Pod,
    PodAction,
    PodActionRequest,
    Pods,
    RenamePod,
    SshKeys,
)

PODS = "/v2/pods"
VOLUMES = "/v2/network-volumes"
MYSELF = "query { myself { id clientBalance currentSpendPerHr spendLimit } }"
# The id of a pod that does not exist: to end it changes nothing, and needs the permission.
NO_POD = "labctl-permission"


class RunPodCloud:
    """One account's pods and volumes. `cache_dir` remembers which account it is."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._client = ApiClient(RUNPOD)
        self._creation = ApiClient(CREATION)
        self._cache_dir = cache_dir

    def get_account_id(self) -> str:
        """Return the id of the user or team whose key it is; see `remember_account`."""
        return remember_account(RUNPOD, self._cache_dir, lambda: self.read_myself().id)

    def read_myself(self) -> Myself:
        """Return whose key it is, and the balance; Myself() if the key may not read it."""
        body = GraphQuery(query=MYSELF)
        try:
            reply = self._client.post("read the account", "/graphql", GraphReply, body)
        except (CredentialsError, DeniedError):
            # GraphQL is a permission of its own. Whether the key is valid, version 2 says.
            return Myself()
        return (reply.data and reply.data.myself) or Myself()

    def count_ssh_keys(self) -> int:
        """Count the account's SSH keys: a call that every valid key may make."""
        path = "/v2/account/ssh-keys"
        return len(self._client.get("read the account's SSH keys", path, SshKeys).keys)

    def list_gpu_types(self, tier: CloudTier, count: int) -> tuple[GpuType, ...]:
        """List the GPU models with their stock of pods with `count` GPUs."""
        query = {
            "include": "AVAILABILITY",
            "product": "POD",
            "count": str(count),
            "cloud": tier,
        }
        return self._client.get("list the GPUs", "/v2/catalog/gpus", GpuTypes, query).gpus

    def list_pods(self) -> tuple[Pod, ...]:
        """List every pod of the account, of labctl or not."""
        return self._client.get("list the pods", PODS, Pods).pods

    def find_pod(self, pod_id: str) -> Pod | None:
        try:
            return self._client.get("show the pod", f"{PODS}/{pod_id}", Pod)
        except AbsentError:
            return None

    def create_pod(self, body: CreatePod) -> Pod:
        """Create a pod. CapacityError also for a rule that the request breaks: RunPod says both
        with the same status.
        """
        return self._creation.post("create a pod", PODS, Pod, body)

    def rename_pod(self, pod_id: str, name: str) -> None:
        body = RenamePod(name=name)
        self._client.call("PATCH", "rename the pod", f"{PODS}/{pod_id}", Nothing, body=body)

    def act(self, pod_id: str, action: PodAction) -> None:
        """Start or stop a pod; BusyError if its status does not allow that now."""
        body = PodActionRequest(action=action)
        self._client.post(f"{action} the pod", f"{PODS}/{pod_id}/action", Nothing, body)

    def delete_pod(self, pod_id: str) -> None:
        """Terminate a pod; an absent one counts as success."""
        try:
            self._client.delete("terminate the pod", f"{PODS}/{pod_id}")
        except AbsentError:
            return

    def check_write_permission(self) -> None:
        """DeniedError if the key may not change pods. Changes nothing."""
        self.delete_pod(NO_POD)

    def list_volumes(self) -> tuple[NetworkVolume, ...]:
        listed = self._client.get("list the network volumes", VOLUMES, NetworkVolumes)
        return listed.network_volumes

    def delete_volume(self, volume_id: str) -> None:
        """Delete a network volume; an absent one counts as success."""
        try:
            self._client.delete("delete the network volume", f"{VOLUMES}/{volume_id}")
        except AbsentError:
            return
