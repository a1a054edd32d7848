"""The manifest of a checkpoint: what the program that wrote it says of its files.

It is a program's own JSON, so that everything in it may be missing or of another type.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..host.paths import read_json

# The value of a field that a manifest does not have.
ABSENT = object()


class PromisedFile(NamedTuple):
    """What a manifest says of one file, unchecked."""

    size: object = ABSENT
    sha256: object = ABSENT

    def is_match(self, size: int, sha256: str) -> bool:
        """Return whether the file is as promised, as far as the manifest says."""
        return self.size in (ABSENT, size) and self.sha256 in (ABSENT, sha256)


class CheckpointManifest(NamedTuple):
    """The names in a manifest, paths beside it, and what it says of those that it describes."""

    names: tuple[str, ...]
    files: dict[str, PromisedFile]

    @property
    def hashes(self) -> dict[str, str]:
        """The hashes that the manifest has, without what is no hash."""
        hashed = ((name, promised.sha256) for name, promised in self.files.items())
        return {name: sha256 for name, sha256 in hashed if isinstance(sha256, str) and sha256}


def read_checkpoint_manifest(path: Path) -> CheckpointManifest:
    """Read a manifest; one that cannot be read names no files."""
    try:
        entries = read_json(path).get("files")
    except OSError:
        entries = None
    if not isinstance(entries, dict):
        return CheckpointManifest((), {})
    promised = {
        name: PromisedFile(entry.get("size", ABSENT), entry.get("sha256", ABSENT))
        for name, entry in entries.items()
        if isinstance(entry, dict)
    }
    return CheckpointManifest(tuple(entries), promised)
