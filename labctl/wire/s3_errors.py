"""The errors of labctl's S3 client, by kind; boto3's errors become one of them."""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import Iterator


class S3Problem(enum.Enum):
    """The kind of a failure."""

    MISSING = "missing"
    NO_BUCKET = "no bucket"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    UNREACHABLE = "unreachable"
    CHANGED_HERE = "changed here"  # the local file (named in `why`) differs from its hash
    CHANGED_THERE = "changed there"  # a condition on the object does not hold
    UNCONFIRMED = "unconfirmed"
    TOO_LARGE = "too large"
    REFUSED = "refused"


# By S3's error codes. Responses without a body have only the HTTP status.
PROBLEMS = {
    "NoSuchKey": S3Problem.MISSING,
    "NoSuchVersion": S3Problem.MISSING,
    "404": S3Problem.MISSING,
    "NoSuchBucket": S3Problem.NO_BUCKET,
    "AccessDenied": S3Problem.DENIED,
    "403": S3Problem.DENIED,
    "InvalidAccessKeyId": S3Problem.DENIED,
    "SignatureDoesNotMatch": S3Problem.DENIED,
    "ExpiredToken": S3Problem.DENIED,
    "PreconditionFailed": S3Problem.CHANGED_THERE,
    "ConditionalRequestConflict": S3Problem.CHANGED_THERE,
    "412": S3Problem.CHANGED_THERE,
    "409": S3Problem.CHANGED_THERE,
}


class S3Error(Exception):
    """A request that failed, at S3 or on the way there."""

    def __init__(self, problem: S3Problem, why: str) -> None:
        super().__init__(why)
        self.problem = problem
        self.why = why


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise S3Error for every error of boto3."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        code = str(error.response["Error"].get("Code", ""))
        why = f"{code}: {error.response['Error'].get('Message', '')}"
        raise S3Error(PROBLEMS.get(code, S3Problem.REFUSED), why) from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise S3Error(S3Problem.NO_CREDENTIALS, str(error)) from None
    except exceptions.HTTPClientError as error:
        raise S3Error(S3Problem.UNREACHABLE, str(error)) from None
    except (exceptions.BotoCoreError, Boto3Error, OSError) as error:
        raise S3Error(S3Problem.REFUSED, str(error)) from None
