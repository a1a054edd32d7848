"""The files of a pulled run that go into a bundle: which checkpoint, which logs, their hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labctl.errors import LabError, NotFoundError, TransferError
from labctl.events import Progress, Reporter
from labctl.model import Value
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import read_evaluation
from labctl.submissions.bundle import Source
from labctl.submissions.manifest import BundleFile
from labctl.sync.local_results import MANIFEST, PARTIAL, run_index

CHECKPOINTS, LOGS, REPORT = "checkpoints", "logs", "report.html"
MOST_MANIFEST_BYTES = 4 * 1024 * 1024
LEFT_OUT = frozenset((PARTIAL, ".labctl"))


class Found(Value, frozen=True):
    """A file that was seen and not read yet. `name` is its path in the bundle, `key` in the run."""

    name: str
    path: Path
    key: str
    size: int


def files_of_run(home: Path, checkpoint: str, notes: list[str]) -> list[Found]:
    """Model, logs, report and evaluation of the run in `home`, by name; nothing is read.

    `checkpoint` "" takes all of them. What is no plain file is left out and told in `notes`.
    NotFoundError where there is no such checkpoint.
    """
    found = list(_model(home, checkpoint, notes))
    found += _tree(home / LOGS, LOGS, f"{LOGS}/", notes)
    for name in (REPORT, EVALUATION):
        path = home / name
        if path.is_file() and not path.is_symlink():
            found.append(Found(name=name, path=path, key=name, size=path.stat().st_size))
    return found


def hashed(found: Sequence[Found], root: Path, run_id: str, reporter: Reporter) -> Iterator[Source]:
    """Each file with its hash; what its pull has hashed already is not read again."""
    index = run_index(root, run_id)
    total, done = sum(one.size for one in found), 0
    for one in found:
        sha256, stat = index.hash(one.key, one.path)
        done += one.size
        reporter.emit(Progress(name="reading", done=done, total=total, unit="bytes"))
        file = BundleFile(path=one.name, size=stat.st_size, sha256=sha256)
        yield Source(file=file, path=one.path)
    index.save(keep=True)


def best_checkpoint(home: Path) -> str:
    """The checkpoint that was evaluated, here or there; else the one that was best on validation;
    else the last. "" where none has a manifest."""
    for file in (home / EVALUATION, home / LOGS / EVALUATION):
        try:
            named = read_evaluation(file).checkpoint
        except LabError:
            continue
        if named and "/" not in named and (home / CHECKPOINTS / named).exists():
            return named
    whole = sorted(home.glob(f"{CHECKPOINTS}/*/{MANIFEST}"))
    ranked = sorted(whole, key=lambda path: (_accuracy(path), path.parent.name))
    return ranked[-1].parent.name if ranked else ""


def check_whole(home: Path, checkpoint: str, sources: Iterable[Source]) -> None:
    """TransferError where a file of the checkpoint is not the one that its own manifest names."""
    listed = _object(home / CHECKPOINTS / checkpoint / MANIFEST).get("files")
    here = {source.file.path: source.file for source in sources}
    for name, promised in listed.items() if checkpoint and isinstance(listed, dict) else ():
        one = here.get(f"model/{checkpoint}/{name}")
        if one is None or {"size": one.size, "sha256": one.sha256} != promised:
            raise TransferError(
                f"the checkpoint {checkpoint} is not whole: {name}",
                why="it is not the file that its manifest names",
                hint="labctl pull",
            )


def _model(home: Path, chosen: str, notes: list[str]) -> Iterator[Found]:
    if "/" in chosen or chosen in (".", ".."):
        raise NotFoundError(f"{chosen!a} is no checkpoint's name", hint=_known(home))
    place = home / CHECKPOINTS / chosen
    if place.is_file() and not place.is_symlink():
        key = f"{CHECKPOINTS}/{chosen}"
        yield Found(name=f"model/{chosen}", path=place, key=key, size=place.stat().st_size)
        return
    if chosen and not place.is_dir():
        raise NotFoundError(f"there is no checkpoint {chosen} in {home}", hint=_known(home))
    inside = f"{CHECKPOINTS}/{chosen}" if chosen else CHECKPOINTS
    yield from _tree(place, inside, f"model/{chosen}/" if chosen else "model/", notes)


def _known(home: Path) -> str:
    known = sorted(path.name for path in (home / CHECKPOINTS).glob("*"))
    return f"labctl submit --checkpoint {known[-1]}" if known else "labctl pull"


def _tree(folder: Path, inside: str, prefix: str, notes: list[str]) -> Iterator[Found]:
    """The plain files below a folder of the run, in order of name."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            path = Path(place) / name
            below = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                notes.append(f"{inside}/{below} is a link or no file, and stays here")
                continue
            size = path.stat().st_size
            yield Found(name=prefix + below, path=path, key=f"{inside}/{below}", size=size)


def _accuracy(file: Path) -> float:
    metrics = _object(file).get("metrics")
    value = metrics.get("val_accuracy") if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else -1.0


def _object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_MANIFEST_BYTES:
            return {}
        body = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
