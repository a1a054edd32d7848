"""Placement groups, which moto lacks: created, described and deleted, and checked at launch.

Error codes are those of "Error codes for the Amazon EC2 API" in AWS's reference.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.calls import (
    Call,
    build_ec2_reply,
    build_element,
    build_refusal,
    parse_tags,
)
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.replies import HttpReply

if TYPE_CHECKING:
    from moto.ec2.models.instances import Instance

STRATEGIES = ("cluster", "partition", "spread")
KIND = "placement-group"


@dataclass
class PlacementGroup:
    """A placement group. `deleted_at` is when its deletion began, None before (monotonic)."""

    name: str
    region: str
    strategy: str
    tags: dict[str, str]
    id: str
    deleted_at: float | None = None


class PlacementGroups:
    """All placement groups. `operations` answers the calls about them by action."""

    def __init__(self, backend: Backend, scenario: Callable[[], Scenario]) -> None:
        self._backend = backend
        self._scenario = scenario
        self._groups: dict[tuple[str, str], PlacementGroup] = {}
        self.operations: dict[str, Callable[[Call], HttpReply]] = {
            "CreatePlacementGroup": self._create,
            "DescribePlacementGroups": self._describe,
            "DeletePlacementGroup": self._delete,
        }

    def check_launch(self, call: Call, zone: str) -> HttpReply | None:
        """Return the refusal of a RunInstances into a group; None if it may go ahead."""
        name, kind = call.form.get("Placement.GroupName", ""), call.form.get("InstanceType", "")
        if not name:
            return None
        with self._backend.lock():
            group = self._find(call.region, name)
            if group is None or group.deleted_at is not None:
                return _refuse_unknown(call, name)
            info = self._backend.describe_type(kind).get("PlacementGroupInfo", {})
            if group.strategy not in info.get("SupportedStrategies", ()):
                words = (
                    f"{group.strategy.capitalize()} placement groups are not supported by the "
                    f"'{kind}' instance type."
                )
                return build_refusal(call, "InvalidParameterCombination", words)
            zones = {str(one.availability_zone) for one in self._list_members(group)}
        if group.strategy == "cluster" and zones - {zone}:
            words = f"The placement group {name} has instances in {', '.join(sorted(zones))}."
            return build_refusal(call, "InvalidParameterCombination", words)
        return None

    def _create(self, call: Call) -> HttpReply:
        name, strategy = call.form.get("GroupName", ""), call.form.get("Strategy", "cluster")
        if not name:
            words = "The request must contain the parameter groupName"
            return build_refusal(call, "MissingParameter", words)
        if strategy not in STRATEGIES:
            words = f"Value ({strategy}) for parameter strategy is invalid."
            return build_refusal(call, "InvalidParameterValue", words)
        if call.dry:
            return _refuse_dry_run(call)
        with self._backend.lock():
            if self._find(call.region, name) is not None:
                words = f"The placement group '{name}' already exists."
                return build_refusal(call, "InvalidPlacementGroup.Duplicate", words)
            group = PlacementGroup(
                name=name,
                region=call.region,
                strategy=strategy,
                tags=parse_tags(call).get(KIND, {}),
                id=f"pg-{secrets.token_hex(8)}",
            )
            self._groups[call.region, name] = group
        described = build_element("placementGroup", self._describe_group(group))
        return build_ec2_reply(call.action, [described])

    def _describe(self, call: Call) -> HttpReply:
        if call.dry:
            return _refuse_dry_run(call)
        names, filters = call.read_numbered("GroupName"), call.read_filters()
        with self._backend.lock():
            for name in names:
                if self._find(call.region, name) is None:
                    return _refuse_unknown(call, name)
            groups = [
                group
                for region, name in list(self._groups)
                if region == call.region and (group := self._find(region, name)) is not None
            ]
        items = [
            build_element("item", self._describe_group(group))
            for group in groups
            if (not names or group.name in names) and self._is_selected(group, filters)
        ]
        return build_ec2_reply(call.action, [build_element("placementGroupSet", items)])

    def _delete(self, call: Call) -> HttpReply:
        if call.dry:
            return _refuse_dry_run(call)
        name = call.form.get("GroupName", "")
        with self._backend.lock():
            group = self._find(call.region, name)
            if group is None:
                return _refuse_unknown(call, name)
            if self._list_members(group):
                words = f"The placement group '{name}' is in use and may not be deleted."
                return build_refusal(call, "InvalidPlacementGroup.InUse", words)
            if group.deleted_at is None:
                group.deleted_at = time.monotonic()
        return build_ec2_reply(call.action, [build_element("return", "true")])

    def _find(self, region: str, name: str) -> PlacementGroup | None:
        """Return a group, which is still listed, as `deleting`, for a while after its deletion."""
        group = self._groups.get((region, name))
        if group is None or group.deleted_at is None:
            return group
        if time.monotonic() - group.deleted_at < self._scenario().delays.terminate:
            return group
        del self._groups[region, name]
        return None

    def _list_members(self, group: PlacementGroup) -> list[Instance]:
        """List the instances in a group that are not terminated."""
        return [
            instance
            for reservation in self._backend.ec2(group.region).reservations.values()
            for instance in reservation.instances
            if instance.placement.group_name == group.name and instance._state.name != "terminated"
        ]

    def _describe_group(self, group: PlacementGroup) -> list[Element]:
        arn = f"arn:aws:ec2:{group.region}:{self._backend.account}:{KIND}/{group.name}"
        tags = [
            build_element("item", [build_element("key", key), build_element("value", value)])
            for key, value in group.tags.items()
        ]
        return [
            build_element("groupName", group.name),
            build_element("groupId", group.id),
            build_element("groupArn", arn),
            build_element("strategy", group.strategy),
            build_element("state", self._state(group)),
            build_element("tagSet", tags),
        ]

    def _state(self, group: PlacementGroup) -> str:
        return "available" if group.deleted_at is None else "deleting"

    def _is_selected(self, group: PlacementGroup, filters: dict[str, list[str]]) -> bool:
        """Whether all filters select the group; one that is not simulated selects none."""
        values = {
            "group-name": group.name,
            "state": self._state(group),
            "strategy": group.strategy,
            **{f"tag:{key}": value for key, value in group.tags.items()},
        }
        return all(values.get(name) in wanted for name, wanted in filters.items())


def _refuse_unknown(call: Call, name: str) -> HttpReply:
    words = f"The Placement Group '{name}' is unknown."
    return build_refusal(call, "InvalidPlacementGroup.Unknown", words)


def _refuse_dry_run(call: Call) -> HttpReply:
    words = "Request would have succeeded, but DryRun flag is set."
    return build_refusal(call, "DryRunOperation", words, 412)
