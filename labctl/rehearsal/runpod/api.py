"""The operations of a rehearsed RunPod, by the operation ids of its description."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
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
from labctl.rehearsal.core.validation import ApiRequest, OpenApiValidator, Validator
from labctl.rehearsal.runpod import replies
from labctl.rehearsal.runpod.catalog import list_gpus, make_data_center, with_stock
from labctl.rehearsal.runpod.pods import PodHandlers
from labctl.rehearsal.runpod.volumes import VolumeHandlers

if TYPE_CHECKING:
    from labctl.rehearsal.runpod.simulation import RunPodRehearsal

KEY = "rpa_rehearsal00000000000000000000"
GRAPH = "/graphql"
SPEND_LIMIT_USD = 80.0


class VersionTwoValidator:
    """RunPod's description of version 2, which does not have the older GraphQL."""

    def __init__(self, path: Path) -> None:
        self._described = OpenApiValidator.load(path)

    def check_request(self, request: ApiRequest) -> tuple[str, ...]:
        return () if request.path == GRAPH else self._described.check_request(request)

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]:
        return () if request.path == GRAPH else self._described.check_reply(request, status, body)


class RunPodApi:
    """Handlers of the operations that labctl calls, and of some beside them."""

    errors = ErrorReplies(
        unauthorized=ApiError(401, "Unauthorized", "invalid bearer token"),
        expired=ApiError(401, "Unauthorized", "expired bearer token"),
        denied=ApiError(403, "Forbidden", "access denied"),
        throttled=ApiError(429, "Too Many Requests", "slow down", (("Retry-After", "1"),)),
        not_found=ApiError(404, "Not Found", "no such path"),
        invalid=ApiError(422, "Unprocessable Entity", "Request validation failed."),
        failed_code="Internal Server Error",
    )

    def __init__(self, cloud: RunPodRehearsal) -> None:
        path = cloud.scenario.description
        self.validator: Validator | None = VersionTwoValidator(Path(path)) if path else None
        self.pods = PodHandlers(cloud)
        self.volumes = VolumeHandlers(cloud)
        self._cloud = cloud
        self._keys: tuple[str, ...] = ()

    def list_operations(self) -> tuple[AnyOperation, ...]:
        keys, catalog = "/v2/account/ssh-keys", "/v2/catalog"
        return (
            Operation("getSshKeys", "GET", keys, self._get_keys, NoBody),
            Operation("updateSshKeys", "PUT", keys, self._put_keys, replies.KeysBody),
            Operation("listGpuTypes", "GET", f"{catalog}/gpus", self._list_gpus, NoBody),
            Operation(
                "listDataCenters", "GET", f"{catalog}/datacenters", self._list_centers, NoBody
            ),
            Operation("graphql", "POST", GRAPH, self._query, replies.QueryBody),
            *self.pods.list_operations(),
            *self.volumes.list_operations(),
        )

    def check_access(self, name: str, headers: Headers) -> None:
        if headers.get("Authorization") != f"Bearer {self._cloud.key}":
            raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        detail = error.message or error.code
        return msgspec.json.encode(
            replies.ProblemReply(title=error.code, status=error.status, detail=detail)
        )

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def _get_keys(self, call: ApiCall[NoBody]) -> replies.KeysBody:
        return replies.KeysBody(keys=self._keys)

    def _put_keys(self, call: ApiCall[replies.KeysBody]) -> replies.KeysBody:
        self._keys = call.body.keys
        return call.body

    def _list_gpus(self, call: ApiCall[NoBody]) -> replies.GpuTypesReply:
        scenario, query = self._cloud.scenario, call.query
        if ("product" in query) != (query.get("include") == "AVAILABILITY"):
            raise ApiError(400, "Bad Request", "include=AVAILABILITY and product belong together")
        if "product" not in query:
            return replies.GpuTypesReply(gpus=tuple(list_gpus(scenario)))
        count, is_secure = int(query.get("count", "1")), query.get("cloud") != "COMMUNITY"
        gpus = []
        for gpu in list_gpus(scenario):
            most = gpu.max_count.secure if is_secure else gpu.max_count.community
            centers = self.pods.list_centers_with_stock(gpu.id) if count <= most else []
            gpus.append(with_stock(gpu, centers))
        return replies.GpuTypesReply(gpus=tuple(gpus))

    def _list_centers(self, call: ApiCall[NoBody]) -> replies.DataCentersReply:
        regions = self._cloud.scenario.regions
        return replies.DataCentersReply(data_centers=tuple(map(make_data_center, regions)))

    def _query(self, call: ApiCall[replies.QueryBody]) -> replies.GraphReplyBody:
        """Answer what labctl asks of GraphQL, whatever the query says: whose key it is."""
        scenario = self._cloud.scenario
        if not scenario.account:
            fault = replies.GraphFault(message="unauthorized")
            return replies.GraphReplyBody(errors=(fault,))
        myself = replies.MyselfReply(
            id=scenario.account,
            client_balance=scenario.balance_usd,
            current_spend_per_hr=self.pods.sum_costs_usd(),
            spend_limit=SPEND_LIMIT_USD,
        )
        return replies.GraphReplyBody(data=replies.GraphDataReply(myself=myself))
