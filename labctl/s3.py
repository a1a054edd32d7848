"""A folder of an S3 bucket: the connection, and S3's refusals as labctl's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labctl.errors import (
    ConnectError,
    CredentialsError,
    DeniedError,
    LabError,
    NotFoundError,
    TransferError,
)

GONE = ("NoSuchKey", "404")
DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")


class S3:
    """The folder of `url` (s3://bucket/folder), with a profile's AWS credentials.

    Nothing is asked, and boto3 not imported, before the first call.
    """

    def __init__(self, url: str, profile: str = "") -> None:
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        self.url = url
        self.bucket = bucket
        self.folder = folder.strip("/")
        self._profile = profile
        self._made: Any = None

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """What `call` returns, given boto3's client.

        NotFoundError for an object that is not there; CredentialsError, DeniedError, ConnectError
        and, for a bucket that is not there and whatever else S3 refuses, TransferError.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            HTTPClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        try:
            return call(self._client())
        except ClientError as error:
            raise self._refused(error.response["Error"]) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise CredentialsError(
                f"there are no credentials for {self.url}", why=str(error), hint="aws configure"
            ) from None
        except HTTPClientError as error:
            raise ConnectError(
                f"{self.url} cannot be reached",
                why=str(error),
                hint="labctl config   # store; then try again",
            ) from None
        except (BotoCoreError, Boto3Error) as error:
            raise TransferError(
                f"{self.url} does not do it",
                why=str(error),
                hint="labctl config   # store; and what its account may do",
            ) from None

    def _client(self) -> Any:
        if self._made is None:
            import boto3
            from botocore.config import Config

            config = Config(
                connect_timeout=10,
                read_timeout=60,
                retries={"mode": "standard"},
                signature_version="s3v4",  # what is signed beforehand is older otherwise
            )
            session = boto3.Session(profile_name=self._profile or None)
            self._made = session.client("s3", config=config)
        return self._made

    def _refused(self, error: dict[str, str]) -> LabError:
        code, why = error.get("Code", ""), error.get("Message", "")
        if code in GONE:
            return NotFoundError(f"it is not in {self.url}", why=why)
        if code == "NoSuchBucket":
            hint = f"aws s3 mb s3://{self.bucket}"
            return TransferError(f"there is no bucket {self.bucket}", why=why, hint=hint)
        if code in DENIED:
            hint = "aws sts get-caller-identity   # whose credentials these are"
            return DeniedError(f"{self.url} may not be used", why=f"{code}: {why}", hint=hint)
        return TransferError(f"{self.url} does not do it", why=f"{code}: {why}")
