"""Files in the home directory of a server that labctl did not put there: list and download them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from labctl.errors import TransferError
from labctl.events import Reporter
from labctl.model import Value
from labctl.servers.agent import AgentClient
from labctl.sync.containment import escape_controls, find_stored_name_problem
from labctl.sync.downloads import AnnouncedFile, Download
from labctl.sync.durability import sync_directories
from labctl.sync.file_transfer import LONG_S, RemoteFolder
from labctl.sync.ignore import create_ignored_directory
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.files import HOME_FILES, HomeFilesRequest, PartsRequest
from labctl.wire.verbs import LabRequest

SAVED = "server-home"
AGAIN = "labctl down   # again"


class HomeFiles(Value, frozen=True):
    """Files below `root`, the home directory; `skipped` cannot be downloaded, with the reason."""

    root: str
    rsync_version: str
    files: tuple[AnnouncedFile, ...] = ()
    skipped: tuple[str, ...] = ()


def list_home_files(remote: AgentClient, since: float) -> HomeFiles:
    """List the files that appeared in the home directory since `since`, in Unix seconds."""
    reply = remote.call(HOME_FILES, HomeFilesRequest(since), timeout_s=LONG_S)
    skipped = [f"{ascii(path)[1:-1]}: {reason}" for path, reason in reply.skipped]
    files = []
    names = {path for path, _ in reply.files}
    for path, size in reply.files:
        if problem := find_stored_name_problem(path, names):
            skipped.append(f"{ascii(path)[1:-1]}: {problem}")
        else:
            files.append(AnnouncedFile(path=path, size=size, sha256=""))
    return HomeFiles(
        root=reply.root, rsync_version=reply.rsync, files=tuple(files), skipped=tuple(skipped)
    )


def pull_home_files(
    remote: AgentClient, lab: LabRequest, listed: HomeFiles, lab_root: Path, *, reporter: Reporter
) -> Path:
    """Download and verify these files; return their new directory below `<lab>/server-home/`.

    TransferError, and nothing is kept, if one of them changes during the download.
    """
    root = lab_root.resolve()
    partial = root / ".labctl" / "partial-home"
    directory = root / SAVED / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    folder = RemoteFolder(
        remote=remote,
        request=PartsRequest(*lab, run="", home=True),
        directory=listed.root,
        rsync_version=listed.rsync_version,
    )
    with hold_transfers(lab_root, "down", reporter):
        # Without a basis, the server learns nothing about local files.
        download = Download(
            folder, partial, basis=None, reporter=reporter, name="pull home files", hint=AGAIN
        )
        good, bad = download.fetch(listed.files)
        if bad:
            name = escape_controls(bad[0].path)
            raise TransferError(
                f"{name} in the server's home directory changed during the download",
                hint=AGAIN,
            )
        create_ignored_directory(root / SAVED)
        _place(good, partial, directory, root)
    return directory


def _place(files: Sequence[AnnouncedFile], partial: Path, directory: Path, root: Path) -> None:
    targets = []
    for file in files:
        target = directory / escape_controls(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        (partial / file.path).replace(target)
        targets.append(target)
    sync_directories(targets, root)
    shutil.rmtree(partial, ignore_errors=True)
