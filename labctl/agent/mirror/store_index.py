"""What a lab's store holds of one run, and what belongs together in it.

    runs/<run>/run.json       {"spec", "code": {"size", "sha256"}, "record", "attempts", "at"}
    runs/<run>/code.tar       the run's own code, written once
    runs/<run>/files/<path>   outputs
    runs/<run>/index.json     {"files": {path: [size, sha256]}, "pending": the same, "at"}

The index is written after the files that it names. "pending" are files that were about to replace
others of their name: whoever restores takes what fits either. Of a file that only grows, the first
bytes count. A directory with a manifest.json (a checkpoint) is there whole or not at all.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

MANIFEST = "manifest.json"
Files = Dict[str, List[Any]]


def key(run: str, name: str) -> str:
    return f"runs/{run}/{name}"


def tops(names: Iterable[str]) -> list[str]:
    """Directories (with "/") that hold a manifest, the outermost ones only."""
    found: list[str] = []
    for name in sorted(names, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in found):
                found.append(top)
    return found


def top_of(name: str, known: list[str]) -> str:
    return next((top for top in known if name.startswith(top)), "")


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by the checkpoint that they belong to ("" for none), manifests last."""
    every = list(names)
    known = tops(every)
    groups: dict[str, list[str]] = {}
    for name in sorted(every, key=lambda one: (one.endswith("/" + MANIFEST), one)):
        groups.setdefault(top_of(name, known), []).append(name)
    return groups


def broken(top: str, manifest: dict[str, Any], files: Files) -> str:
    """What keeps a checkpoint from being whole, "" where nothing does. `files` are those there."""
    listed = manifest.get("files", {})
    for inner, expected in listed.items() if isinstance(listed, dict) else ():
        found = files.get(top + inner)
        if found is None:
            return f"{inner} is missing"
        if isinstance(expected, dict) and (
            expected.get("size", found[0]) != found[0]
            or expected.get("sha256", found[1]) != found[1]
        ):
            return f"{inner} is not the file that its manifest names"
    return ""
