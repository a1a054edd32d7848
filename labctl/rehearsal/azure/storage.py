"""Handlers of resource groups, networks, addresses, interfaces and disks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from labctl.model import Value
from labctl.rehearsal.azure.account import (
    ADDRESSES,
    DISKS,
    NETWORKS,
    NICS,
    NSGS,
    AzureAccount,
    find_address,
    find_subnet,
    make_absent,
)
from labctl.rehearsal.azure.machines import GROUP, NO_CONTENT, BuildReply
from labctl.rehearsal.azure.resources import ArmListing, ArmResource, Properties, last_segment
from labctl.rehearsal.core.operations import ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.core.replies import HttpReply

# The part of the names of operations, by kind.
NAMES = {
    NETWORKS: "VirtualNetworks",
    NSGS: "NetworkSecurityGroups",
    ADDRESSES: "PublicIPAddresses",
    NICS: "NetworkInterfaces",
    DISKS: "Disks",
}


class RuleResource(Value, frozen=True):
    properties: Properties
    name: str = ""
    id: str = ""


class PartHandlers:
    """The calls of everything that belongs to machines."""

    def __init__(self, account: AzureAccount, build_reply: BuildReply) -> None:
        self._account = account
        self._build_reply = build_reply

    def list_operations(self) -> tuple[Operation[Any], ...]:
        rule = f"{GROUP}/providers/{NSGS}/<name>/securityRules/<rule>"
        listed: list[Operation[Any]] = [
            Operation("ResourceGroups_CreateOrUpdate", "PUT", GROUP, self._put_group, ArmResource),
            Operation("ResourceGroups_Get", "GET", GROUP, self._get_group, NoBody),
            Operation("SecurityRules_CreateOrUpdate", "PUT", rule, self._put_rule, RuleResource),
        ]
        for kind, name in NAMES.items():
            path = f"{GROUP}/providers/{kind}"
            listed += [
                Operation(f"{name}_Get", "GET", f"{path}/<name>", self._make_get(kind), NoBody),
                Operation(f"{name}_List", "GET", path, self._make_list(kind), NoBody),
                Operation(
                    f"{name}_Delete", "DELETE", f"{path}/<name>", self._make_delete(kind), NoBody
                ),
            ]
            if kind != DISKS:
                put = self._make_put(kind)
                operation = f"{name}_CreateOrUpdate"
                listed.append(Operation(operation, "PUT", f"{path}/<name>", put, ArmResource))
        return tuple(listed)

    def _put_group(self, call: ApiCall[ArmResource]) -> ArmResource:
        name = call.path["group"]
        path = f"/subscriptions/{call.path['subscription']}/resourceGroups/{name}"
        properties = {"provisioningState": "Succeeded"}
        kind = "Microsoft.Resources/resourceGroups"
        made = replace(call.body, name=name, id=path, type=kind, properties=properties)
        self._account.groups[name] = made
        return made

    def _get_group(self, call: ApiCall[NoBody]) -> ArmResource:
        return self._require_group(call.path["group"])

    def _require_group(self, name: str) -> ArmResource:
        if name not in self._account.groups:
            text = f"Resource group '{name}' could not be found."
            raise ApiError(404, "ResourceGroupNotFound", text)
        return self._account.groups[name]

    def _put_rule(self, call: ApiCall[RuleResource]) -> HttpReply:
        """Create or replace one rule; no two rules of a group have the same priority."""
        name = call.path["rule"]
        with self._account.fleet.lock:
            nsg = self._require(NSGS, call.path["name"])
            others = [one for one in nsg.properties["securityRules"] if one["name"] != name]
            priority = call.body.properties["priority"]
            if any(one["properties"]["priority"] == priority for one in others):
                raise ApiError(400, "SecurityRuleConflict", f"priority {priority} is taken")
            made = RuleResource(
                name=name, id=f"{nsg.id}/securityRules/{name}", properties=call.body.properties
            )
            rules = [*others, msgspec.to_builtins(made)]
            changed = replace(nsg, properties={**nsg.properties, "securityRules": rules})
            self._account.resources[NSGS, nsg.name] = changed
        self._account.apply_rules()
        return self._build_reply(201, self._account.begin(), made)

    def _make_put(self, kind: str) -> Callable[[ApiCall[ArmResource]], HttpReply]:
        def create_part(call: ApiCall[ArmResource]) -> HttpReply:
            self._require_group(call.path["group"])
            name, account = call.path["name"], self._account
            with account.fleet.lock:
                is_new = (kind, name) not in account.resources
                self._check_references(kind, call.body)
                account.resources[kind, name] = replace(
                    call.body,
                    name=name,
                    type=kind,
                    id=account.make_id(call.path["group"], kind, name),
                    properties={**call.body.properties, "provisioningState": "Succeeded"},
                )
            shown = self._describe(account.resources[kind, name])
            return self._build_reply(201 if is_new else 200, account.begin(), shown)

        return create_part

    def _make_get(self, kind: str) -> Callable[[ApiCall[NoBody]], ArmResource]:
        return lambda call: self._describe(self._require(kind, call.path["name"]))

    def _make_list(self, kind: str) -> Callable[[ApiCall[NoBody]], ArmListing]:
        def list_all(call: ApiCall[NoBody]) -> ArmListing:
            self._require_group(call.path["group"])
            some = [one for (its, _), one in self._account.resources.items() if its == kind]
            return ArmListing(value=tuple(map(self._describe, some)))

        return list_all

    def _make_delete(self, kind: str) -> Callable[[ApiCall[NoBody]], HttpReply]:
        def delete(call: ApiCall[NoBody]) -> HttpReply:
            name = call.path["name"]
            with self._account.fleet.lock:
                if (kind, name) not in self._account.resources:
                    return HttpReply(status=NO_CONTENT)
                self._require_unused(kind, name)
                del self._account.resources[kind, name]
            return self._build_reply(202, self._account.begin(), None)

        return delete

    def _require(self, kind: str, name: str) -> ArmResource:
        if (kind, name) not in self._account.resources:
            raise make_absent(name)
        return self._account.resources[kind, name]

    def _check_references(self, kind: str, body: ArmResource) -> None:
        """Refuse an interface whose network, group or address does not exist."""
        if kind != NICS:
            return
        network = find_subnet(body).rpartition("/subnets/")[0]
        group = body.properties["networkSecurityGroup"]["id"]
        references = ((NETWORKS, network), (NSGS, group), (ADDRESSES, find_address(body)["id"]))
        for its_kind, resource_id in references:
            if (its_kind, last_segment(resource_id)) not in self._account.resources:
                raise ApiError(400, "InvalidResourceReference", f"{resource_id} does not exist")

    def _require_unused(self, kind: str, name: str) -> None:
        nics = [one for (its, _), one in self._account.resources.items() if its == NICS]
        if kind == NICS:
            is_used = self._account.find_user(name) is not None
        elif kind == DISKS:
            is_used = any(one.disk_name == name for one in self._account.list_machines())
        else:
            is_used = any(name in _list_references(nic) for nic in nics)
        if is_used:
            # The codes differ by kind; each of them is a refusal with status 400.
            raise ApiError(400, f"{kind.rpartition('/')[2]}InUse", f"{name} is in use")

    def _describe(self, resource: ArmResource) -> ArmResource:
        if resource.type != ADDRESSES:
            return resource
        for (kind, _), nic in self._account.resources.items():
            if kind == NICS and last_segment(find_address(nic)["id"]) == resource.name:
                machine = self._account.find_user(nic.name)
                if machine is not None and machine.address:
                    properties = {**resource.properties, "ipAddress": machine.address}
                    return replace(resource, properties=properties)
        return resource


def _list_references(nic: ArmResource) -> tuple[str, str, str]:
    """Return the names of the network, the security group and the address of an interface."""
    network = find_subnet(nic).rpartition("/subnets/")[0]
    ids = (network, nic.properties["networkSecurityGroup"]["id"], find_address(nic)["id"])
    one, two, three = map(last_segment, ids)
    return one, two, three
