"""A store in S3. S3 itself checks every upload by the checksum that goes with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labctl.errors import (
    ConnectError,
    CredentialsError,
    DeniedError,
    NotFoundError,
    TransferError,
)
from labctl.stores import Surroundings, staged

GONE = ("NoSuchKey", "404")
DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
CHUNK_BYTES = 1024 * 1024


class S3Store:
    def __init__(self, url: str, prefix: str, around: Surroundings) -> None:
        bucket, _, below = url.removeprefix("s3://").partition("/")
        self.url = url
        self._bucket = bucket
        self._prefix = "/".join(filter(None, [below.strip("/"), prefix])) + "/"
        self._profile = around.profile
        self._made: Any = None

    def read(self, key: str) -> bytes | None:
        return self._found(key)[0]

    def write(self, key: str, data: bytes | Path) -> None:
        known = {"sha256": _sha256(data)}
        extra = {"Metadata": known, "ChecksumAlgorithm": "SHA256"}
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        if isinstance(data, bytes):
            self._asked(lambda s3: s3.put_object(**where, Body=data, **extra))
        else:
            self._asked(lambda s3: s3.upload_file(str(data), *where.values(), ExtraArgs=extra))

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def bring(s3: Any, draft: Path) -> None:
            left, body = size, s3.get_object(**where)["Body"]
            with draft.open("wb") as file:
                while left > 0 and (block := body.read(min(CHUNK_BYTES, left))):
                    file.write(block)
                    left -= len(block)
            body.close()

        staged(path, size, sha256, lambda draft: self._asked(lambda s3: bring(s3, draft)))

    def names(self, prefix: str = "") -> list[str]:
        def listed(s3: Any) -> list[str]:
            pages = s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [one["Key"] for page in pages for one in page.get("Contents", ())]

        return sorted(key.removeprefix(self._prefix) for key in self._asked(listed))

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        content, tag = self._found(key)
        if content != expected:
            return False
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": tag}
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def put(s3: Any) -> bool:
            from botocore.exceptions import ClientError

            try:
                s3.put_object(**where, Body=data, ChecksumAlgorithm="SHA256", **condition)
            except ClientError as error:
                if error.response["Error"]["Code"] not in (*TAKEN, *GONE):
                    raise
                # It may have been taken by this very call, whose first answer was lost.
                return self._found(key)[0] == data
            return True

        return bool(self._asked(put))

    def _found(self, key: str) -> tuple[bytes | None, str]:
        """(content, its tag)."""
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def get(s3: Any) -> tuple[bytes, str]:
            answer = s3.get_object(**where)
            return bytes(answer["Body"].read()), str(answer["ETag"])

        try:
            content, tag = self._asked(get)
        except NotFoundError:
            return None, ""
        return content, tag

    def _client(self) -> Any:
        if self._made is None:
            import boto3
            from botocore.config import Config

            config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard"})
            session = boto3.Session(profile_name=self._profile or None)
            self._made = session.client("s3", config=config)
        return self._made

    def _asked(self, call: Callable[[Any], Any]) -> Any:
        """What S3 answers, its errors as ours."""
        try:
            from boto3.exceptions import Boto3Error
            from botocore.exceptions import (
                BotoCoreError,
                ClientError,
                HTTPClientError,
                NoCredentialsError,
                PartialCredentialsError,
            )
        except ImportError:
            raise CredentialsError(
                f"{self.url} needs boto3", hint="pip install 'labctl[aws]'"
            ) from None
        try:
            return call(self._client())
        except ClientError as error:
            raise self._refused(error.response["Error"]) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise CredentialsError(
                f"there are no credentials for {self.url}", why=str(error), hint="aws configure"
            ) from None
        except HTTPClientError as error:
            raise ConnectError(f"{self.url} cannot be reached", why=str(error)) from None
        except (BotoCoreError, Boto3Error) as error:
            raise TransferError(f"{self.url} does not do it", why=str(error)) from None

    def _refused(self, error: dict[str, str]) -> Exception:
        code, why = error.get("Code", ""), error.get("Message", "")
        if code in GONE:
            return NotFoundError(f"it is not in {self.url}", why=why)
        if code == "NoSuchBucket":
            return TransferError(f"there is no bucket {self._bucket}", why=why)
        if code in DENIED:
            return DeniedError(f"{self.url} may not be used", why=f"{code}: {why}")
        return TransferError(f"{self.url} does not do it", why=f"{code}: {why}")


def _sha256(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
