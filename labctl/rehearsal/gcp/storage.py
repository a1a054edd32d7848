"""Handlers of disks, firewall rules, addresses, images and operations."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from labctl.model import Value
from labctl.rehearsal.core.operations import ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.gcp.limits import QuotaState, list_quotas
from labctl.rehearsal.gcp.project import Project, absent, make_disk_id, matches_filter
from labctl.rehearsal.gcp.resources import (
    DiskResource,
    FirewallResource,
    LabelChange,
    OperationResource,
    make_fingerprint,
    make_timestamp,
)

PROJECT = "/compute/v1/projects/<project>"
DISK = f"{PROJECT}/zones/<zone>/disks/<disk>"
FIREWALLS = f"{PROJECT}/global/firewalls"
FIREWALL = f"{FIREWALLS}/<firewall>"
IMAGES = ("ubuntu-os-accelerator-images", "ubuntu-os-cloud", "deeplearning-platform-release")


class DiskScope(Value, frozen=True, rename="camel"):
    disks: tuple[DiskResource, ...] = ()


class AggregatedDisks(Value, frozen=True, rename="camel"):
    items: dict[str, DiskScope]


class NoAddresses(Value, frozen=True, rename="camel", omit_defaults=True):
    """labctl reserves no addresses, so this rehearsal has none."""

    kind: str = "compute#addressAggregatedList"


class FirewallList(Value, frozen=True, rename="camel"):
    items: tuple[FirewallResource, ...] = ()


class ImageResource(Value, frozen=True, rename="camel"):
    name: str
    self_link: str
    disk_size_gb: str = "10"


class RegionResource(Value, frozen=True, rename="camel"):
    name: str
    quotas: tuple[QuotaState, ...]


class RegionList(Value, frozen=True, rename="camel"):
    items: tuple[RegionResource, ...]


class ProjectResource(Value, frozen=True, rename="camel"):
    name: str
    quotas: tuple[QuotaState, ...]


class OperationList(Value, frozen=True, rename="camel"):
    items: tuple[OperationResource, ...]


class ResourceHandlers:
    """The calls of a project's other resources."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._lock = project.fleet.lock

    def list_operations(self) -> tuple[Operation[Any], ...]:
        return (
            *self._list_disk_operations(),
            *self._list_firewall_operations(),
            *self._list_other_operations(),
        )

    def _list_disk_operations(self) -> tuple[Operation[Any], ...]:
        everywhere = f"{PROJECT}/aggregated/disks"
        return (
            Operation("disks.aggregatedList", "GET", everywhere, self.list_disks, NoBody),
            Operation("disks.delete", "DELETE", DISK, self.delete_disk, NoBody),
            Operation("disks.setLabels", "POST", f"{DISK}/setLabels", self.label_disk, LabelChange),
        )

    def _list_firewall_operations(self) -> tuple[Operation[Any], ...]:
        return (
            Operation("firewalls.insert", "POST", FIREWALLS, self.insert_rule, FirewallResource),
            Operation("firewalls.list", "GET", FIREWALLS, self.list_rules, NoBody),
            Operation("firewalls.get", "GET", FIREWALL, self.get_rule, NoBody),
            Operation("firewalls.patch", "PATCH", FIREWALL, self.patch_rule, FirewallResource),
            Operation("firewalls.delete", "DELETE", FIREWALL, self.delete_rule, NoBody),
        )

    def _list_other_operations(self) -> tuple[Operation[Any], ...]:
        addresses = f"{PROJECT}/aggregated/addresses"
        family = f"{PROJECT}/global/images/family/<family>"
        in_zone = f"{PROJECT}/zones/<zone>/operations"
        in_all = f"{PROJECT}/global/operations/<operation>"
        one = f"{in_zone}/<operation>"
        return (
            Operation(
                "addresses.aggregatedList", "GET", addresses, lambda call: NoAddresses(), NoBody
            ),
            Operation("images.getFromFamily", "GET", family, self.get_image, NoBody),
            Operation("regions.list", "GET", f"{PROJECT}/regions", self.list_regions, NoBody),
            Operation("projects.get", "GET", PROJECT, self.get_project, NoBody),
            Operation("zoneOperations.get", "GET", one, self.get_operation, NoBody),
            Operation("zoneOperations.list", "GET", in_zone, self.list_done, NoBody),
            Operation("globalOperations.get", "GET", in_all, self.get_operation, NoBody),
        )

    def list_disks(self, call: ApiCall[NoBody]) -> AggregatedDisks:
        condition = call.query.get("filter", "")
        scopes: dict[str, list[DiskResource]] = {}
        with self._lock:
            for (zone, _), disk in self._project.disks.items():
                if matches_filter(disk, condition):
                    print_ = make_fingerprint(disk.labels)
                    scopes.setdefault(f"zones/{zone}", []).append(
                        replace(disk, label_fingerprint=print_)
                    )
        return AggregatedDisks(
            items={scope: DiskScope(disks=tuple(some)) for scope, some in scopes.items()}
        )

    def delete_disk(self, call: ApiCall[NoBody]) -> OperationResource:
        zone, name = call.path["zone"], call.path["disk"]
        with self._lock:
            disk = self._project.find_disk(zone, name)
            if disk.users:
                raise ApiError(400, "resourceInUseByAnotherResource", f"{name} is in use")
            del self._project.disks[zone, name]
        self._project.fleet.drop_disk(make_disk_id(zone, name))
        return self._project.begin("delete", f"zones/{zone}/disks/{name}", zone)

    def label_disk(self, call: ApiCall[LabelChange]) -> OperationResource:
        zone, name = call.path["zone"], call.path["disk"]
        with self._lock:
            disk = self._project.find_disk(zone, name)
            if call.body.label_fingerprint != make_fingerprint(disk.labels):
                raise ApiError(412, "conditionNotMet", "Labels fingerprint does not match")
            self._project.disks[zone, name] = replace(disk, labels=call.body.labels)
        return self._project.begin("setLabels", f"zones/{zone}/disks/{name}", zone)

    def insert_rule(self, call: ApiCall[FirewallResource]) -> OperationResource:
        rule = replace(call.body, creation_timestamp=make_timestamp())
        with self._lock:
            if rule.name in self._project.firewalls:
                raise ApiError(409, "alreadyExists", f"The resource '{rule.name}' already exists")
            self._project.firewalls[rule.name] = rule
            self._project.apply_rules()
        return self._project.begin("insert", f"global/firewalls/{rule.name}")

    def list_rules(self, call: ApiCall[NoBody]) -> FirewallList:
        condition = call.query.get("filter", "")
        with self._lock:
            rules = tuple(self._project.firewalls.values())
        return FirewallList(items=tuple(r for r in rules if matches_filter(r, condition)))

    def get_rule(self, call: ApiCall[NoBody]) -> FirewallResource:
        return self._find_rule(call)

    def patch_rule(self, call: ApiCall[FirewallResource]) -> OperationResource:
        """Change the networks of a rule: what labctl patches."""
        with self._lock:
            rule = self._find_rule(call)
            ranges = call.body.source_ranges or rule.source_ranges
            self._project.firewalls[rule.name] = replace(rule, source_ranges=ranges)
            self._project.apply_rules()
        return self._project.begin("patch", f"global/firewalls/{rule.name}")

    def delete_rule(self, call: ApiCall[NoBody]) -> OperationResource:
        with self._lock:
            rule = self._find_rule(call)
            del self._project.firewalls[rule.name]
            self._project.apply_rules()
        return self._project.begin("delete", f"global/firewalls/{rule.name}")

    def get_image(self, call: ApiCall[NoBody]) -> ImageResource:
        owner, family = call.path["project"], call.path["family"]
        if owner not in IMAGES:
            raise absent(f"projects/{owner}/global/images/family/{family}")
        name = f"{family}-v20251101"
        link = self._project.link("global/images").replace(self._project.name, owner)
        return ImageResource(name=name, self_link=f"{link}/{name}")

    def list_regions(self, call: ApiCall[NoBody]) -> RegionList:
        scenario, fleet = self._project.scenario(), self._project.fleet
        return RegionList(
            items=tuple(
                RegionResource(name=name, quotas=list_quotas(scenario, fleet, name))
                for name in scenario.regions
            )
        )

    def get_project(self, call: ApiCall[NoBody]) -> ProjectResource:
        scenario, fleet = self._project.scenario(), self._project.fleet
        return ProjectResource(name=scenario.project, quotas=list_quotas(scenario, fleet, ""))

    def get_operation(self, call: ApiCall[NoBody]) -> OperationResource:
        return self._project.read_operation(call.path["operation"])

    def list_done(self, call: ApiCall[NoBody]) -> OperationList:
        condition, zone = call.query.get("filter", ""), call.path["zone"]
        found = [
            self._project.read_operation(name)
            for name, operation in list(self._project.operations.items())
            if operation.zone.endswith(f"/zones/{zone}") and matches_filter(operation, condition)
        ]
        return OperationList(items=tuple(found))

    def _find_rule(self, call: ApiCall[Any]) -> FirewallResource:
        rule = self._project.firewalls.get(call.path["firewall"])
        if rule is None:
            raise absent(f"global/firewalls/{call.path['firewall']}")
        return rule
