"""A store in S3. S3 itself verifies every upload by its checksum."""

from __future__ import annotations

from pathlib import Path

from labctl.stores import StoreContext, write_verified
from labctl.stores.bucket import open_folder


class S3LabStore:
    def __init__(self, url: str, prefix: str, context: StoreContext) -> None:
        self.url = url
        self._folder = open_folder(url, prefix, context.profile)

    def read(self, key: str) -> bytes | None:
        return self._folder.read(key)

    def write(self, key: str, data: bytes) -> None:
        self._folder.write(key, data)

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def write_draft(draft: Path) -> None:
            with draft.open("wb") as file:
                for block in self._folder.read_blocks(key, size=size):
                    file.write(block)

        write_verified(path, size, sha256, write_draft)

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        return self._folder.swap(key, data, expected)
