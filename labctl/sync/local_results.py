"""The local copy of a run's results: compare it with the server's, and rename files into place.

Nothing is written through links, and every hash in the index was verified on the local disk. A
control character in a file's name on the server is %0A, for example, in its name here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from labctl.decoding import decode_json
from labctl.errors import PolicyError
from labctl.model import Run, Value
from labctl.sync.containment import escape_controls, find_stored_name_problem
from labctl.sync.downloads import AnnouncedFile, rename_stable_identity
from labctl.sync.durability import hash_on_disk, sync_directories
from labctl.sync.ignore import create_ignored_directory
from labctl.sync.scan import HashIndex
from labctl.wire.checkpoints import MANIFEST, find_checkpoint, list_checkpoints
from labctl.wire.containment import find_link_on_way
from labctl.wire.files import RunManifest

PARTIAL = ".labctl-partial"
RECORD = "run.json"


class MissingFile(Value, frozen=True):
    """A file of a run that is not on this machine. `reason` is "" if a pull would fetch it."""

    run: str
    path: str
    size: int = 0
    reason: str = ""


def run_index(lab_root: Path, run: str) -> HashIndex:
    """Open the index of a run's file hashes, as verified on the local disk."""
    # Not "runs/": there, earlier versions kept hashes of received data, not of what was on disk.
    return HashIndex(lab_root.resolve(), f"pulled/{run}")


class RunComparison:
    """One run's files on the server, compared with those on this machine."""

    def __init__(self, lab_root: Path, run: str, manifest: RunManifest) -> None:
        # runs/ itself may be a link of the user's; links below it are not followed.
        self.home = (lab_root / "runs").resolve() / run
        self.index = run_index(lab_root, run)
        self.ended = manifest.ended
        self.unpulled = manifest.unpulled
        self.files: dict[str, AnnouncedFile] = {}
        self.skipped = [
            MissingFile(run=run, path=ascii(path)[1:-1], reason=reason)
            for path, reason in manifest.skipped
        ]
        names = {file.path for file in manifest.files}
        for path, size, sha256, growing in manifest.files:
            if reason := find_stored_name_problem(path, names, reserved=(PARTIAL, RECORD)):
                self.skipped.append(
                    MissingFile(run=run, path=ascii(path)[1:-1], size=size, reason=reason)
                )
            else:
                due = AnnouncedFile(path=path, size=size, sha256=sha256, growing=growing)
                self.files[path] = due

    def locate(self, name: str) -> Path:
        """Return where a file of the server is stored; PolicyError as in `resolve_result`."""
        return resolve_result(self.home, escape_controls(name))

    def list_missing(self) -> list[AnnouncedFile]:
        """Return the files that are missing here or differ from the server's."""
        missing = [due for due in self.files.values() if not self._is_local(due)]
        self.index.save(keep=True)
        return missing

    def list_local_files(self) -> Iterator[Path]:
        """Yield local files that have the name of a file on the server, whatever their content."""
        for due in self.files.values():
            path = self.locate(due.path)
            if path.is_file() and not path.is_symlink():
                yield path

    def _is_local(self, due: AnnouncedFile) -> bool:
        """Whether the local file has the server's content, by index or by reading it."""
        path = self.locate(due.path)
        if not due.sha256 or not path.is_file() or path.is_symlink():
            return False
        status = path.lstat()
        if status.st_size != due.size:
            return False
        sha256 = self.index.lookup(due.path, status)
        if not sha256:
            try:
                sha256, status = hash_on_disk(path)
            except OSError:
                return False
            self.index.store_settled(due.path, status, sha256)
        return sha256 == due.sha256


def create_run_directory(home: Path) -> None:
    """Create the run's directory; PolicyError if it is a link."""
    if home.is_symlink():
        raise PolicyError(
            f"{home} is a symbolic link",
            why="labctl does not write results through links",
            hint=f"{_move_away(home, '.link')}\nlabctl pull {home.name}",
        )
    create_ignored_directory(home.parent)
    home.mkdir(exist_ok=True)


def write_record(home: Path, record: Run | None) -> None:
    """Write the run's record beside its files.

    Call this after all outputs are in place: whoever reads the record takes them to be as new as
    it is.
    """
    if record is not None:
        staging = home / f".{RECORD}.new"
        staging.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        staging.replace(home / RECORD)


def read_pulled_run(file: Path) -> Run | None:
    """Read the record that a pull wrote beside the run's files; None if it cannot be read."""
    try:
        return decode_json(file.read_bytes(), Run)
    except (OSError, msgspec.MsgspecError):
        return None


def resolve_result(home: Path, name: str) -> Path:
    """Return `home/name`; PolicyError if a directory on the way is a link."""
    link = find_link_on_way(home, name)
    if link is not None:
        raise PolicyError(
            f"{link} is a symbolic link",
            why="labctl does not write results through links",
            hint=f"{_move_away(link, '.link')}\nlabctl pull {home.name}",
        )
    return home / name


def place_files(
    comparison: RunComparison, confirmed: list[AnnouncedFile], bad: list[AnnouncedFile]
) -> int:
    """Rename verified files into place and count them; an incomplete checkpoint is left out.

    The index is written after the renames are on the disk, so that its entries survive a crash.
    """
    partial = comparison.home / PARTIAL
    tops = list_checkpoints(comparison.files)
    incomplete = {top for file in bad if (top := find_checkpoint(file.path, tops))}
    good = [file for file in confirmed if find_checkpoint(file.path, tops) not in incomplete]
    count = 0
    for top, members in _group(good, tops).items():
        target = comparison.locate(top.rstrip("/")) if top else comparison.home
        keeps_names = all(escape_controls(file.path) == file.path for file in members)
        has_all = keeps_names and len(members) == _count_members(comparison.files, top)
        if top and has_all and not target.exists():
            _delete_all_except(partial / top, {partial / file.path for file in members})
            target.parent.mkdir(parents=True, exist_ok=True)
            (partial / top).rename(target)
        else:
            for file in sorted(members, key=lambda file: file.path == top + MANIFEST):
                place = comparison.locate(file.path)
                _move(partial / file.path, place, run_id=comparison.home.name)
        count += len(members)
    placed = {file: comparison.locate(file.path) for file in good}
    sync_directories([*placed.values()], comparison.home.parent.parent)
    for file, place in placed.items():
        status = place.lstat()
        if rename_stable_identity(status) == file.identity:
            comparison.index.store(file.path, status, file.sha256)
    comparison.index.save(keep=True)
    return count


def _group(due: list[AnnouncedFile], tops: list[str]) -> dict[str, list[AnnouncedFile]]:
    groups: dict[str, list[AnnouncedFile]] = {}
    for file in due:
        groups.setdefault(find_checkpoint(file.path, tops), []).append(file)
    return groups


def _count_members(files: Iterable[str], top: str) -> int:
    return sum(name.startswith(top) for name in files)


def _delete_all_except(directory: Path, wanted: set[Path]) -> None:
    """Delete leftovers of an interrupted pull that are no longer part of the directory."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if path not in wanted:
                path.unlink()


def _move(arrived: Path, target: Path, run_id: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(target)
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise PolicyError(
            f"{target} cannot be written: a file and a directory have the same name",
            hint=f"{_move_away(target, '.old')}\nlabctl pull {run_id}",
        ) from None


def _move_away(path: Path, ending: str) -> str:
    """Return the command that gives a file or directory another name."""
    return shlex.join(["mv", str(path), f"{path}{ending}"])
