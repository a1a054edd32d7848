"""The layout of a run in a lab's store, and the files that belong together in it.

    runs/<run>/run.json       {"spec", "code": {"size", "sha256"}, "record", "attempts", "at"}
    runs/<run>/code.tar       the run's own code, written once
    runs/<run>/files/<path>   outputs
    runs/<run>/index.json     {"files": {path: [size, sha256]}, "pending": the same, "at"}

The index is written after the files that it names. "pending" are files that were about to replace
others of the same name: a restore accepts either version. Of a file that only grows, the first
bytes count. A directory with a manifest.json (a checkpoint) is restored completely or not at all.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

MANIFEST = "manifest.json"
Files = Dict[str, List[Any]]


def build_key(run: str, name: str) -> str:
    return f"runs/{run}/{name}"


def list_checkpoints(names: Iterable[str]) -> list[str]:
    """Return the directories (with "/") that have a manifest, only the outermost ones."""
    outermost: list[str] = []
    for name in sorted(names, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in outermost):
                outermost.append(top)
    return outermost


def find_checkpoint(name: str, known: list[str]) -> str:
    return next((top for top in known if name.startswith(top)), "")


def group_by_checkpoint(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their checkpoint ("" for none), manifests last."""
    all_names = list(names)
    known_tops = list_checkpoints(all_names)
    groups: dict[str, list[str]] = {}
    for name in sorted(all_names, key=lambda name: (name.endswith("/" + MANIFEST), name)):
        groups.setdefault(find_checkpoint(name, known_tops), []).append(name)
    return groups


def find_damage(top: str, manifest: dict[str, Any], files: Files) -> str:
    """Return why a checkpoint is incomplete, "" if it is complete. `files` are those present."""
    entries = manifest.get("files", {})
    for inner, expected in entries.items() if isinstance(entries, dict) else ():
        present = files.get(top + inner)
        if present is None:
            return f"{inner} is missing"
        if isinstance(expected, dict) and (
            expected.get("size", present[0]) != present[0]
            or expected.get("sha256", present[1]) != present[1]
        ):
            return f"{inner} does not match its manifest"
    return ""
