"""The offers and the instances of a rehearsed Vast.ai."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec
import yaml

from labctl.decoding import decode_json
from labctl.rehearsal.core.fleet import ALIVE, CloudInstance, InstanceState
from labctl.rehearsal.core.machines import build_seed
from labctl.rehearsal.core.operations import AnyOperation, ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.vast import replies
from labctl.rehearsal.vast.catalog import list_asks, matches, name_type

if TYPE_CHECKING:
    from labctl.rehearsal.vast.simulation import VastRehearsal

FIRST_INSTANCE = 20_000_001
PAGE_SIZE = 25
LONGEST_ONSTART = 4048
SSH = "22/tcp"
STATUSES: dict[InstanceState, str | None] = {
    "pending": "loading",
    "running": "running",
    "stopping": "running",
    "stopped": "exited",
}
# Run at each start of the machine, as Vast.ai runs `onstart`.
SCRIPT = "/var/lib/cloud/scripts/per-boot/onstart"
NO_INSTANCE = ApiError(404, "not_found", "Instance not found")


@dataclass
class RehearsedVm(CloudInstance):
    """A virtual machine with what its API shows besides. `intended` is what its user asked for."""

    ask: replies.AskReply | None = None
    body: replies.RentBody | None = None
    label: str = ""
    intended: str = "running"


class VastVmHandlers:
    """Offers and instances by id. `keys` are the account's SSH keys, which a new VM gets."""

    def __init__(self, cloud: VastRehearsal) -> None:
        self.keys: dict[int, replies.VastKeyReply] = {}
        self._cloud = cloud
        self._numbers = itertools.count(FIRST_INSTANCE)

    def list_operations(self) -> tuple[AnyOperation, ...]:
        one = "/api/v0/instances/<int:id>"
        return (
            Operation("searchOffers", "POST", "/api/v0/bundles", self._search, replies.SearchBody),
            Operation(
                "createInstance", "PUT", "/api/v0/asks/<int:id>", self._rent, replies.RentBody
            ),
            Operation("showInstances", "GET", "/api/v1/instances", self._list, NoBody),
            Operation("manageInstance", "PUT", one, self._manage, replies.ManageBody),
            Operation("destroyInstance", "DELETE", one, self._destroy, NoBody),
        )

    def _search(self, call: ApiCall[replies.SearchBody]) -> replies.AsksReply:
        body = call.body
        taken = self._list_taken()
        listed = [
            ask
            for ask in list_asks(self._cloud.scenario, body.type, body.allocated_storage)
            if ask.id not in taken and matches(ask, body)
        ]
        for name, direction in reversed(body.order):
            listed.sort(key=lambda ask: getattr(ask, name), reverse=direction == "desc")
        return replies.AsksReply(offers=tuple(listed[: body.limit]))

    def _list_taken(self) -> set[int]:
        """List the offers that are not shown, because they are rented or have no capacity."""
        fleet = self._cloud.fleet
        rented = {one.ask.id for one in fleet.list_all() if one.ask and one.state in ALIVE}
        missing = {
            ask.id
            for ask in list_asks(self._cloud.scenario)
            if not fleet.has_capacity(name_type(ask), ask.geolocation[-2:])
        }
        return rented | missing

    def _rent(self, call: ApiCall[replies.RentBody]) -> replies.RentedReply:
        body, fleet, scenario = call.body, self._cloud.fleet, self._cloud.scenario
        number = int(call.path["id"])
        market = "ondemand" if body.price is None else "bid"
        asks = {ask.id: ask for ask in list_asks(scenario, market, body.disk)}
        with fleet.lock:
            if number not in asks:
                raise ApiError(404, "invalid_args", f"no_such_ask {number} is not available")
            gone = any(fnmatchcase(str(number), pattern) for pattern in scenario.gone)
            if gone or number in self._list_taken():
                raise ApiError(410, "no_such_ask", f"{number} is no longer available")
            self._require_valid(body, asks[number])
            instance_id = str(next(self._numbers))
            record = RehearsedVm(
                id=instance_id,
                type=name_type(asks[number]),
                region=asks[number].geolocation[-2:],
                is_spot=body.price is not None,
                seed=self._make_seed(instance_id, body),
                ask=asks[number],
                body=body,
                label=body.label,
            )
            fleet.add(record)
        return replies.RentedReply(new_contract=int(instance_id))

    def _require_valid(self, body: replies.RentBody, ask: replies.AskReply) -> None:
        """ApiError for a request that breaks a documented rule."""
        if self._cloud.scenario.balance_usd <= 0:
            raise ApiError(402, "invalid_args", "the account lacks credit")
        if body.price is not None and body.price < ask.min_bid:
            raise ApiError(400, "invalid_price", f"the least bid is {ask.min_bid}")
        if not (body.vm and ask.vms_enabled):
            raise ApiError(400, "invalid_args", "this rehearsal has only virtual machines")
        if not self.keys:
            raise ApiError(400, "no_ssh_key_for_vm", "add an SSH key to the account first")
        if len(body.onstart) > LONGEST_ONSTART:
            raise ApiError(400, "invalid_args", f"onstart is longer than {LONGEST_ONSTART}")

    def _make_seed(self, instance_id: str, body: replies.RentBody) -> dict[str, str]:
        """Return what cloud-init needs to prepare the machine as Vast.ai does."""
        script = {
            "path": SCRIPT,
            "permissions": "0755",
            "content": f"#!/bin/bash\n{body.onstart}\n",
        }
        config = {
            "disable_root": False,
            "ssh_authorized_keys": [key.key for key in self.keys.values()],
            "write_files": [script],
        }
        return build_seed(instance_id, f"#cloud-config\n{yaml.safe_dump(config, width=10_000)}")

    def _list(self, call: ApiCall[NoBody]) -> replies.VmsReply:
        text = call.query.get("select_filters", "{}")
        try:
            wanted = decode_json(text, replies.FilterBody)
        except msgspec.MsgspecError as error:
            raise ApiError(400, "invalid_request", str(error)) from error
        shown = [
            one
            for one in self._cloud.fleet.list_shown()
            if one.state not in ("ending", "ended")
            and wanted.id.eq in (None, int(one.id))
            and wanted.label.eq in (None, one.label)
        ]
        after = int(call.query.get("after_token") or 0)
        later = [one for one in shown if int(one.id) > after]
        limit = min(PAGE_SIZE, int(call.query.get("limit", PAGE_SIZE)))
        page = later[:limit]
        return replies.VmsReply(
            instances=tuple(map(_describe, page)),
            instances_found=len(page),
            total_instances=len(shown),
            next_token=page[-1].id if len(later) > limit else None,
        )

    def _manage(self, call: ApiCall[replies.ManageBody]) -> replies.DoneReply:
        record, body = self._require(call.path["id"]), call.body
        if body.label is not None:
            record.label = body.label
        if body.state:
            record.intended = body.state
        if body.state == "stopped":
            self._cloud.fleet.stop(record)
        elif body.state == "running":
            self._cloud.fleet.start(record)
        return replies.DoneReply()

    def _destroy(self, call: ApiCall[NoBody]) -> replies.DoneReply:
        self._cloud.fleet.terminate(self._require(call.path["id"]))
        return replies.DoneReply()

    def _require(self, number: str) -> RehearsedVm:
        record = self._cloud.fleet.find(str(number))
        if record is None or record.state in ("ending", "ended"):
            raise NO_INSTANCE
        return record


