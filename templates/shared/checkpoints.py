"""Checkpoints that are either complete or absent.

A checkpoint is a directory `step-00000100` with the model, a `state.json`, and
a manifest with the size and SHA-256 of each file. No file is a pickle: loading
one never runs code. It is written under another name, forced to disk and
renamed, so that the last whole one survives a power cut. `labctl pull` reads
the same manifests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, as its manifest describes it; the files may not have been checked."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def rank(self) -> tuple[float, float, int]:
        """The best checkpoint has the largest: accuracy on val, then the lower loss, then age."""
        accuracy = self.metrics.get("val_accuracy", -1.0)
        return accuracy, -self.metrics.get("val_loss", float("inf")), self.step

    def read_bytes(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.read_bytes(STATE))
        return state


def read(path: Path) -> Checkpoint:
    """Read a manifest; raises CheckpointError if it is not one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["version"] != VERSION or STATE not in manifest["files"]:
            raise ValueError("unknown version, or no state.json")
        return Checkpoint(
            path=path,
            step=int(manifest["step"]),
            metrics=dict(manifest["metrics"]),
            files=dict(manifest["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no valid {MANIFEST} ({error!r})") from error


def is_whole(checkpoint: Checkpoint) -> bool:
    """Compare every file with the manifest; print the first difference."""
    for name, expected in checkpoint.files.items():
        try:
            is_same = _describe(checkpoint.path / name) == expected
        except OSError:
            is_same = False
        if not is_same:
            print(f"skipped: {checkpoint.path}: {name} is missing or damaged", file=sys.stderr)
            return False
    return True


def find(paths: Iterable[Path]) -> list[Checkpoint]:
    """List the checkpoints among `paths`, oldest first."""
    checkpoints = []
    for path in paths:
        if NAME.fullmatch(path.name) and path.is_dir():
            try:
                checkpoints.append(read(path))
            except CheckpointError as error:
                print(f"skipped: {error}", file=sys.stderr)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def latest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in `directory`."""
    newest_first = reversed(find(directory.glob("step-*")))
    return next((checkpoint for checkpoint in newest_first if is_whole(checkpoint)), None)


def best(path: Path) -> Checkpoint:
    """Find the best complete checkpoint at or below `path`; raises CheckpointError without one."""
    paths = [path] if NAME.fullmatch(path.resolve().name) else path.rglob("step-*")
    ranked = sorted(find(paths), key=lambda checkpoint: checkpoint.rank, reverse=True)
    for checkpoint in ranked:
        if is_whole(checkpoint):
            return checkpoint
    raise CheckpointError(f"no whole checkpoint in {path}")


def write(
    directory: Path,
    step: int,
    metrics: Mapping[str, float],
    files: Mapping[str, bytes],
    state: Mapping[str, Any],
) -> Path:
    """Write a checkpoint and return its path; `files` has the content of each file."""
    final = directory / f"step-{step:08d}"
    partial = _partial(final)
    partial.mkdir(parents=True)
    contents = {**files, STATE: _to_json(state)}
    for name, content in contents.items():
        (partial / name).write_bytes(content)
    described = {name: _describe(partial / name) for name in sorted(contents)}
    manifest = {"version": VERSION, "step": step, "metrics": metrics, "files": described}
    (partial / MANIFEST).write_bytes(_to_json(manifest))
    for path in (*partial.iterdir(), partial):
        _to_disk(path)
    if final.exists():  # a damaged one, or one without validation
        final.rename(_partial(final))
    partial.rename(final)
    _to_disk(directory)
    return final


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    checkpoints = find(directory.glob("step-*"))
    kept = {checkpoint.path for checkpoint in checkpoints[-keep:]}
    kept.add(max(checkpoints, key=lambda checkpoint: checkpoint.rank).path)
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            # Rename first: removal takes time, and a part of a checkpoint must
            # not have this name.
            checkpoint.path.rename(_partial(checkpoint.path))
    clean(directory)


def clean(directory: Path) -> None:
    """Remove leftovers of an interrupted `write` or `prune`."""
    for path in directory.glob(".step-*.partial-*"):
        shutil.rmtree(path)


def copy_from(earlier: Path, directory: Path) -> None:
    """Copy the checkpoints of an earlier run, unless `directory` has one to resume from."""
    if earlier.is_dir() and latest(directory) is None:
        shutil.copytree(earlier, directory, dirs_exist_ok=True)


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _to_disk(path: Path) -> None:
    """Wait until a file's, or a directory's, contents would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
