"""A folder of an S3 bucket: labctl's only S3 client, on servers and on your machine.

It uses boto3, which the first request imports.
"""

from __future__ import annotations

import base64
import enum
import functools
import hashlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Callable, Iterator, NamedTuple, TypeVar, cast

from .s3_errors import S3Error, S3Problem, translate_errors

if TYPE_CHECKING:
    from botocore.session import Session
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectRequestTypeDef, PutObjectRequestTypeDef

Result = TypeVar("Result")

CHUNK_BYTES = 1024 * 1024
# Records in a store are smaller. Whoever else can write there must not fill a reader's memory.
MOST_READ_BYTES = 64 * 1024 * 1024
# A smaller file is sent in one request, whose response has the hash of what S3 has written.
PARTS_FROM_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30
ROLE_METHOD = "iam-role"  # botocore's name for the credentials of an instance profile
NO_ROLE = "this server has no instance profile, and labctl uses no other credentials"


class Credentials(enum.Enum):
    """The credentials that sign the requests."""

    USER = "user"  # those that boto3 finds, or those of a named profile
    ROLE = "role"  # those of the machine's instance profile, never a person's keys
    NONE = "none"  # unsigned, for a public bucket


class ListedObject(NamedTuple):
    """An object of a listing. Its key is relative to the folder."""

    key: str
    size: int
    etag: str


class S3:
    """The folder of `url` (s3://bucket/folder), or `prefix` below it. Keys are relative to it.

    `convert_error` turns an S3Error into the caller's own exception. `report_progress` is called
    after every transfer of bytes. Several threads may share a client.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "",
        *,
        credentials: Credentials = Credentials.USER,
        profile: str = "",
        endpoint: str = "",
        convert_error: Callable[[S3Error], Exception] = lambda error: error,
        report_progress: Callable[[], None] = lambda: None,
    ) -> None:
        bucket, _, folder = url[len("s3://") :].partition("/")
        self.url = url
        self.bucket = bucket
        self.folder = "/".join(filter(None, [folder.strip("/"), prefix]))
        self._credentials = credentials
        self._profile = profile
        self._endpoint = endpoint
        self._convert_error = convert_error
        self._report_progress = report_progress
        self._client: S3Client | None = None

    def call(self, request: Callable[[S3Client], Result]) -> Result:
        """Return what `request` does, given boto3's client."""
        try:
            return self._call(request)
        except S3Error as error:
            raise self._convert_error(error) from None

    def read(self, key: str) -> bytes | None:
        """Return the whole content; None if absent, or if only a listing could tell.

        An object of more than MOST_READ_BYTES is an error.
        """
        return self._read_tagged(key)[0]

    def read_blocks(
        self, key: str, start: int = 0, size: int | None = None, etag: str = ""
    ) -> Iterator[bytes]:
        """Yield at most `size` bytes from `start` on, if the object still has the `etag` given."""
        request: GetObjectRequestTypeDef = {"Bucket": self.bucket, "Key": self._full_key(key)}
        if start:
            request["Range"] = f"bytes={start}-"
        if etag:
            request["IfMatch"] = etag
        body = self.call(lambda client: client.get_object(**request)["Body"])
        remaining = size

        def read_block(_: S3Client) -> bytes:
            return body.read(CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining))

        try:
            while remaining is None or remaining > 0:
                block = self.call(read_block)
                if not block:
                    break
                self._report_progress()
                yield block
                remaining = None if remaining is None else remaining - len(block)
        finally:
            body.close()

    def write(self, key: str, content: bytes) -> None:
        """Write one object. The response has the hash of what S3 has written."""
        digest = hashlib.sha256(content)
        checksum = base64.b64encode(digest.digest()).decode()
        reply = self.call(
            lambda client: client.put_object(
                Bucket=self.bucket,
                Key=self._full_key(key),
                Body=content,
                Metadata={"sha256": digest.hexdigest()},
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=checksum,
            )
        )
        if reply.get("ChecksumSHA256", checksum) != checksum:
            self._fail(S3Problem.UNCONFIRMED, f"S3 did not confirm the content of {key}")
        self._report_progress()

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the first `size` bytes of a file, which have this hash; S3 confirms them.

        Large files are sent in parts, and not at all if S3 has them already.
        """
        with path.open("rb") as file:
            if size < PARTS_FROM_BYTES:
                content = file.read(size)
                if hashlib.sha256(content).hexdigest() != sha256:
                    self._fail(S3Problem.CHANGED_HERE, path.name)
                self.write(key, content)
                return
            is_there = self._has(key, size, sha256)
            beginning = FilePrefix(file, size, self._report_progress)
            if is_there:
                beginning.read_all()
            else:
                self._upload(key, beginning, sha256)
        if beginning.sha256 != sha256:
            self._fail(S3Problem.CHANGED_HERE, path.name)
        if not is_there and not self._has(key, size, sha256):
            self._fail(S3Problem.UNCONFIRMED, f"S3 did not confirm the content of {key}")

    def list_objects(self, prefix: str = "") -> list[ListedObject]:
        """List the objects whose keys start with `prefix`, sorted by key."""
        top = f"{self.folder}/" if self.folder else ""

        def list_pages(client: S3Client) -> list[ListedObject]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=top + prefix
            )
            return [
                ListedObject(
                    entry["Key"][len(top) :], int(entry["Size"]), str(entry.get("ETag", ""))
                )
                for page in pages
                for entry in page.get("Contents", ())
            ]

        return sorted(self.call(list_pages))

    def find(self) -> ListedObject | None:
        """Return the object whose key is the folder's own name, with the key ""."""
        reply = self.call(
            lambda client: client.list_objects_v2(Bucket=self.bucket, Prefix=self.folder, MaxKeys=1)
        )
        for entry in reply.get("Contents", ()):
            if entry["Key"] == self.folder:
                return ListedObject("", int(entry["Size"]), str(entry.get("ETag", "")))
        return None

    def swap(self, key: str, content: bytes, expected: bytes | None) -> bool:
        """Write only if the content is `expected` (None for no object); return whether it was."""
        content_now, etag = self._read_tagged(key)
        if content_now != expected:
            return False
        request: PutObjectRequestTypeDef = {
            "Bucket": self.bucket,
            "Key": self._full_key(key),
            "Body": content,
            "ChecksumAlgorithm": "SHA256",
        }
        if expected is None:
            request["IfNoneMatch"] = "*"
        else:
            request["IfMatch"] = etag
        try:
            self._call(lambda client: client.put_object(**request))
        except S3Error as error:
            if error.problem not in (S3Problem.CHANGED_THERE, S3Problem.MISSING):
                raise self._convert_error(error) from None
            # This very call may have written it, if its first response was lost.
            return self._read_tagged(key)[0] == content
        return True

    def _call(self, request: Callable[[S3Client], Result]) -> Result:
        with translate_errors():
            if self._client is None:
                self._client = self._connect()
            return request(self._client)

    def _call_for_object(self, request: Callable[[S3Client], Result]) -> Result | None:
        """Make a request; return None if the object is missing."""
        try:
            return self._call(request)
        except S3Error as error:
            # S3 returns 403 for a missing object to a role that is not allowed to list.
            may_not_list = (
                self._credentials is Credentials.ROLE and error.problem is S3Problem.DENIED
            )
            if not may_not_list and error.problem is not S3Problem.MISSING:
                raise self._convert_error(error) from None
            return None

    def _full_key(self, key: str) -> str:
        return "/".join(filter(None, [self.folder, key]))

    def _read_tagged(self, key: str) -> tuple[bytes | None, str]:
        """Return (content, ETag); (None, "") if the object is missing."""

        def get(client: S3Client) -> tuple[bytes, str]:
            reply = client.get_object(Bucket=self.bucket, Key=self._full_key(key))
            with closing(reply["Body"]) as body:
                if reply["ContentLength"] > MOST_READ_BYTES:
                    why = f"{key} has more than {MOST_READ_BYTES // 1024**2} MiB"
                    raise S3Error(S3Problem.TOO_LARGE, why)
                return body.read(), reply["ETag"]

        return self._call_for_object(get) or (None, "")

    def _has(self, key: str, size: int, sha256: str) -> bool:
        head = self._call_for_object(
            lambda client: client.head_object(Bucket=self.bucket, Key=self._full_key(key))
        )
        stored = (head["ContentLength"], head["Metadata"].get("sha256")) if head else None
        return stored == (size, sha256)

    def _upload(self, key: str, beginning: FilePrefix, sha256: str) -> None:
        extra = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
        # boto3 only reads it.
        file = cast("BinaryIO", beginning)
        self.call(
            lambda client: client.upload_fileobj(
                file, self.bucket, self._full_key(key), ExtraArgs=extra
            )
        )

    def _fail(self, problem: S3Problem, why: str) -> None:
        raise self._convert_error(S3Error(problem, why))

    def _connect(self) -> S3Client:
        if self._credentials is Credentials.ROLE:
            return connect_as_role()
        unsigned = self._credentials is Credentials.NONE
        return connect(profile=self._profile, endpoint=self._endpoint, unsigned=unsigned)


