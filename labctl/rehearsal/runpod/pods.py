"""The pods of a rehearsed RunPod."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from labctl.providers.runpod.api import CloudTier, PodAction
from labctl.rehearsal.core.fleet import CloudInstance, InstanceState
from labctl.rehearsal.core.operations import AnyOperation, ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.runpod import replies
from labctl.rehearsal.runpod.catalog import find_gpu, get_price
from labctl.rehearsal.runpod.containers import make_seed

if TYPE_CHECKING:
    from labctl.rehearsal.runpod.simulation import RunPodRehearsal

PATH = "/v2/pods"
STATUSES: dict[InstanceState, str] = {
    "pending": "PROVISIONING",
    "running": "RUNNING",
    "stopping": "EXITED",
    "stopped": "EXITED",
    "ending": "TERMINATED",
    "ended": "TERMINATED",
}
ACTIONS: dict[str, tuple[PodAction, ...]] = {
    "PROVISIONING": ("stop", "terminate"),
    "RUNNING": ("stop", "restart", "terminate"),
    "EXITED": ("start", "terminate"),
    "TERMINATED": (),
}
ENDED: tuple[InstanceState, ...] = ("ending", "ended")
BILLED: tuple[InstanceState, ...] = ("pending", "running")
SSH = "22/tcp"
EMPTY = replies.CreateBody(name="")
NO_POD = ApiError(404, "Not Found", "pod not found")


@dataclass
class RehearsedPod(CloudInstance):
    """A pod with what its API shows besides. `started_at` is in Unix seconds."""

    body: replies.CreateBody = EMPTY
    name: str = ""
    cloud: CloudTier = "SECURE"
    price: float = 0.0
    started_at: float | None = None


class PodHandlers:
    """Pods by id."""

    def __init__(self, cloud: RunPodRehearsal) -> None:
        self._cloud = cloud

    def list_operations(self) -> tuple[AnyOperation, ...]:
        one = f"{PATH}/<id>"
        return (
            Operation("listPods", "GET", PATH, self._list, NoBody),
            Operation("createPod", "POST", PATH, self._create, replies.CreateBody, status=201),
            Operation("getPod", "GET", one, self._get, NoBody),
            Operation("updatePod", "PATCH", one, self._update, replies.UpdateBody),
            Operation("deletePod", "DELETE", one, self._delete, NoBody, status=204),
            Operation("podAction", "POST", f"{one}/action", self._act, replies.ActionBody),
        )

    def list_centers_with_stock(self, gpu_id: str) -> list[str]:
        fleet, regions = self._cloud.fleet, self._cloud.scenario.regions
        return [name for name in regions if fleet.has_capacity(gpu_id, name)]

    def sum_costs_usd(self) -> float:
        """Return the price of all pods per hour now."""
        return sum(one.price for one in self._cloud.fleet.list_all() if one.state in BILLED)

    def _list(self, call: ApiCall[NoBody]) -> replies.PodsReply:
        # RunPod documents that a terminated pod is no longer listed.
        shown = [one for one in self._cloud.fleet.list_shown() if one.state not in ENDED]
        return replies.PodsReply(pods=tuple(map(self._describe, shown)))

    def _get(self, call: ApiCall[NoBody]) -> replies.PodReply:
        return self._describe(self._require(call.path["id"]))

    def _create(self, call: ApiCall[replies.CreateBody]) -> replies.PodReply:
        body, scenario, fleet = call.body, self._cloud.scenario, self._cloud.fleet
        if body.gpu is None:
            raise ApiError(400, "Bad Request", "this rehearsal has only GPU pods")
        gpu = find_gpu(scenario, body.gpu.id)
        if gpu is None:
            raise ApiError(400, "Bad Request", "no such GPU type")
        if any(fnmatchcase(gpu.id, pattern) for pattern in scenario.no_pool):
            raise ApiError(403, "Forbidden", "this account has no access to the pool")
        price = get_price(gpu, body.cloud, body.gpu.count)
        with fleet.lock:
            if scenario.balance_usd < price:
                raise ApiError(402, "Payment Required", "insufficient balance")
            stock = self.list_centers_with_stock(gpu.id)
            wanted = [name for name in body.data_center_ids if name in stock]
            if not (wanted if body.data_center_ids else stock):
                raise ApiError(400, "Bad Request", "no instances with the requested specification")
            record = RehearsedPod(
                id=secrets.token_hex(7),
                type=gpu.id,
                region=(wanted or stock)[0],
                seed=make_seed(body.args, body.env),
                body=body,
                name=body.name,
                cloud=body.cloud,
                price=price,
                started_at=time.time(),
            )
            fleet.add(record)
        return self._describe(record)

    def _update(self, call: ApiCall[replies.UpdateBody]) -> replies.PodReply:
        record = self._require(call.path["id"])
        record.name = call.body.name or record.name
        return self._describe(record)

    def _delete(self, call: ApiCall[NoBody]) -> None:
        self._cloud.fleet.terminate(self._require(call.path["id"]))

    def _act(self, call: ApiCall[replies.ActionBody]) -> replies.PodReply | None:
        record, action = self._require(call.path["id"]), call.body.action
        fleet = self._cloud.fleet
        with fleet.lock:
            # A pod on its way down is shown as EXITED, but cannot be started yet.
            if action not in ACTIONS[STATUSES[record.state]] or record.state == "stopping":
                raise ApiError(409, "Conflict", f"{action} is not valid for this pod now")
            if action == "stop":
                fleet.stop(record)
            elif action == "start":
                record.started_at = time.time()
                fleet.start(record)
            elif action == "restart":
                fleet.reboot(record)
            else:
                fleet.terminate(record)
        return self._describe(record)

    def _require(self, pod_id: str) -> RehearsedPod:
        record = self._cloud.fleet.find(pod_id)
        if record is None or record.state == "ended":
            raise NO_POD
        return record

    def _describe(self, record: RehearsedPod) -> replies.PodReply:
        body, status = record.body, STATUSES[record.state]
        assert body.gpu is not None
        direct = self._find_address(record)
        return replies.PodReply(
            id=record.id,
            name=record.name,
            status=status,
            actions=ACTIONS[status],
            image=body.image,
            args=body.args,
            disk=body.disk,
            mounts=body.mounts,
            ports=body.ports,
            env=body.env,
            registry=None,
            gpu=body.gpu,
            cloud=record.cloud,
            data_center_id=record.region,
            cuda_version=None,
            ssh=replies.SshReply(proxy=None, direct=direct),
            template=None,
            cost=record.price if record.state in BILLED else 0.0,
            locked=False,
            runtime=_describe_runtime(record, direct) if status == "RUNNING" else None,
            created_at=_format_time(record.created_at),
            started_at=_format_time(record.started_at) if record.started_at else None,
        )

    def _find_address(self, record: RehearsedPod) -> replies.SshAddress | None:
        port = self._cloud.find_port(record.id)
        if record.state != "running" or SSH not in record.body.ports or not port:
            return None
        command = f"ssh root@{record.address} -p {port}"
        return replies.SshAddress(host=record.address, port=port, username="root", command=command)


def _describe_runtime(
    record: RehearsedPod, direct: replies.SshAddress | None
) -> replies.RuntimeReply:
    ports: tuple[replies.PortReply, ...] = ()
    if direct is not None:
        ports = (replies.PortReply(private=22, public=direct.port, type="tcp", ip=direct.host),)
    uptime = int(time.time() - (record.started_at or time.time()))
    return replies.RuntimeReply(uptime=uptime, ports=ports)


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
