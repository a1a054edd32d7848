"""The layout of a run in a lab's store, and the files that belong together in it.

    runs/<run>/run.json       a `RunObjectRecord`
    runs/<run>/code.tar       the run's own code, written once
    runs/<run>/files/<path>   outputs
    runs/<run>/index.json     an `IndexRecord`

The index is written after the files that it names. "pending" are files that were about to replace
others of the same name: a restore accepts either version. Of a file that only grows, the first
bytes count. A directory with a manifest.json (a checkpoint) is restored completely or not at all.
"""

from __future__ import annotations

from typing import Dict, Iterable

from ...wire.checkpoints import MANIFEST, find_checkpoint, list_checkpoints
from ...wire.mirrors import StoredFile
from ..files.checkpoints import CheckpointManifest

Files = Dict[str, StoredFile]


def build_key(run: str, name: str) -> str:
    return f"runs/{run}/{name}"


def group_by_checkpoint(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their checkpoint ("" for none), manifests last."""
    all_names = list(names)
    known_tops = list_checkpoints(all_names)
    groups: dict[str, list[str]] = {}
    for name in sorted(all_names, key=lambda name: (name.endswith("/" + MANIFEST), name)):
        groups.setdefault(find_checkpoint(name, known_tops), []).append(name)
    return groups


def find_damage(top: str, manifest: CheckpointManifest, files: Files) -> str:
    """Return why a checkpoint is incomplete, "" if it is complete. `files` are those present."""
    for inner in manifest.names:
        present, promised = files.get(top + inner), manifest.files.get(inner)
        if present is None:
            return f"{inner} is missing"
        if promised and not promised.is_match(present.size, present.sha256):
            return f"{inner} does not match its manifest"
    return ""
