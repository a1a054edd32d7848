"""The provider `auto`: every provider that is set up here, asked at once.

It creates no servers itself. Its offers name the provider that does, and a lab's server is always
recorded with that one. Before the lab has a server, this one answers for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from labctl.errors import LabError, NoOfferError, ProviderError
from labctl.errors.replies import describe_error
from labctl.estimate.prices import make_rank
from labctl.model import (
    Check,
    CreateServerRequest,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.parallel import start_daemon
from labctl.providers import (
    MARKET,
    CatalogOffers,
    CredentialSource,
    Guarded,
    Marketplace,
    OfferBatch,
    Provider,
    ProviderContext,
    RequiresSettings,
    SubmitsJobs,
    list_provider_names,
)
from labctl.text import duration_text, price_text

# seconds that one provider may take to list its offers
OFFERS_S = 20.0
NO_CREDENTIALS = "no credentials on this machine"


class AutoSettings(Value, frozen=True):
    """lab.yaml's `server.auto`: it has no settings."""


class AutoProvider:
    """A Provider and a Marketplace. `check`, `servers` and `leftovers` are those of all members."""

    name: ClassVar[str] = MARKET
    settings_type: ClassVar[type[Value]] = AutoSettings

    def __init__(self, settings: AutoSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.context = context

    @property
    def settle_s(self) -> float:
        return max((member.settle_s for member in self.open_members()), default=0.0)

    def get_account(self) -> ProviderAccount:
        """Return no account: each server has that of its own provider."""
        return ProviderAccount()

    def gather_offers(self, need: Need) -> list[OfferBatch]:
        return self._gather(need, with_catalogs=True)

    def _gather(self, need: Need, *, with_catalogs: bool) -> list[OfferBatch]:
        batches: list[OfferBatch] = []
        questions: dict[str, tuple[bool, Future[list[Offer]]]] = {}
        for name, member in self._installed.items():
            why = member if isinstance(member, str) else _explain_left_out(member)
            if isinstance(member, str) or (
                why and not (with_catalogs and _has_catalog(member, why))
            ):
                batches.append(OfferBatch(provider=name, left_out=str(why)))
                continue
            listing = _choose_listing(member, need, is_live=not why)
            questions[name] = not why, start_daemon(listing)
        end_s = time.monotonic() + OFFERS_S
        for name, (is_live, answer) in questions.items():
            batches.append(_await_batch(name, answer, end_s, is_live=is_live))
        return sorted(batches, key=lambda batch: batch.provider)

    def open_members(self) -> list[Provider]:
        opened = self._installed.values()
        return [one for one in opened if not isinstance(one, str) and not _explain_left_out(one)]

    def explain_left_out(self) -> dict[str, str]:
        reasons = {
            name: member if isinstance(member, str) else _explain_left_out(member)
            for name, member in self._installed.items()
        }
        return {name: why for name, why in reasons.items() if why}

    @cached_property
    def _installed(self) -> dict[str, Provider | str]:
        """Open every installed provider that could be a member; a text says why one cannot."""
        members: dict[str, Provider | str] = {}
        for name in list_provider_names():
            try:
                member: Provider = self._open(name)
            except LabError as error:
                members[name] = describe_error(error)
            except ImportError as error:  # a plugin package, or an extra, that is not installed
                members[name] = str(error)
            else:
                # A course's servers, and jobs of a cluster, cannot be compared with a rented one.
                if not isinstance(member, Marketplace | Guarded | SubmitsJobs):
                    members[name] = member
        return members

    def _open(self, name: str) -> Any:
        assert self.context.open_provider is not None
        return self if name == self.name else self.context.open_provider(name)

    def check(self, need: Need | None = None) -> list[Check]:
        """Run the checks of every member: a problem of one is a warning, as others may work."""
        checks: list[Check] = []
        usable = []
        for member in self.open_members():
            own = member.check(need)
            if all(check.ok for check in own):
                usable.append(member.name)
            checks += [_soften(member.name, check) for check in own]
        detail = ", ".join(usable) or "none of the providers with credentials is usable now"
        fix = "" if usable else "labctl offers --provider auto --all   # says why"
        return [*checks, Check(name="provider auto", ok=bool(usable), detail=detail, next=fix)]

    def offers(self, need: Need) -> list[Offer]:
        """List what can be created now: the live offers of all members, the cheapest first."""
        batches = self._gather(need, with_catalogs=False)
        offers = [offer for batch in batches for offer in batch.offers]
        ceiling = need.max_price_usd_per_hour
        fitting = [o for o in offers if ceiling is None or o.price_usd_per_hour <= ceiling]
        if fitting:
            return sorted(fitting, key=lambda offer: make_rank(offer, need))
        raise NoOfferError(
            "no provider has a server that meets the requirements",
            why="\n".join(_explain_batch(batch, need) for batch in batches),
            hint=lambda subject: (
                f"{subject.offers} --provider auto --all   # shows why each one has none"
            ),
        )

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        return self._open_by_name(offer.provider).create(offer, request)

    def find(self, server_id: str) -> Server | None:
        found = (member.find(server_id) for member in self.open_members())
        return next((server for server in found if server is not None), None)

    def servers(self) -> list[Server]:
        return [server for member in self.open_members() for server in member.servers()]

    def terminate(self, server_id: str) -> None:
        if (server := self.find(server_id)) is not None:
            self._open_by_name(server.provider).terminate(server_id)

    def leftovers(self) -> list[Resource]:
        return [resource for member in self.open_members() for resource in member.leftovers()]

    def remove(self, resource: Resource) -> None:
        self._open_by_name(resource.provider).remove(resource)

    def _open_by_name(self, name: str) -> Provider:
        for member in self.open_members():
            if member.name == name:
                return member
        raise ProviderError(
            f"{name} is not usable now", why=NO_CREDENTIALS, hint=f"labctl doctor --provider {name}"
        )


def _explain_left_out(member: Provider) -> str:
    """Say why a provider can create no server now; "" if it can. Contacts nobody."""
    try:
        if isinstance(member, RequiresSettings):
            member.check_settings()
        if isinstance(member, CredentialSource) and not member.has_credentials:
            return NO_CREDENTIALS
    except LabError as error:
        return describe_error(error)
    return ""


def _has_catalog(member: Provider, why: str) -> bool:
    return why == NO_CREDENTIALS and isinstance(member, CatalogOffers)


def _choose_listing(member: Provider, need: Need, *, is_live: bool) -> Callable[[], list[Offer]]:
    if not is_live and isinstance(member, CatalogOffers):
        catalog = member
        return lambda: catalog.list_catalog_offers(need)
    return lambda: member.offers(need)


def _await_batch(
    name: str, answer: Future[list[Offer]], end_s: float, *, is_live: bool
) -> OfferBatch:
    start = "" if is_live else f"{NO_CREDENTIALS}; "
    try:
        offers = answer.result(max(0.0, end_s - time.monotonic()))
    except NoOfferError as error:
        return OfferBatch(provider=name, is_live=is_live, left_out=start + describe_error(error))
    except FutureTimeoutError:
        failure = f"no reply within {duration_text(OFFERS_S)}"
    except LabError as error:
        failure = describe_error(error)
    except Exception as error:  # of a plugin package: the other providers must be listed anyway
        failure = f"{type(error).__name__}: {error}"
    else:
        return OfferBatch(provider=name, offers=tuple(offers), is_live=is_live)
    return OfferBatch(provider=name, is_live=is_live, failure=start + failure)


def _explain_batch(batch: OfferBatch, need: Need) -> str:
    if batch.offers:
        ceiling = price_text(need.max_price_usd_per_hour or 0.0)
        return f"{batch.provider}: all offers cost more than max_price ({ceiling})"
    return f"{batch.provider}: {batch.failure or batch.left_out or 'no offer fits'}"


def _soften(name: str, check: Check) -> Check:
    """Return the check of a member with the member's name, and its failure as a warning."""
    if name not in check.name:
        check = msgspec.structs.replace(check, name=f"{name} {check.name}")
    return check if check.ok else msgspec.structs.replace(check, ok=True, warning=True)
