"""Checkpoints that are either complete or absent.

A checkpoint is a directory `step-00000100` with a manifest: the size and
SHA-256 of each file. It is written under another name and renamed, so that the
last complete one can be loaded whenever the power goes. `labctl pull` and
`labctl submit` read the same manifests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# labctl sets these on a server. Elsewhere, everything is beside the code.
RUN = Path(os.environ.get("LABCTL_RUN_DIR", "."))
DIRECTORY = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", RUN / "checkpoints"))
# Checkpoints of an earlier run, from which a new run continues.
START = Path(os.environ.get("LABCTL_DATA_DIR", RUN)) / "start"
MANIFEST, STATE = "manifest.json", "state.json"
NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def state(self) -> dict[str, Any]:
        """What the training stored beside the weights."""
        return json.loads((self.path / STATE).read_text())

    @property
    def rank(self) -> tuple[float, int]:
        """The best checkpoint has the largest: the lowest loss on val, then age."""
        return -self.metrics.get("val_loss", float("inf")), self.step


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and compare each file with the manifest. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
        if STATE not in files or any(_describe(path / name) != files[name] for name in files):
            raise CheckpointError(f"{path}: a file is missing, or is not what was written")
        return Checkpoint(path, int(manifest["step"]), dict(manifest["metrics"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no valid checkpoint ({error!r})") from None


def find(top: Path) -> list[Checkpoint]:
    """List the complete checkpoints at or below `top`, oldest first; name the damaged ones."""
    paths = [top] if NAME.fullmatch(top.resolve().name) else top.rglob("step-*")
    checkpoints = []
    for path in paths:
        if NAME.fullmatch(path.resolve().name) and path.is_dir():
            try:
                checkpoints.append(load(path))
            except CheckpointError as error:
                print(f"skipped: {error}", file=sys.stderr, flush=True)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def latest() -> Checkpoint | None:
    """Return the checkpoint to continue from: the newest of this run, else of an earlier one."""
    checkpoints = find(DIRECTORY) or find(START)
    return checkpoints[-1] if checkpoints else None


def best(top: Path) -> Checkpoint:
    """Return the best complete checkpoint at or below `top`; raises CheckpointError without one."""
    checkpoints = find(top)
    if not checkpoints:
        raise CheckpointError(f"no complete checkpoint in {top}; train first: python train.py")
    return max(checkpoints, key=lambda checkpoint: checkpoint.rank)


@contextmanager
def writing(step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a directory for the files of a new checkpoint, which then becomes complete."""
    final = DIRECTORY / f"step-{step:08d}"
    partial = DIRECTORY / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    (partial / STATE).write_text(json.dumps(state) + "\n")
    files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
    manifest = {"version": 1, "step": step, "epoch": 0, "metrics": metrics, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (*partial.iterdir(), partial):
        _write_through(path)
    # The same step once more: a repeated one, or one that was damaged.
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _write_through(DIRECTORY)


def prune(keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    checkpoints = find(DIRECTORY)
    kept = checkpoints[-keep:] + sorted(checkpoints, key=lambda checkpoint: checkpoint.rank)[-1:]
    for checkpoint in checkpoints:
        if checkpoint not in kept:
            # A half-removed checkpoint must not have this name.
            checkpoint.path.rename(checkpoint.path.with_name(f".{checkpoint.path.name}.removed"))
    for leftover in DIRECTORY.glob(".step-*"):
        shutil.rmtree(leftover)


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _write_through(path: Path) -> None:
    """Wait until the contents of a file or directory would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
