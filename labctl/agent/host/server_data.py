"""Data sets that are already on the server: which directories a lab may mount, read-only.

The path is checked again after links are resolved, with this account's own permissions: Docker
would mount what the account itself may not read.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ...wire.server_data import CheckDataRequest
from ...wire.server_paths import describe_problem
from ...wire.verbs import CONFIG_FILE, Empty, HintPart
from ..broker.detection import JOBS, is_brokered
from ..broker.shared_data import SHARED
from ..reply import Failure

MOUNT_TABLE = Path("/proc/self/mountinfo")
FIX = ("then fix data: in ", CONFIG_FILE)


def check_data(request: CheckDataRequest) -> Empty:
    """Check every directory. Failure for the first that is missing or may not be mounted."""
    resolve_all(request.directories)
    return Empty()


def resolve_all(directories: dict[str, str]) -> dict[str, Path]:
    """Return the directory, without links, of each data set. Failure as in `check_data`."""
    return {name: resolve_directory(name, path) for name, path in directories.items()}


def resolve_directory(name: str, path: str) -> Path:
    target = os.path.realpath(path)
    for each in dict.fromkeys((path, target)):
        if problem := describe_problem(each, os.path.realpath(Path.home())):
            where = path if each == path else f"{path}, which leads to {each} on the server,"
            what = f"{where} cannot be the data set {name}"
            raise Failure("policy", what, problem, ("fix data: in ", CONFIG_FILE))
    directory = Path(target)
    if is_brokered() and not JOBS.exists() and SHARED not in (directory, *directory.parents):
        what = f"{path} cannot be the data set {name}: this server is shared"
        why = f"a run on a shared server can read only your own files and those in {SHARED}"
        hint = (HintPart("ssh", f"ls {SHARED}"), "   # what your instructor provides; ", *FIX)
        raise Failure("policy", what, why, hint)
    _require_readable(name, path, directory)
    _require_no_inner_mounts(path, directory)
    return directory


def _require_readable(name: str, path: str, directory: Path) -> None:
    if not os.access(directory, os.F_OK):
        what = f"the server has no directory {path}"
        why = f"lab.yaml names it for the data set {name}; or {_get_user()} may not enter it"
        near = next(each for each in Path(path).parents if os.path.isdir(each))  # noqa: PTH112
        hint = (HintPart("ssh", f"ls {shlex.quote(str(near))}"), "   # ", *FIX)
        raise Failure("missing", what, why, hint)
    if not directory.is_dir():
        what = f"{path} on the server is not a directory"
        why = f"the data set {name} is mounted as a directory"
        raise Failure("usage", what, why, ("fix data: in ", CONFIG_FILE))
    if not os.access(directory, os.R_OK | os.X_OK):
        what = f"{_get_user()} may not read {path} on the server"
        show_owner = (
            HintPart("ssh", f"ls -ld {shlex.quote(path)}"),
            "   # ask its owner for access",
        )
        raise Failure("policy", what, f"it is the data set {name}", show_owner)


def _get_user() -> str:
    import pwd  # needed only for an error

    return pwd.getpwuid(os.getuid()).pw_name


def _require_no_inner_mounts(path: str, directory: Path) -> None:
    """Failure if other file systems are mounted below: a run could write to them."""
    inner = [each for each in _list_mount_points() if each.startswith(f"{directory}/")]
    if inner:
        what = f"{path} on the server contains other file systems: {', '.join(sorted(inner)[:5])}"
        why = "labctl mounts data read-only, and could not keep a run from writing to these"
        hint = ("name each of them as a data set of its own under data: in ", CONFIG_FILE)
        raise Failure("policy", what, why, hint)


def _list_mount_points() -> list[str]:
    """List the mount points, which the table writes with octal escapes such as \\040."""
    lines = MOUNT_TABLE.read_bytes().splitlines()
    texts = (line.split(b" ")[4].decode("unicode_escape") for line in lines)
    return [text.encode("latin-1").decode(errors="surrogateescape") for text in texts]
