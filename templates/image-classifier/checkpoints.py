"""Checkpoints that are either complete or absent.

A checkpoint is a directory `step-00000100` of safetensors and JSON files (no
pickle: loading one never runs code), and a manifest with the size and SHA-256
of each. It is written under another name, forced to disk and renamed, so that
whenever the power goes, the last whole one can still be loaded. `labctl pull`
reads the same manifests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

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
    epoch: int
    metrics: Mapping[str, float]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def rank(self) -> tuple[float, float, int]:
        """The best checkpoint has the largest: accuracy on val, then the lower loss, then age."""
        accuracy = self.metrics.get("val_accuracy", -1.0)
        return accuracy, -self.metrics.get("val_loss", float("inf")), self.step


def read(path: Path) -> Checkpoint:
    """Read a manifest; raises CheckpointError if it is not one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["version"] != VERSION:
            raise CheckpointError(f"{path}: manifest of unknown version {manifest['version']}")
        if not {"model.safetensors", STATE} <= set(manifest["files"]):
            raise CheckpointError(f"{path}: the manifest names no {STATE} or no weights")
        return Checkpoint(
            path=path,
            step=int(manifest["step"]),
            epoch=int(manifest["epoch"]),
            metrics=dict(manifest["metrics"]),
            files=dict(manifest["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no valid {MANIFEST} ({error!r})") from error


def verify(checkpoint: Checkpoint) -> None:
    """Compare every file with the manifest; raises CheckpointError at the first difference."""
    for name, expected in checkpoint.files.items():
        try:
            found = _describe(checkpoint.path / name)
        except OSError as error:
            raise CheckpointError(f"{checkpoint.path}: {name} cannot be read ({error})") from error
        if found != expected:
            raise CheckpointError(f"{checkpoint.path}: {name} is not the file that was written")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def found(paths: Iterable[Path], say: Callable[[str], None] = _print) -> list[Checkpoint]:
    """List the checkpoints among `paths`, oldest first; `say` reports each without a manifest."""
    checkpoints = []
    for path in paths:
        if NAME.fullmatch(path.name) and path.is_dir():
            try:
                checkpoints.append(read(path))
            except CheckpointError as error:
                say(f"skipped: {error}")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def first_whole(candidates: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the first undamaged candidate; print the damaged ones before it."""
    for checkpoint in candidates:
        try:
            verify(checkpoint)
        except CheckpointError as error:
            _print(f"skipped: {error}")
        else:
            return checkpoint
    return None


def latest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in `directory`."""
    return first_whole(reversed(found(directory.glob("step-*"))))


def best(path: Path) -> Checkpoint:
    """Find the best complete checkpoint at or below `path`; raises CheckpointError without one."""
    paths = [path] if NAME.fullmatch(path.resolve().name) else path.rglob("step-*")
    ranked = sorted(found(paths), key=lambda checkpoint: checkpoint.rank, reverse=True)
    checkpoint = first_whole(ranked)
    if checkpoint is None:
        raise CheckpointError(f"no whole checkpoint in {path}")
    return checkpoint


def load_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """Load a safetensors file to main memory. Other formats are never loaded: pickles run code."""
    path = checkpoint.path / f"{name}.safetensors"
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} holds no safetensors ({error})") from error


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint.path / STATE).read_text())
    return state


def write(
    directory: Path,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> Path:
    """Write a checkpoint and return its path; `tensors` has one entry per safetensors file."""
    final = directory / f"step-{step:08d}"
    partial = _partial(final)
    partial.mkdir(parents=True)
    for name, values in tensors.items():
        flat = {key: value.detach().cpu().contiguous() for key, value in values.items()}
        (partial / f"{name}.safetensors").write_bytes(save(flat))
    _write_json(partial / STATE, state)
    files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
    manifest = {"version": VERSION, "step": step, "epoch": epoch, "metrics": metrics}
    _write_json(partial / MANIFEST, manifest | {"files": files})
    for path in (*partial.iterdir(), partial):
        _to_disk(path)
    if final.exists():
        # A damaged one that was skipped, or one that was not validated yet.
        final.rename(_partial(final))
    partial.rename(final)
    _to_disk(directory)
    return final


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    # Damaged checkpoints were already reported when the run started.
    checkpoints = found(directory.glob("step-*"), say=lambda _: None)
    kept = {checkpoint.path for checkpoint in checkpoints[-keep:]}
    kept.add(max(checkpoints, key=lambda checkpoint: checkpoint.rank).path)
    for checkpoint in checkpoints:
        if checkpoint.path not in kept:
            # Rename first: removal takes time, and a partial checkpoint must
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


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def _to_disk(path: Path) -> None:
    """Wait until a file's, or a directory's, contents would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
