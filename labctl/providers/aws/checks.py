"""The checks of `labctl doctor`: credentials, permissions, network, image and quotas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.model import Check, Need, Offer
from labctl.providers import QuotaRoom
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import POLICY_PAGE, translate_errors
from labctl.providers.aws.images import find_image
from labctl.providers.aws.network import find_subnet, list_ssh_networks
from labctl.providers.aws.permissions import (
    count_checked_actions,
    list_denied_actions,
    require_run_permission,
)
from labctl.providers.aws.quotas import find_quota

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings


def run_checks(
    clients: Clients,
    settings: AwsSettings,
    regions: Sequence[str],
    need: Need,
    offers: Callable[[Need], list[Offer]],
) -> list[Check]:
    """Run all checks. Credentials that do not work are the only result then."""
    region = regions[0]
    identity = check_credentials(clients, region, "credentials")
    if not identity.ok:
        return [identity]
    with ThreadPoolExecutor(3) as threads:
        permissions = threads.submit(_check_permissions, clients, region)
        address = threads.submit(_run_check, "address", lambda: _describe_networks(settings))
        best = _find_best_offers(need, offers)
        if isinstance(best, Check):
            return [identity, *permissions.result(), address.result(), best]
        launch = _check_launch(clients, settings, best[0])
        quotas = _check_quotas(clients, need, best)
    return [
        identity,
        *permissions.result(),
        address.result(),
        launch,
        *quotas,
        *_check_guard_settings(settings),
    ]


def check_credentials(clients: Clients, region: str, name: str) -> Check:
    """Check that AWS accepts the credentials; `name` is the name of the check."""
    return _run_check(name, lambda: _get_identity(clients, region))


def _run_check(name: str, probe: Callable[[], str]) -> Check:
    """Return the result of `probe` as a Check, or its LabError with the way to fix it."""
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabError as error:
        detail = f"{error.what}: {error.why}" if error.why else error.what
        return Check(name=name, ok=False, detail=detail, next=error.hint)


def _get_identity(clients: Clients, region: str) -> str:
    with translate_errors():
        return clients.get_sts(region).get_caller_identity()["Arn"]


def _check_permissions(clients: Clients, region: str) -> list[Check]:
    try:
        denied = list_denied_actions(clients.get_ec2(region))
    except LabError as error:
        return [Check(name="permissions", ok=False, detail=error.what, next=error.hint)]
    if not denied:
        return [
            Check(
                name="permissions",
                ok=True,
                detail=f"{count_checked_actions()} EC2 actions, by dry run",
            )
        ]
    return [
        Check(
            name=f"permission {action}",
            ok=False,
            detail="these credentials do not have it",
            next=f"have {action} allowed\n{POLICY_PAGE}   # the policy that labctl needs",
        )
        for action in denied
    ]


def _describe_networks(settings: AwsSettings) -> str:
    return f"ssh is open to {', '.join(list_ssh_networks(settings))}"


def _find_best_offers(need: Need, offers: Callable[[Need], list[Offer]]) -> list[Offer] | Check:
    """Return the first spot offer and the first on-demand offer, the better one first."""
    try:
        listed = offers(need)
    except LabError as error:
        return Check(name="offers", ok=False, detail=describe_error(error), next=error.hint)
    first = {offer.spot: offer for offer in reversed(listed)}
    return sorted(first.values(), key=listed.index)


def _check_launch(clients: Clients, settings: AwsSettings, offer: Offer) -> Check:
    """Check that there is an image, a subnet, and the permission to launch the offer there."""

    def probe() -> str:
        ec2 = clients.get_ec2(offer.region)
        machine_image = find_image(clients, settings, offer)
        subnet = find_subnet(ec2, settings, offer.zone)
        require_run_permission(ec2, machine_image.id, offer.type, subnet.subnet)
        return f"{offer.type} would boot {machine_image.id} in {subnet.zone} ({subnet.vpc})"

    return _run_check("image and network", probe)


def _check_quotas(clients: Clients, need: Need, offers: list[Offer]) -> list[Check]:
    """Check one quota per market. With `spot: prefer` one sufficient quota is enough."""
    quotas = [(offer, *_read_quota(clients, offer)) for offer in offers]
    enough = any(value is not None and value >= offer.cpus for offer, value, _ in quotas)
    listed = []
    for offer, value, text in quotas:
        quota = find_quota(offer.type, offer.spot)
        market = "spot" if offer.spot else "on-demand"
        suffices = value is not None and value >= offer.cpus
        detail = f"{text}; {offer.type} needs {offer.cpus} ({quota.name}, {offer.region})"
        if not suffices and enough:
            detail += f"; no {market} servers until it is raised"
        listed.append(
            Check(
                name=f"quota {market}",
                ok=suffices or (enough and need.spot == "prefer"),
                warning=not suffices,
                detail=detail,
                next="" if suffices else f"ask for more at {quota.link(offer.region)}",
            )
        )
    return listed


def _read_quota(clients: Clients, offer: Offer) -> tuple[float | None, str]:
    """Return the quota in vCPUs, None if unknown, and a text for users."""
    quota = find_quota(offer.type, offer.spot)
    try:
        with translate_errors():
            answer = clients.get_quotas(offer.region).get_service_quota(
                ServiceCode="ec2", QuotaCode=quota.code
            )
    except LabError as error:
        return None, f"unknown: {error.what}"
    value = float(answer["Quota"]["Value"])
    return value, f"{value:.0f} vCPUs"


def compute_room(clients: Clients, offer: Offer) -> QuotaRoom:
    """Compute how many machines of this type the account's quota of vCPUs allows."""
    quota = find_quota(offer.type, offer.spot)
    value, _ = _read_quota(clients, offer)
    return QuotaRoom(
        most=None if value is None or not offer.cpus else int(value // offer.cpus),
        quota=f"{quota.name}, {offer.region}",
        code=quota.code,
        units="vCPUs",
        limit=value,
        each=float(offer.cpus),
        next=f"ask for more at {quota.link(offer.region)}",
    )


def _check_guard_settings(settings: AwsSettings) -> list[Check]:
    """Check two optional guards, and say what is missing without them."""
    deadline = "nothing at AWS ends a server that hangs: server.aws.scheduler_role is not set"
    profile = "a server cannot keep its disk by itself: server.aws.instance_profile is not set"
    ready = bool(settings.scheduler_role)
    return [
        Check(
            name="deadline at AWS",
            ok=True,
            warning=not ready,
            detail=settings.scheduler_role if ready else deadline,
            next="" if ready else f"{POLICY_PAGE}   # that role and its policy",
        ),
        Check(
            name="instance profile",
            ok=True,
            warning=not settings.instance_profile,
            detail=settings.instance_profile or profile,
            next="" if settings.instance_profile else f"{POLICY_PAGE}   # that profile",
        ),
    ]
