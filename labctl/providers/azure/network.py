"""The network of a lab or a course: a virtual network and a security group in each region.

Azure's own rules let the machines of one virtual network reach one another, so the security group
denies that unless they form a gang. Above it, each owner has one rule that admits his address to
SSH: no two owners change the same one.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from labctl.errors import NotFoundError
from labctl.providers.azure import permissions, tags
from labctl.providers.azure.arm import RESOURCES, Arm
from labctl.providers.azure.bodies import (
    AddressSpace,
    GroupBody,
    NetworkBody,
    NetworkBodyProperties,
    NsgBody,
    NsgProperties,
    RuleBody,
    RuleProperties,
    SubnetBody,
    SubnetBodyProperties,
)
from labctl.providers.azure.replies import NamedReply, NsgReply, RuleReply
from labctl.providers.azure.settings import AzureSettings
from labctl.providers.azure.tags import AzureRecord
from labctl.providers.caller_network import find_caller_network

VERSION = "2024-05-01"
NETWORKS = "Microsoft.Network/virtualNetworks"
NSGS = "Microsoft.Network/networkSecurityGroups"
ADDRESS_SPACE, SUBNET = "10.77.0.0/16", "default"
# Lower numbers win, and no two rules of a group have the same one.
FIRST_PRIORITY, LAST_PRIORITY, GANG_PRIORITY, DENY_PRIORITY = 200, 3800, 3900, 4000
PEERS = "VirtualNetwork"
WAIT_S = 60.0


class NetworkGroup(NamedTuple):
    """The servers that share a network: those of a lab, or of a course, in one region."""

    id: str
    name: str
    region: str

    @property
    def network(self) -> str:
        return tags.make_network_name(self.id, self.region, "net")

    @property
    def nsg(self) -> str:
        return tags.make_network_name(self.id, self.region, "nsg")


def find_group(record: AzureRecord) -> NetworkGroup:
    return NetworkGroup(record.group, record.group_name, record.offer.region)


def list_ssh_networks(settings: AzureSettings) -> tuple[str, ...]:
    """List the networks that may reach SSH: those of the settings, else this machine's address."""
    if settings.ssh_from:
        return settings.ssh_from
    return (find_caller_network(settings.address_from, "server.azure.ssh_from"),)


def ensure_network(
    arm: Arm, settings: AzureSettings, group: NetworkGroup, owner: str, *, gang: bool
) -> None:
    """Create what is missing: resource group, security group with its rules, virtual network."""
    networks = list_ssh_networks(settings)
    _ensure_resource_group(arm, settings)
    labels = tags.make_search_tags(group.name, group.id, owner)
    nsg = _ensure_nsg(arm, group, labels)
    _ensure_rule(arm, nsg, _make_owner_rule(nsg, owner, networks))
    if gang:
        _ensure_rule(arm, nsg, _make_peer_rule("gang", "Allow", GANG_PRIORITY))
    path = arm.resource_path(NETWORKS, group.network)
    # Its subnets must not be replaced, so an existing one is left as it is.
    if arm.find(NamedReply, path, VERSION, permissions.READ_NET) is None:
        subnet = SubnetBody(
            name=SUBNET, properties=SubnetBodyProperties(address_prefix=ADDRESS_SPACE)
        )
        body = NetworkBody(
            location=group.region,
            tags=labels,
            properties=NetworkBodyProperties(
                address_space=AddressSpace(address_prefixes=(ADDRESS_SPACE,)), subnets=(subnet,)
            ),
        )
        arm.create_or_replace(path, VERSION, permissions.WRITE_NET, body, WAIT_S)


def get_subnet_path(arm: Arm, group: NetworkGroup) -> str:
    return f"{arm.resource_path(NETWORKS, group.network)}/subnets/{SUBNET}"


