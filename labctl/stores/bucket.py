"""A folder of an S3 bucket with your own credentials; S3's refusals as labctl's errors."""

from __future__ import annotations

from labctl.errors import (
    ConnectError,
    CredentialsError,
    DeniedError,
    LabError,
    NotFoundError,
    TransferError,
)
from labctl.wire.s3 import S3, Problem, S3Error


def open_folder(url: str, prefix: str = "", profile: str = "") -> S3:
    """The folder of `url` (s3://bucket/folder), or `prefix` below it. Connects at first use.

    Its methods raise NotFoundError for an object that is not there, CredentialsError, DeniedError,
    ConnectError and, for a bucket that is not there and whatever else S3 refuses, TransferError.
    """
    return S3(url, prefix, profile=profile, convert_error=lambda error: convert_error(url, error))


def convert_error(url: str, error: S3Error) -> LabError:
    problem, why = error.problem, error.why
    if problem is Problem.MISSING:
        return NotFoundError(f"it is not in {url}", why=why)
    if problem is Problem.NO_BUCKET:
        bucket = url[len("s3://") :].partition("/")[0]
        hint = f"aws s3 mb s3://{bucket}"
        return TransferError(f"there is no bucket {bucket}", why=why, hint=hint)
    if problem is Problem.DENIED:
        hint = "aws sts get-caller-identity   # whose credentials these are"
        return DeniedError(f"{url} may not be used", why=why, hint=hint)
    if problem is Problem.NO_CREDENTIALS:
        what = f"there are no credentials for {url}"
        return CredentialsError(what, why=why, hint="aws configure")
    if problem is Problem.UNREACHABLE:
        hint = "labctl config   # store; then try again"
        return ConnectError(f"{url} cannot be reached", why=why, hint=hint)
    if problem is Problem.CHANGED_HERE:
        what = f"{why} changed while it was sent"
        return TransferError(what, hint="run the same command again")
    hint = "labctl config   # store; and what its account may do"
    return TransferError(f"{url} does not do it", why=why, hint=hint)
