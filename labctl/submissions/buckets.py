"""A bucket that receives an assignment: students can post into it, and nothing else.

    <folder>/NAME/STUDENT/part-01 ...    the parts of a bundle
    <folder>/NAME/STUDENT/index.json     which parts make a bundle
    <folder>/NAME/STUDENT/receipts.json  the receiver's answers

A ticket permits posting exactly these keys, each up to a size, until it expires. The bucket keeps
versions, so that no post replaces an earlier one. A ticket permits neither reading nor deleting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labctl.config.times import Moment
from labctl.errors import PolicyError
from labctl.model import Value
from labctl.stores.bucket import open_folder
from labctl.submissions.assignment import Assignment, Ticket

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 64 * 2**20
MOST_PARTS = 12
MOST_INDEX_BYTES = 64 * 1024
# Longest validity of a signature that S3 accepts.
LONGEST_S = 7 * 86_400
CHUNK_BYTES = 8 * 2**20


class Version(Value, frozen=True):
    """One version of an object. `at` is S3's own clock, in Unix seconds."""

    key: str
    id: str
    size: int
    at: float


class PostForm(Value, frozen=True):
    """A signed form: the URL to post it to, and its fields, which precede the file."""

    url: str
    fields: dict[str, str]


class Bucket:
    """The folder of `url` (s3://bucket/folder), with the receiver's own AWS credentials."""

    def __init__(self, url: str, profile: str = "") -> None:
        self._s3 = open_folder(url, profile=profile)
        self.name = self._s3.bucket

    def key(self, *parts: str) -> str:
        return "/".join(filter(None, [self._s3.folder, *parts]))

    def check_versioned(self) -> None:
        """Raise PolicyError if the bucket keeps no versions, so that posts would replace others."""
        versioning = self._s3.call(lambda s3: s3.get_bucket_versioning(Bucket=self.name))
        if versioning.get("Status") != "Enabled":
            raise PolicyError(
                f"the bucket {self.name} keeps no versions",
                why="a second post under one name would replace the first",
                hint=f"aws s3api put-bucket-versioning --bucket {self.name} "
                "--versioning-configuration Status=Enabled",
            )

    def create_ticket(self, rules: Assignment, student: str, valid_s: int) -> Ticket:
        """Create a ticket for one student, for bundles of up to the assignment's maximum size."""
        part_bytes = max(PART_BYTES, -(-rules.max_size // MOST_PARTS))
        count = -(-rules.max_size // part_bytes)
        expires = Moment(at=int(time.time()) + valid_s)
        folder = (rules.name, student)

        def build_form(key: str, most_bytes: int) -> PostForm:
            form = self._s3.call(
                lambda s3: s3.generate_presigned_post(
                    Bucket=self.name,
                    Key=self.key(*folder, key),
                    Fields={"success_action_status": "201"},
                    Conditions=[
                        {"success_action_status": "201"},
                        ["content-length-range", 1, most_bytes],
                    ],
                    ExpiresIn=valid_s,
                )
            )
            return PostForm(url=form["url"], fields=form["fields"])

        forms = [build_form(part_key(number), part_bytes) for number in range(1, count + 1)]
        index = build_form("index.json", MOST_INDEX_BYTES)
        location = {"Bucket": self.name, "Key": self.key(*folder, "receipts.json")}
        receipts = self._s3.call(
            lambda s3: s3.generate_presigned_url("get_object", Params=location, ExpiresIn=valid_s)
        )
        return Ticket(
            url=index.url,
            expires=expires,
            part_bytes=part_bytes,
            index=index.fields,
            parts=tuple(form.fields for form in forms),
            receipts=receipts,
        )

    def list_versions(self, *parts: str) -> list[Version]:
        """List every version below a prefix, oldest first."""

        def list_versions(s3: S3Client) -> list[Version]:
            pages = s3.get_paginator("list_object_versions").paginate(
                Bucket=self.name, Prefix=self.key(*parts)
            )
            return [
                Version(
                    key=item["Key"],
                    id=item["VersionId"],
                    size=item["Size"],
                    at=item["LastModified"].timestamp(),
                )
                for page in pages
                for item in page.get("Versions", ())
            ]

        versions = self._s3.call(list_versions)
        # S3 lists the newest version of a key first, with times in whole seconds.
        versions.reverse()
        return sorted(versions, key=lambda version: version.at)

    def read_blocks(self, version: Version) -> Iterator[bytes]:
        """Yield the content of one version in blocks."""
        body = self._s3.call(
            lambda s3: s3.get_object(Bucket=self.name, Key=version.key, VersionId=version.id)
        )["Body"]
        while block := self._s3.call(lambda s3: body.read(CHUNK_BYTES)):
            yield block

    def write(self, key: str, data: bytes) -> None:
        self._s3.call(
            lambda s3: s3.put_object(
                Bucket=self.name, Key=key, ContentType="application/json", Body=data
            )
        )


def part_key(number: int) -> str:
    """Return the name of a part; numbers start at 1."""
    return f"part-{number:02}"
