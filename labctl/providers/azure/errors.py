"""Turn refusals of Azure Resource Manager into labctl's own errors, by documented codes.

The codes are those of learn.microsoft.com/azure/azure-resource-manager/troubleshooting/
common-deployment-errors and, of spot machines, learn.microsoft.com/azure/virtual-machines/
error-codes-spot. A refusal may name more codes in its details.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from labctl.decoding import decode_json
from labctl.errors import (
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    LabError,
    ProviderError,
    QuotaError,
    ThrottledError,
)
from labctl.model import Value
from labctl.providers.azure.permissions import ROLE_HINT, WRITE

if TYPE_CHECKING:
    from collections.abc import Mapping

SIGN_IN = "az login"
QUOTAS_LINK = "https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade/~/myQuotas"
BILLING_LINK = "https://portal.azure.com/#view/Microsoft_Azure_Billing/SubscriptionsBladeV2"
CAPACITY = frozenset(
    {
        "AllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
        "SkuNotAvailable",
        "ZonalAllocationFailed",
    }
)
# All quotas of machines are those of one region, so that an offer elsewhere may fit. A machine that
# exceeds one is refused with OperationNotAllowed, which has other meanings for other calls.
COMPUTE_QUOTA = frozenset({"OperationNotAllowed", "QuotaExceeded", "ResourceQuotaExceeded"})
OTHER_QUOTA = frozenset(
    {
        "PublicIPCountLimitReached",
        "ResourceQuotaExceeded",
        "QuotaExceeded",
        "SubscriptionOrResourceGroupLimitReached",
    }
)
# Policies of an organization or of Azure itself that forbid a region or a size.
POLICY = frozenset({"RequestDisallowedByPolicy", "RequestDisallowedByAzure"})
# A subscription without credit, or beyond its spending limit, is disabled and can only be read.
DISABLED = frozenset(
    {"ReadOnlyDisabledSubscription", "SubscriptionDisabled", "DisabledSubscription"}
)
SIGNED_OUT = frozenset(
    {"AuthenticationFailed", "ExpiredAuthenticationToken", "InvalidAuthenticationToken"}
)
OTHER_ACCOUNT = frozenset(
    {"InvalidAuthenticationTokenTenant", "InvalidSubscriptionId", "SubscriptionNotFound"}
)
UNREGISTERED = frozenset({"MissingSubscriptionRegistration", "MissingRegistrationForType"})


class ArmErrorBody(Value, frozen=True):
    """An error, as replies and operations have it."""

    code: str = ""
    message: str = ""
    details: tuple[ArmErrorBody, ...] | None = None

    def list_codes(self) -> Iterator[str]:
        """Yield the code of the error and those of its details."""
        yield self.code
        for detail in self.details or ():
            yield from detail.list_codes()


class ArmErrorReply(Value, frozen=True):
    error: ArmErrorBody = ArmErrorBody()


class ArmFault(Exception):
    """A refusal as Azure wrote it: the cause of labctl's own error."""

    def __init__(self, status: int, body: ArmErrorBody, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status} {body.code}: {body.message}")
        self.status = status
        self.body = body
        self.codes = frozenset(filter(None, body.list_codes()))
        self.retry_after_s = retry_after_s


def parse_fault(status: int, content: bytes, headers: Mapping[str, str]) -> ArmFault:
    """Parse the reply to a refused call."""
    try:
        body = decode_json(content, ArmErrorReply).error
    except msgspec.DecodeError:
        body = ArmErrorBody()
    wait = headers.get("Retry-After", "")
    return ArmFault(status, body, float(wait) if wait.isdecimal() else 0.0)


def is_absent(error: LabError) -> bool:
    """Whether Azure answered that the resource or its group does not exist.

    It answers with the same status if the credentials do not reach the subscription.
    """
    fault = error.__cause__
    return isinstance(fault, ArmFault) and fault.status == 404 and not fault.codes & OTHER_ACCOUNT


def translate_fault(fault: ArmFault, action: str) -> LabError:
    """Turn a refusal into labctl's own error. `action` is the one that the call needs."""
    codes = fault.codes
    why = f"{fault.body.message} ({', '.join(sorted(codes)) or fault.status})"
    if fault.status == 429:
        wait = f"in {fault.retry_after_s:.0f} s" if fault.retry_after_s else "in a minute"
        return ThrottledError(
            f"Azure is throttling {action}", why=why, hint=f"run the same command again {wait}"
        )
    if codes & OTHER_ACCOUNT:
        return DeniedError(
            "the credentials do not reach the subscription",
            why=why,
            hint="az account list   # then: az account set --subscription ID",
        )
    if fault.status == 401 or codes & SIGNED_OUT:
        return CredentialsError(
            "the Azure credentials have expired or are not accepted", why=why, hint=SIGN_IN
        )
    if error := _translate_limits(codes, action, why):
        return error
    if fault.status == 403 or codes & UNREGISTERED:
        return _make_denied_error(codes, action, why)
    if fault.status in (409, 412):
        return BusyError(f"Azure cannot do {action} yet", why=why, hint="try again in a moment")
    if fault.status >= 500:
        return BusyError(f"Azure failed at {action}", why=why, hint="try again in a moment")
    return ProviderError(f"Azure refused {action}", why=why, hint="labctl doctor --provider azure")


def _translate_limits(codes: frozenset[str], action: str, why: str) -> LabError | None:
    """Return the error of a refusal for lack of capacity, quota or credit."""
    if codes & DISABLED:
        return DeniedError(
            "the subscription is disabled: its credit is used up, or it has ended",
            why=why,
            hint=BILLING_LINK,
        )
    if codes & CAPACITY:
        return CapacityError(
            "Azure has no room for this machine now", why=why, hint=lambda subject: subject.offers
        )
    if codes & POLICY:
        return CapacityError(
            "a policy does not allow this machine in this region",
            why=why,
            hint="set server.azure.regions to others; the policy is that of your organization",
        )
    if action == WRITE and codes & COMPUTE_QUOTA:
        return CapacityError(
            "the quota of the region does not allow this machine",
            why=why,
            hint=f"ask for more at {QUOTAS_LINK}",
        )
    if codes & OTHER_QUOTA:
        return QuotaError(
            f"a quota does not allow {action}", why=why, hint=f"ask for more at {QUOTAS_LINK}"
        )
    return None


def _make_denied_error(codes: frozenset[str], action: str, why: str) -> DeniedError:
    if codes & UNREGISTERED:
        namespace = action.partition("/")[0]
        return DeniedError(
            f"the subscription has not registered {namespace}",
            why=why,
            hint=f"az provider register --namespace {namespace}",
        )
    return DeniedError(f"the account lacks the action {action}", why=why, hint=ROLE_HINT)
