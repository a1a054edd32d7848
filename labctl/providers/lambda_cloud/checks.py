"""The checks of `labctl doctor`: the key, the account, capacity, and what ends the costs."""

from __future__ import annotations

from collections.abc import Callable

from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.model import Check, GpuNeed, Need, Offer
from labctl.providers.lambda_cloud.cloud import LambdaCloud
from labctl.text import price_text

PAGE = "labctl docs lambda"


def check_credentials(cloud: LambdaCloud, name: str) -> Check:
    """Check that Lambda accepts the key; `name` is the name of the check."""
    return _run_check(name, lambda: f"{len(cloud.list_keys())} keys in the account")


def run_checks(
    cloud: LambdaCloud, need: Need | None, offers: Callable[[Need], list[Offer]]
) -> list[Check]:
    """Run all checks. A key that is not accepted is the only result then."""
    credentials = check_credentials(cloud, "credentials")
    if not credentials.ok:
        return [credentials]
    wanted = need or Need(gpu=GpuNeed(kind="any", count=1))

    def describe_offer() -> str:
        cheapest = min(offers(wanted), key=lambda offer: offer.price_usd_per_hour)
        price = price_text(cheapest.price_usd_per_hour)
        return f"{cheapest.type} in {cheapest.region} has capacity now, {price}"

    return [
        credentials,
        _check_account(cloud),
        _run_check("capacity", describe_offer),
        Check(
            name="quota",
            ok=True,
            skipped=True,
            detail="Lambda's API shows neither quota nor credit; `labctl up` reports a refusal",
        ),
        Check(
            name="deadline at Lambda",
            ok=True,
            warning=True,
            detail="only `labctl down` or a keeper ends the costs: Lambda has no timer, and bills "
            "until an instance is terminated",
            next=f"{PAGE}   # how to set up a keeper",
        ),
    ]


def _check_account(cloud: LambdaCloud) -> Check:
    def describe_account() -> str:
        account = cloud.get_account_id()
        if account.startswith("key-"):
            return (
                "the audit log names no owner; labctl identifies the account by a hash of this key"
            )
        return account

    return _run_check("account", describe_account)


def _run_check(name: str, probe: Callable[[], str]) -> Check:
    """Return the result of `probe` as a Check, or its LabError with the way to fix it."""
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabError as error:
        return Check(name=name, ok=False, detail=describe_error(error), next=error.hint)
