"""Firewall rules: only the caller's own address reaches SSH, whatever else the network admits.

Google's network `default` admits SSH from everywhere. So each group of servers has a rule of higher
priority that denies everything, and above it one for each owner that admits his address. A rule is
the owner's alone, so that no two owners change the same one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from labctl.errors import BusyError, LabError
from labctl.providers.caller_network import find_caller_network
from labctl.providers.gcp import labels, permissions
from labctl.providers.gcp.clients import GcpClients, is_absent
from labctl.providers.gcp.errors import EXISTS, get_reasons, make_operation_error
from labctl.providers.gcp.labels import FirewallRecord, ServerRecord
from labctl.providers.gcp.replies import FirewallRule, GceOperation, decode_reply
from labctl.providers.gcp.settings import GcpSettings

# Lower numbers win; the rules of a new network have 1000 or more.
ADMIT_PRIORITY, DENY_PRIORITY = 800, 900
DENY, GANG = "deny", "gang"
ANYWHERE = "0.0.0.0/0"
# seconds to wait until a rule holds; it takes a few
RULE_S = 60.0


class LabGroup(NamedTuple):
    """The servers that share firewall rules: those of a lab, or of a course."""

    id: str
    name: str

    @property
    def tag(self) -> str:
        return labels.make_network_tag(self.id)


def find_group(record: ServerRecord) -> LabGroup:
    return LabGroup(record.group, record.group_name)


def list_ssh_networks(settings: GcpSettings) -> tuple[str, ...]:
    """List the networks that may reach SSH: those of the settings, else this machine's address."""
    if settings.ssh_from:
        return settings.ssh_from
    return (find_caller_network(settings.address_from, "server.gcp.ssh_from"),)


def get_network_path(clients: GcpClients, settings: GcpSettings) -> str:
    """Return the network's path below Google's API."""
    project, _, name = settings.network.rpartition("/")
    return f"projects/{project or clients.project}/global/networks/{name}"


def ensure_rules(
    clients: GcpClients, settings: GcpSettings, group: LabGroup, owner: str, *, gang: bool
) -> None:
    """Create the rules of a group that are missing, and wait until they hold."""
    rules = [_build_deny_rule(clients, settings, group)]
    rules.append(_build_admit_rule(clients, settings, group, owner, list_ssh_networks(settings)))
    if gang:
        rules.append(_build_gang_rule(clients, settings, group))
    with ThreadPoolExecutor(len(rules)) as threads:
        list(threads.map(partial(_ensure_rule, clients), rules))


def admit(clients: GcpClients, settings: GcpSettings, group: LabGroup, owner: str) -> str:
    """Admit the allowed networks; return those that are new, with commas, "" for none."""
    networks = list_ssh_networks(settings)
    rule = _build_admit_rule(clients, settings, group, owner, networks)
    if _find_rule(clients, labels.make_rule_name(group.id, DENY)) is None:
        _ensure_rule(clients, _build_deny_rule(clients, settings, group))
    before = _find_rule(clients, rule.name)
    admitted = before.source_ranges if before else ()
    if new := sorted(set(networks) - set(admitted)):
        _ensure_rule(clients, rule)
    return ", ".join(new)


def list_rules(clients: GcpClients) -> list[FirewallRule]:
    """List labctl's rules in the project."""
    return clients.list_all(
        FirewallRule,
        "firewalls",
        "list",
        permissions.LIST_FIREWALLS,
        filter=f'name eq "{labels.PREFIX}.*"',
    )


def delete_rule(clients: GcpClients, name: str) -> None:
    clients.call("firewalls", "delete_unary", permissions.DELETE_FIREWALL, firewall=name)


