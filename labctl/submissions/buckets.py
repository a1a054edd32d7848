"""A bucket as the place of an assignment: students post into it and can do nothing else there.

    <folder>/NAME/STUDENT/part-01 ...    the parts of a bundle
    <folder>/NAME/STUDENT/index.json     which parts make a bundle
    <folder>/NAME/STUDENT/receipts.json  what the receiver answered

A ticket lets its bearer post exactly these keys, each up to a size, until it expires. The bucket
keeps versions, so that no post takes away what an earlier one brought; who posts can neither read
nor remove.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from labctl.config.times import Moment
from labctl.errors import PolicyError
from labctl.model import Value
from labctl.stores.bucket import open_folder
from labctl.submissions.assignment import Assignment, Ticket

PART_BYTES = 64 * 2**20
MOST_PARTS = 12
MOST_INDEX_BYTES = 64 * 1024
# S3 believes a signature for so long.
LONGEST_S = 7 * 86_400
CHUNK_BYTES = 8 * 2**20


class Version(Value, frozen=True):
    """One version of an object. `at` is S3's own clock, in Unix seconds."""

    key: str
    id: str
    size: int
    at: float


class Bucket:
    """The folder of `url` (s3://bucket/folder), with the receiver's own AWS credentials."""

    def __init__(self, url: str, profile: str = "") -> None:
        self._s3 = open_folder(url, profile=profile)
        self.name = self._s3.bucket

    def key(self, *parts: str) -> str:
        return "/".join(filter(None, [self._s3.folder, *parts]))

    def check_versioned(self) -> None:
        """PolicyError where a later post would take away an earlier one."""
        said = self._s3.call(lambda s3: s3.get_bucket_versioning(Bucket=self.name))
        if said.get("Status") != "Enabled":
            raise PolicyError(
                f"the bucket {self.name} keeps no versions",
                why="a second post under one name would replace the first",
                hint=f"aws s3api put-bucket-versioning --bucket {self.name} "
                "--versioning-configuration Status=Enabled",
            )

    def ticket(self, rules: Assignment, student: str, valid_s: int) -> Ticket:
        """Leave for one student to post bundles of up to the assignment's size."""
        part_bytes = max(PART_BYTES, -(-rules.max_size // MOST_PARTS))
        count = -(-rules.max_size // part_bytes)
        expires = Moment(at=int(time.time()) + valid_s)
        about = (rules.name, student)

        def form(key: str, most: int) -> dict[str, Any]:
            asked = {
                "Bucket": self.name,
                "Key": self.key(*about, key),
                "Fields": {"success_action_status": "201"},
                "Conditions": [
                    {"success_action_status": "201"},
                    ["content-length-range", 1, most],
                ],
                "ExpiresIn": valid_s,
            }
            found: dict[str, Any] = self._s3.call(lambda s3: s3.generate_presigned_post(**asked))
            return found

        forms = [form(part_key(number), part_bytes) for number in range(1, count + 1)]
        index = form("index.json", MOST_INDEX_BYTES)
        where = {"Bucket": self.name, "Key": self.key(*about, "receipts.json")}
        receipts = self._s3.call(
            lambda s3: s3.generate_presigned_url("get_object", Params=where, ExpiresIn=valid_s)
        )
        return Ticket(
            url=index["url"],
            expires=expires,
            part_bytes=part_bytes,
            index=index["fields"],
            parts=tuple(one["fields"] for one in forms),
            receipts=receipts,
        )

    def versions(self, *parts: str) -> list[Version]:
        """Every version below a prefix, oldest first."""

        def listed(s3: Any) -> list[Version]:
            pages = s3.get_paginator("list_object_versions").paginate(
                Bucket=self.name, Prefix=self.key(*parts)
            )
            return [
                Version(
                    key=one["Key"],
                    id=one["VersionId"],
                    size=one["Size"],
                    at=one["LastModified"].timestamp(),
                )
                for page in pages
                for one in page.get("Versions", ())
            ]

        found: list[Version] = self._s3.call(listed)
        # S3 lists the newest of a key first, and its clock is told in whole seconds.
        found.reverse()
        return sorted(found, key=lambda one: one.at)

    def blocks(self, version: Version) -> Iterator[bytes]:
        """The content of one version."""
        where = {"Bucket": self.name, "Key": version.key, "VersionId": version.id}
        body = self._s3.call(lambda s3: s3.get_object(**where)["Body"])
        while block := self._s3.call(lambda s3: body.read(CHUNK_BYTES)):
            yield block

    def write(self, key: str, data: bytes) -> None:
        where = {"Bucket": self.name, "Key": key, "ContentType": "application/json"}
        self._s3.call(lambda s3: s3.put_object(**where, Body=data))


def part_key(number: int) -> str:
    """The name of a part, from 1."""
    return f"part-{number:02}"
