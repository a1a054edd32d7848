"""A store in S3. S3 itself checks every upload by the checksum that goes with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from labctl.errors import NotFoundError
from labctl.s3 import GONE, S3
from labctl.stores import Surroundings, staged

TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
CHUNK_BYTES = 1024 * 1024


class S3Store:
    def __init__(self, url: str, prefix: str, around: Surroundings) -> None:
        self.url = url
        self._s3 = S3(url, around.profile)
        self._bucket = self._s3.bucket
        self._prefix = "/".join(filter(None, [self._s3.folder, prefix])) + "/"

    def read(self, key: str) -> bytes | None:
        return self._found(key)[0]

    def write(self, key: str, data: bytes | Path) -> None:
        known = {"sha256": _sha256(data)}
        extra = {"Metadata": known, "ChecksumAlgorithm": "SHA256"}
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        if isinstance(data, bytes):
            self._s3.ask(lambda s3: s3.put_object(**where, Body=data, **extra))
        else:
            self._s3.ask(lambda s3: s3.upload_file(str(data), *where.values(), ExtraArgs=extra))

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def bring(s3: Any, draft: Path) -> None:
            left, body = size, s3.get_object(**where)["Body"]
            with draft.open("wb") as file:
                while left > 0 and (block := body.read(min(CHUNK_BYTES, left))):
                    file.write(block)
                    left -= len(block)
            body.close()

        staged(path, size, sha256, lambda draft: self._s3.ask(lambda s3: bring(s3, draft)))

    def names(self, prefix: str = "") -> list[str]:
        def listed(s3: Any) -> list[str]:
            pages = s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [one["Key"] for page in pages for one in page.get("Contents", ())]

        return sorted(key.removeprefix(self._prefix) for key in self._s3.ask(listed))

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

        return bool(self._s3.ask(put))

    def _found(self, key: str) -> tuple[bytes | None, str]:
        """(content, its tag)."""
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def get(s3: Any) -> tuple[bytes, str]:
            answer = s3.get_object(**where)
            return bytes(answer["Body"].read()), str(answer["ETag"])

        try:
            content, tag = self._s3.ask(get)
        except NotFoundError:
            return None, ""
        return content, tag


def _sha256(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
