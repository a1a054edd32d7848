"""What the shared client must know of a cloud, and how it turns error replies into labctl's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from labctl.errors.subject import Subject
from labctl.model import Value

# The errors that a cloud's code can stand for, beside those of HTTP's own status codes.
ErrorKind = type[LabError]


class AbsentError(ProviderError):
    """What was asked for does not exist. Providers turn it into None or success."""


class ErrorDetail(Value, frozen=True):
    """What an error reply says: the cloud's own code ("" without one), and a text for people."""

    code: str = ""
    message: str = ""


class CloudDescription(Value, frozen=True):
    """A cloud with a JSON API.

    `name` is its name for users, `provider` its name in labctl. `endpoint` is the URL before the
    paths of its operations, which `endpoint_variable` replaces. `key_variables` are read first,
    then the first of `key_files` that exists (relative to the home directory). `key_help` says
    where to get a key, `quota_help` how a quota is raised, `balance_help` how credit is added.

    `parse_error` reads the body of an error reply; b"" and what is no JSON come too. `codes` are
    the documented codes that decide more than the status does: QuotaError, CapacityError,
    DeniedError, CredentialsError, ThrottledError, BusyError, AbsentError or ProviderError each. A
    code ending in "*" stands for all that begin so. `balance_codes` mean that credit is used up.
    """

    name: str
    provider: str
    endpoint: str
    endpoint_variable: str
    key_variables: tuple[str, ...]
    key_help: str
    parse_error: Callable[[bytes], ErrorDetail]
    codes: Mapping[str, ErrorKind] = {}
    balance_codes: frozenset[str] = frozenset()
    key_files: tuple[str, ...] = ()
    quota_help: str = ""
    balance_help: str = ""


STATUS_KINDS: Mapping[int, ErrorKind] = {
    401: CredentialsError,
    403: DeniedError,
    404: AbsentError,
    408: BusyError,
    429: ThrottledError,
}
PAYMENT_REQUIRED = 402


def translate_reply(
    cloud: CloudDescription, action: str, status: int, detail: ErrorDetail
) -> LabError:
    """Turn an error reply into labctl's own error; `action` says for users what was tried."""
    code = detail.code or f"HTTP {status}"
    why = f"{detail.message} ({code})" if detail.message else code
    if detail.code in cloud.balance_codes or status == PAYMENT_REQUIRED:
        what = f"the credit of your {cloud.name} account does not pay for it"
        return QuotaError(what, why=why, hint=cloud.balance_help)
    kind = _find_kind(cloud, detail.code) or STATUS_KINDS.get(status)
    if kind is AbsentError and detail == ErrorDetail():
        return _make_unknown_path_error(cloud, action, why)
    if kind is None:
        kind = BusyError if status >= 500 else ProviderError
    what, hint = _describe(cloud, action, kind)
    return kind(what, why=why, hint=hint)


def _make_unknown_path_error(cloud: CloudDescription, action: str, why: str) -> ProviderError:
    """Return the error of a 404 that is not the cloud's own.

    A wrong address or a proxy sends one. If it counted as "absent", a server that still bills would
    be recorded as removed.
    """
    return ProviderError(
        f"the reply to the request to {action} is not from {cloud.name}'s API",
        why=f"{why}, without a message in {cloud.name}'s form",
        hint=f"unset {cloud.endpoint_variable}, if it is set, and check the network's proxy",
    )


def _find_kind(cloud: CloudDescription, code: str) -> ErrorKind | None:
    if not code:
        return None
    for pattern, kind in cloud.codes.items():
        if code == pattern or (pattern.endswith("*") and code.startswith(pattern[:-1])):
            return kind
    return None


def _describe(
    cloud: CloudDescription, action: str, kind: ErrorKind
) -> tuple[str, str | Callable[[Subject], str]]:
    """Say what failed, and the next step, for an error of this kind."""
    name = cloud.name
    if kind is CapacityError:
        return f"{name} has no such machine available", lambda subject: subject.offers
    if kind is QuotaError:
        return f"the quota of your {name} account does not allow this", cloud.quota_help
    if kind is CredentialsError:
        return f"the {name} key is not accepted", cloud.key_help
    if kind is DeniedError:
        return f"the {name} key has no permission to {action}", cloud.key_help
    if kind is ThrottledError:
        return (
            f"{name} is throttling requests to {action}",
            "run the same command again in a minute",
        )
    if kind is AbsentError:
        return (
            f"{name} could not {action}: it was not found",
            f"labctl doctor --provider {cloud.provider}",
        )
    if kind is BusyError:
        return f"{name} failed to {action}", "try again in a moment"
    return f"{name} refused to {action}", f"labctl doctor --provider {cloud.provider}"


def make_lost_reply_error(cloud: CloudDescription, action: str, cause: Exception) -> ConnectError:
    """Return the error of a call without a reply, which may have had its effect."""
    return ConnectError(
        f"{cloud.name} did not answer the request to {action}",
        why=f"{type(cause).__name__}: {cause}",
        hint="check the network, then run the same command again",
    )
