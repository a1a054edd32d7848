"""Rent a machine exactly once, although a rental at Vast.ai is not idempotent.

An attempt's token is in the instance's label.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from labctl.errors import BusyError, QuotaError
from labctl.model import CreateServerRequest, Offer
from labctl.providers.http.creation import AttemptMachines
from labctl.providers.vast.api import VAST, RentRequest, VastInstance, VastUser
from labctl.providers.vast.catalog import compute_bid, find_ask, get_ask_id
from labctl.providers.vast.cloud import VastCloud, make_gone_error
from labctl.providers.vast.label import format_label, get_label, make_key_line, make_label
from labctl.providers.vast.settings import VastSettings
from labctl.text import dollars_text, price_text

# Prices are compared in hundredths of a cent.
PRICE_STEP_USD = 0.0001


def rent_once(
    cloud: VastCloud,
    settings: VastSettings,
    owner: str,
    offer: Offer,
    request: CreateServerRequest,
) -> VastInstance:
    """Return the instance of this attempt, after renting it unless it exists."""

    def prepare() -> Callable[[], VastInstance]:
        require_balance(cloud.read_user())
        body = _build_body(cloud, settings, owner, offer, request)
        _ensure_key(cloud, request)
        return lambda: _rent(cloud, offer, body)

    return VastAttempts(cloud).create_once(request.token, settings.settle_s, prepare)


class VastAttempts(AttemptMachines[VastInstance]):
    cloud = VAST

    def __init__(self, instances: VastCloud) -> None:
        self._instances = instances

    def list_attempts(self, token: str) -> list[VastInstance]:
        return [one for one in self._instances.list_instances() if get_label(one).token == token]

    def get_id(self, machine: VastInstance) -> str:
        return str(machine.id)

    def get_age_key(self, machine: VastInstance) -> int:
        # Ids rise with time.
        return machine.id

    def end(self, machine: VastInstance) -> None:
        self._instances.destroy(str(machine.id))


def get_balance(user: VastUser) -> float | None:
    """Return what the account can spend; None if Vast.ai does not show it."""
    return user.balance if user.credit is None else max(user.credit, user.balance or 0.0)


def require_balance(user: VastUser) -> None:
    """QuotaError without credit: Vast.ai stops such an account's instances, and deletes them."""
    balance = get_balance(user)
    if balance is not None and balance <= 0:
        raise QuotaError(
            "the credit of your Vast.ai account is used up",
            why=f"its balance is {dollars_text(balance)}",
            hint=VAST.balance_help,
        )


def _build_body(
    cloud: VastCloud,
    settings: VastSettings,
    owner: str,
    offer: Offer,
    request: CreateServerRequest,
) -> RentRequest:
    """Build the request at the present price; CapacityError if that is above the confirmed one."""
    found = find_ask(cloud, settings, request.need, offer)
    if found is None:
        raise make_gone_error("somebody else rented it, or its host took it back")
    ask, now = found
    if now.price_usd_per_hour > offer.price_usd_per_hour + PRICE_STEP_USD:
        was, price = price_text(offer.price_usd_per_hour), price_text(now.price_usd_per_hour)
        raise make_gone_error(f"it costs {price} now, and {was} was confirmed")
    return RentRequest(
        image=settings.image,
        label=format_label(make_label(request, owner)),
        disk=settings.disk_gb,
        onstart=request.first_boot,
        price=compute_bid(ask, settings) if offer.spot else UNSET,
    )


def _rent(cloud: VastCloud, offer: Offer, body: RentRequest) -> VastInstance:
    instance_id = cloud.rent(get_ask_id(offer), body)
    if not instance_id:
        raise BusyError("the reply of Vast.ai is incomplete", why="its reply names no instance")
    return VastInstance(id=instance_id, label=body.label, is_bid=offer.spot)


def _ensure_key(cloud: VastCloud, request: CreateServerRequest) -> None:
    """Have the lab's key in the account: a VM gets the keys that are there when it is created.

    A key that an earlier state of this machine left for the lab is removed.
    """
    line = make_key_line(request)
    words, comment = line.split()[:2], line.split()[2]
    keys = cloud.list_keys()
    for key in keys:
        if key.key.split()[:2] != words and key.key.split()[2:] == [comment]:
            cloud.delete_key(str(key.id))
    if not any(key.key.split()[:2] == words for key in keys):
        cloud.add_key(line)
