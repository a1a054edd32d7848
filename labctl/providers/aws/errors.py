"""Turn errors of AWS and boto3 into labctl's own, by tables of error codes."""

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
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors
    from botocore import parsers

POLICY_PAGE = "labctl docs aws"
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
        "PlacementGroupLimitExceeded",
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
        "InvalidPlacementGroup.InUse",
        "VolumeInUse",
    }
)
SIGN_IN = "aws sso login\naws configure   # with an access key"
_BLOB = re.compile(r"\s*Encoded authorization failure message: \S+")


def get_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def get_message(error: ClientError) -> str:
    message = str(error.response.get("Error", {}).get("Message", "")) or str(error)
    return _BLOB.sub("", message).strip()


def is_absent(error: ClientError) -> bool:
    """Whether the requested object does not exist (or its id is malformed)."""
    code = get_code(error)
    return code.endswith((".NotFound", ".Malformed")) or code in (
        "InvalidAllocationID.NotFound",
        "InvalidAMIID.Unavailable",
        "InvalidPlacementGroup.Unknown",
        "ResourceNotFoundException",
        "ParameterNotFound",
    )


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn errors of AWS and boto3 that are raised inside into labctl's own."""
    try:
        yield
    except boto_errors.ClientError as error:
        raise translate_client_error(error) from error
    except boto_errors.BotoCoreError as error:
        raise translate_boto_error(error) from error
    except parsers.ResponseParserError as error:
        raise ConnectError(
            "AWS's reply cannot be read", why=str(error), hint="run the same command again"
        ) from error


def translate_client_error(error: ClientError) -> LabError:
    """Turn an error reply of AWS into labctl's own error."""
    code, message, call = get_code(error), get_message(error), error.operation_name
    why = f"{message} ({code})"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    if code in CAPACITY:
        what = "AWS has no such machine available"
        return CapacityError(what, why=why, hint=lambda subject: subject.offers)
    if code in QUOTA:
        return QuotaError("the account's quota does not allow it", why=why, hint=QUOTAS_LINK)
    if code in THROTTLED or status == 429:
        return ThrottledError(
            f"AWS is throttling {call}", why=why, hint="run the same command again in a minute"
        )
    if code in DENIED:
        return _make_denied_error(call, code, message)
    if code in CREDENTIALS:
        what = "have expired" if code in EXPIRED else "are not accepted"
        return CredentialsError(f"the AWS credentials {what}", why=why, hint=SIGN_IN)
    if code in HELD:
        return BusyError(f"AWS cannot do {call} yet", why=why, hint="try again in a moment")
    if status >= 500 or code == "RequestTimeout":
        return BusyError(f"AWS failed at {call}", why=why, hint="try again in a moment")
    return ProviderError(f"AWS refused {call}", why=why, hint="labctl doctor --provider aws")


def _make_denied_error(call: str, code: str, message: str) -> DeniedError:
    if code == "AuthFailure.ServiceLinkedRoleCreationNotPermitted":
        return DeniedError(
            "the account has no role for spot instances yet, and you may not create it",
            why=message,
            hint="aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
        )
    if code == "OptInRequired":
        return DeniedError(
            "the account may not use this region or service",
            why=f"{message} ({code})",
            hint="labctl config   # server.aws.regions; a region must be enabled in the account",
        )
    if code in ("Blocked", "PendingVerification"):
        return DeniedError(
            "AWS has blocked this action for the account",
            why=f"{message} ({code})",
            hint="https://console.aws.amazon.com/support",
        )
    return DeniedError(
        f"the account may not do {call}",
        why=message,
        hint=f"have {call} allowed\n{POLICY_PAGE}   # the policy that labctl needs",
    )


def translate_boto_error(error: BotoCoreError) -> LabError:
    """Turn an error that boto3 itself raised, mostly without a reply, into labctl's own error."""
    why = str(error)
    if isinstance(error, boto_errors.ProfileNotFound):
        return CredentialsError("the AWS configuration has no such profile", why=why, hint=SIGN_IN)
    if isinstance(error, boto_errors.NoCredentialsError):
        places = "neither the environment nor ~/.aws has any"
        return CredentialsError("no AWS credentials were found", why=places, hint=SIGN_IN)
    if isinstance(error, boto_errors.PartialCredentialsError | boto_errors.NoAuthTokenError):
        return CredentialsError("the AWS credentials are incomplete", why=why, hint=SIGN_IN)
    if isinstance(
        error,
        boto_errors.CredentialRetrievalError
        | boto_errors.SSOError
        | boto_errors.TokenRetrievalError
        | boto_errors.RefreshWithMFAUnsupportedError,
    ):
        return CredentialsError("the AWS credentials cannot be loaded", why=why, hint=SIGN_IN)
    if isinstance(
        error,
        boto_errors.HTTPClientError
        | boto_errors.ConnectionError
        | boto_errors.ConnectionClosedError,
    ):
        return ConnectError(
            "AWS does not answer",
            why=why,
            hint="check the network, then run the same command again",
        )
    return ProviderError("boto3 failed", why=f"{type(error).__name__}: {why}")
