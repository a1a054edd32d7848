"""Turn errors of Google and its SDK into labctl's own, by documented codes and reasons.

A refused call names its reasons in `error.errors[].reason` and, in newer replies, in an ErrorInfo
(AIP-193). A call that starts an operation may still fail: the operation then has codes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from labctl.errors import (
    BusyError,
    CapacityError,
    ConnectError,
    CredentialsError,
    DeniedError,
    LabError,
    ProviderError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.lazy import lazy_imports
from labctl.providers.gcp.permissions import ROLE_HINT
from labctl.providers.gcp.replies import GceOperation, OperationProblem

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError

with lazy_imports(__name__):
    import requests
    from google.api_core import exceptions as api_errors
    from google.auth import exceptions as auth_errors

SIGN_IN = "gcloud auth application-default login"
QUOTAS_LINK = "https://console.cloud.google.com/iam-admin/quotas"
BILLING_LINK = "https://console.cloud.google.com/billing"
# A quota for all regions: no other offer helps. Others are those of one region.
GLOBAL_QUOTAS = frozenset(
    {"GPUS-ALL-REGIONS-per-project", "CPUS-ALL-REGIONS-per-project", "NETWORKS", "FIREWALLS"}
)
CAPACITY = frozenset(
    {
        "insufficientCapacity",
        "RESOURCE_POOL_EXHAUSTED",
        "STOCKOUT",
        "UNSUPPORTED_OPERATION",
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    }
)
QUOTA = frozenset({"quotaExceeded", "QUOTA_EXCEEDED", "QUOTA_FOR_INSTANCES"})
THROTTLED = frozenset(
    {
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
        "dailyLimitExceeded",
        "RATE_LIMIT_EXCEEDED",
        "rateLimitExceeded",
        "userRateLimitExceeded",
    }
)
HELD = frozenset(
    {
        "conditionNotMet",
        "CONDITION_NOT_MET",
        "resourceInUseByAnotherResource",
        "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
        "resourceNotReady",
        "RESOURCE_NOT_READY",
    }
)
API_OFF = frozenset({"accessNotConfigured", "SERVICE_DISABLED"})
BILLING_OFF = frozenset({"BILLING_DISABLED", "billingNotEnabled", "UREQ_PROJECT_BILLING_NOT_OPEN"})
EXISTS = frozenset({"alreadyExists", "RESOURCE_ALREADY_EXISTS"})


def get_reasons(error: GoogleAPICallError) -> frozenset[str]:
    """Return every reason that a refusal names."""
    reasons = {str(one.get("reason", "")) for one in error.errors if isinstance(one, dict)}
    return frozenset(filter(None, {*reasons, error.reason or ""}))


def get_status(error: GoogleAPICallError) -> int:
    return int(error.code or 0)


@contextmanager
def translate_errors(call: str) -> Iterator[None]:
    """Turn errors of Google and its SDK that are raised inside into labctl's own.

    `call` is the permission that the call needs, such as compute.instances.create.
    """
    try:
        yield
    except LabError:
        # Without the extra, there is no SDK whose errors could be compared.
        raise
    except api_errors.GoogleAPICallError as error:
        raise translate_call_error(error, call) from error
    except auth_errors.TransportError as error:
        raise _make_connect_error(error) from error
    except auth_errors.DefaultCredentialsError as error:
        raise CredentialsError(
            "no Google Cloud credentials were found", why=str(error), hint=SIGN_IN
        ) from error
    except auth_errors.GoogleAuthError as error:
        raise CredentialsError(
            "the Google Cloud credentials are not accepted", why=str(error), hint=SIGN_IN
        ) from error
    except (api_errors.RetryError, requests.RequestException) as error:
        raise _make_connect_error(error) from error


def translate_call_error(error: GoogleAPICallError, call: str) -> LabError:
    """Turn a refused call into labctl's own error."""
    status, reasons = get_status(error), get_reasons(error)
    why = f"{error.message} ({', '.join(sorted(reasons)) or status})"
    if status == 401:
        return CredentialsError(
            "the Google Cloud credentials have expired or are not accepted", why=why, hint=SIGN_IN
        )
    if reasons & THROTTLED or status == 429:
        return ThrottledError(
            f"Google is throttling {call}", why=why, hint="run the same command again in a minute"
        )
    if reasons & QUOTA:
        return QuotaError("the project's quota does not allow it", why=why, hint=QUOTAS_LINK)
    if reasons & CAPACITY:
        return _make_capacity_error("such a machine", why)
    if status == 403:
        return _make_denied_error(call, reasons, error.message)
    if reasons & HELD or status in (409, 412):
        return BusyError(f"Google cannot do {call} yet", why=why, hint="try again in a moment")
    if status >= 500:
        return BusyError(f"Google failed at {call}", why=why, hint="try again in a moment")
    return ProviderError(f"Google refused {call}", why=why, hint="labctl doctor --provider gcp")


def make_operation_error(operation: GceOperation, what: str, call: str) -> LabError | None:
    """Return the error that an operation ended with, None without one. `what` was being done."""
    if not operation.error.errors:
        return None
    problem = operation.error.errors[0]
    why = f"{problem.message} ({problem.code})"
    if problem.code in CAPACITY:
        return _make_capacity_error(what, why)
    if problem.code in QUOTA:
        return _make_quota_error(problem, why)
    if problem.code in THROTTLED:
        return ThrottledError(f"Google is throttling {call}", why=why, hint="try again in a minute")
    if problem.code in HELD:
        return BusyError(f"Google cannot do {call} yet", why=why, hint="try again in a moment")
    if problem.code == "PERMISSIONS_ERROR":
        return _make_denied_error(call, frozenset(), problem.message)
    # A definite refusal: nothing was created, and the same request would be refused again.
    return UsageError(
        f"Google refused {what}",
        why=why,
        hint="labctl config   # shows the settings of server.gcp",
    )


def _make_capacity_error(machine: str, why: str) -> CapacityError:
    what = f"Google has no room for {machine} now"
    return CapacityError(what, why=why, hint=lambda subject: subject.offers)


def _make_quota_error(problem: OperationProblem, why: str) -> LabError:
    """Return a CapacityError for a quota of one region: an offer elsewhere may fit."""
    infos = [detail.quota_info for detail in problem.error_details if detail.quota_info]
    name = infos[0].limit_name if infos else "of the project"
    region = infos[0].dimensions.get("region", "") if infos else ""
    what = f"the quota {name} does not allow this machine{f' in {region}' if region else ''}"
    if region and name not in GLOBAL_QUOTAS:
        return CapacityError(what, why=why, hint=f"ask for more at {QUOTAS_LINK}")
    return QuotaError(what, why=why, hint=f"ask for more at {QUOTAS_LINK}")


def _make_denied_error(call: str, reasons: frozenset[str], message: str) -> DeniedError:
    if reasons & API_OFF:
        return DeniedError(
            "the project has not enabled this API of Google",
            why=message,
            hint="gcloud services enable compute.googleapis.com",
        )
    if reasons & BILLING_OFF:
        return DeniedError(
            "the project has no active billing account", why=message, hint=BILLING_LINK
        )
    return DeniedError(
        f"the account lacks the permission {call}",
        why=message,
        hint=ROLE_HINT,
    )


def _make_connect_error(error: Exception) -> ConnectError:
    return ConnectError(
        "Google Cloud does not answer",
        why=str(error),
        hint="check the network, then run the same command again",
    )
