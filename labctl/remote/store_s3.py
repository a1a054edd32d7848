"""A store in S3, by boto3, with the server's own credentials: those of its instance profile alone.

Whatever keys a person has in files or variables on this machine are left alone. S3 checks the bytes
against the checksum that goes with them; size and hash are read back.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any, BinaryIO

from .place import CHUNK, sha256_of
from .store import ChangedError, Progress, StoreError

LOOK_BYTES = 4 * 1024 * 1024
"""A file of this size is worth a look whether it is there already, and sent in parts."""
METHOD = "iam-role"
NO_PROFILE = "this server has no instance profile, and uses no other credentials"


class S3Store:
    def __init__(self, url: str, prefix: str, progress: Progress) -> None:
        self.bucket, below = split(url)
        self.prefix = f"{below}{prefix}/"
        self.progress = progress

    @property
    def client(self) -> Any:
        return client()

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        if size < LOOK_BYTES:
            self._send_small(key, path, size, sha256)
            return
        if self._confirmed(key, size, sha256):
            if sha256_of(path, size) != sha256:
                raise ChangedError(path.name)
            return
        with path.open("rb") as file:
            part = _Part(file, size, self.progress)
            extra = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
            where = (self.bucket, self.prefix + key)
            self._asked(lambda: self.client.upload_fileobj(part, *where, ExtraArgs=extra))
        if part.sha256 != sha256:
            raise ChangedError(path.name)
        if not self._confirmed(key, size, sha256):
            raise StoreError(f"the store does not show {key} as it was sent", False)

    def _send_small(self, key: str, path: Path, size: int, sha256: str) -> None:
        with path.open("rb") as file:
            content = file.read(size)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ChangedError(path.name)
        self.put(key, content)

    def put(self, key: str, content: bytes) -> None:
        """One request: its answer bears the hash of what S3 has written."""
        digest = hashlib.sha256(content)
        told = base64.b64encode(digest.digest()).decode()
        where = {"Bucket": self.bucket, "Key": self.prefix + key, "Body": content}
        known = {"Metadata": {"sha256": digest.hexdigest()}, "ChecksumSHA256": told}
        known["ChecksumAlgorithm"] = "SHA256"
        answer = self._asked(lambda: self.client.put_object(**where, **known))
        if answer.get("ChecksumSHA256", told) != told:
            raise StoreError(f"the store does not show {key} as it was sent", False)
        self.progress()

    def read(self, key: str) -> bytes | None:
        where = {"Bucket": self.bucket, "Key": self.prefix + key}
        found = self._asked(lambda: self.client.get_object(**where), or_none=True)
        return None if found is None else bytes(self._asked(found["Body"].read))

    def fetch(self, key: str, path: Path, size: int) -> None:
        where = {"Bucket": self.bucket, "Key": self.prefix + key}
        found = self._asked(lambda: self.client.get_object(**where), or_none=True)
        if found is None:
            raise StoreError("it is not in the store", False)
        with path.open("wb") as file:
            self._asked(lambda: self._copied(found["Body"], file, size))

    def _copied(self, body: Any, file: BinaryIO, left: int) -> None:
        while left > 0:
            block = body.read(min(CHUNK, left))
            if not block:
                break
            file.write(block)
            left -= len(block)
            self.progress()
        body.close()

    def close(self) -> None:
        """The client is kept for the next pass: it takes longer to make than a pass does."""

    def _confirmed(self, key: str, size: int, sha256: str) -> bool:
        where = {"Bucket": self.bucket, "Key": self.prefix + key}
        head = self._asked(lambda: self.client.head_object(**where), or_none=True)
        if head is None:
            return False
        return bool(head["ContentLength"] == size and head["Metadata"].get("sha256") == sha256)

    def _asked(self, call: Any, or_none: bool = False) -> Any:
        """What S3 answers. `or_none`: who may not list is told 403 of what is not there."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return call()
        except ClientError as error:
            if or_none and error.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404):
                return None
            raise StoreError(str(error)[:300]) from None
        except (BotoCoreError, Boto3Error, OSError) as error:
            raise StoreError(str(error)[:300]) from None


class _Part:
    """The first bytes of a file that may grow, hashed as they are read. It cannot be sought in, so
    that each byte is read once and what was hashed is what was sent."""

    def __init__(self, file: BinaryIO, size: int, progress: Progress) -> None:
        self._file = file
        self._left = size
        self._digest = hashlib.sha256()
        self._progress = progress

    def read(self, length: int = -1) -> bytes:
        most = self._left if length is None or length < 0 else min(length, self._left)
        block = self._file.read(most)
        self._left -= len(block)
        self._digest.update(block)
        self._progress()
        return block

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def split(url: str) -> tuple[str, str]:
    """("bucket", "prefix/") of s3://bucket/prefix."""
    bucket, _, prefix = url[len("s3://") :].partition("/")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


@functools.lru_cache(maxsize=None)
def client() -> Any:
    """One for this process. It renews the role's credentials by itself."""
    import boto3
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    session = botocore.session.get_session()
    resolver = session.get_component("credential_provider")
    resolver.providers = [one for one in resolver.providers if one.METHOD == METHOD]
    config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard"})
    try:
        if session.get_credentials() is None:
            raise StoreError(NO_PROFILE)
        return boto3.Session(botocore_session=session).client("s3", config=config)
    except BotoCoreError as error:
        raise StoreError(str(error)[:300]) from None
