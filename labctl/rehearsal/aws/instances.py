"""EC2's calls about instances for which moto's responses are incomplete or wrong."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from xml.etree.ElementTree import Element

from labctl.rehearsal.aws import launch
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.calls import (
    Call,
    build_ec2_reply,
    build_element,
    build_refusal,
    build_xml_reply,
    parse_reply,
)
from labctl.rehearsal.aws.fleet import STOPPED, Fleet, InstanceRecord, State
from labctl.rehearsal.aws.placement_groups import PlacementGroups
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.aws.tokens import Tokens
from labctl.rehearsal.core.replies import HttpReply


class InstanceHandlers:
    """The calls. `operations` answers by action; None passes a call on to moto."""

    def __init__(self, backend: Backend, fleet: Fleet, scenario: Callable[[], Scenario]) -> None:
        self._backend = backend
        self._fleet = fleet
        self._scenario = scenario
        self._tokens = Tokens()
        self._placement_groups = PlacementGroups(backend, scenario)
        self.operations: dict[str, Callable[[Call], HttpReply | None]] = {
            "RunInstances": self.run,
            "TerminateInstances": self._terminate,
            "StopInstances": self._stop,
            "StartInstances": self._start,
            "RebootInstances": self._reboot,
            "DescribeInstances": self._describe,
            "DescribeInstanceStatus": self._describe,
            "DescribeVolumes": self._describe_volumes,
            "GetConsoleOutput": self._console,
            "DeleteSecurityGroup": self._delete_group,
            "DeleteNetworkInterface": self._delete_interface,
            "AttachVolume": self._attach,
            "DeleteVolume": self._delete_volume,
            **self._placement_groups.operations,
        }

    def run(self, call: Call) -> HttpReply | None:
        """Handle RunInstances: replay or refuse it, or create instances and their machines."""
        if call.dry:
            return None
        with self._tokens.lock:
            earlier = self._tokens.replay(call)
            if isinstance(earlier, HttpReply):
                return earlier
            if earlier is not None:
                return self._reservation(call, earlier)
            placed = launch.place_or_refuse(
                call, self._scenario(), self._backend, self._fleet, self._placement_groups
            )
            if isinstance(placed, HttpReply):
                return placed
            reply = self._backend.apply(placed)
            if reply.status != 200:
                return reply
            ids = [node.text or "" for node in parse_reply(reply).iter("instanceId")]
            for instance_id in dict.fromkeys(ids):
                self._register(placed, instance_id)
            self._tokens.remember(call, list(dict.fromkeys(ids)))
            return self._reservation(call, ids)

    def _register(self, call: Call, instance_id: str) -> None:
        data = base64.b64decode(call.form.get("UserData", "")).decode(errors="replace")
        record = InstanceRecord(instance_id, call.region, data)
        with self._backend.lock():
            instance = self._backend.instance(call.region, instance_id)
            launch.complete_instance(call, instance)
            if instance.lifecycle == "spot":
                record.spot_request = f"sir-{secrets.token_hex(4)}"
                # moto's replies have it, its class does not declare it.
                instance.spot_instance_request_id = record.spot_request  # type: ignore[attr-defined]
        self._fleet.add(record)

    def _reservation(self, call: Call, ids: list[str]) -> HttpReply:
        """Return the response of RunInstances for these instances as they are now."""
        numbered = {
            f"InstanceId.{n}": instance_id for n, instance_id in enumerate(dict.fromkeys(ids), 1)
        }
        describe_call = call.with_form(
            {"Action": "DescribeInstances", "Version": "2016-11-15", **numbered}
        )
        reservation = parse_reply(self._backend.apply(describe_call)).find("reservationSet/item")
        return build_ec2_reply("RunInstances", list(reservation) if reservation is not None else [])

    def _terminate(self, call: Call) -> HttpReply | None:
        def allowed(record: InstanceRecord) -> HttpReply | None:
            if not self._fleet.instance(record).disable_api_termination:
                return None
            words = f"The instance '{record.id}' may not be terminated. Modify its attribute."
            return build_refusal(call, "OperationNotPermitted", words)

        return self._change_states(call, allowed, self._fleet.terminate)

    def _stop(self, call: Call) -> HttpReply | None:
        def allowed(record: InstanceRecord) -> HttpReply | None:
            if not record.spot_request:
                return None
            words = (
                f"You can't stop the Spot Instance '{record.id}' because it is associated with a "
                "one-time Spot Instance request."
            )
            return build_refusal(call, "UnsupportedOperation", words)

        return self._change_states(call, allowed, self._fleet.stop)

    def _start(self, call: Call) -> HttpReply | None:
        def allowed(record: InstanceRecord) -> HttpReply | None:
            if self._fleet.state(record)[0] in (0, 16, STOPPED[0]):
                return None
            words = f"The instance '{record.id}' is not in a state from which it can be started."
            return build_refusal(call, "IncorrectInstanceState", words)

        return self._change_states(call, allowed, self._fleet.start)

    def _reboot(self, call: Call) -> HttpReply | None:
        records = self._records(call)
        if call.dry or isinstance(records, HttpReply) or records is None:
            return records if isinstance(records, HttpReply) else None
        for record in records:
            self._fleet.reboot(record)
        return build_ec2_reply(call.action, [build_element("return", "true")])

    def _change_states(
        self,
        call: Call,
        refuse: Callable[[InstanceRecord], HttpReply | None],
        move: Callable[[InstanceRecord], tuple[State, State]],
    ) -> HttpReply | None:
        """Change the state of every instance of the call: all of them or none."""
        records = self._records(call)
        if call.dry or records is None or isinstance(records, HttpReply):
            return records if isinstance(records, HttpReply) else None
        with self._backend.lock():
            for record in records:
                if (refused := refuse(record)) is not None:
                    return refused
        items = []
        for record in records:
            previous, current = move(record)
            fields = [build_element("instanceId", record.id)]
            fields.append(build_element("currentState", _state_elements(current)))
            fields.append(build_element("previousState", _state_elements(previous)))
            items.append(build_element("item", fields))
        return build_ec2_reply(call.action, [build_element("instancesSet", items)])

    def _records(self, call: Call) -> list[InstanceRecord] | HttpReply | None:
        """Return the instances of a call; None if moto should report what is wrong."""
        names = call.read_numbered("InstanceId")
        candidates = [self._fleet.records.get(name) for name in names]
        records = [record for record in candidates if record is not None]
        not_shown = [r for r in records if self._is_hidden(r) or r.region != call.region]
        if not_shown:
            return _refuse_unknown(call, not_shown[0].id)
        return records if len(records) == len(names) > 0 else None

    def _is_hidden(self, record: InstanceRecord) -> bool:
        """Return whether describe calls do not show it yet, or no longer."""
        delays = self._scenario().delays
        now = time.monotonic()
        if now - record.created < delays.visible:
            return True
        return record.ended is not None and now - record.ended > delays.forget

    def _describe(self, call: Call) -> HttpReply | None:
        """Return moto's response without hidden instances, and with states of a while ago."""
        hidden = {r.id for r in list(self._fleet.records.values()) if self._is_hidden(r)}
        for name in call.read_numbered("InstanceId"):
            if name in hidden:
                return _refuse_unknown(call, name)
        behind_s = self._scenario().delays.state
        reply = self._backend.apply(call)
        if reply.status != 200 or not (hidden or behind_s):
            return reply
        root = parse_reply(reply)
        for parent in list(root.iter()):
            for item in list(parent):
                instance_id = item.findtext("instanceId")
                if item.tag != "item" or instance_id is None:
                    continue
                if instance_id in hidden:
                    parent.remove(item)
                elif behind_s and (record := self._fleet.records.get(instance_id)) is not None:
                    _set_past_state(item, record, time.monotonic() - behind_s)
        _drop_empty(root)
        return build_xml_reply(_set_xml_namespace(root))

    def _describe_volumes(self, call: Call) -> HttpReply | None:
        """Return moto's response without the volumes of instances that are not shown yet."""
        now = time.monotonic()
        lag_s = self._scenario().delays.visible
        hidden = {r.id for r in list(self._fleet.records.values()) if now - r.created < lag_s}
        reply = self._backend.apply(call)
        if reply.status != 200 or not hidden:
            return reply
        root = parse_reply(reply)
        volumes = root.find("volumeSet")
        for item in list(volumes if volumes is not None else []):
            if item.findtext("attachmentSet/item/instanceId") in hidden and volumes is not None:
                volumes.remove(item)
        return build_xml_reply(_set_xml_namespace(root))

    def _console(self, call: Call) -> HttpReply | None:
        record = self._fleet.records.get(call.form.get("InstanceId", ""))
        if call.dry or record is None or record.region != call.region:
            return None
        text = base64.b64encode(self._fleet.read_console(record).encode()).decode()
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        fields = [build_element("instanceId", record.id), build_element("timestamp", when)]
        return build_ec2_reply(call.action, [*fields, build_element("output", text)])

    def _attach(self, call: Call) -> HttpReply:
        reply = self._backend.apply(call)
        if reply.status == 200 and not call.dry:
            self._fleet.attach(call.form["InstanceId"], call.form["VolumeId"])
        return reply

    def _delete_volume(self, call: Call) -> HttpReply:
        reply = self._backend.apply(call)
        if reply.status == 200 and not call.dry:
            self._fleet.drop_disk(call.form["VolumeId"])
        return reply

    def _delete_interface(self, call: Call) -> HttpReply | None:
        """Refuse to delete an interface that is in use, as AWS does and moto does not."""
        interface_id = call.form.get("NetworkInterfaceId", "")
        if call.dry or not interface_id:
            return None
        with self._backend.lock():
            nics = self._backend.ec2(call.region).get_all_network_interfaces()
            is_used = any(nic.id == interface_id and nic.attachment_id for nic in nics)
        if is_used:
            words = f"Network interface '{interface_id}' is currently in use."
            return build_refusal(call, "InvalidParameterValue", words)
        return None

    def _delete_group(self, call: Call) -> HttpReply | None:
        """Refuse to delete a group that is in use, as AWS does and moto does not."""
        group_id = call.form.get("GroupId", "")
        if call.dry or not group_id:
            return None
        with self._backend.lock():
            nics = self._backend.ec2(call.region).get_all_network_interfaces()
            is_used = any(group.id == group_id for nic in nics for group in nic.group_set)
        if is_used:
            words = f"resource {group_id} has a dependent object"
            return build_refusal(call, "DependencyViolation", words)
        return None


