"""Files that people put into the home directory of a server, outside labctl's own directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterator

from ...wire.files import HomeFile, HomeFilesReply, HomeFilesRequest, SkippedFile
from ..host.paths import labctl_home
from .files import UNREADABLE, is_by_product, read_rsync_version

# Marks of an environment of packages: thousands of files that can be installed again.
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


def list_home_files(request: HomeFilesRequest) -> HomeFilesReply:
    """List the regular files that appeared in the home directory since `since`.

    No file is read: a home may hold 100 GB, and only what is downloaded needs a hash. Hidden names
    of the home directory itself, labctl's directories and environments of packages are left out.
    Links are not followed.
    """
    home = Path.home()
    files, skipped = [], []
    for path in _walk_home(home):
        name = str(path.relative_to(home))
        try:
            status = path.lstat()
            # A copy may keep its time of modification; the time of its change here is new.
            is_new = stat.S_ISREG(status.st_mode) and status.st_ctime >= request.since
        except FileNotFoundError:
            continue
        if not is_new or is_by_product(name):
            continue
        if os.access(path, os.R_OK):
            files.append(HomeFile(name, status.st_size))
        else:
            skipped.append(SkippedFile(name, UNREADABLE))
    return HomeFilesReply(tuple(files), tuple(skipped), str(home), read_rsync_version())


def _walk_home(home: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(home):
        here = Path(directory)
        if here == home:
            folders[:] = [name for name in folders if not name.startswith(".")]
            folders[:] = [name for name in folders if home / name != labctl_home()]
            names = [name for name in names if not name.startswith(".")]
        folders[:] = sorted(name for name in folders if not _is_environment(here / name))
        yield from (here / name for name in sorted(names))


def _is_environment(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in ENVIRONMENT_MARKS)