class FilePrefix:
    """The first bytes of a file that may grow, hashed as they are read.

    It is not seekable, so that each byte is read once and the hash is that of the bytes sent.
    """

    def __init__(self, file: BinaryIO, size: int, report_progress: Callable[[], None]) -> None:
        self._file = file
        self._left = size
        self._digest = hashlib.sha256()
        self._report_progress = report_progress

    def read(self, length: int | None = -1) -> bytes:
        limit = self._left if length is None or length < 0 else min(length, self._left)
        block = self._file.read(limit)
        self._left -= len(block)
        self._digest.update(block)
        self._report_progress()
        return block

    def read_all(self) -> None:
        while self.read(CHUNK_BYTES):
            pass

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def connect(
    *,
    profile: str = "",
    endpoint: str = "",
    unsigned: bool = False,
    session: Session | None = None,
) -> S3Client:
    import boto3
    import botocore
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard"},
        # Otherwise presigned URLs would use an older signature.
        signature_version=botocore.UNSIGNED if unsigned else "s3v4",
        s3={"addressing_style": "path"} if endpoint else {},
    )
    boto3_session = boto3.Session(profile_name=profile or None, botocore_session=session)
    client: S3Client = boto3_session.client("s3", config=config, endpoint_url=endpoint or None)
    return client


@functools.lru_cache(maxsize=None)
def connect_as_role() -> S3Client:
    """Return the process's only client: to create one takes longer than a small pass.

    botocore renews the credentials of an instance profile by itself.
    """
    import botocore.session

    session = botocore.session.get_session()
    resolver = session.get_component("credential_provider")
    resolver.providers = [
        provider for provider in resolver.providers if provider.METHOD == ROLE_METHOD
    ]
    if session.get_credentials() is None:
        raise S3Error(S3Problem.NO_CREDENTIALS, NO_ROLE)
    return connect(session=session)
