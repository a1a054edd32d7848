"""A folder of an S3 bucket, with the user's credentials; S3's errors become labctl's errors."""

from __future__ import annotations

from labctl.errors import (
    ConnectError,
    CredentialsError,
    DeniedError,
    LabError,
    NotFoundError,
    TransferError,
)
from labctl.wire.s3 import S3
from labctl.wire.s3_errors import S3Error, S3Problem


def open_folder(url: str, prefix: str = "", profile: str = "") -> S3:
    """Open the folder of `url` (s3://bucket/folder), or `prefix` below it. Connects at first use.

    Its methods raise NotFoundError for a missing object, CredentialsError, DeniedError,
    ConnectError and, for a missing bucket or any other refusal, TransferError.
    """
    return S3(url, prefix, profile=profile, convert_error=lambda error: convert_error(url, error))


def convert_error(url: str, error: S3Error) -> LabError:
    """Convert an error of S3 into a LabError with the next command."""
    problem, why = error.problem, error.why
    if problem is S3Problem.MISSING:
        return NotFoundError(f"{url} does not contain it", why=why)
    if problem is S3Problem.NO_BUCKET:
        bucket = url[len("s3://") :].partition("/")[0]
        hint = f"aws s3 mb s3://{bucket}"
        return TransferError(f"the bucket {bucket} does not exist", why=why, hint=hint)
    if problem is S3Problem.DENIED:
        hint = "aws sts get-caller-identity   # shows whose credentials are in use"
        return DeniedError(f"access to {url} was denied", why=why, hint=hint)
    if problem is S3Problem.NO_CREDENTIALS:
        what = f"no credentials for {url}"
        return CredentialsError(what, why=why, hint="aws configure")
    if problem is S3Problem.UNREACHABLE:
        hint = "labctl config   # check store, then try again"
        return ConnectError(f"{url} cannot be reached", why=why, hint=hint)
    if problem is S3Problem.CHANGED_HERE:
        what = f"{why} changed while it was being sent"
        return TransferError(what, hint="run the same command again")
    if problem is S3Problem.TOO_LARGE:
        hint = "labctl config   # check store: something else has written to it"
        return TransferError(f"{url} has a file that is too large to read", why=why, hint=hint)
    hint = "labctl config   # check store, and the permissions of its account"
    return TransferError(f"{url} refused the request", why=why, hint=hint)
