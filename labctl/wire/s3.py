"""A folder of an S3 bucket, by boto3: labctl's only S3 client, on servers and on your machine.

boto3 is imported by the first request. This module imports nothing of labctl.
"""

from __future__ import annotations

import base64
import enum
import functools
import hashlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

CHUNK_BYTES = 1024 * 1024
# A smaller file is one request, whose answer bears the hash of what S3 has written.
PARTS_FROM_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30
ROLE_METHOD = "iam-role"  # what botocore calls the credentials of an instance profile
NO_ROLE = "this server has no instance profile, and uses no other credentials"


class Credentials(enum.Enum):
    """Whose credentials sign the requests."""

    USER = "user"  # those that boto3 finds, or of a named profile
    ROLE = "role"  # those of the machine's instance profile, whatever keys a person has there
    NONE = "none"  # nobody's: a public bucket


class Problem(enum.Enum):
    MISSING = "missing"
    NO_BUCKET = "no bucket"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    UNREACHABLE = "unreachable"
    CHANGED_HERE = "changed here"  # the file to send, named as the reason, is not as announced
    CHANGED_THERE = "changed there"  # a condition on the object does not hold
    UNCONFIRMED = "unconfirmed"
    REFUSED = "refused"


# By S3's error codes; requests without a body have the status alone.
PROBLEMS = {
    "NoSuchKey": Problem.MISSING,
    "NoSuchVersion": Problem.MISSING,
    "404": Problem.MISSING,
    "NoSuchBucket": Problem.NO_BUCKET,
    "AccessDenied": Problem.DENIED,
    "403": Problem.DENIED,
    "InvalidAccessKeyId": Problem.DENIED,
    "SignatureDoesNotMatch": Problem.DENIED,
    "ExpiredToken": Problem.DENIED,
    "PreconditionFailed": Problem.CHANGED_THERE,
    "ConditionalRequestConflict": Problem.CHANGED_THERE,
    "412": Problem.CHANGED_THERE,
    "409": Problem.CHANGED_THERE,
}


class S3Error(Exception):
    """A request that S3 or the way to it did not fulfill."""

    def __init__(self, problem: Problem, why: str) -> None:
        super().__init__(why)
        self.problem = problem
        self.why = why


class Listed(NamedTuple):
    """An object of a listing. Its key is relative to the folder."""

    key: str
    size: int
    etag: str


