"""The checks of `labctl doctor`: all that can be tried at Azure without spending money."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from labctl.errors import DeniedError, LabError
from labctl.model import Check, Need, Offer
from labctl.providers import QuotaRoom
from labctl.providers.azure import network, permissions
from labctl.providers.azure.arm import Arm
from labctl.providers.azure.errors import BILLING_LINK, QUOTAS_LINK
from labctl.providers.azure.launch import choose_image
from labctl.providers.azure.quotas import read_limits
from labctl.providers.azure.replies import PermissionReply, SubscriptionReply
from labctl.providers.azure.settings import AzureSettings
from labctl.providers.azure.timer import explain_missing_setup

CREDENTIALS = "credentials"
SUBSCRIPTIONS, PERMISSIONS = "2022-12-01", "2022-04-01"
ENABLED = "Enabled"


def run_checks(
    arm: Arm,
    settings: AzureSettings,
    need: Need,
    list_offers: Callable[[Need], list[Offer]],
) -> list[Check]:
    """Run all checks. Credentials that do not work are the only result then."""
    identity = check_credentials(arm, CREDENTIALS)
    if not identity.ok:
        return [identity]
    checks = [identity, *_check_permissions(arm)]
    checks.append(_run("address", lambda: _describe_networks(settings)))
    missing = explain_missing_setup(arm)
    detail = missing or "a server is deallocated at its deadline even if it hangs"
    checks.append(Check(name="timer", ok=True, warning=bool(missing), detail=detail))
    try:
        offers = list_offers(need)
    except LabError as error:
        return [*checks, _describe_failure("offers", error)]
    first = offers[0]
    image = choose_image(settings, first)
    detail = f"{first.type} in {first.region} would boot {image}"
    return [*checks, Check(name="image", ok=True, detail=detail), _check_quota(arm, first)]


def check_credentials(arm: Arm, name: str) -> Check:
    """Check that Azure accepts the credentials, and that the subscription may spend money."""
    return _run(name, lambda: _describe_subscription(arm))


def compute_room(arm: Arm, offer: Offer) -> QuotaRoom:
    """Compute how many machines of this offer the quotas of its region allow."""
    quotas = read_limits(arm, [offer.region]).list_quotas(offer)
    if not quotas or not offer.cpus:
        return QuotaRoom(next=f"ask for more at {QUOTAS_LINK}")
    least = min(quotas, key=lambda quota: quota.limit)
    return QuotaRoom(
        most=int(least.limit // offer.cpus),
        quota=least.text,
        code=least.name,
        units="vCPUs",
        limit=least.limit,
        each=offer.cpus,
        next=f"ask for more at {QUOTAS_LINK}",
    )


def _run(name: str, probe: Callable[[], str]) -> Check:
    """Return the result of `probe` as a Check, or its LabError with the way to fix it."""
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabError as error:
        return _describe_failure(name, error)


def _describe_failure(name: str, error: LabError) -> Check:
    detail = f"{error.what}: {error.why}" if error.why else error.what
    return Check(name=name, ok=False, detail=detail, next=error.hint)


def _describe_subscription(arm: Arm) -> str:
    found = arm.find(
        SubscriptionReply, arm.subscription_path(), SUBSCRIPTIONS, permissions.READ_SUBSCRIPTION
    )
    if found is None:
        return f"subscription {arm.subscription}"
    if found.state != ENABLED:
        raise DeniedError(
            f"the subscription {found.display_name} is {found.state}",
            why="its credit is used up, its spending limit is reached, or it has ended",
            hint=BILLING_LINK,
        )
    return f"subscription {found.display_name} ({arm.subscription})"


def _describe_networks(settings: AzureSettings) -> str:
    return f"ssh is open to {', '.join(network.list_ssh_networks(settings))}"


def _check_permissions(arm: Arm) -> list[Check]:
    """Check the actions in the resource group, which may not exist before the first server."""
    path = f"{arm.group_path}/providers/Microsoft.Authorization/permissions"
    try:
        granted = arm.list_all(PermissionReply, path, PERMISSIONS, permissions.READ_PERMISSIONS)
    except LabError as error:
        detail = f"not checked: {error.what}"
        return [Check(name="permissions", ok=True, skipped=True, detail=detail)]
    if not granted:
        detail = "not checked: the resource group does not exist yet"
        return [Check(name="permissions", ok=True, skipped=True, detail=detail)]
    checks = [
        _describe_lack(action, "", ok=False)
        for action in _list_missing(granted, permissions.REQUIRED)
    ]
    checks += [
        _describe_lack(action, permissions.OPTIONAL[action], ok=True)
        for action in _list_missing(granted, permissions.OPTIONAL)
    ]
    count = len(permissions.REQUIRED) + len(permissions.OPTIONAL)
    return checks or [Check(name="permissions", ok=True, detail=f"all {count}")]


def _list_missing(granted: Iterable[PermissionReply], actions: Iterable[str]) -> list[str]:
    roles = list(granted)
    return [
        action
        for action in actions
        if not any(permissions.is_granted(action, one.actions, one.not_actions) for one in roles)
    ]


def _describe_lack(action: str, use: str, *, ok: bool) -> Check:
    return Check(
        name=f"permission {action}",
        ok=ok,
        warning=ok,
        detail=f"missing; needed for {use}" if use else "these credentials do not have it",
        next=permissions.ROLE_HINT,
    )


def _check_quota(arm: Arm, offer: Offer) -> Check:
    try:
        quotas = read_limits(arm, [offer.region]).list_quotas(offer)
    except LabError as error:
        return _describe_failure("quota", error)
    text = ", ".join(f"{one.text}: {one.usage:.0f} of {one.limit:.0f} vCPUs used" for one in quotas)
    lacks = [one for one in quotas if one.limit < offer.cpus]
    return Check(
        name="quota",
        ok=not lacks,
        detail=f"{offer.type}: {text or 'unknown'}",
        next=f"ask for more at {QUOTAS_LINK}" if lacks else "",
    )