def admit(arm: Arm, settings: AzureSettings, group: NetworkGroup, owner: str) -> str:
    """Admit the allowed networks; return those that are new, with commas, "" for none."""
    networks = list_ssh_networks(settings)
    nsg = arm.find(NsgReply, arm.resource_path(NSGS, group.nsg), VERSION, permissions.READ_NSG)
    if nsg is None:
        raise NotFoundError(
            f"Azure does not list the security group {group.nsg}",
            why="it may have been deleted",
            hint=lambda subject: subject.down,
        )
    rule = _make_owner_rule(nsg, owner, networks)
    before = _find_rule(nsg, rule.name)
    admitted = before.properties.source_address_prefixes if before else ()
    _ensure_rule(arm, nsg, rule)
    return ", ".join(sorted(set(networks) - set(admitted)))


def _ensure_resource_group(arm: Arm, settings: AzureSettings) -> None:
    path = arm.group_path
    if arm.find(NamedReply, path, RESOURCES, permissions.READ_GROUP) is None:
        body = GroupBody(location=settings.regions[0], tags={tags.OURS: "1"})
        arm.create_or_replace(path, RESOURCES, permissions.WRITE_GROUP, body, WAIT_S)


def _ensure_nsg(arm: Arm, group: NetworkGroup, labels: dict[str, str]) -> NsgReply:
    """Return the security group; a new one has the rule that keeps machines apart."""
    path = arm.resource_path(NSGS, group.nsg)
    nsg = arm.find(NsgReply, path, VERSION, permissions.READ_NSG)
    if nsg is not None:
        return nsg
    rules = (_make_peer_rule("deny-peers", "Deny", DENY_PRIORITY),)
    body = NsgBody(
        location=group.region, tags=labels, properties=NsgProperties(security_rules=rules)
    )
    arm.create_or_replace(path, VERSION, permissions.WRITE_NSG, body, WAIT_S)
    return NsgReply(name=group.nsg)


def _ensure_rule(arm: Arm, nsg: NsgReply, rule: RuleBody) -> None:
    """Create a rule, or change its networks if it exists with others."""
    before = _find_rule(nsg, rule.name)
    wanted = rule.properties.source_address_prefixes
    if before and set(before.properties.source_address_prefixes) == set(wanted):
        return
    path = f"{arm.resource_path(NSGS, nsg.name)}/securityRules/{rule.name}"
    arm.create_or_replace(path, VERSION, permissions.WRITE_RULE, rule, WAIT_S)


def _find_rule(nsg: NsgReply, name: str) -> RuleReply | None:
    return next((rule for rule in nsg.properties.security_rules if rule.name == name), None)


def _make_owner_rule(nsg: NsgReply, owner: str, networks: tuple[str, ...]) -> RuleBody:
    name = f"admit-{tags.make_owner_part(owner)}"
    rules = nsg.properties.security_rules
    taken = {rule.properties.priority for rule in rules if rule.name != name}
    return RuleBody(
        name=name,
        properties=RuleProperties(
            protocol="Tcp",
            access="Allow",
            direction="Inbound",
            priority=_choose_priority(owner, taken),
            destination_port_range=str(tags.SSH_PORT),
            source_port_range="*",
            destination_address_prefix="*",
            source_address_prefixes=tuple(sorted(networks)),
        ),
    )


def _choose_priority(owner: str, taken: set[int]) -> int:
    """Return the owner's own priority, or the next one that is free."""
    span = LAST_PRIORITY - FIRST_PRIORITY
    first = int(hashlib.sha256(owner.encode()).hexdigest(), 16) % span
    order = (FIRST_PRIORITY + (first + step) % span for step in range(span))
    return next(priority for priority in order if priority not in taken)


def _make_peer_rule(name: str, access: str, priority: int) -> RuleBody:
    return RuleBody(
        name=name,
        properties=RuleProperties(
            protocol="*",
            access=access,
            direction="Inbound",
            priority=priority,
            destination_port_range="*",
            source_port_range="*",
            destination_address_prefix="*",
            source_address_prefix=PEERS,
        ),
    )