def _ensure_rule(clients: GcpClients, rule: Any) -> None:
    """Create a rule, or change its networks if it exists with others."""
    try:
        _wait(clients, _insert_rule(clients, rule), permissions.CREATE_FIREWALL)
        return
    except _RuleExistsError:
        existing = _find_rule(clients, rule.name)
    if existing is None:
        raise BusyError(
            f"Google does not show the firewall rule {rule.name} yet",
            why="another process has just created it",
            hint="run the same command again in a minute",
        )
    if set(existing.source_ranges) != set(rule.source_ranges):
        change = clients.types.Firewall(source_ranges=list(rule.source_ranges))
        message = clients.call(
            "firewalls",
            "patch_unary",
            permissions.UPDATE_FIREWALL,
            firewall=rule.name,
            firewall_resource=change,
        )
        _wait(clients, message, permissions.UPDATE_FIREWALL)


class _RuleExistsError(LabError):
    """A rule of this name exists."""


def _insert_rule(clients: GcpClients, rule: Any) -> Any:
    try:
        return clients.call(
            "firewalls", "insert_unary", permissions.CREATE_FIREWALL, firewall_resource=rule
        )
    except LabError as error:
        cause: Any = error.__cause__
        if hasattr(cause, "errors") and get_reasons(cause) & EXISTS:
            raise _RuleExistsError(f"{rule.name} exists") from error
        raise


def _wait(clients: GcpClients, message: Any, call: str) -> None:
    operation = decode_reply(message, GceOperation)

    def read() -> GceOperation:
        return clients.read(
            GceOperation,
            "global_operations",
            "get",
            permissions.READ_OPERATION,
            operation=operation.name,
        )

    done = clients.wait_for(read, operation, RULE_S)
    if any(problem.code in EXISTS for problem in done.error.errors):
        raise _RuleExistsError("the rule exists")
    if error := make_operation_error(done, "the firewall rule", call):
        raise error
    if done.status != "DONE":
        raise BusyError(
            "Google has not applied a firewall rule yet",
            why=f"{done.name} is still in progress",
            hint="run the same command again in a minute",
        )


def _find_rule(clients: GcpClients, name: str) -> FirewallRule | None:
    try:
        return clients.read(
            FirewallRule, "firewalls", "get", permissions.READ_FIREWALL, firewall=name
        )
    except LabError as error:
        if is_absent(error):
            return None
        raise


def _build_deny_rule(clients: GcpClients, settings: GcpSettings, group: LabGroup) -> Any:
    types = clients.types
    return types.Firewall(
        name=labels.make_rule_name(group.id, DENY),
        description=labels.encode_record(FirewallRecord(lab=group.name, lab_id=group.id)),
        network=get_network_path(clients, settings),
        direction="INGRESS",
        priority=DENY_PRIORITY,
        denied=[types.Denied(I_p_protocol="all")],
        source_ranges=[ANYWHERE],
        target_tags=[group.tag],
    )


def _build_admit_rule(
    clients: GcpClients,
    settings: GcpSettings,
    group: LabGroup,
    owner: str,
    networks: tuple[str, ...],
) -> Any:
    types = clients.types
    record = FirewallRecord(lab=group.name, lab_id=group.id, owner=owner)
    return types.Firewall(
        name=labels.make_rule_name(group.id, labels.make_owner_part(owner)),
        description=labels.encode_record(record),
        network=get_network_path(clients, settings),
        direction="INGRESS",
        priority=ADMIT_PRIORITY,
        allowed=[types.Allowed(I_p_protocol="tcp", ports=[str(labels.SSH_PORT)])],
        source_ranges=sorted(networks),
        target_tags=[group.tag],
    )


def _build_gang_rule(clients: GcpClients, settings: GcpSettings, group: LabGroup) -> Any:
    """Build the rule by which the servers of a gang reach one another at every port."""
    types = clients.types
    return types.Firewall(
        name=labels.make_rule_name(group.id, GANG),
        description=labels.encode_record(FirewallRecord(lab=group.name, lab_id=group.id)),
        network=get_network_path(clients, settings),
        direction="INGRESS",
        priority=ADMIT_PRIORITY,
        allowed=[types.Allowed(I_p_protocol="all")],
        source_tags=[group.tag],
        target_tags=[group.tag],
    )
