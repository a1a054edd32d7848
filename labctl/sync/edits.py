"""Code that was edited on the server: save it, or merge it into the lab."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from labctl.errors import PolicyError, TransferError
from labctl.events import Note, Reporter
from labctl.model import Value
from labctl.servers.agent import AgentClient
from labctl.sync.containment import find_name_problem, require_contained
from labctl.sync.downloads import AnnouncedFile, Download
from labctl.sync.durability import sync_directories
from labctl.sync.file_transfer import RemoteFolder
from labctl.sync.scan import hash_file
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.files import EDITS, PULLED, PartsRequest, PulledEdit, PulledRequest
from labctl.wire.verbs import LabRequest

SAVED = "server-edits"
LONG_S = 3600.0


class EditsResult(Value, frozen=True):
    """Edited files: `saved` below `directory` ("" if none), `brought` into the lab, `skipped`."""

    directory: str = ""
    saved: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class _Edit(Value, frozen=True):
    due: AnnouncedFile
    base: str


def pull_edits(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    lab_root: Path,
    *,
    reporter: Reporter,
) -> EditsResult:
    """Save files that were edited on the server to `<lab_root>/server-edits/<UTC time>/`.

    The lab's own files stay as they are. Without edits, the directory is not created.
    """
    with hold_transfers(lab_root, "pull", reporter):
        download = _EditsDownload(remote, LabRequest(lab_name, lab_id), lab_root, reporter)
        edits = download.fetch()
        names = tuple(download.keep(edit.due) for edit in edits)
        return download.result(saved=names)


def pull_code(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    lab_root: Path,
    *,
    reporter: Reporter,
) -> EditsResult:
    """Copy files that were edited on the server into the lab itself.

    A file that also changed here stays, and the server's version is saved as in `pull_edits`.
    """
    with hold_transfers(lab_root, "pull --code", reporter):
        download = _EditsDownload(remote, LabRequest(lab_name, lab_id), lab_root, reporter)
        return _merge(download, lab_root)


def _merge(download: _EditsDownload, lab_root: Path) -> EditsResult:
    brought, saved = [], []
    for edit in download.fetch():
        local_hash = _hash_local(_inside(lab_root, edit.due.path))
        if local_hash not in ("", edit.base, edit.due.sha256):
            saved.append(download.keep(edit.due))
        else:
            download.replace(edit.due)
            brought.append(edit.due.path)
    if saved:
        download.reporter.emit(
            Note(
                text=f"changed here and on the server: {', '.join(saved)}. Your files are "
                f"unchanged; the server's are in {download.directory}. "
                "Merge them, then labctl push --force",
                level="warning",
            )
        )
    return download.result(saved=tuple(saved), brought=tuple(brought))


class _EditsDownload:
    """Downloads edited files, and puts each into the lab or beside it."""

    def __init__(
        self,
        remote: AgentClient,
        request: LabRequest,
        lab_root: Path,
        reporter: Reporter,
    ) -> None:
        self.remote = remote
        self.request = request
        self.root = lab_root.resolve()
        self.reporter = reporter
        self.partial = self.root / ".labctl" / "partial-edits"
        self.directory = self.root / SAVED / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        self.skipped: list[str] = []
        self.held: tuple[PulledEdit, ...] = ()
        self.placed: list[Path] = []

    def fetch(self) -> Sequence[_Edit]:
        """Download all edited files to the partial directory and verify them."""
        reply = self.remote.call(EDITS, self.request, timeout_s=LONG_S)
        edits = []
        self.skipped += [f"{ascii(path)[1:-1]}: {reason}" for path, reason in reply.skipped]
        for path, size, sha256, base in reply.files:
            if reason := find_name_problem(path):
                self.skipped.append(f"{ascii(path)[1:-1]}: {reason}")
            else:
                due = AnnouncedFile(path=require_contained(path), size=size, sha256=sha256)
                edits.append(_Edit(due=due, base=base))
        download = Download(
            RemoteFolder(
                remote=self.remote,
                request=PartsRequest(*self.request, run=""),
                directory=reply.root,
                rsync_version=reply.rsync,
            ),
            self.partial,
            basis=None,  # so that the server learns nothing about the local files
            reporter=self.reporter,
            name="pull code",
            hint="labctl pull --code",
        )
        _, bad = download.fetch([edit.due for edit in edits])
        if bad:
            raise TransferError(
                f"{bad[0].path} changed on the server during the download",
                hint="labctl pull --code",
            )
        self.held = tuple(PulledEdit(edit.due.path, edit.due.sha256) for edit in edits)
        return edits

    def keep(self, due: AnnouncedFile) -> str:
        target = self.directory / due.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.partial / due.path).replace(target)
        self.placed.append(target)
        return due.path

    def replace(self, due: AnnouncedFile) -> None:
        target = _inside(self.root, due.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        arrived = self.partial / due.path
        if target.exists():
            arrived.chmod(target.stat().st_mode & 0o777)
        arrived.replace(target)
        self.placed.append(target)

    def result(self, *, saved: tuple[str, ...] = (), brought: tuple[str, ...] = ()) -> EditsResult:
        sync_directories(self.placed, self.root)
        shutil.rmtree(self.partial, ignore_errors=True)
        if self.held:
            # The watchdog then saves only edits that are not on this machine.
            self.remote.call(PULLED, PulledRequest(*self.request, edits=self.held))
        return EditsResult(
            directory=str(self.directory) if saved else "",
            saved=saved,
            brought=brought,
            skipped=tuple(self.skipped),
        )


def _inside(root: Path, name: str) -> Path:
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise PolicyError(
                f"{path} is a symbolic link",
                why=f"labctl does not write the server's {name} through links",
                hint=f"rm {shlex.quote(str(path))}\nlabctl pull --code",
            )
    return path


def _hash_local(path: Path) -> str:
    """Hash the lab's own file; "" if it does not exist."""
    if not os.path.lexists(path):
        return ""
    return hash_file(path) if path.is_file() else "not a file"
