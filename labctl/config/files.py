"""What lab.yaml names on this disk: does it exist, and does it stay inside the lab.

Apart from loading, so that `down` and `status` work when a data set is gone.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import msgspec

from labctl.config.document import plain, shown
from labctl.config.reader import LAB_FILE
from labctl.config.schema import LabConfig
from labctl.errors import ConfigError, LabError, PolicyError, Problem

LAB_ID_FILE = Path(".labctl") / "lab.json"
_LAB_ID = re.compile(r"[0-9a-f]{12}")


def check_files(config: LabConfig) -> None:
    """Raises ConfigError with every path of lab.yaml that is not there or leaves the lab."""
    problems = [
        *_image_problems(config),
        *_data_problems(config),
        *_wheelhouse_problems(config),
    ]
    if problems:
        problems.sort(key=lambda found: (found.line == 0, found.line))
        raise ConfigError(
            f"{plain(str(config.path))} names files that cannot be used",
            tuple(problems),
            hint=f"mend these lines of {LAB_FILE}, or put the files there, and try again",
        )


def _image_problems(config: LabConfig) -> list[Problem]:
    if not config.image.build:
        return []
    key = "image.build"
    directory = config.root / config.image.build
    said = ""
    if not directory.is_dir():
        said = f"there is no directory {shown(config.image.build)} in the lab"
    elif not _stays_inside(config.root, directory / "Dockerfile"):
        said = f"{shown(config.image.build)} leads out of the lab through a link"
    elif not (directory / "Dockerfile").is_file():
        said = f"there is no Dockerfile in {shown(config.image.build)}"
    return [Problem(key, config.lines.get(key, 0), said)] if said else []


def _data_problems(config: LabConfig) -> list[Problem]:
    problems = []
    for name, source in config.data.items():
        if source.path is None:
            continue
        said = ""
        if not source.path.exists():
            said = f"there is no directory {shown(source.written)}"
        elif not source.path.is_dir():
            said = f"{shown(source.written)} is not a directory"
        elif source.inside_lab and not _stays_inside(config.root, source.path):
            said = (
                f"{shown(source.written)} leads out of the lab through a link; "
                "if that is meant, write where it leads"
            )
        elif not os.access(source.path, os.R_OK | os.X_OK):
            said = f"{shown(source.written)} may not be read"
        if said:
            key = f"data.{name}"
            problems.append(Problem(key, config.lines.get(key, 0), said))
    return problems


def _wheelhouse_problems(config: LabConfig) -> list[Problem]:
    if not config.wheelhouse or Path(config.wheelhouse).is_dir():
        return []
    origin = config.origins.get("wheelhouse", "")
    said = f"there is no directory {shown(config.wheelhouse)} (from {plain(origin)})"
    return [Problem("wheelhouse", 0, said)]


def _stays_inside(root: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


class _LabRecord(msgspec.Struct):
    id: str
    created_at: float = 0.0


def known_lab_id(root: Path) -> str:
    """The lab's id, or "" where it has none yet. Creates nothing.

    Raises PolicyError where .labctl leads elsewhere, LabError where the file is damaged.
    """
    file = root / LAB_ID_FILE
    if file.parent.is_symlink() or file.is_symlink():
        raise PolicyError(
            f"{plain(str(file.parent))} leads elsewhere through a link",
            why="labctl writes there, and a stranger's lab must not choose where",
            hint=f"rm {plain(str(file.parent))}",
        )
    try:
        record = msgspec.json.decode(file.read_bytes(), type=_LabRecord)
    except FileNotFoundError:
        return ""
    except msgspec.MsgspecError:
        record = _LabRecord(id="")
    except OSError as error:
        raise LabError(f"cannot read {plain(str(file))}", why=error.strerror or "") from error
    if not _LAB_ID.fullmatch(record.id):
        raise LabError(
            f"{plain(str(file))} is damaged",
            why="it holds the id by which this lab's servers are found",
            hint="labctl orphans   # what the lab still has; then delete that file",
        )
    return record.id


def lab_id(root: Path) -> str:
    """The lab's id, 12 hex digits; made where there is none, once, whoever else tries too."""
    known = known_lab_id(root)
    if known:
        return known
    file = root / LAB_ID_FILE
    record = {"id": os.urandom(6).hex(), "created_at": round(time.time(), 3)}
    try:
        file.parent.mkdir(exist_ok=True)
        # An id that travels with a copied or committed lab would be shared by its servers.
        ignore = file.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        _create_whole(file, json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise LabError(
            f"cannot write {plain(str(file))}",
            why=error.strerror or "",
            hint="make the lab's directory writable for yourself",
        ) from error
    return known_lab_id(root)


def _create_whole(file: Path, data: bytes) -> None:
    """Create `file` with all of `data` at once; leaves a file that is already there alone."""
    draft = write_draft(file, data, mode=0o644)
    try:
        os.link(draft, file)
    except FileExistsError:
        return
    except OSError:
        # No hard links on this file system (FAT, some shares): the last one to rename wins.
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def write_draft(file: Path, data: bytes, *, mode: int) -> Path:
    """A new file beside `file`, on disk with all of `data`, to be renamed to it."""
    draft = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return draft


def write_private(file: Path, data: bytes) -> None:
    """Replace `file` whole with a 0600 one; directories that it needs are made 0700."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = write_draft(file, data, mode=0o600)
    try:
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
