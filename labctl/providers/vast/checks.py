"""The checks of `labctl doctor`: the key, the account's credit, offers, and what ends the costs."""

from __future__ import annotations

import stat
from collections.abc import Callable

from labctl.config.directories import copy_environment, find_home
from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.model import Check, GpuNeed, Need, Offer
from labctl.providers.vast.api import VAST
from labctl.providers.vast.cloud import VastCloud
from labctl.providers.vast.launch import get_balance
from labctl.text import dollars_text, price_text

PAGE = "labctl docs vast"
GUARD = (
    "only `labctl down` or a keeper ends the costs: Vast.ai has no timer, and bills the disk of a "
    "machine that is off"
)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_credentials(cloud: VastCloud, name: str) -> Check:
    """Check that Vast.ai accepts the key; `name` is the name of the check."""
    return _run_check(name, lambda: f"accepted, of the account {cloud.read_user().id}")


def run_checks(
    cloud: VastCloud, need: Need | None, offers: Callable[[Need], list[Offer]]
) -> list[Check]:
    """Run all checks. A key that is not accepted is the only result then."""
    credentials = check_credentials(cloud, "credentials")
    if not credentials.ok:
        return [credentials]
    wanted = need or Need(gpu=GpuNeed(kind="any", count=1))
    price = 0.0
    try:
        cheapest = min(offers(wanted), key=lambda offer: offer.price_usd_per_hour)
    except LabError as error:
        capacity = _make_failure("capacity", error)
    else:
        price = cheapest.price_usd_per_hour
        where = f" in {cheapest.region}" if cheapest.region else ""
        detail = f"{cheapest.type}{where} is free now, {price_text(price)}"
        capacity = Check(name="capacity", ok=True, detail=detail)
    keys = _run_check("SSH keys", lambda: f"{len(cloud.list_keys())} in the account")
    guard = Check(
        name="deadline at Vast.ai",
        ok=True,
        warning=True,
        detail=GUARD,
        next=f"{PAGE}   # how to set up a keeper",
    )
    return [credentials, *_check_key_files(), _check_balance(cloud, price), keys, capacity, guard]


def _check_key_files() -> list[Check]:
    """Warn of a key file that others may read: Vast.ai's own tool may create it like that."""
    environ = copy_environment()
    if any(environ.get(name) for name in VAST.key_variables):
        return []
    checks = []
    for name in VAST.key_files:
        path = find_home(environ) / name
        if path.is_file() and path.stat().st_mode & OTHERS:
            detail = f"other users of this machine may read ~/{name}"
            fix = f"chmod 600 ~/{name}"
            checks.append(Check(name="key file", ok=True, warning=True, detail=detail, next=fix))
    return checks


def _check_balance(cloud: VastCloud, price: float) -> Check:
    """Check that the balance pays for an hour of the cheapest offer.

    Vast.ai stops every instance of an account whose credit is used up, and later deletes them.
    """
    try:
        balance = get_balance(cloud.read_user())
    except LabError as error:
        return _make_failure("balance", error)
    if balance is None:
        return Check(name="balance", ok=True, skipped=True, detail="Vast.ai does not show it")
    is_enough = balance > 0 and balance >= price
    next_step = "" if is_enough else VAST.balance_help
    return Check(name="balance", ok=is_enough, detail=dollars_text(balance), next=next_step)


def _make_failure(name: str, error: LabError) -> Check:
    return Check(name=name, ok=False, detail=describe_error(error), next=error.hint)


def _run_check(name: str, probe: Callable[[], str]) -> Check:
    """Return the result of `probe` as a Check, or its LabError with the way to fix it."""
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabError as error:
        return _make_failure(name, error)
