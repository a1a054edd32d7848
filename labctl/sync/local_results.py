"""What is here of a run's results: compared with what the server has, and renamed into place.

Nothing is written through links, and what the index knows was found right on the disk here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import PolicyError
from labctl.model import Run, Value
from labctl.sync.containment import contained, unwelcome
from labctl.sync.downloads import Due, renamed_identity
from labctl.sync.durability import hash_on_disk, sync_directories
from labctl.sync.file_transfer import RemoteFolder
from labctl.sync.scan import Index

PARTIAL = ".labctl-partial"
RECORD = "run.json"
MANIFEST = "manifest.json"


class Missing(Value, frozen=True):
    """A file of a run that is not here. `reason` is "" where a pull would bring it."""

    run: str
    path: str
    size: int = 0
    reason: str = ""


def run_index(lab_root: Path, run: str) -> Index:
    """Hashes of a run's files, as they were found on the disk here."""
    # Not "runs/": there, earlier versions kept hashes of what had come, not of what was on disk.
    return Index(lab_root.resolve(), f"pulled/{run}")


class Look:
    """What the server has of one run, compared with what is here."""

    def __init__(self, lab_root: Path, run: str, found: dict[str, Any]) -> None:
        # The user may have put runs/ itself elsewhere; below it nothing is followed.
        self.home = (lab_root / "runs").resolve() / run
        self.index = run_index(lab_root, run)
        self.ended = bool(found["ended"])
        self.unpulled = int(found.get("unpulled", 0))
        self.folder = RemoteFolder(
            directory=found["directory"], rsync_version=found.get("rsync", "")
        )
        self.files: dict[str, Due] = {}
        self.skipped = [
            Missing(run=run, path=ascii(path)[1:-1], reason=reason)
            for path, reason in found["skipped"]
        ]
        for path, size, sha256, growing in found["files"]:
            if reason := unwelcome(path, reserved=(PARTIAL, RECORD)):
                self.skipped.append(
                    Missing(run=run, path=ascii(path)[1:-1], size=size, reason=reason)
                )
            else:
                due = Due(path=path, size=size, sha256=sha256, growing=growing)
                self.files[contained(path)] = due

    def due(self) -> list[Due]:
        """The files that are not here as they are there."""
        missing = [due for due in self.files.values() if not self._here(due)]
        self.index.save(keep=True)
        return missing

    def here(self) -> Iterator[Path]:
        """The files that lie here under the names of those there, right or not."""
        for due in self.files.values():
            path = inside(self.home, due.path)
            if path.is_file() and not path.is_symlink():
                yield path

    def _here(self, due: Due) -> bool:
        path = inside(self.home, due.path)
        if not due.sha256 or not path.is_file() or path.is_symlink():
            return False
        found = path.lstat()
        if found.st_size != due.size:
            return False
        sha256 = self.index.known(due.path, found)
        if not sha256:
            try:
                sha256, found = hash_on_disk(path)
            except OSError:
                return False
            self.index.learn(due.path, found, sha256)
        return sha256 == due.sha256


def make_home(home: Path, record: Run | None) -> None:
    if home.is_symlink():
        raise PolicyError(
            f"{home} is a link",
            why="results are not written through links",
            hint=f"mv {home} somewhere else, then labctl pull",
        )
    home.mkdir(parents=True, exist_ok=True)
    if record is not None:
        staging = home / f".{RECORD}.new"
        staging.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        staging.replace(home / RECORD)


def inside(home: Path, name: str) -> Path:
    """`home/name`, refused where the way there passes through a link."""
    path = home
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink():
            raise PolicyError(
                f"{path} is a link",
                why="results are not written through links",
                hint=f"mv {path} somewhere else, then labctl pull",
            )
    return home / name


def settle(look: Look, confirmed: list[Due], bad: list[Due]) -> int:
    """Rename what was found right on the disk into place; a checkpoint with a file missing waits.

    The names are on the disk before the index knows them: what it knows survives a crash.
    """
    partial = look.home / PARTIAL
    tops = _tops(look.files)
    waiting = {top for one in bad if (top := _top_of(one.path, tops))}
    good = [d for d in confirmed if _top_of(d.path, tops) not in waiting]
    count = 0
    for top, members in _grouped(good, tops).items():
        place = inside(look.home, top.rstrip("/")) if top else look.home
        if top and not place.exists() and len(members) == _members(look.files, top):
            _keep_only(partial / top, {partial / one.path for one in members})
            place.parent.mkdir(parents=True, exist_ok=True)
            (partial / top).rename(place)
        else:
            for one in sorted(members, key=lambda d: d.path == top + MANIFEST):
                _place(partial / one.path, inside(look.home, one.path))
        count += len(members)
    sync_directories([look.home / one.path for one in good], look.home.parent.parent)
    for one in good:
        found = (look.home / one.path).lstat()
        if renamed_identity(found) == one.identity:
            look.index.put(one.path, found, one.sha256)
    look.index.save(keep=True)
    return count


def _tops(files: Iterable[str]) -> list[str]:
    """Directories (with "/") that hold a manifest, outermost ones only."""
    tops: list[str] = []
    for name in sorted(files, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in tops):
                tops.append(top)
    return tops


def _top_of(name: str, tops: list[str]) -> str:
    return next((top for top in tops if name.startswith(top)), "")


def _grouped(due: list[Due], tops: list[str]) -> dict[str, list[Due]]:
    groups: dict[str, list[Due]] = {}
    for one in due:
        groups.setdefault(_top_of(one.path, tops), []).append(one)
    return groups


def _members(files: Iterable[str], top: str) -> int:
    return sum(name.startswith(top) for name in files)


def _keep_only(directory: Path, wanted: set[Path]) -> None:
    """Drop what an earlier, cut pull left here and is no part of it any more."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if path not in wanted:
                path.unlink()


def _place(arrived: Path, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(place)
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise PolicyError(
            f"{place} cannot be written: a file and a directory of one name",
            hint=f"mv {place} somewhere else, then labctl pull",
        ) from None
