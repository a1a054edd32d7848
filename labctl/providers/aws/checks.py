"""What `doctor` looks at: who we are, what we may do, how many machines the account may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from labctl.errors import LabError, NoOfferError
from labctl.model import Check, Need, Offer
from labctl.providers import Room
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import POLICY_PAGE, told
from labctl.providers.aws.images import image
from labctl.providers.aws.network import caller_network, place
from labctl.providers.aws.permissions import denied_actions, may_run, tried
from labctl.providers.aws.quotas import quota_for

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings


def checks(
    clients: Clients,
    settings: AwsSettings,
    regions: Sequence[str],
    need: Need,
    offers: Callable[[Need], list[Offer]],
) -> list[Check]:
    """Without credentials that work, that alone."""
    region = regions[0]
    who = _told("credentials", lambda: _identity(clients, region))
    if not who.ok:
        return [who]
    with ThreadPoolExecutor(3) as threads:
        allowed = threads.submit(_permissions, clients, region)
        address = threads.submit(_told, "address", lambda: _address(settings))
        found = _best(need, offers)
        if isinstance(found, Check):
            return [who, *allowed.result(), address.result(), found]
        stands = [_standing(clients, settings, found[0])]
        quotas = _quotas(clients, need, found)
    return [
        who,
        *allowed.result(),
        address.result(),
        *stands,
        *quotas,
        *_guards(settings),
    ]


def _told(name: str, look: Callable[[], str]) -> Check:
    """A look at something, as a Check: its answer, or the error with what mends it."""
    try:
        return Check(name=name, ok=True, detail=look())
    except LabError as error:
        detail = f"{error.what}: {error.why}" if error.why else error.what
        return Check(name=name, ok=False, detail=detail, next=error.hint)


def _identity(clients: Clients, region: str) -> str:
    with told():
        return str(clients.client("sts", region).get_caller_identity()["Arn"])


def _permissions(clients: Clients, region: str) -> list[Check]:
    try:
        denied = denied_actions(clients.ec2(region))
    except LabError as error:
        return [Check(name="permissions", ok=False, detail=error.what, next=error.hint)]
    if not denied:
        return [Check(name="permissions", ok=True, detail=f"{tried()} actions of EC2 tried dry")]
    return [
        Check(
            name=f"permission {action}",
            ok=False,
            detail="AWS refuses it to these credentials",
            next=f"have {action} allowed; the policy that labctl needs is in {POLICY_PAGE}",
        )
        for action in denied
    ]


def _address(settings: AwsSettings) -> str:
    networks = settings.ssh_from or (caller_network(settings),)
    return f"ssh is let in from {', '.join(networks)}"


def _best(need: Need, offers: Callable[[Need], list[Offer]]) -> list[Offer] | Check:
    """The first spot offer and the first on-demand one, the better first."""
    try:
        found = offers(need)
    except LabError as error:
        said = error.why.replace("\n", "; ") if isinstance(error, NoOfferError) else error.why
        return Check(name="offers", ok=False, detail=f"{error.what}: {said}", next=error.hint)
    first = {offer.spot: offer for offer in reversed(found)}
    return sorted(first.values(), key=found.index)


def _standing(clients: Clients, settings: AwsSettings, offer: Offer) -> Check:
    """Whether there is an image to boot, a network to stand in, and leave to start it there."""

    def look() -> str:
        ec2 = clients.ec2(offer.region)
        boots = image(clients, settings, offer)
        stands = place(ec2, settings, offer.zone)
        may_run(ec2, boots.id, offer.type, stands.subnet)
        return f"{offer.type} would boot {boots.id} in {stands.zone} ({stands.vpc})"

    return _told("image and network", look)


def _quotas(clients: Clients, need: Need, offers: list[Offer]) -> list[Check]:
    """One per market. With `spot: prefer` one that suffices is enough; the other is only told."""
    read = [(offer, *_allowance(clients, offer)) for offer in offers]
    enough = any(value is not None and value >= offer.cpus for offer, value, _ in read)
    listed = []
    for offer, value, said in read:
        quota = quota_for(offer.type, offer.spot)
        market = "spot" if offer.spot else "on-demand"
        suffices = value is not None and value >= offer.cpus
        detail = f"{said}; {offer.type} needs {offer.cpus} ({quota.name}, {offer.region})"
        if not suffices and enough:
            detail += f"; nothing {market} until it is raised"
        listed.append(
            Check(
                name=f"quota {market}",
                ok=suffices or (enough and need.spot == "prefer"),
                detail=detail,
                next="" if suffices else f"ask for more at {quota.link(offer.region)}",
            )
        )
    return listed


def _allowance(clients: Clients, offer: Offer) -> tuple[float | None, str]:
    """(vCPUs, in words); None where AWS does not tell."""
    quota = quota_for(offer.type, offer.spot)
    try:
        with told():
            answer = clients.client("service-quotas", offer.region).get_service_quota(
                ServiceCode="ec2", QuotaCode=quota.code
            )
    except LabError as error:
        return None, f"not known: {error.what}"
    value = float(answer["Quota"]["Value"])
    return value, f"{value:.0f} vCPUs"


def room(clients: Clients, offer: Offer) -> Room:
    """How many machines of this type the account's vCPUs are enough for."""
    quota = quota_for(offer.type, offer.spot)
    value, _ = _allowance(clients, offer)
    return Room(
        most=None if value is None or not offer.cpus else int(value // offer.cpus),
        quota=f"{quota.name}, {offer.region}",
        code=quota.code,
        units="vCPUs",
        limit=value,
        each=float(offer.cpus),
        next=f"ask for more at {quota.link(offer.region)}",
    )


def _guards(settings: AwsSettings) -> list[Check]:
    """Two guards that are nobody's duty, and what is missing without them."""
    deadline = "nothing at AWS ends a server that hangs: server.aws.scheduler_role is not set"
    profile = "a server cannot keep its disk by itself: server.aws.instance_profile is not set"
    ready = bool(settings.scheduler_role)
    return [
        Check(
            name="deadline at AWS",
            ok=True,
            warning=not ready,
            detail=settings.scheduler_role if ready else deadline,
            next="" if ready else f"{POLICY_PAGE} has that role and its policy",
        ),
        Check(
            name="instance profile",
            ok=True,
            warning=not settings.instance_profile,
            detail=settings.instance_profile or profile,
            next="" if settings.instance_profile else f"{POLICY_PAGE} has that profile",
        ),
    ]
