"""The checks of `labctl doctor`: all that can be tried at Google Cloud without spending money."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labctl.decoding import decode_json
from labctl.errors import LabError
from labctl.model import Check, Need, Offer, Value
from labctl.providers import QuotaRoom
from labctl.providers.gcp import images, network, permissions
from labctl.providers.gcp.clients import TIMEOUT_S, GcpClients
from labctl.providers.gcp.errors import QUOTAS_LINK, translate_errors
from labctl.providers.gcp.offers import load_prices
from labctl.providers.gcp.quotas import QuotaTable, read_quotas
from labctl.providers.gcp.replies import GceProject
from labctl.providers.gcp.settings import GcpSettings
from labctl.text import duration_text

RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
CREDENTIALS = "credentials"


class PermissionsReply(Value, frozen=True):
    """Those of the permissions in question that the caller has."""

    permissions: tuple[str, ...] = ()


def run_checks(
    clients: GcpClients,
    settings: GcpSettings,
    need: Need,
    list_offers: Callable[[Need], list[Offer]],
    cache_dir: Path | None,
    now: float,
) -> list[Check]:
    """Run all checks. Credentials that do not work are the only result then."""
    identity = check_credentials(clients, CREDENTIALS)
    if not identity.ok:
        return [identity]
    checks = [identity, *_check_permissions(clients, settings)]
    checks.append(_run("address", lambda: _describe_networks(settings)))
    checks.append(_run("prices", lambda: _describe_prices(settings, cache_dir, now)))
    try:
        offers = list_offers(need)
    except LabError as error:
        return [*checks, _describe_failure("offers", error), *_check_quotas(clients, None)]
    checks.append(_run("image", lambda: _describe_image(clients, settings, offers[0])))
    return [*checks, *_check_quotas(clients, offers[0])]


def check_credentials(clients: GcpClients, name: str) -> Check:
    """Check that Google accepts the credentials for the project; `name` is that of the check."""
    return _run(name, lambda: _describe_project(clients))


def compute_room(clients: GcpClients, offer: Offer) -> QuotaRoom:
    """Compute how many machines of this offer the project's quotas allow."""
    limits = read_quotas(clients).list_limits(offer)
    if not limits:
        return QuotaRoom(next=f"ask for more at {QUOTAS_LINK}")
    least = min(limits, key=lambda one: one.room)
    return QuotaRoom(
        most=least.room,
        quota=least.name,
        code=least.metric,
        units="GPUs" if "GPUS" in least.metric else "vCPUs",
        limit=least.limit,
        each=least.amount,
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


def _describe_project(clients: GcpClients) -> str:
    project = clients.read(GceProject, "projects", "get", permissions.READ_PROJECT)
    return f"project {project.name}"


def _describe_networks(settings: GcpSettings) -> str:
    return f"ssh is open to {', '.join(network.list_ssh_networks(settings))}"


def _describe_prices(settings: GcpSettings, cache_dir: Path | None, now: float) -> str:
    catalog = load_prices(settings, cache_dir)
    age = duration_text(max(0.0, now - catalog.published_at))
    return f"{len(catalog.rows)} prices of gpuhunt's catalog, {age} old"


def _describe_image(clients: GcpClients, settings: GcpSettings, offer: Offer) -> str:
    image = images.find_image(clients, settings, offer)
    return f"{offer.type} in {offer.zone} would boot {image.name}"


def _check_permissions(clients: GcpClients, settings: GcpSettings) -> list[Check]:
    """Check the permissions at Google's Resource Manager, whose API a project may not enable."""
    try:
        granted = _list_granted(clients, settings)
    except LabError as error:
        detail = f"not checked: {error.what}"
        command = "gcloud services enable cloudresourcemanager.googleapis.com"
        return [Check(name="permissions", ok=True, skipped=True, detail=detail, next=command)]
    missing = [name for name in permissions.REQUIRED if name not in granted]
    checks = [
        Check(
            name=f"permission {name}",
            ok=False,
            detail="these credentials do not have it",
            next=permissions.ROLE_HINT,
        )
        for name in missing
    ]
    checks += [
        Check(
            name=f"permission {name}",
            ok=True,
            warning=True,
            detail=f"missing; needed for {use}",
            next=permissions.ROLE_HINT,
        )
        for name, use in permissions.OPTIONAL.items()
        if name not in granted
    ]
    count = len(permissions.REQUIRED) + len(permissions.OPTIONAL)
    return checks or [Check(name="permissions", ok=True, detail=f"all {count}")]


def _list_granted(clients: GcpClients, settings: GcpSettings) -> tuple[str, ...]:
    base = (settings.endpoint_url or RESOURCE_MANAGER).rstrip("/")
    wanted = [*permissions.REQUIRED, *permissions.OPTIONAL]
    with translate_errors("resourcemanager.projects.testIamPermissions"):
        response = clients.open_session().post(
            f"{base}/v1/projects/{clients.project}:testIamPermissions",
            json={"permissions": wanted},
            timeout=TIMEOUT_S,
        )
        response.raise_for_status()
        return decode_json(response.content, PermissionsReply).permissions


def _check_quotas(clients: GcpClients, offer: Offer | None) -> list[Check]:
    """Check the quotas of an offer; without one, that the project may have a GPU at all."""
    try:
        table = read_quotas(clients)
    except LabError as error:
        return [_describe_failure("quota", error)]
    return [_describe_quota(table, offer)] if offer else []


def _describe_quota(table: QuotaTable, offer: Offer) -> Check:
    limits = table.list_limits(offer)
    lack = table.find_lack(offer)
    text = ", ".join(f"{one.name}: {one.usage:.0f} of {one.limit:.0f} used" for one in limits)
    return Check(
        name="quota",
        ok=not lack,
        detail=f"{offer.type}: {text or 'unknown'}",
        next=f"ask for more at {QUOTAS_LINK}" if lack else "",
    )
