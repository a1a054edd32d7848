"""A store in S3. S3 itself verifies every upload by its checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

from labctl.stores import StoreContext, write_verified
from labctl.stores.bucket import open_folder


class S3LabStore:
    def __init__(self, url: str, prefix: str, around: StoreContext) -> None:
        self.url = url
        self._folder = open_folder(url, prefix, around.profile)

    def read(self, key: str) -> bytes | None:
        return self._folder.read(key)

    def write(self, key: str, data: bytes | Path) -> None:
        if isinstance(data, bytes):
            self._folder.write(key, data)
            return
        with data.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        self._folder.send(key, data, size, sha256)

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def write_draft(draft: Path) -> None:
            with draft.open("wb") as file:
                for block in self._folder.read_blocks(key, size=size):
                    file.write(block)

        write_verified(path, size, sha256, write_draft)

    def list_keys(self, prefix: str = "") -> list[str]:
        return [listed.key for listed in self._folder.list_objects(prefix)]

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        return self._folder.swap(key, data, expected)
