"""A store in S3, used from the server with the credentials of its instance profile only."""

from __future__ import annotations

from pathlib import Path

from ...wire.s3 import S3, Credentials
from ...wire.s3_errors import S3Error, S3Problem
from .store import ChangedError, Progress, StoreError


class MirrorS3Store(S3):
    """The lab's prefix in its bucket."""

    def __init__(self, url: str, prefix: str, progress: Progress) -> None:
        super().__init__(
            url,
            prefix,
            credentials=Credentials.ROLE,
            convert_error=convert_error,
            report_progress=progress,
        )

    def fetch(self, key: str, path: Path, size: int) -> None:
        with path.open("wb") as file:
            for block in self.read_blocks(key, size=size):
                file.write(block)

    def close(self) -> None:
        """Keep the connection open for the next pass."""


def convert_error(error: S3Error) -> StoreError:
    if error.problem is S3Problem.CHANGED_HERE:
        return ChangedError(error.why)
    if error.problem is S3Problem.MISSING:
        return StoreError("the store does not have it", False)
    return StoreError(error.why[:300], error.problem is not S3Problem.UNCONFIRMED)
