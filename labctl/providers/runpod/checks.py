"""The checks of `labctl doctor`: the key, the account's credit, stock, and what ends the costs."""

from __future__ import annotations

from collections.abc import Callable

from labctl.errors import DeniedError, LabError
from labctl.errors.replies import describe_error
from labctl.model import Check, GpuNeed, Need, Offer
from labctl.providers.runpod.api import RUNPOD, Myself
from labctl.providers.runpod.cloud import RunPodCloud
from labctl.text import dollars_text, price_text

PAGE = "labctl docs runpod"
GUARD = (
    "only `labctl down` or a keeper is sure to end the costs: RunPod has no timer, and bills "
    "a pod even after its processes have ended"
)


def check_credentials(cloud: RunPodCloud, name: str) -> Check:
    """Check that RunPod accepts the key; `name` is the name of the check."""
    return _run_check(name, lambda: f"accepted; {cloud.count_ssh_keys()} SSH keys in the account")


def run_checks(
    cloud: RunPodCloud, need: Need | None, offers: Callable[[Need], list[Offer]]
) -> list[Check]:
    """Run all checks. A key that is not accepted is the only result then."""
    credentials = check_credentials(cloud, "credentials")
    if not credentials.ok:
        return [credentials]
    wanted = need or Need(gpu=GpuNeed(kind="any", count=1))
    checks = [credentials, _check_permission(cloud)]
    try:
        cheapest = min(offers(wanted), key=lambda offer: offer.price_usd_per_hour)
    except LabError as error:
        detail = describe_error(error)
        stock = Check(name="capacity", ok=False, detail=detail, next=error.hint)
        price = 0.0
    else:
        price = cheapest.price_usd_per_hour
        where = cheapest.zone or cheapest.region
        detail = f"{cheapest.type} in {where} is in stock now, {price_text(price)}"
        stock = Check(name="capacity", ok=True, detail=detail)
    guard = Check(
        name="deadline at RunPod",
        ok=True,
        warning=True,
        detail=GUARD,
        next=f"{PAGE}   # how to set up a keeper",
    )
    return [*checks, *_check_account(cloud, price), stock, guard]


def _check_permission(cloud: RunPodCloud) -> Check:
    """Check that the key may change pods, by ending one that does not exist."""
    try:
        cloud.check_write_permission()
    except DeniedError as error:
        detail = "the key may read pods, but not create or terminate them"
        return Check(name="permission", ok=False, detail=detail, next=error.hint)
    except LabError as error:
        detail = describe_error(error)
        return Check(name="permission", ok=False, detail=detail, next=error.hint)
    return Check(name="permission", ok=True, detail="the key may create and terminate pods")


def _check_account(cloud: RunPodCloud, price: float) -> list[Check]:
    try:
        account, myself = cloud.get_account_id(), cloud.read_myself()
    except LabError as error:
        return [Check(name="account", ok=False, detail=describe_error(error), next=error.hint)]
    if not myself.id:
        detail = (
            "the key has no access to GraphQL, the only API that shows account and "
            "balance; labctl identifies the account by a hash of this key"
        )
        next_step = f"{PAGE}   # the permissions"
        return [Check(name="account", ok=True, warning=True, detail=detail, next=next_step)]
    return [Check(name="account", ok=True, detail=account), _check_balance(myself, price)]


def _check_balance(myself: Myself, price: float) -> Check:
    """Check that the balance pays for an hour of the cheapest pod, and the spend limit allows it.

    RunPod stops every pod of an account whose balance is used up.
    """
    balance, spending = myself.client_balance, myself.current_spend_per_hr or 0.0
    if balance is None:
        return Check(name="balance", ok=True, skipped=True, detail="RunPod does not show it")
    detail = f"{dollars_text(balance)} left; your pods cost {price_text(spending)} now"
    if balance < price + spending or balance <= 0:
        return Check(name="balance", ok=False, detail=detail, next=RUNPOD.balance_help)
    limit = myself.spend_limit
    if limit is not None and spending + price > limit:
        detail += f"; the spend limit is {price_text(limit)}"
        return Check(name="balance", ok=False, detail=detail, next=RUNPOD.quota_help)
    return Check(name="balance", ok=True, detail=detail)


def _run_check(name: str, probe: Callable[[], str]) -> Check:
    """Return the result of `probe` as a Check, or its LabError with the way to fix it."""
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabError as error:
        return Check(name=name, ok=False, detail=describe_error(error), next=error.hint)
