"""The calls of Lambda's API that labctl makes."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import DeniedError, ProviderError
from labctl.providers.http import AbsentError, ApiClient, remember_account
from labctl.providers.lambda_cloud.api import (
    LAMBDA,
    PREFIX,
    AddKeyRequest,
    AuditEvents,
    Data,
    InstanceIds,
    LambdaFileSystem,
    LambdaInstance,
    LambdaKey,
    LambdaTypeItem,
    LaunchedInstances,
    LaunchRequest,
    RenameRequest,
)
from labctl.providers.lambda_cloud.tags import is_ours


class LambdaCloud:
    """One account's instances, keys and file systems. `cache_dir` remembers which account it is."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._client = ApiClient(LAMBDA)
        self._cache_dir = cache_dir

    def get_account_id(self) -> str:
        """Return the owner that the audit log names; see `remember_account`."""
        return remember_account(LAMBDA, self._cache_dir, self._find_owner)

    def _find_owner(self) -> str:
        try:
            path = f"{PREFIX}/audit-events"
            log = self._client.get("read the audit log", path, Data[AuditEvents]).data
        except (DeniedError, AbsentError):
            return ""
        owners = [event.resource_owner_lrn for event in log.events if event.resource_owner_lrn]
        return owners[0] if owners else ""

    def list_types(self) -> list[LambdaTypeItem]:
        path = f"{PREFIX}/instance-types"
        kind = Data[dict[str, LambdaTypeItem]]
        return list(self._client.get("list the instance types", path, kind).data.values())

    def list_instances(self) -> list[LambdaInstance]:
        """List labctl's instances, in every region."""
        path = f"{PREFIX}/instances"
        listed = self._client.get("list the instances", path, Data[tuple[LambdaInstance, ...]])
        return [instance for instance in listed.data if is_ours(instance)]

    def find_instance(self, instance_id: str) -> LambdaInstance | None:
        path = f"{PREFIX}/instances/{instance_id}"
        try:
            return self._client.get("show the instance", path, Data[LambdaInstance]).data
        except AbsentError:
            return None

    def launch(self, request: LaunchRequest) -> str:
        """Launch an instance and return its id."""
        path = f"{PREFIX}/instance-operations/launch"
        kind = Data[LaunchedInstances]
        return self._client.post("launch an instance", path, kind, request).data.instance_ids[0]

    def terminate(self, instance_id: str) -> None:
        """Terminate an instance; an absent one counts as success."""
        path = f"{PREFIX}/instance-operations/terminate"
        body = InstanceIds(instance_ids=(instance_id,))
        try:
            self._client.post("terminate the instance", path, Data[object], body)
        except AbsentError:
            return

    def rename(self, instance_id: str, name: str) -> None:
        path = f"{PREFIX}/instances/{instance_id}"
        self._client.post("rename the instance", path, Data[object], RenameRequest(name=name))

    def list_keys(self) -> list[LambdaKey]:
        path = f"{PREFIX}/ssh-keys"
        return list(self._client.get("list the keys", path, Data[tuple[LambdaKey, ...]]).data)

    def add_key(self, name: str, public_key: str) -> None:
        body = AddKeyRequest(name=name, public_key=public_key)
        self._client.post("add a key", f"{PREFIX}/ssh-keys", Data[object], body)

    def delete_key(self, key_id: str) -> None:
        """Delete a key; an absent one counts as success. Lambda documents no 404 for it."""
        try:
            self._client.delete("delete the key", f"{PREFIX}/ssh-keys/{key_id}")
        except ProviderError:
            if key_id in {key.id for key in self.list_keys()}:
                raise

    def list_file_systems(self) -> list[LambdaFileSystem]:
        path = f"{PREFIX}/file-systems"
        kind = Data[tuple[LambdaFileSystem, ...]]
        return list(self._client.get("list the file systems", path, kind).data)

    def delete_file_system(self, file_system_id: str) -> None:
        """Delete a file system; an absent one counts as success, BusyError while it is mounted."""
        try:
            path = f"{PREFIX}/filesystems/{file_system_id}"
            self._client.delete("delete the file system", path)
        except AbsentError:
            return