def _describe(record: RehearsedVm) -> replies.VastVmReply:
    ask, body = record.ask, record.body
    assert ask is not None
    assert body is not None
    is_running = record.state == "running" and bool(record.address)
    mapping = replies.PortMappingReply(host_ip="0.0.0.0", host_port="22")
    base = ask.dph_base if body.price is None else body.price
    return replies.VastVmReply(
        id=int(record.id),
        actual_status=STATUSES[record.state],
        intended_status=record.intended,
        cur_state="stopped" if record.state == "stopped" else "running",
        next_state=record.intended,
        label=record.label,
        image_uuid=body.image,
        image_runtype=body.runtype,
        onstart=body.onstart,
        machine_id=ask.machine_id,
        start_date=record.created_at,
        gpu_name=ask.gpu_name,
        gpu_arch=ask.gpu_arch,
        num_gpus=ask.num_gpus,
        gpu_ram=ask.gpu_ram,
        gpu_frac=ask.gpu_frac,
        cpu_cores_effective=ask.cpu_cores_effective,
        cpu_ram=ask.cpu_ram,
        cpu_arch=ask.cpu_arch,
        disk_space=body.disk,
        geolocation=ask.geolocation,
        verification=ask.verification,
        is_bid=record.is_spot,
        min_bid=ask.min_bid,
        dph_base=base,
        dph_total=base + ask.storage_total_cost,
        storage_cost=ask.storage_cost,
        storage_total_cost=ask.storage_total_cost,
        public_ipaddr=record.address or msgspec.UNSET,
        ports={SSH: (mapping,)} if is_running else None,
    )
