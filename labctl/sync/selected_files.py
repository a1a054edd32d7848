"""Downloads of chosen files of a lab, for a reader that is not the lab's own machine.

Nothing of the lab is here before: a download fills a directory of its own. The names come from a
server that students control.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from labctl.errors import PolicyError, TransferError
from labctl.events import Reporter
from labctl.servers.agent import AgentClient
from labctl.sync.containment import find_name_problem
from labctl.sync.downloads import AnnouncedFile, Download
from labctl.sync.file_transfer import LONG_S, RemoteFolder
from labctl.sync.ignore import (
    ENVIRONMENT_MARKS,
    IGNORE_FILES,
    NEVER_ANYWHERE,
    NEVER_AT_TOP,
    find_ignored_name,
    read_rules,
)
from labctl.text import bytes_text, names_text
from labctl.wire.files import CODE_FILES, MANIFEST, ManifestRequest, PartsRequest
from labctl.wire.verbs import LabRequest

MOST_FILES = 20_000
MOST_NAMED = 5
# The rules of one directory are read in full.
MOST_RULES_BYTES = 64 * 1024
AGAIN = "try again once nothing writes to it any more"


class SelectedFiles:
    """The files of one directory of a lab that can be downloaded; `skipped` says why others not.

    A later `fetch` keeps what is wanted of an earlier one, and deletes the rest.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        files: Iterable[AnnouncedFile],
        skipped: Iterable[tuple[str, str]],
        target: Path,
        reporter: Reporter,
    ) -> None:
        self.target = target
        self.skipped = [f"{ascii(path)[1:-1]}: {reason}" for path, reason in skipped]
        self.files: dict[str, AnnouncedFile] = {}
        for file in files:
            if problem := find_name_problem(file.path):
                self.skipped.append(f"{ascii(file.path)[1:-1]}: {problem}")
            else:
                self.files[file.path] = file
        self._download = Download(
            folder, target, basis=None, reporter=reporter, name="download", hint=AGAIN
        )

    def describe_skipped(self) -> list[str]:
        """Say in one sentence which files were left out; [] if none was."""
        return [f"skipped {names_text(self.skipped, MOST_NAMED)}"] if self.skipped else []

    def fetch(self, paths: Sequence[str], most_bytes: int) -> None:
        """Download these files, and verify them.

        PolicyError if they are larger than `most_bytes` or too many, before any of them is
        transferred; TransferError if one of them changes meanwhile.
        """
        wanted = [self.files[path] for path in paths]
        _require_limits(wanted, most_bytes)
        self.target.mkdir(parents=True, exist_ok=True, mode=0o700)
        _, bad = self._download.fetch(wanted)
        if bad:
            raise TransferError(
                f"{bad[0].path} changed on the server during the download", why=AGAIN
            )


def list_code(
    remote: AgentClient, lab: LabRequest, target: Path, reporter: Reporter
) -> SelectedFiles:
    """List the code on the server, without what a push never sends."""
    reply = remote.call(CODE_FILES, lab, timeout_s=LONG_S)
    folder = RemoteFolder(
        remote=remote,
        request=PartsRequest(*lab, run=""),
        directory=reply.root,
        rsync_version=reply.rsync,
    )
    environments = tuple(
        f"{directory}/"
        for path, _ in reply.files
        for directory, _, name in (path.rpartition("/"),)
        if directory and name in ENVIRONMENT_MARKS
    )
    files = [
        AnnouncedFile(path=part.path, size=part.size, sha256="")
        for part in reply.files
        if not _is_never_sent(part.path) and not part.path.startswith(environments)
    ]
    skipped = [file for file in reply.skipped if not _is_never_sent(file.path)]
    return SelectedFiles(folder, files, skipped, target, reporter)


def fetch_code(code: SelectedFiles, most_bytes: int) -> None:
    """Download the code that the lab's ignore rules do not leave out."""
    rules = [path for path in code.files if PurePosixPath(path).name in IGNORE_FILES]
    code.fetch([path for path in rules if code.files[path].size <= MOST_RULES_BYTES], most_bytes)
    is_ignored = _make_ignore_check(code.target)
    code.fetch([path for path in code.files if not is_ignored(path)], most_bytes)


def list_run(
    remote: AgentClient,
    lab: LabRequest,
    run_id: str,
    only: Sequence[str],
    target: Path,
    reporter: Reporter,
) -> SelectedFiles:
    """List the complete files of a run at or below the paths `only`."""
    request = ManifestRequest(*lab, runs=(run_id,), only=tuple(only), quick=True)
    runs = remote.call(MANIFEST, request, timeout_s=LONG_S).runs
    if run_id not in runs:
        raise TransferError(f"the server lists no files of run {run_id}", why=AGAIN)
    manifest = runs[run_id]
    folder = RemoteFolder(
        remote=remote,
        request=PartsRequest(*lab, run=run_id),
        directory=manifest.directory,
        rsync_version=manifest.rsync,
    )
    files = [
        AnnouncedFile(path=file.path, size=file.size, sha256=file.sha256, growing=file.growing)
        for file in manifest.files
    ]
    return SelectedFiles(folder, files, manifest.skipped, target, reporter)


def _is_never_sent(path: str) -> bool:
    parts = path.split("/")
    return parts[0] in NEVER_AT_TOP or not NEVER_ANYWHERE.isdisjoint(parts)


def _make_ignore_check(root: Path) -> Callable[[str], bool]:
    """Return a function that tells whether the ignore files in `root` leave a path out."""

    read = functools.cache(lambda prefix: read_rules(root, prefix, IGNORE_FILES).rules)
    return lambda path: find_ignored_name(root, path, read) is not None


def _require_limits(files: Sequence[AnnouncedFile], most_bytes: int) -> None:
    total = sum(file.size for file in files)
    if total > most_bytes:
        largest = sorted(files, key=lambda file: -file.size)[:3]
        raise PolicyError(
            f"the files are too large: {bytes_text(total)}, at most {bytes_text(most_bytes)}",
            why="the largest: "
            + ", ".join(f"{file.path} ({bytes_text(file.size)})" for file in largest)
            + "; list what does not belong to the submission in .labignore",
        )
    if len(files) > MOST_FILES:
        raise PolicyError(
            f"there are {len(files)} files; at most {MOST_FILES} are accepted",
            why="list what does not belong to the submission in .labignore",
        )