class S3:
    """The folder of `url` (s3://bucket/folder), or `prefix` below it. Keys are relative to it.

    `convert_error` makes the caller's own exception of an S3Error. `report_progress` is called
    whenever bytes have moved. A client may be used from several threads.
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
        self._client: Any = None

    def call(self, request: Callable[[Any], Any]) -> Any:
        """Return what `request` does, given boto3's client."""
        try:
            return self._ask(request)
        except S3Error as error:
            raise self._convert_error(error) from None

    def read(self, key: str) -> bytes | None:
        """The whole content; None where there is none, or where only a listing could tell."""
        return self._read_tagged(key)[0]

    def read_blocks(
        self, key: str, start: int = 0, size: int | None = None, etag: str = ""
    ) -> Iterator[bytes]:
        """At most `size` bytes from `start` on, of the object with this ETag where one is given."""
        request = self._locate(key)
        if start:
            request["Range"] = f"bytes={start}-"
        if etag:
            request["IfMatch"] = etag
        body = self.call(lambda client: client.get_object(**request)["Body"])
        left = size

        def read_block(_: Any) -> bytes:
            return bytes(body.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)))

        try:
            while left is None or left > 0:
                block = self.call(read_block)
                if not block:
                    break
                self._report_progress()
                yield block
                left = None if left is None else left - len(block)
        finally:
            body.close()

    def put(self, key: str, content: bytes, **conditions: str) -> None:
        """Write one object. Its answer bears the hash of what S3 has written."""
        digest = hashlib.sha256(content)
        checksum = base64.b64encode(digest.digest()).decode()
        request = {
            **self._locate(key),
            **conditions,
            "Body": content,
            "Metadata": {"sha256": digest.hexdigest()},
            "ChecksumAlgorithm": "SHA256",
            "ChecksumSHA256": checksum,
        }
        reply = self.call(lambda client: client.put_object(**request))
        if reply.get("ChecksumSHA256", checksum) != checksum:
            self._fail(Problem.UNCONFIRMED, f"S3 does not show {key} as it was sent")
        self._report_progress()

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the first `size` bytes of a file, which have this hash; confirmed by S3.

        Large files go in parts, and not again where they are there already.
        """
        with path.open("rb") as file:
            if size < PARTS_FROM_BYTES:
                content = file.read(size)
                if hashlib.sha256(content).hexdigest() != sha256:
                    self._fail(Problem.CHANGED_HERE, path.name)
                self.put(key, content)
                return
            there = self._has(key, size, sha256)
            beginning = Beginning(file, size, self._report_progress)
            if there:
                beginning.read_all()
            else:
                self._upload(key, beginning, sha256)
        if beginning.sha256 != sha256:
            self._fail(Problem.CHANGED_HERE, path.name)
        if not there and not self._has(key, size, sha256):
            self._fail(Problem.UNCONFIRMED, f"S3 does not show {key} as it was sent")

    def list_objects(self, prefix: str = "") -> list[Listed]:
        """What lies below the folder with keys that begin so, sorted by key."""
        top = f"{self.folder}/" if self.folder else ""
        request = {"Bucket": self.bucket, "Prefix": top + prefix}

        def list_pages(client: Any) -> list[Listed]:
            pages = client.get_paginator("list_objects_v2").paginate(**request)
            return [
                Listed(entry["Key"][len(top) :], int(entry["Size"]), str(entry.get("ETag", "")))
                for page in pages
                for entry in page.get("Contents", ())
            ]

        found: list[Listed] = self.call(list_pages)
        return sorted(found)

    def find(self) -> Listed | None:
        """The object that bears the folder's own name, with the key ""."""
        where = {"Bucket": self.bucket, "Prefix": self.folder, "MaxKeys": 1}
        reply = self.call(lambda client: client.list_objects_v2(**where))
        for entry in reply.get("Contents", ()):
            if entry["Key"] == self.folder:
                return Listed("", int(entry["Size"]), str(entry.get("ETag", "")))
        return None

    def swap(self, key: str, content: bytes, expected: bytes | None) -> bool:
        """Write only where the content is `expected`, None for no object; whether it was."""
        found, tag = self._read_tagged(key)
        if found != expected:
            return False
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": tag}
        where = self._locate(key)

        request = {**where, **condition, "Body": content, "ChecksumAlgorithm": "SHA256"}
        try:
            self._ask(lambda client: client.put_object(**request))
        except S3Error as error:
            if error.problem not in (Problem.CHANGED_THERE, Problem.MISSING):
                raise self._convert_error(error) from None
            # It may have been changed by this very call, whose first answer was lost.
            return self._read_tagged(key)[0] == content
        return True

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        with translate_errors():
            if self._client is None:
                self._client = self._connect()
            return request(self._client)

    def _ask_for_object(self, request: Callable[[Any], Any]) -> Any:
        """None where the object is missing."""
        try:
            return self._ask(request)
        except S3Error as error:
            # S3 answers 403 for a missing object to a role that may not list.
            blind = self._credentials is Credentials.ROLE and error.problem is Problem.DENIED
            if not blind and error.problem is not Problem.MISSING:
                raise self._convert_error(error) from None
            return None

    def _locate(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": "/".join(filter(None, [self.folder, key]))}

    def _read_tagged(self, key: str) -> tuple[bytes | None, str]:
        """(content, ETag)."""
        where = self._locate(key)

        def get(client: Any) -> tuple[bytes, str]:
            reply = client.get_object(**where)
            return bytes(reply["Body"].read()), str(reply["ETag"])

        return self._ask_for_object(get) or (None, "")

    def _has(self, key: str, size: int, sha256: str) -> bool:
        where = self._locate(key)
        head = self._ask_for_object(lambda client: client.head_object(**where))
        found = (head["ContentLength"], head["Metadata"].get("sha256")) if head else None
        return found == (size, sha256)

    def _upload(self, key: str, beginning: Beginning, sha256: str) -> None:
        extra = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
        where = tuple(self._locate(key).values())
        self.call(lambda client: client.upload_fileobj(beginning, *where, ExtraArgs=extra))

    def _fail(self, problem: Problem, why: str) -> None:
        raise self._convert_error(S3Error(problem, why))

    def _connect(self) -> Any:
        if self._credentials is Credentials.ROLE:
            return connect_as_role()
        unsigned = self._credentials is Credentials.NONE
        return connect(profile=self._profile, endpoint=self._endpoint, unsigned=unsigned)


class Beginning:
    """The first bytes of a file that may grow, hashed as they are read.

    It cannot be sought in, so that each byte is read once and what was hashed is what was sent.
    """

    def __init__(self, file: BinaryIO, size: int, report_progress: Callable[[], None]) -> None:
        self._file = file
        self._left = size
        self._digest = hashlib.sha256()
        self._report_progress = report_progress

    def read(self, length: int | None = -1) -> bytes:
        most = self._left if length is None or length < 0 else min(length, self._left)
        block = self._file.read(most)
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
    *, profile: str = "", endpoint: str = "", unsigned: bool = False, session: Any = None
) -> Any:
    import boto3
    import botocore
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard"},
        # Addresses that are signed beforehand are of an older kind otherwise.
        signature_version=botocore.UNSIGNED if unsigned else "s3v4",
        s3={"addressing_style": "path"} if endpoint else {},
    )
    own = boto3.Session(profile_name=profile or None, botocore_session=session)
    return own.client("s3", config=config, endpoint_url=endpoint or None)


@functools.lru_cache(maxsize=None)
def connect_as_role() -> Any:
    """One client for the process: it takes longer to make than a pass of little does.

    botocore renews the credentials of an instance profile by itself.
    """
    import botocore.session

    session = botocore.session.get_session()
    resolver = session.get_component("credential_provider")
    resolver.providers = [each for each in resolver.providers if each.METHOD == ROLE_METHOD]
    if session.get_credentials() is None:
        raise S3Error(Problem.NO_CREDENTIALS, NO_ROLE)
    return connect(session=session)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise S3Error for whatever boto3 raises."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as known

    try:
        yield
    except known.ClientError as error:
        code = str(error.response["Error"].get("Code", ""))
        why = f"{code}: {error.response['Error'].get('Message', '')}"
        raise S3Error(PROBLEMS.get(code, Problem.REFUSED), why) from None
    except (known.NoCredentialsError, known.PartialCredentialsError) as error:
        raise S3Error(Problem.NO_CREDENTIALS, str(error)) from None
    except known.HTTPClientError as error:
        raise S3Error(Problem.UNREACHABLE, str(error)) from None
    except (known.BotoCoreError, Boto3Error, OSError) as error:
        raise S3Error(Problem.REFUSED, str(error)) from None