def _state_elements(state: State) -> list[Element]:
    return [build_element("code", str(state[0])), build_element("name", state[1])]


def _refuse_unknown(call: Call, instance_id: str) -> HttpReply:
    words = f"The instance ID '{instance_id}' does not exist"
    return build_refusal(call, "InvalidInstanceID.NotFound", words)


def _set_past_state(item: Element, record: InstanceRecord, at: float) -> None:
    """Set the state that the instance had at a time, and drop its address if it was pending."""
    past_states = [state for since, state in record.states if since <= at] or [(0, "pending")]
    for name in ("instanceState", "state"):
        state = item.find(name)
        if state is not None and state.find("code") is not None:
            for field, value in zip(("code", "name"), past_states[-1], strict=True):
                child = state.find(field)
                if child is not None:
                    child.text = str(value)
    if past_states[-1][1] == "pending":
        for name in ("ipAddress", "dnsName"):
            for child in item.findall(name):
                item.remove(child)


def _drop_empty(root: Element) -> None:
    """Remove reservations without instances."""
    reservations = root.find("reservationSet")
    for item in list(reservations if reservations is not None else []):
        if item.find("instancesSet/item") is None and reservations is not None:
            reservations.remove(item)


def _set_xml_namespace(root: Element) -> Element:
    root.set("xmlns", "http://ec2.amazonaws.com/doc/2016-11-15/")
    return root
