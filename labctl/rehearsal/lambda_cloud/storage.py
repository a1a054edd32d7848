"""The SSH keys and the file systems of a rehearsed Lambda."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from labctl.rehearsal.core.fleet import ALIVE
from labctl.rehearsal.core.operations import AnyOperation, ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.lambda_cloud import replies

if TYPE_CHECKING:
    from labctl.rehearsal.lambda_cloud.simulation import LambdaRehearsal


class Storage:
    """Keys and file systems by id. `key_names` are those that a launch may name."""

    def __init__(self, cloud: LambdaRehearsal) -> None:
        self._cloud = cloud
        self.keys: dict[str, replies.KeyReply] = {}
        self.file_systems: dict[str, replies.FileSystemReply] = {}

    @property
    def key_names(self) -> set[str]:
        return {key.name for key in self.keys.values()}

    def list_operations(self, prefix: str) -> tuple[AnyOperation, ...]:
        keys, systems = f"{prefix}/ssh-keys", f"{prefix}/filesystems"
        return (
            Operation("listSSHKeys", "GET", keys, self._list_keys, NoBody),
            Operation("addSSHKey", "POST", keys, self._add_key, replies.AddKeyBody),
            Operation("deleteSSHKey", "DELETE", f"{keys}/<id>", self._delete_key, NoBody),
            Operation(
                "listFilesystems", "GET", f"{prefix}/file-systems", self._list_systems, NoBody
            ),
            Operation(
                "createFilesystem", "POST", systems, self._create, replies.CreateFileSystemBody
            ),
            Operation("filesystemDelete", "DELETE", f"{systems}/<id>", self._delete, NoBody),
        )

    def require_file_systems(self, names: Iterable[str], region: str) -> None:
        """ApiError unless every file system exists in the region."""
        regions = {one.name: one.region.name for one in self.file_systems.values()}
        for name in names:
            if name not in regions:
                raise ApiError(404, "global/object-does-not-exist", name)
            if regions[name] != region:
                raise ApiError(400, "instance-operations/launch/file-system-in-wrong-region", name)

    def _list_keys(self, call: ApiCall[NoBody]) -> replies.KeysReply:
        return replies.KeysReply(data=tuple(self.keys.values()))

    def _add_key(self, call: ApiCall[replies.AddKeyBody]) -> replies.KeyDataReply:
        with self._cloud.fleet.lock:
            if call.body.name in self.key_names:
                raise ApiError(400, "global/invalid-parameters", "A key has this name already.")
            key = replies.KeyReply(
                id=uuid.uuid4().hex, name=call.body.name, public_key=call.body.public_key
            )
            self.keys[key.id] = key
        return replies.KeyDataReply(data=key)

    def _delete_key(self, call: ApiCall[NoBody]) -> replies.NothingReply:
        if self.keys.pop(call.path["id"], None) is None:
            raise ApiError(400, "global/invalid-parameters", "There is no such key.")
        return replies.NothingReply()

    def _list_systems(self, call: ApiCall[NoBody]) -> replies.FileSystemsReply:
        return replies.FileSystemsReply(data=tuple(self.file_systems.values()))

    def _create(self, call: ApiCall[replies.CreateFileSystemBody]) -> replies.FileSystemDataReply:
        body = call.body
        with self._cloud.fleet.lock:
            if any(one.name == body.name for one in self.file_systems.values()):
                raise ApiError(400, "global/duplicate", "A file system has this name already.")
            system = replies.FileSystemReply(
                id=uuid.uuid4().hex,
                name=body.name,
                mount_point=f"/lambda/nfs/{body.name}",
                created=datetime.now(UTC).isoformat(),
                created_by=replies.UserReply(id="u-1", email="student@example.com"),
                is_in_use=False,
                region=replies.RegionReply(name=body.region, description=body.region),
                bytes_used=0,
            )
            self.file_systems[system.id] = system
        return replies.FileSystemDataReply(data=system)

    def _delete(self, call: ApiCall[NoBody]) -> replies.DeletedFileSystemsReply:
        system = self.file_systems.get(call.path["id"])
        if system is None:
            raise ApiError(404, "global/object-does-not-exist", call.path["id"])
        with self._cloud.fleet.lock:
            for record in self._cloud.fleet.list_all():
                if record.state in ALIVE and system.name in record.file_system_names:
                    raise ApiError(400, "filesystems/filesystem-in-use", record.id)
            del self.file_systems[system.id]
        deleted = replies.DeletedFileSystems(deleted_ids=(system.id,))
        return replies.DeletedFileSystemsReply(data=deleted)
