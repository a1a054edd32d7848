"""What AWS and its library say, in our words: one table of codes, and one place that reads it."""

from __future__ import annotations

import re
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
)

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

POLICY_PAGE = "docs/aws.md"
QUOTAS_LINK = "https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas"

CAPACITY = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "SpotMaxPriceTooLow",
        "Unsupported",
    }
)
QUOTA = frozenset(
    {
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "ResourceLimitExceeded",
        "RulesPerSecurityGroupLimitExceeded",
        "SecurityGroupLimitExceeded",
        "ServiceQuotaExceededException",
        "VcpuLimitExceeded",
        "VolumeLimitExceeded",
    }
)
THROTTLED = frozenset(
    {
        "EC2ThrottledException",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
DENIED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        "Blocked",
        "OptInRequired",
        "PendingVerification",
        "UnauthorizedOperation",
    }
)
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
CREDENTIALS = EXPIRED | frozenset(
    {
        "AuthFailure",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
HELD = frozenset(
    {
        "DependencyViolation",
        "IncorrectInstanceState",
        "IncorrectState",
        "InvalidGroup.InUse",
        "InvalidNetworkInterface.InUse",
        "VolumeInUse",
    }
)
SIGN_IN = "aws sso login   # or: aws configure"
_BLOB = re.compile(r"\s*Encoded authorization failure message: \S+")


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    said = str(error.response.get("Error", {}).get("Message", "")) or str(error)
    return _BLOB.sub("", said).strip()


def is_absent(error: ClientError) -> bool:
    """Whether what was asked for is not there (or is no id at all)."""
    code = code_of(error)
    return code.endswith((".NotFound", ".Malformed")) or code in (
        "InvalidAllocationID.NotFound",
        "InvalidAMIID.Unavailable",
        "ResourceNotFoundException",
        "ParameterNotFound",
    )


@contextmanager
def told() -> Iterator[None]:
    """Whatever AWS or its library raises in here comes out as one of our errors."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise refusal(error) from error
    except BotoCoreError as error:
        raise of_library(error) from error
    except ResponseParserError as error:
        raise ConnectError(
            "AWS's answer cannot be read", why=str(error), hint="the same command again"
        ) from error


def refusal(error: ClientError) -> LabError:
    """Our error for an answer of AWS's."""
    code, said, call = code_of(error), message_of(error), error.operation_name
    why = f"{said} ({code})"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    if code in CAPACITY:
        return CapacityError("AWS has no such machine there now", why=why, hint="labctl offers")
    if code in QUOTA:
        return QuotaError("the account's quota does not allow it", why=why, hint=QUOTAS_LINK)
    if code in THROTTLED or status == 429:
        return ThrottledError(
            "AWS is asked too often at the moment", why=why, hint=f"later: {call}"
        )
    if code in DENIED:
        return _denied(call, code, said)
    if code in CREDENTIALS:
        what = "have expired" if code in EXPIRED else "are not accepted"
        return CredentialsError(f"the AWS credentials {what}", why=why, hint=SIGN_IN)
    if code in HELD:
        return BusyError(f"AWS cannot do {call} yet", why=why, hint="try again in a moment")
    if status >= 500 or code == "RequestTimeout":
        return BusyError(f"AWS failed at {call}", why=why, hint="try again in a moment")
    return ProviderError(f"AWS refused {call}", why=why, hint="labctl doctor --provider aws")


def _denied(call: str, code: str, said: str) -> DeniedError:
    if code == "AuthFailure.ServiceLinkedRoleCreationNotPermitted":
        return DeniedError(
            "the account has no role for spot instances yet, and you may not make it",
            why=said,
            hint="aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
        )
    if code == "OptInRequired":
        return DeniedError(
            "the account may not use this region or service",
            why=f"{said} ({code})",
            hint="labctl config   # server.aws.regions; a region must be enabled in the account",
        )
    if code in ("Blocked", "PendingVerification"):
        return DeniedError(
            "AWS does not let this account do that",
            why=f"{said} ({code})",
            hint="https://console.aws.amazon.com/support",
        )
    return DeniedError(
        f"the account may not do {call}",
        why=said,
        hint=f"have {call} allowed; the policy that labctl needs is in {POLICY_PAGE}",
    )


def of_library(error: BotoCoreError) -> LabError:
    """Our error for one that AWS's library raised by itself, mostly before any answer."""
    from botocore import exceptions as known

    why = str(error)
    if isinstance(error, known.ProfileNotFound):
        return CredentialsError("AWS's configuration has no such profile", why=why, hint=SIGN_IN)
    if isinstance(
        error,
        known.NoCredentialsError | known.PartialCredentialsError | known.NoAuthTokenError,
    ):
        return CredentialsError("there are no AWS credentials", why=why, hint=SIGN_IN)
    if isinstance(
        error,
        known.CredentialRetrievalError
        | known.SSOError
        | known.TokenRetrievalError
        | known.RefreshWithMFAUnsupportedError,
    ):
        return CredentialsError("the AWS credentials cannot be had", why=why, hint=SIGN_IN)
    if isinstance(
        error, known.HTTPClientError | known.ConnectionError | known.ConnectionClosedError
    ):
        return ConnectError(
            "AWS does not answer", why=why, hint="check the network, then the same command again"
        )
    return ProviderError("AWS's library failed", why=f"{type(error).__name__}: {why}")
