"""The actions that labctl needs at Azure: docs/azure.md has them as a custom role."""

from __future__ import annotations

from fnmatch import fnmatchcase

PAGE = "labctl docs azure"
ROLE_HINT = f"have an owner of the subscription assign labctl's role\n{PAGE}   # the role"

_COMPUTE, _NETWORK = "Microsoft.Compute", "Microsoft.Network"
_SCHEDULE = "Microsoft.ComputeSchedule/locations"
VM = f"{_COMPUTE}/virtualMachines"
READ, WRITE, DELETE = f"{VM}/read", f"{VM}/write", f"{VM}/delete"
START, DEALLOCATE = f"{VM}/start/action", f"{VM}/deallocate/action"
CONSOLE = f"{VM}/retrieveBootDiagnosticsData/action"
READ_DISK, DELETE_DISK = f"{_COMPUTE}/disks/read", f"{_COMPUTE}/disks/delete"
READ_SKUS, READ_USAGES = f"{_COMPUTE}/skus/read", f"{_COMPUTE}/locations/usages/read"
READ_IP, WRITE_IP = f"{_NETWORK}/publicIPAddresses/read", f"{_NETWORK}/publicIPAddresses/write"
READ_NIC, WRITE_NIC = f"{_NETWORK}/networkInterfaces/read", f"{_NETWORK}/networkInterfaces/write"
READ_NET, WRITE_NET = f"{_NETWORK}/virtualNetworks/read", f"{_NETWORK}/virtualNetworks/write"
READ_NSG = f"{_NETWORK}/networkSecurityGroups/read"
WRITE_NSG = f"{_NETWORK}/networkSecurityGroups/write"
WRITE_RULE = f"{_NETWORK}/networkSecurityGroups/securityRules/write"
READ_GROUP = "Microsoft.Resources/subscriptions/resourceGroups/read"
WRITE_GROUP = "Microsoft.Resources/subscriptions/resourceGroups/write"
WRITE_TAGS = "Microsoft.Resources/tags/write"
READ_SUBSCRIPTION = "Microsoft.Resources/subscriptions/read"
READ_PERMISSIONS = "Microsoft.Authorization/permissions/read"
READ_PROVIDER = "Microsoft.Resources/subscriptions/providers/read"
SUBMIT_TIMER = f"{_SCHEDULE}/virtualMachinesSubmitDeallocate/action"
CANCEL_TIMER = f"{_SCHEDULE}/virtualMachinesCancelOperations/action"

# Those without which `up` and `down` fail.
REQUIRED = (
    READ,
    WRITE,
    DELETE,
    READ_DISK,
    f"{_COMPUTE}/disks/write",
    DELETE_DISK,
    READ_IP,
    WRITE_IP,
    f"{_NETWORK}/publicIPAddresses/delete",
    f"{_NETWORK}/publicIPAddresses/join/action",
    READ_NIC,
    WRITE_NIC,
    f"{_NETWORK}/networkInterfaces/delete",
    f"{_NETWORK}/networkInterfaces/join/action",
    READ_NET,
    WRITE_NET,
    f"{_NETWORK}/virtualNetworks/delete",
    f"{_NETWORK}/virtualNetworks/subnets/join/action",
    READ_NSG,
    WRITE_NSG,
    f"{_NETWORK}/networkSecurityGroups/delete",
    f"{_NETWORK}/networkSecurityGroups/join/action",
    WRITE_RULE,
    READ_GROUP,
    WRITE_TAGS,
)
# Those of one command each: what it does without the action.
OPTIONAL = {
    WRITE_GROUP: "creating the resource group",
    READ_SUBSCRIPTION: "the state of the subscription in labctl doctor",
    READ_SKUS: "which sizes the subscription may use",
    READ_USAGES: "the quotas in labctl offers and labctl doctor",
    READ_PERMISSIONS: "the check of the permissions themselves",
    START: "labctl up of a stopped server",
    DEALLOCATE: "labctl stop",
    CONSOLE: "the boot output of a server that ssh does not reach",
    READ_PROVIDER: "the timer at Azure",
    SUBMIT_TIMER: "the timer at Azure",
    CANCEL_TIMER: "the timer at Azure",
}


def is_granted(action: str, actions: tuple[str, ...], not_actions: tuple[str, ...]) -> bool:
    """Whether a role with these patterns allows an action; Azure ignores the case."""

    def matches(pattern: str) -> bool:
        return fnmatchcase(action.lower(), pattern.lower())

    return any(map(matches, actions)) and not any(map(matches, not_actions))
