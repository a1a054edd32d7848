"""The files of a pulled run for a bundle: its checkpoint, its logs, and their hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from labctl.decoding import convert_value
from labctl.errors import LabError, NotFoundError, TransferError
from labctl.events import Progress, Reporter
from labctl.model import Value
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import read_evaluation
from labctl.submissions.bundle import BundleSource
from labctl.submissions.manifest import BundleFile
from labctl.sync.local_results import PARTIAL, run_index
from labctl.wire.checkpoints import MANIFEST
from labctl.wire.containment import is_contained

CHECKPOINTS, LOGS, REPORT = "checkpoints", "logs", "report.html"
MOST_MANIFEST_BYTES = 4 * 1024 * 1024
LEFT_OUT = frozenset((PARTIAL, ".labctl"))


class RunFile(Value, frozen=True):
    """A file that is not read yet. `name` is its path in the bundle, `key` its path in the run."""

    name: str
    path: Path
    key: str
    size: int


class _CheckpointMetrics(Value, frozen=True):
    val_accuracy: float | None = None


class _ManifestWithMetrics(Value, frozen=True):
    metrics: _CheckpointMetrics = _CheckpointMetrics()


class _ManifestWithFiles(Value, frozen=True):
    """The size and SHA-256 of each file, by its path in the checkpoint."""

    files: dict[str, object] = msgspec.field(default_factory=dict)


Part = TypeVar("Part", _ManifestWithMetrics, _ManifestWithFiles)


def list_run_files(home: Path, checkpoint: str, notes: list[str]) -> list[RunFile]:
    """List the model, logs, report and evaluation of the run in `home`; nothing is read.

    `checkpoint` "" means all of them. Links and special files are skipped, with a line in `notes`.
    NotFoundError if the checkpoint does not exist.
    """
    files = list(_list_model(home, checkpoint, notes))
    files += _list_files(home / LOGS, LOGS, f"{LOGS}/", notes)
    for name in (REPORT, EVALUATION):
        path = home / name
        if path.is_file() and not path.is_symlink():
            files.append(RunFile(name=name, path=path, key=name, size=path.stat().st_size))
    return files


def hash_files(
    found: Sequence[RunFile], root: Path, run_id: str, reporter: Reporter
) -> Iterator[BundleSource]:
    """Yield each file with its hash; files that were hashed by the pull are not read again."""
    index = run_index(root, run_id)
    total, done = sum(file.size for file in found), 0
    for entry in found:
        sha256, stat = index.hash_and_stat(entry.key, entry.path)
        done += entry.size
        reporter.emit(Progress(name="reading", done=done, total=total, unit="bytes"))
        file = BundleFile(path=entry.name, size=stat.st_size, sha256=sha256)
        yield BundleSource(file=file, path=entry.path)
    index.save(keep=True)


def find_best_checkpoint(home: Path) -> str:
    """Return the name of the evaluated checkpoint, else the best on validation, else the last.

    "" if no checkpoint has a manifest.
    """
    for file in (home / EVALUATION, home / LOGS / EVALUATION):
        try:
            named = read_evaluation(file).checkpoint
        except LabError:
            continue
        if named and "/" not in named and (home / CHECKPOINTS / named).exists():
            return named
    complete = sorted(home.glob(f"{CHECKPOINTS}/*/{MANIFEST}"))
    ranked = sorted(complete, key=lambda path: (_read_accuracy(path), path.parent.name))
    return ranked[-1].parent.name if ranked else ""


def require_complete_checkpoint(
    home: Path, checkpoint: str, sources: Iterable[BundleSource]
) -> None:
    """Raise TransferError if a file of the checkpoint differs from the checkpoint's manifest."""
    manifest = _read_manifest(home / CHECKPOINTS / checkpoint / MANIFEST, _ManifestWithFiles)
    by_path = {source.file.path: source.file for source in sources}
    for name, promised in manifest.files.items() if checkpoint else ():
        file = by_path.get(f"model/{checkpoint}/{name}")
        if file is None or {"size": file.size, "sha256": file.sha256} != promised:
            raise TransferError(
                f"the checkpoint {checkpoint} is incomplete: {name}",
                why="the file does not match the checkpoint's manifest",
                hint=f"labctl pull {home.name}",
            )


def _list_model(home: Path, chosen: str, notes: list[str]) -> Iterator[RunFile]:
    if chosen and ("/" in chosen or not is_contained(chosen)):
        raise NotFoundError(
            f"{chosen!a} is not the name of a checkpoint", hint=_checkpoint_hint(home)
        )
    source = home / CHECKPOINTS / chosen
    if source.is_file() and not source.is_symlink():
        key = f"{CHECKPOINTS}/{chosen}"
        yield RunFile(name=f"model/{chosen}", path=source, key=key, size=source.stat().st_size)
        return
    if chosen and not source.is_dir():
        raise NotFoundError(
            f"there is no checkpoint {chosen} in {home}", hint=_checkpoint_hint(home)
        )
    inside = f"{CHECKPOINTS}/{chosen}" if chosen else CHECKPOINTS
    yield from _list_files(source, inside, f"model/{chosen}/" if chosen else "model/", notes)


def _checkpoint_hint(home: Path) -> str:
    names = sorted(path.name for path in (home / CHECKPOINTS).glob("*"))
    return f"labctl submit --checkpoint {names[-1]}" if names else f"labctl pull {home.name}"


def _list_files(folder: Path, inside: str, prefix: str, notes: list[str]) -> Iterator[RunFile]:
    """List the regular files below a directory of the run, in order of name."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            path = Path(place) / name
            below = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                notes.append(f"skipped {inside}/{below}: it is a link or a special file")
                continue
            size = path.stat().st_size
            yield RunFile(name=prefix + below, path=path, key=f"{inside}/{below}", size=size)


def _read_accuracy(file: Path) -> float:
    value = _read_manifest(file, _ManifestWithMetrics).metrics.val_accuracy
    return -1.0 if value is None else value


def _read_manifest(file: Path, kind: type[Part]) -> Part:
    """Read a part of a checkpoint's manifest, which the run wrote; empty if it is damaged."""
    try:
        if file.stat().st_size > MOST_MANIFEST_BYTES:
            return kind()
        # Not by msgspec: Python programs write NaN for a metric.
        return convert_value(json.loads(file.read_text()), kind)
    except (OSError, ValueError, RecursionError):
        return kind()
