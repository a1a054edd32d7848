"""The operations of a rehearsed Lambda, by the operation ids of its documentation."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from werkzeug.datastructures import Headers

from labctl.model import Value
from labctl.rehearsal.core.fleet import CloudInstance, InstanceState
from labctl.rehearsal.core.machines import build_seed
from labctl.rehearsal.core.operations import (
    AnyOperation,
    ApiCall,
    ApiError,
    ErrorReplies,
    NoBody,
    Operation,
)
from labctl.rehearsal.core.validation import OpenApiValidator
from labctl.rehearsal.lambda_cloud import catalog, replies
from labctl.rehearsal.lambda_cloud.storage import Storage

if TYPE_CHECKING:
    from labctl.rehearsal.lambda_cloud.simulation import LambdaRehearsal

KEY = "secret_rehearsal_0000000000000000"
DESCRIPTION = Path(__file__).with_name("description.yaml")
PREFIX = "/api/v1"
STATUSES: dict[InstanceState, str] = {
    "pending": "booting",
    "running": "active",
    "ending": "terminating",
    "ended": "terminated",
}
NO_OBJECT = ApiError(404, "global/object-does-not-exist", "Specified object does not exist.")


@dataclass
class LambdaRecord(CloudInstance):
    """An instance with what its API shows besides."""

    name: str = ""
    tags: tuple[replies.TagEntry, ...] = ()
    key_names: tuple[str, ...] = ()
    file_system_names: tuple[str, ...] = ()


def make_region(name: str) -> replies.RegionReply:
    return replies.RegionReply(name=name, description=f"{name}, rehearsed")


class LambdaApi:
    """Handlers of the operations that description.yaml has."""

    errors = ErrorReplies(
        unauthorized=ApiError(401, "global/invalid-api-key", "API key was invalid."),
        expired=ApiError(401, "global/invalid-api-key", "API key was expired."),
        denied=ApiError(403, "global/account-inactive", "Your account is inactive."),
        throttled=ApiError(429, "global/too-many-requests", "Slow down.", (("Retry-After", "1"),)),
        not_found=NO_OBJECT,
        invalid=ApiError(400, "global/invalid-parameters"),
        failed_code="global/internal-error",
    )

    def __init__(self, cloud: LambdaRehearsal) -> None:
        self.validator = OpenApiValidator.load(DESCRIPTION, PREFIX)
        self.storage = Storage(cloud)
        self._cloud = cloud

    def list_operations(self) -> tuple[AnyOperation, ...]:
        base = f"{PREFIX}/instance-operations"
        return (
            Operation(
                "listInstanceTypes", "GET", f"{PREFIX}/instance-types", self._list_types, NoBody
            ),
            Operation("listInstances", "GET", f"{PREFIX}/instances", self._list, NoBody),
            Operation("getInstance", "GET", f"{PREFIX}/instances/<id>", self._get, NoBody),
            Operation(
                "postInstance",
                "POST",
                f"{PREFIX}/instances/<id>",
                self._modify,
                replies.ModifyBody,
            ),
            Operation("launchInstance", "POST", f"{base}/launch", self._launch, replies.LaunchBody),
            Operation(
                "terminateInstance",
                "POST",
                f"{base}/terminate",
                self._terminate,
                replies.InstanceIdsBody,
            ),
            Operation(
                "restartInstance",
                "POST",
                f"{base}/restart",
                self._restart,
                replies.InstanceIdsBody,
            ),
            Operation("getAuditEvents", "GET", f"{PREFIX}/audit-events", self._audit, NoBody),
            *self.storage.list_operations(PREFIX),
        )

    def check_access(self, name: str, headers: Headers) -> None:
        if headers.get("Authorization") != f"Bearer {self._cloud.key}":
            raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        text = replies.FaultText(code=error.code, message=error.message or error.code)
        return msgspec.json.encode(replies.FaultBody(error=text))

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def _list_types(self, call: ApiCall[NoBody]) -> replies.TypesReply:
        scenario, fleet = self._cloud.scenario, self._cloud.fleet
        return replies.TypesReply(
            data={
                kind.name: replies.TypeItemReply(
                    instance_type=kind,
                    regions_with_capacity_available=tuple(
                        make_region(name)
                        for name in scenario.regions
                        if fleet.has_capacity(kind.name, name)
                    ),
                )
                for kind in catalog.list_types(scenario)
            }
        )

    def _list(self, call: ApiCall[NoBody]) -> replies.InstancesReply:
        shown = self._cloud.fleet.list_shown()
        return replies.InstancesReply(data=tuple(map(self._describe, shown)))

    def _get(self, call: ApiCall[NoBody]) -> replies.InstanceDataReply:
        return replies.InstanceDataReply(data=self._describe(self._require(call.path["id"])))

    def _modify(self, call: ApiCall[replies.ModifyBody]) -> replies.InstanceDataReply:
        instance = self._require(call.path["id"])
        instance.name = call.body.name or instance.name
        return replies.InstanceDataReply(data=self._describe(instance))

    def _launch(self, call: ApiCall[replies.LaunchBody]) -> replies.LaunchReply:
        body, scenario, fleet = call.body, self._cloud.scenario, self._cloud.fleet
        kind = catalog.find_type(scenario, body.instance_type_name)
        keys = set(body.ssh_key_names)
        if kind is None or body.region_name not in scenario.regions:
            raise NO_OBJECT
        if not keys <= self.storage.key_names:
            raise NO_OBJECT
        with fleet.lock:
            if fleet.count_alive() >= scenario.quota:
                raise ApiError(400, "global/quota-exceeded", "Quota exceeded.")
            if not fleet.has_capacity(kind.name, body.region_name):
                code = "instance-operations/launch/insufficient-capacity"
                raise ApiError(400, code, "Not enough capacity to fulfill launch request.")
            self.storage.require_file_systems(body.file_system_names, body.region_name)
            instance_id = uuid.uuid4().hex
            record = LambdaRecord(
                id=instance_id,
                type=kind.name,
                region=body.region_name,
                seed=build_seed(instance_id, body.user_data or "#cloud-config\n{}\n"),
                name=body.name,
                tags=body.tags,
                key_names=body.ssh_key_names,
                file_system_names=body.file_system_names,
            )
            fleet.add(record)
        return replies.LaunchReply(data=replies.LaunchedIds(instance_ids=(instance_id,)))

    def _terminate(self, call: ApiCall[replies.InstanceIdsBody]) -> replies.TerminateReply:
        records = [self._require(one) for one in call.body.instance_ids]
        for record in records:
            self._cloud.fleet.terminate(record)
        ended = replies.TerminatedInstances(
            terminated_instances=tuple(map(self._describe, records))
        )
        return replies.TerminateReply(data=ended)

    def _restart(self, call: ApiCall[replies.InstanceIdsBody]) -> replies.RestartReply:
        records = [self._require(one) for one in call.body.instance_ids]
        for record in records:
            self._cloud.fleet.reboot(record)
        shown = tuple(map(self._describe, records))
        return replies.RestartReply(data=replies.RestartedInstances(restarted_instances=shown))

    def _audit(self, call: ApiCall[NoBody]) -> replies.AuditReply:
        account = self._cloud.scenario.account
        if not account:
            return replies.AuditReply(data=replies.AuditPage(events=()))
        event = replies.AuditEventReply(
            service_name="cloud-api",
            resource_name="api-key",
            action="create",
            catalog_version="1",
            event_id=secrets.token_hex(8),
            event_time=datetime.now(UTC).isoformat(),
            actor_lrn=None,
            resource_lrns=(),
            resource_owner_lrn=account,
            request_api_key_lrn=None,
        )
        return replies.AuditReply(data=replies.AuditPage(events=(event,)))

    def _require(self, instance_id: str) -> LambdaRecord:
        record = self._cloud.fleet.find(instance_id)
        if record is None:
            raise NO_OBJECT
        return record

    def _describe(self, record: LambdaRecord) -> replies.InstanceReply:
        kind = catalog.find_type(
            msgspec.structs.replace(self._cloud.scenario, types=()), record.type
        )
        assert kind is not None, "the scenario's types may only grow"
        can = replies.ActionReply(available=record.state == "running")
        cannot = replies.ActionReply(available=False)
        return replies.InstanceReply(
            id=record.id,
            status=STATUSES[record.state],
            ssh_key_names=record.key_names,
            file_system_names=record.file_system_names,
            region=make_region(record.region),
            instance_type=kind,
            actions=replies.ActionsReply(
                migrate=cannot, rebuild=cannot, restart=can, cold_reboot=cannot, terminate=can
            ),
            hostname=record.address or record.id,
            tags=record.tags,
            name=record.name or msgspec.UNSET,
            ip=record.address or msgspec.UNSET,
        )
