"""What AWS and its library say, in our words."""

from __future__ import annotations

import pytest

pytest.importorskip("botocore")

from botocore import exceptions as library
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

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
from labctl.providers.aws.errors import (
    translate_boto_error,
    translate_client_error,
    translate_errors,
)


def answer(code: str, message: str = "no", status: int = 400) -> ClientError:
    return ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {
                "RequestId": "1",
                "HostId": "",
                "HTTPStatusCode": status,
                "HTTPHeaders": {},
                "RetryAttempts": 0,
            },
        },
        "RunInstances",
    )


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, CapacityError),
        ("InsufficientFreeAddressesInSubnet", 400, CapacityError),
        ("Unsupported", 400, CapacityError),
        ("VcpuLimitExceeded", 400, QuotaError),
        ("ServiceQuotaExceededException", 402, QuotaError),
        ("RequestLimitExceeded", 503, ThrottledError),
        ("ThrottlingException", 400, ThrottledError),
        ("SomethingNew", 429, ThrottledError),
        ("UnauthorizedOperation", 403, DeniedError),
        ("AccessDeniedException", 400, DeniedError),
        ("OptInRequired", 401, DeniedError),
        ("AuthFailure", 401, CredentialsError),
        ("RequestExpired", 400, CredentialsError),
        ("ExpiredTokenException", 400, CredentialsError),
        ("DependencyViolation", 400, BusyError),
        ("VolumeInUse", 400, BusyError),
        ("InternalError", 500, BusyError),
        ("Unavailable", 503, BusyError),
        ("InvalidParameterValue", 400, ProviderError),
    ],
)
def test_code_has_its_error(code: str, status: int, kind: type[LabError]) -> None:
    error = translate_client_error(answer(code, "what AWS said", status))
    assert type(error) is kind
    assert "what AWS said" in error.why
    assert error.hint or code in ("OptInRequired",)


def test_expired_credentials_are_told_from_wrong_ones() -> None:
    assert "expired" in translate_client_error(answer("ExpiredToken")).what
    assert "not accepted" in translate_client_error(answer("InvalidClientTokenId")).what


def test_denial_names_the_action_and_leaves_out_the_cipher() -> None:
    said = "You are not authorized. Encoded authorization failure message: aGVsbG8tZ29vZGJ5ZQ_x"
    error = translate_client_error(answer("UnauthorizedOperation", said))
    assert "RunInstances" in error.what
    assert error.why == "You are not authorized."


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (library.NoCredentialsError(), CredentialsError),
        (library.PartialCredentialsError(provider="env", cred_var="x"), CredentialsError),
        (library.ProfileNotFound(profile="nobody"), CredentialsError),
        (library.SSOTokenLoadError(error_msg="none"), CredentialsError),
        (library.UnauthorizedSSOTokenError(), CredentialsError),
        (library.CredentialRetrievalError(provider="x", error_msg="y"), CredentialsError),
        (library.EndpointConnectionError(endpoint_url="https://x"), ConnectError),
        (library.ReadTimeoutError(endpoint_url="https://x"), ConnectError),
        (library.ConnectTimeoutError(endpoint_url="https://x"), ConnectError),
        (library.ConnectionClosedError(endpoint_url="https://x"), ConnectError),
        (library.SSLError(endpoint_url="https://x", error="bad"), ConnectError),
        (library.ParamValidationError(report="x"), ProviderError),
    ],
)
def test_library_error_has_its_own(raised: BotoCoreError, kind: type[LabError]) -> None:
    error = translate_boto_error(raised)
    assert type(error) is kind
    assert error.why


def test_answer_that_cannot_be_read_is_a_lost_one() -> None:
    with pytest.raises(ConnectError), translate_errors():
        raise ResponseParserError("half an answer")
