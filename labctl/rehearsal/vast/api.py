"""The operations of a rehearsed Vast.ai, by the operation ids of its description."""

from __future__ import annotations

import functools
import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from werkzeug.datastructures import Headers

from labctl.model import Value
from labctl.rehearsal.core.operations import (
    AnyOperation,
    ApiCall,
    ApiError,
    ErrorReplies,
    NoBody,
    Operation,
)
from labctl.rehearsal.core.replies import HttpReply
from labctl.rehearsal.core.validation import ApiRequest, OpenApiValidator, Validator
from labctl.rehearsal.vast import replies
from labctl.rehearsal.vast.instances import VastVmHandlers

if TYPE_CHECKING:
    from labctl.rehearsal.vast.simulation import VastRehearsal

KEY = "0" * 64
# Documented for every operation on a page of its own, and described for some alone.
GENERAL_STATUSES = (401, 402, 403, 429)
SERVER_ERROR = 500


class VastValidator:
    """Vast.ai's description, whose operations leave out most of the general errors."""

    def __init__(self, path: Path) -> None:
        self._described = OpenApiValidator.load(path)

    def check_request(self, request: ApiRequest) -> tuple[str, ...]:
        return self._described.check_request(request)

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]:
        if status in GENERAL_STATUSES or status >= SERVER_ERROR:
            return ()
        return self._described.check_reply(request, status, body)


@functools.cache
def _load_validator(path: Path) -> VastValidator:
    """Load the description; cached, because its YAML takes a second and more."""
    return VastValidator(path)


class VastApi:
    """Handlers of the operations that labctl calls."""

    errors = ErrorReplies(
        unauthorized=ApiError(401, "auth_error", "Invalid user key"),
        expired=ApiError(401, "auth_error", "Invalid user key"),
        denied=ApiError(403, "not_authorized", "The key lacks the permission"),
        throttled=ApiError(429, "", "API requests too frequent endpoint threshold=2.0"),
        not_found=ApiError(404, "invalid_args", "no such path"),
        invalid=ApiError(400, "invalid_request"),
        failed_code="internal_error",
    )

    def __init__(self, cloud: VastRehearsal) -> None:
        path = cloud.scenario.description
        self.validator: Validator | None = _load_validator(Path(path)) if path else None
        self.instances = VastVmHandlers(cloud)
        self._cloud = cloud
        self._numbers = itertools.count(1)

    def list_operations(self) -> tuple[AnyOperation, ...]:
        keys = "/api/v0/ssh"
        return (
            Operation("showUser", "GET", "/api/v0/users/current", self._show_user, NoBody),
            Operation("getSshKeysUser", "GET", keys, self._list_keys, NoBody),
            Operation("createSshKey", "POST", keys, self._add_key, replies.AddVastKeyBody),
            Operation("deleteSshKey", "DELETE", f"{keys}/<int:id>", self._delete_key, NoBody),
            *self.instances.list_operations(),
        )

    def check_access(self, name: str, headers: Headers) -> None:
        if headers.get("Authorization") == f"Bearer {self._cloud.key}":
            return
        if name == "searchOffers":
            raise ApiError(404, "invalid_key", "Invalid user key")
        raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        if not error.code:
            return msgspec.json.encode(replies.VastFaultReply(detail=error.message or UNSET))
        return msgspec.json.encode(
            replies.VastFaultReply(success=False, error=error.code, msg=error.message or error.code)
        )

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def _show_user(self, call: ApiCall[NoBody]) -> replies.VastUserReply:
        scenario = self._cloud.scenario
        return replies.VastUserReply(id=scenario.account, balance=scenario.balance_usd)

    def _list_keys(self, call: ApiCall[NoBody]) -> HttpReply:
        body = msgspec.json.encode(list(self.instances.keys.values()))
        return HttpReply(status=200, body=body, headers=(("Content-Type", "application/json"),))

    def _add_key(self, call: ApiCall[replies.AddVastKeyBody]) -> replies.AddedKeyReply:
        number, user = next(self._numbers), self._cloud.scenario.account
        at = datetime.now(UTC).isoformat()
        line = call.body.ssh_key
        key = replies.VastKeyReply(id=number, user_id=user, key=line, created_at=at)
        self.instances.keys[number] = key
        added = replies.NewKeyReply(id=number, user_id=user, public_key=line, created_at=at)
        return replies.AddedKeyReply(key=added)

    def _delete_key(self, call: ApiCall[NoBody]) -> replies.DoneReply:
        if self.instances.keys.pop(int(call.path["id"]), None) is None:
            raise ApiError(400, "no_ssh_key", "No ssh key provided")
        return replies.DoneReply()
